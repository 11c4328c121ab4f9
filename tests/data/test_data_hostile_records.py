"""One record must not end a run: whatever its caption and numbers hold, it is read or bad, and nothing is said."""

from __future__ import annotations

import html
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ftfy
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.decode import fields
from murmuration.data.decode.decode import BadRecord, parsing
from murmuration.data.decode.fields import MOST_BYTES, captions_of, numbers_of
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.text.clip_bpe import clean
from murmuration.data.text.encoder import TextEncoder

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 100  # 6,400 characters of a caption are looked at
NUMBERS = {"kind": 1, "weight": 1}
GOOD: list[dict[str, Any]] = [
    {},
    {"txt": b"&#" + b"9" * 5000 + b"; dog"},
    {"txt": b"&amp;#" + b"9" * 5000 + b"; dog"},
    {"txt": b"&#" + b"0" * 5000 + b"65; dog"},
    {"txt": b"&#xD800; " + b"&" * 5000},
    {"json": NUMBERS | {"id": int("7" * 300)}},
    {"json": NUMBERS | {"kind": 2.0}},
    {"json": NUMBERS | {"kind": "2"}},
]
BAD: list[dict[str, Any]] = [
    {"cls": b"1" * 5000},
    {"cls": b"0" * 5000 + b"1"},
    {"cls": b"-1"},
    {"json": NUMBERS | {"kind": 1.7}},
    {"json": NUMBERS | {"kind": "1_0"}},
    {"json": NUMBERS | {"kind": "٢"}},
    {"json": NUMBERS | {"kind": [1]}},
    {"json": NUMBERS | {"kind": float("nan")}},
    {"json": b'{"weight": 1, "kind": 1' + b"0" * 5000 + b"}"},
    {"json": b'{"weight": 1, "kind": 1e99999999}'},
    {"json": b'{"kind": 1, "weight": 1' + b"0" * 5000 + b"}"},
    {"json": b'{"kind": 1, "weight": 1, "deep": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"},
    {"json": b"[" * 50_000},
    {"json": b'[["kind", 1]]'},
    {"json": {"weight": 1, "anna": 3}},
    {"json": b"7"},
    {"json": b"\xff\xfe{"},
    {"json": b'{"kind": 1, "weight": 1, "open": "' + b'\\"' * 50_000},
    {"txt": b"a \xed\xa0\x80 dog"},
]


@pytest.fixture
def hostile(tmp_path: Path, write_tar: Callable[..., Path], picture: Callable[..., bytes]) -> ShardIndex:
    """Records that can be read first, then those that cannot."""
    samples = []
    for number, changed in enumerate(GOOD + BAD):
        sample: dict[str, Any] = {"__key__": f"{number:04d}", "jpg": picture(number), "txt": b"a dog", "cls": b"1"}
        sample |= {"json": NUMBERS} | changed
        if not isinstance(sample["json"], bytes):
            sample["json"] = json.dumps(sample["json"]).encode()
        samples.append(sample)
    write_tar(tmp_path / "a.tar", samples)
    return build(tmp_path)


def _reader(index: ShardIndex, tokenizer: str | Path = "clip", **reading: int) -> BatchReader:
    spec = DataSpec(16, labels=("cls", "kind"), target="kind", classes=3, weight="weight")
    return BatchReader(index, spec, TextEncoder(tokenizer, LENGTH), reading=ReadOptions(**reading))


@pytest.fixture
def any_digits() -> Iterator[None]:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(limit)


def _check(reader: BatchReader) -> None:
    batch = reader.read(np.arange(len(GOOD) + len(BAD)), 1)
    assert batch.present.tolist() == [True] * len(GOOD) + [False] * len(BAD)
    assert sorted(reader.bad_records) == list(range(len(GOOD), len(GOOD) + len(BAD)))
    assert all(not tensor[len(GOOD) :].any() for tensor in batch.inputs.values()), "a bad record is an empty slot"
    assert batch.inputs["labels"][: len(GOOD)].tolist() == [1] * (len(GOOD) - 2) + [2, 2]


@pytest.mark.parametrize("in_flight", [1, 4])
def test_no_caption_and_no_number_ends_a_run(hostile: ShardIndex, in_flight: int) -> None:
    _check(_reader(hostile, in_flight=in_flight))


def test_the_verdict_does_not_follow_the_interpreters_limit(hostile: ShardIndex, any_digits: None) -> None:
    _check(_reader(hostile))


def test_the_verdict_does_not_follow_the_depth_of_the_stack() -> None:
    def verdict(depth: int, frames: int) -> bool:
        if frames:
            return verdict(depth, frames - 1)
        members = {"json": b'{"kind": 1, "deep": ' + b"[" * depth + b'"]]]{{{"' + b"]" * depth + b"}"}
        try:
            return numbers_of(members, ["kind"], None, 0, None) == ([1], 1.0)
        except BadRecord:
            return False

    assert [verdict(depth, 0) for depth in (90, 99, 100, 960)] == [True, True, False, False]
    assert [verdict(depth, 600) for depth in (90, 99, 100, 960)] == [True, True, False, False]


def test_brackets_in_strings_and_side_by_side_are_no_nesting() -> None:
    content = {"kind": 2, "text": "[{" * 500 + '\\"[', "boxes": [[1, 2]] * 500}
    assert numbers_of({"json": json.dumps(content).encode()}, ["kind"], None, 0, None)[0] == [2]


@pytest.mark.parametrize("excess", [0, 1])
def test_what_is_larger_than_a_mebibyte_is_bad_before_it_is_parsed(
    excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed JSON takes 25 times its size in memory, in the trainer's own process and at every participation."""
    content = b'{"kind": 1, "much": ['
    content += b" " * (MOST_BYTES + excess - len(content) - 2) + b"]}"
    members = {"json": content, "txt": b"x" * (MOST_BYTES + excess)}
    if not excess:
        assert numbers_of(members, ["kind"], None, 0, None)[0] == [1] and len(captions_of(members, "txt")[0]) == 1 << 20
        return
    for parser in ("json", "_NESTING"):
        monkeypatch.setattr(fields, parser, None)
    for parse in (lambda: numbers_of(members, ["kind"], None, 0, None), lambda: captions_of(members, "txt")):
        with pytest.raises(BadRecord, match="more than 1048576 bytes"):
            parse()
    with pytest.raises(BadRecord, match="more than 1048576 bytes"):
        captions_of({"json": content}, "txt")


def test_nothing_is_said_on_the_console(hostile: ShardIndex) -> None:
    """In a process of its own, because pytest replaces the filters of warnings and holds back what libraries print."""
    code = f"""
import numpy as np
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.text.encoder import TextEncoder
spec = DataSpec(16, labels=("cls", "kind"), target="kind", classes=3, weight="weight")
reader = BatchReader(ShardIndex.open({str(hostile.folder)!r}), spec, TextEncoder("clip", {LENGTH}))
reader.read(np.arange({len(GOOD) + len(BAD)}), 1)
assert len(reader.bad_records) == {len(BAD)}
"""
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_numbers_of_characters_mean_what_they_mean_in_html() -> None:
    rng = random.Random(5)
    parts = ("&#", "&#x", "&amp;", "#", "0", "00000", "65", "9", "1114111", "1114112", "99999999", "55296", ";", "x")
    for _ in range(20_000):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 9)))
        assert clean(text) == " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split()).lower(), text


