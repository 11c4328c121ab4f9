"""Shards and index files that somebody forged: a sentence in linear time, never a hang or a traceback."""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.draw.stream import open_tape
from murmuration.data.index.build import STAMPS, WorkArea
from murmuration.data.index.exclusions import FACTS, IDS, Exclusions
from murmuration.data.index.folders import FolderIndex, build_folder
from murmuration.data.index.open import open_index
from murmuration.data.index.scan import _Window, scan
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store import tar
from murmuration.data.store.place import ShardError
from murmuration.data.store.tar import BLOCK, LONGEST_EXTENSION, split_name, walk
from murmuration.train.storage.feature_store import HEADER, FeatureFolder

ROOT = Path(__file__).resolve().parents[2]
PREPARE = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index"]
END = bytes(2 * BLOCK)
DEEP = b"[" * 50_000 + b"]" * 50_000
DIGITS = b"9" * 5_000


class StillBusyError(Exception):
    """No OSError, as TimeoutError is one: the product would take it for a failing disk."""


@contextmanager
def ends_within(seconds: int) -> Iterator[None]:
    """Seconds that only an endless loop or work that grows with the square of the input would take."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise StillBusyError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def header(name: bytes, size: int | bytes, kind: bytes = b"0") -> bytes:
    """One block with a right checksum; `size` as octal digits, or as the bytes of the field."""
    field = size.ljust(12, b"\0") if isinstance(size, bytes) else b"%011o\0" % size
    block = bytearray(name[:100].ljust(100, b"\0") + b"0000644\0" + bytes(16) + field + bytes(12))
    block += b" " * 8 + kind + bytes(100) + b"ustar\x0000" + bytes(247)
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def pax(records: bytes) -> bytes:
    return header(b"pax", len(records), b"x") + padded(records)


def member(name: bytes, content: bytes = b"x") -> bytes:
    return header(name, len(content)) + padded(content)


def prefixed(mark: bytes) -> bytes:
    """An empty a.jpg with a path prefix and this mark of its form."""
    block = bytearray(header(b"a.jpg", 0))
    block[257:265], block[345:349], block[148:156] = mark, b"path", b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def sized(text: bytes) -> bytes:
    """A PAX header that gives the size of the next member as `text`."""
    body = b"size=" + text + b"\n"
    return pax(next(b"%d %s" % (n, body) for n in range(9_999) if len(b"%d %s" % (n, body)) == n))


# Members behind one that is sound, or alone, and what is said of them.
OCTAL = r"no valid tar header at byte 1024 \(number field\)"
NAMES = r"follows another one|has an empty name|continues past its end"
LONG, PATH = header(b"long", 8, b"L") + padded(b"two.jpg\0"), pax(b"16 path=one.jpg\n")
FORGED: dict[str, tuple[bytes, str]] = {
    # int() takes signs and underscores; after a negative size the walk goes in circles.
    **{f"size {field!r} of a {kind!r}": (member(b"a.jpg") + header(b"b.jpg", field, kind), OCTAL)
       for field in (b"-0000000777", b"-1", b"+0000000001", b"0_0", b"0o17", b"8", b"\xff" * 12, b"1 2")
       for kind in (b"0", b"x", b"L", b"K")},
    **{f"PAX size {size[:9]!r}": (member(b"a.jpg") + sized(size) + member(b"b.jpg"), "damaged PAX header at byte 1024")
       for size in (b"-512", b"-1024", b"+1", b"1_0", b" 1", b"", b"9" * 5_000, b"\xd9\xa1")},
    # tarfile believes the outer one of two extension headers, and an empty name; others do not.
    **{f"a name that is {what}": (member(b"a.jpg") + extension + member(b"a.txt"), NAMES) for what, extension in {
        "PAX twice": PATH + pax(b"16 path=two.jpg\n"), "PAX and GNU": PATH + LONG, "GNU and PAX": LONG + PATH,
        "empty GNU": header(b"long", 1, b"L") + padded(b"\0"), "empty PAX": pax(b"8 path=\n"),
        "longer than said": header(b"long", 7, b"L") + padded(b"two.jpg.txt")}.items()},
    # tarfile joins a path prefix to the name; by POSIX it is none without its mark.
    **{f"a prefix marked {mark!r}": (prefixed(mark) + member(b"b.jpg"), "byte 0 has a path prefix but no mark")
       for mark in (b"\0" * 8, b"\xff" * 8)},
    **{f"size {size[:4]!r} beyond the shard": (header(b"a.jpg", size), "cut off, the member at byte 0 needs")
       for size in (b"\x80" + b"\xff" * 11, b"\x80" + (1 << 63).to_bytes(11, "big"), b"77777777777")},
    **{f"PAX record {damage!r}": (pax(b"6 a=b\n" + damage + b"\n") + member(b"a.jpg"), "damaged PAX header at byte 0")
       for damage in (b"", b"4 a", b"-6 a=b", b"+7 a=b", b"0 a=b", b"99 a=b", b"1_0 abcde=", b"0" * 30, b"00005 a=b",
                      b"5 =a", b"6 abc")},
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_forged_headers_are_refused_with_their_place(tmp_path: Path, what: str) -> None:
    content, said = FORGED[what]
    (tmp_path / "a.tar").write_bytes(content + END)
    with ends_within(30), pytest.raises(ShardError, match=said):
        build(tmp_path)


@pytest.mark.parametrize("mark", [b"ustar\x0000", b"ustar  \0"])
def test_a_path_prefix_with_its_mark_is_one(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(prefixed(mark) + member(b"b.jpg") + END)
    assert build(tmp_path).records == 2


@given(st.binary(min_size=512, max_size=512) | st.integers(0, 255).map(lambda byte: bytes([byte]) * 512), st.data())
def test_the_checksum_of_a_header_is_the_sum_of_its_bytes(block: bytes, data: st.DataObject) -> None:
    total = sum(block) - sum(block[148:156]) + 8 * 32
    off = data.draw(st.sampled_from([1, -1, 255, 256, 65_520, 65_521, -65_521, 65_536]))
    for told in (total, total + off):
        if told >= 0:
            right = block[:148] + b"%06o\0 " % told + block[156:]
            with nullcontext() if told == total else pytest.raises(ShardError, match="checksum"):
                tar._check_sum(right, 0, "a shard")


def test_base_256_sizes_are_read(tmp_path: Path) -> None:
    """What GNU tar writes for members of more than 8 GiB, here of a small one."""
    (tmp_path / "a.tar").write_bytes(header(b"a.jpg", b"\x80" + (3).to_bytes(11, "big")) + padded(b"abc") + END)
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert [found.size for found in archive] == [3]
    assert ShardReader(build(tmp_path)).read(0) == {"jpg": b"abc"}


def test_names_of_slashes_and_pax_headers_of_many_records_cost_what_their_bytes_cost(tmp_path: Path) -> None:
    """The square of 400,000 slashes takes a regular expression twenty minutes."""
    name = b"/" * 400_000 + b"a.jpg"
    path = b"path=" + name + b"\n"
    long = b"%d %s" % (len(path) + 7, path)
    with ends_within(60):
        assert split_name(name.decode()) == (name[:-4].decode(), "jpg")
        assert split_name("/" * 400_000) is None and split_name("./" * 200_000) is None
        many = b"5 a=\n" * 400_000
        shard = pax(long) + member(b"x") + pax(many + long) + member(b"x")
        (tmp_path / "a.tar").write_bytes(pax(long) + member(b"x") + pax(many) + member(b"b.jpg") + END)
        assert build(tmp_path).records == 2
        (tmp_path / "a.tar").write_bytes(pax(b"9" * 4_000_000) + member(b"b.jpg") + END)
        with pytest.raises(ShardError, match="damaged PAX"):
            build(tmp_path)
        (tmp_path / "a.tar").write_bytes(shard + END)
        with pytest.raises(ShardError, match="occurs twice") as caught:
            build(tmp_path)
    assert len(str(caught.value)) < 1_000, "a name of pages is not printed"


@pytest.mark.parametrize("kind", [b"x", b"g", b"L"])
def test_extension_headers_of_gigabytes_are_not_read(kind: bytes) -> None:
    size = 8 << 30
    block = header(b"long", size - 3 * BLOCK, kind)
    asked: list[int] = []

    def read(at: int, count: int) -> bytes:
        asked.append(count)
        return block if at == 0 else bytes(min(count, BLOCK))

    with pytest.raises(ShardError, match="extension header at byte 0 has"):
        list(walk(read, size, "a.tar", whole=True))
    assert max(asked) == BLOCK < LONGEST_EXTENSION


def test_members_in_the_form_of_a_record_are_walked_in_a_number_of_reads_that_grows_with_the_headers() -> None:
    """Each header once, whatever stands in it: the position always moves on."""
    chance = random.Random(5)
    whole = b"".join(member(b"%d.jpg" % i, bytes(i)) for i in range(40)) + END
    for _ in range(3_000):
        raw = bytearray(whole)
        at = chance.randrange(40) * BLOCK
        at += chance.randrange(100, 200)
        raw[at] = chance.choice(b"-+_ 0789\x80\xff\0xLgS")
        begin = at // BLOCK * BLOCK
        raw[begin + 148 : begin + 156] = b" " * 8
        raw[begin + 148 : begin + 156] = b"%06o\0 " % sum(raw[begin : begin + BLOCK])
        places: list[int] = []

        def read(at: int, count: int, raw: bytearray = raw, places: list[int] = places) -> bytes:
            places.append(at)
            assert len(places) < 200
            return bytes(raw[at : at + count])

        with suppress(ShardError):
            list(walk(read, len(raw), "a.tar", whole=True))
        assert places == sorted(places)


def test_names_are_split_as_webdataset_splits_them() -> None:
    chance = random.Random(3)
    for length in range(1, 60):
        for _ in range(300):
            name = "".join(chance.choices("/.aB_é", k=length))
            theirs = base_plus_ext(name)
            if not re.match(r"__[^/]*__($|/)", name):
                assert split_name(name) == (None if theirs[0] is None else (theirs[0], theirs[1].lower())), name


@pytest.mark.parametrize("seed", range(12))
def test_random_sound_shards_are_indexed_as_tarfile_and_webdataset_read_them(
    tmp_path: Path, write_members: Callable[..., Path], seed: int
) -> None:
    chance = random.Random(seed)
    form = chance.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    deep = 90 if form == tarfile.USTAR_FORMAT else chance.choice([90, 400, 3_000])
    members: list[tuple[str, bytes]] = []
    for number in range(chance.randrange(1, 60)):
        folder = chance.choice(["", "a/", ".hidden/", "ä.b/", "f" * chance.randrange(1, deep) + "/"])
        stem = f"{folder}{number:04d}" + ("" if form == tarfile.USTAR_FORMAT else chance.choice(["", "é", " b"]))
        suffixes = chance.sample(["jpg", "txt", "seg.PNG", "json", "cls"], chance.randrange(1, 5))
        members += [(f"{stem}.{suffix}", chance.randbytes(chance.randrange(0, 2_000))) for suffix in suffixes]
        if chance.random() < 0.2:
            members.append((chance.choice(["README", "d/", "__meta__/x.json", ".dot", "a.b/.c"]), b""))
    seen: set[str] = set()
    members = [each for each in members if not (each[0] in seen or seen.add(each[0]))]
    path = write_members(tmp_path / "s" / "a.tar", members, form)
    index = build(path.parent)
    theirs = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))  # pyright: ignore[reportAttributeAccessIssue]
    reader = ShardReader(index)
    assert [reader.read(record) for record in range(index.records)] == [
        {key: value for key, value in sample.items() if not key.startswith("__")} for sample in theirs
    ]
    with tarfile.open(path) as archive:
        begins = {found.offset for found in archive}
        assert {index.locate(record)[1] for record in range(index.records)} <= begins
        assert index.locate(index.records - 1)[2] == archive.offset


@pytest.mark.parametrize("what", ["pipe", "endless device", "folder", "circle of links"])
def test_what_is_no_file_is_refused_and_not_waited_for(small_set: ShardIndex, what: str) -> None:
    path = small_set.folder.parent / "000003.tar"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if what == "circle of links" else "/dev/zero")
    with ends_within(30):
        with pytest.raises(ShardError, match=r"000003\.tar: (not a regular file|cannot be read)|zero: not a regular"):
            build(path.parent)
        for read in (lambda: scan(path), lambda: open_tape(str(path), 5).__enter__()):
            if what != "circle of links":
                with pytest.raises(ShardError, match="not a regular file"):
                    read()


def test_pipes_and_circles_among_images_are_no_records(tmp_path: Path, picture: Callable[..., bytes]) -> None:
    root = tmp_path / "set"
    root.mkdir()
    (root / "a.jpg").write_bytes(picture(1))
    os.mkfifo(root / "b.jpg")
    with ends_within(30):
        assert build_folder(root, contents=True).records == 1
    done = subprocess.run([*PREPARE, str(root)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "not used: 1 file (1 pipe or device)" in done.stdout
    (root / "c.jpg").symlink_to("c.jpg")
    message = r"c\.jpg: Too many levels of symbolic links; repair or remove it"
    with ends_within(30), pytest.raises(ShardError, match=message):
        build_folder(root)
    done = subprocess.run([*PREPARE, str(root / "c.jpg")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "symbolic links" in done.stderr


def test_a_file_that_never_ends_is_not_followed() -> None:
    """As a writer that is faster than the reader would have it."""
    pulled: list[int] = []

    def more(count: int) -> bytes:
        pulled.append(count)
        assert len(pulled) < 100
        return bytes(1_000)

    window = _Window(more)
    assert window.read(0, 512) == bytes(512)
    window.drain(5_000)
    assert 5_000 < window.size <= 6_000


WRONG_JSON = {
    "deep": DEEP,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "digits": b'{"successes": %s, "records": %s, "format": %s}' % (DIGITS, DIGITS, DIGITS),
    "list": b"[1, 2]",
    "number": b"3",
    "null": b"null",
    "torn": b'{"successes": 1',
    "no text": b"\xff\xfe\x00",
    "infinite": b'{"successes": 1e999, "records": 1e999, "distance": 1e999, "format": 1e999}',
    "empty": b"",
}


@pytest.mark.parametrize("wrong", WRONG_JSON)
def test_statistics_that_cannot_be_understood_are_told_and_change_nothing(small_set: ShardIndex, wrong: str) -> None:
    stats = small_set.folder.parent / "000001_stats.json"
    stats.write_bytes(WRONG_JSON[wrong])
    told: list[str] = []
    assert build(stats.parent, tell=told.append).manifest_digest == small_set.manifest_digest
    (said,) = (each for each in told if each.startswith(f"{stats}: not a count of img2dataset ("))
    assert len(said) < 500


@pytest.mark.parametrize("name", ["manifest.json", STAMPS, FACTS])
@pytest.mark.parametrize("wrong", WRONG_JSON)
def test_forged_json_of_an_index_is_a_sentence(small_set: ShardIndex, name: str, wrong: str) -> None:
    Exclusions(small_set.manifest_digest, np.array([3], dtype=np.uint64)).write(small_set.folder)
    (small_set.folder / name).write_bytes(WRONG_JSON[wrong])
    if name != STAMPS:
        with pytest.raises(ShardError, match=r"(prepare\.py index|overlap again)"):
            open_index(small_set.folder)
    (small_set.folder / FACTS).unlink()
    (small_set.folder / IDS).unlink()
    assert build(small_set.folder.parent).manifest_digest == small_set.manifest_digest


@pytest.mark.parametrize("forged", [3, None, "x", [1, 2], [[["a"]]], {"a": 1}])
def test_forged_stamps_and_notes_are_not_believed(small_set: ShardIndex, forged) -> None:
    folder = small_set.folder.parent
    time.sleep(0.1)
    build(folder)
    stamps = json.loads((small_set.folder / STAMPS).read_bytes())
    assert len(stamps) == 3
    (small_set.folder / STAMPS).write_text(json.dumps({place: forged for place in stamps}))
    assert build(folder).manifest_digest == small_set.manifest_digest
    area = WorkArea(folder / "work", folder)
    area.note("000002.tar", scan(folder / "000002.tar"))
    (path,) = area.folder.iterdir()
    head, _, raw = path.read_bytes().partition(b"\n")
    facts = json.loads(head)
    for wrong in ({"shard": forged}, {"census": forged}, {"shard": {**facts["shard"], "records": 13}}):
        path.write_bytes(json.dumps({**facts, **wrong}).encode() + b"\n" + raw)
        assert area.read("000002.tar") is None
    for forgery in WRONG_JSON.values():
        path.write_bytes(forgery + b"\n" + raw)
        assert area.read("000002.tar") is None


WRONG_FIELDS = [
    ("records", "25"), ("records", 25.0), ("records", -1), ("records", True), ("records", None), ("records", 1 << 70),
    ("folder", 3), ("folder", "a\0b"), ("kind", ["shards"]), ("kind", "other"), ("shards", 3), ("shards", {"a": 1}),
    ("shards", [3]), ("shards", [[["name", "x"]]]), ("format", "2"), ("format", {"a": ["x"] * 10_000}),
]  # fmt: skip
WRONG_LINES = [
    ("name", 3), ("name", "a\0b"), ("records", "10"), ("records", 10.0), ("records", -10), ("records", 1 << 65),
    ("records", True), ("bytes", "x"), ("bytes", -1), ("sha256", 5), ("offsets_sha256", None), ("etag", []),
    ("more", 1),
]  # fmt: skip


@pytest.mark.parametrize("field, value", WRONG_FIELDS)
def test_a_manifest_with_a_field_of_another_type_is_a_sentence(small_set: ShardIndex, field: str, value) -> None:
    _refused_with(small_set, lambda manifest: manifest.update({field: value}))


@pytest.mark.parametrize("field, value", WRONG_LINES)
def test_a_shard_with_a_field_of_another_type_is_a_sentence(small_set: ShardIndex, field: str, value) -> None:
    _refused_with(small_set, lambda manifest: manifest["shards"][0].update({field: value}))


def _refused_with(index: ShardIndex, change: Callable[[dict], None]) -> None:
    path = index.folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match=r"build it with: python launch/prepare\.py index") as caught:
        open_index(index.folder)
    assert len(str(caught.value)) < 1_000
    assert build(index.folder.parent).manifest_digest == index.manifest_digest


def npy(head: bytes, content: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    size = len(head).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + head + content


def saved(array: np.ndarray, pickled: bool = False) -> bytes:
    raw = io.BytesIO()
    np.save(raw, array, allow_pickle=pickled)
    return raw.getvalue()


def zipped() -> bytes:
    raw = io.BytesIO()
    np.savez(raw, a=np.zeros(3))
    return raw.getvalue()


HEAD = b"{'descr': '<u8', 'fortran_order': False, 'shape': (%s,), }\n"
WRONG_NPY = {
    "empty": b"",
    "magic alone": b"\x93NUMPY",
    "cut header": npy(HEAD % b"3")[:30],
    "no dictionary": npy(b"17\n"),
    "deep": npy(b"(" * 9_000 + b")" * 9_000 + b"\n"),
    "unclosed": npy(b"{'descr': ((((\n"),
    "code": npy(b"__import__('os').system('true')\n"),
    "digits": npy(HEAD % (b"9" * 5_000)),
    "far too many": npy(HEAD % b"999999999999999999999999"),
    "more than there are": npy(HEAD % b"9000000000", bytes(24)),
    "negative": npy(HEAD % b"-1", bytes(24)),
    "no number": npy(HEAD % b"'a'", bytes(24)),
    "no type": npy((HEAD % b"3").replace(b"<u8", b"q9x"), bytes(24)),
    "items of no size": npy((HEAD % b"-1").replace(b"<u8", b"|V0")),  # numpy's memmap divides by it: SIGFPE
    "as many items of no size": npy((HEAD % b"28").replace(b"<u8", b"|S0")),
    "product that wraps": npy(HEAD % b"4294967296, 4294967296", bytes(24)),
    "header of gigabytes": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + bytes(100),
    "unknown version": npy(HEAD % b"3", bytes(24), b"\x09\x00"),
    "objects": saved(np.array([{}, []], dtype=object), pickled=True),
    "archive": zipped(),
    "broken archive": b"PK\x03\x04" + bytes(60),
    "pickle": b"\x80\x04K\x01.",
    "other type": saved(np.zeros(28, dtype="<f8")),
    "other shape": saved(np.zeros((14, 2), dtype="<u8")),
    "single": saved(np.uint64(3)),
}


@pytest.mark.parametrize("wrong", WRONG_NPY)
def test_forged_npy_files_are_a_sentence_wherever_one_is_read(
    small_set: ShardIndex, tmp_path: Path, picture: Callable[..., bytes], wrong: str
) -> None:
    Exclusions(small_set.manifest_digest, np.array([3], dtype=np.uint64)).write(small_set.folder)
    (small_set.folder / IDS).write_bytes(WRONG_NPY[wrong])
    with ends_within(30), pytest.raises(ShardError, match="overlap again"):
        open_index(small_set.folder)
    for name in (IDS, FACTS):
        (small_set.folder / name).unlink()
    (small_set.folder / "offsets.npy").write_bytes(WRONG_NPY[wrong])
    with pytest.raises(ShardError, match="build it with"):
        open_index(small_set.folder)
    assert build(small_set.folder.parent).manifest_digest == small_set.manifest_digest
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "1.jpg").write_bytes(picture(1))
    for name in ("files.npy", "digests.npy"):
        images = build_folder(tmp_path / "set", contents=True)
        (images.folder / name).write_bytes(WRONG_NPY[wrong])
        with pytest.raises(ShardError, match="build it with"):
            FolderIndex.open(images.folder)


@pytest.mark.parametrize("wrong", WRONG_JSON)
def test_features_under_a_forged_header_are_made_anew(tmp_path: Path, wrong: str) -> None:
    folder = FeatureFolder.within(tmp_path / "features", "0" * 64, 3, 2)
    with folder.claimed() as missing:
        assert missing and folder.missing(0, 1).tolist() == [0, 1, 2]
    (folder.path / HEADER).write_bytes(WRONG_JSON[wrong])
    with folder.claimed() as missing:
        assert missing and folder.missing(0, 1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "facts",
    [
        {"distance": "x"}, {"distance": None}, {"against": 3}, {"ids_sha256": 5}, {"format": [1]},
        {"manifest_digest": {"a": 1}}, {"reason": ["x"] * 9},
    ],
)  # fmt: skip
def test_exclusions_with_a_field_of_another_type_are_refused_or_harmless(small_set: ShardIndex, facts: dict) -> None:
    Exclusions(small_set.manifest_digest, np.array([3], dtype=np.uint64)).write(small_set.folder)
    path = small_set.folder / FACTS
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **facts}))
    try:
        index = open_index(small_set.folder)
        assert index.left_out(3) and index.records == 25 and "reason" in facts
    except ShardError as error:
        assert "overlap again" in str(error)


def test_a_full_disk_is_told_with_the_file_and_the_fix_and_the_command_goes_on(
    small_set: ShardIndex, tmp_path: Path
) -> None:
    """A limit of the size of files ends a write like a full disk: with an error in the middle of it."""
    out = tmp_path / "out"
    command = [*PREPARE, str(small_set.folder.parent), "--out", str(out)]
    shards = [(path, path.read_bytes()) for path in small_set.folder.parent.glob("*.tar")]
    for limit in (40, 600):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=600,
            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode == 2, done.stdout
        (sentence,) = done.stderr.splitlines()
        assert "cannot be written (File too large); raise the limit" in sentence
        assert "then repeat the command" in sentence
        place = Path(sentence.removeprefix("prepare.py: ").partition(": cannot")[0])
        assert out in place.parents
        assert not [each for each in tmp_path.rglob("*.tmp") if each.is_file()] and not (out / "manifest.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and small_set.manifest_digest in done.stdout
    assert shards == [(path, path.read_bytes()) for path, _ in shards]