def _tokenizer(path: Path, *, unknown: bool) -> Path:
    """A tokenizer whose regular expression gives up on many a's, or that knows no unknown words."""
    words = {"<pad>": 0, "<start>": 1, "<end>": 2, "<unk>": 3, "a": 4, "dog": 5}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>" if unknown else "absent"))
    split = pre_tokenizers.Split(Regex(r"(a|aa|aaa)+b"), "isolated") if unknown else pre_tokenizers.Whitespace()
    made.pre_tokenizer = split  # pyright: ignore[reportAttributeAccessIssue]
    made.save(str(path))
    return path


@pytest.mark.parametrize("unknown", [True, False])
def test_a_caption_that_a_tokenizer_breaks_on_is_bad(
    unknown: bool, tmp_path: Path, write_tar: Callable[..., Path], picture: Callable[..., bytes]
) -> None:
    captions = [b"dog", b"a" * 4000 if unknown else b"cat"]
    samples = [{"__key__": str(i), "jpg": picture(i), "txt": text} for i, text in enumerate(captions)]
    write_tar(tmp_path / "a.tar", samples)
    text = TextEncoder(_tokenizer(tmp_path / "tokenizer.json", unknown=unknown), LENGTH)
    reader = BatchReader(build(tmp_path), DataSpec(16), text)
    assert reader.read(np.arange(2), 0).present.tolist() == [True, False]
    assert reader.bad_records == [1]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, GeneratorExit])
def test_what_may_go_better_next_time_is_nobodys_fault(
    error: type[BaseException], hostile: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_self: TextEncoder, _caption: str) -> list[int]:
        raise error

    monkeypatch.setattr(TextEncoder, "encode", fails)
    reader = _reader(hostile)
    with pytest.raises(error):
        reader.read(np.array([0]), 0)
    assert reader.bad_records == []


@pytest.mark.parametrize("error", [OSError, ValueError, RecursionError, IndexError, SyntaxError])
def test_whatever_a_parser_raises_is_a_bad_record(error: type[Exception]) -> None:
    with pytest.raises(BadRecord, match=r"the picture.*the cause"), parsing("the picture"):
        raise error("the cause")
