"""JSON that others may have written: what no file of ours holds is refused with a sentence, in linear time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.statement import compose
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.ledger.chain import GENESIS, LedgerError, Lines, make_entry
from murmuration.accounting.ledger.history import History
from murmuration.accounting.strict_json import MOST_DEPTH, JsonError, parse, require_shallow
from tests.support.acc_world import KEY, certified, document_of, whole_run

HOSTILE: dict[str, tuple[bytes, str]] = {
    "5,000 digits": (b'{"a":' + b"1" * 5000 + b"}", "does not fit in 64 bits"),
    "400 digits": (b'{"a":-' + b"9" * 400 + b"}", "does not fit in 64 bits"),
    "65 bits": (b"%d" % 2**64, "does not fit in 64 bits"),
    "65 bits below 0": (b"%d" % (-(2**63) - 1), "does not fit in 64 bits"),
    "lists, 101 deep": (b"[" * (MOST_DEPTH + 1) + b"]" * (MOST_DEPTH + 1), "more than 100 levels deep"),
    "lists, 50,000 deep": (b"[" * 50_000 + b"]" * 50_000, "levels deep"),
    "objects, 50,000 deep": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "levels deep"),
    "lists, 900 deep": (b"[" * 900 + b"]" * 900, "levels deep"),
    "huge exponent": (b'{"a":1e999}', "not a number that can be used"),
    "huge negative exponent of a negative": (b"-1e999999999", "not a number that can be used"),
    "NaN": (b'{"a":NaN}', "NaN is not a number"),
    "Infinity": (b"-Infinity", "Infinity is not a number"),
    "equal keys": (b'{"a":1,"b":2,"a":3}', "the key 'a' appears twice"),
    "UTF-16": ('{"a":1}'.encode("utf-16"), "is not UTF-8"),
    "half a character": (b'"\xed\xa0\x80"', "is not UTF-8"),
    "nothing": (b"", "is not valid JSON"),
    "a torn end": (b'{"a":1', "is not valid JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_file_of_ours_holds_is_refused_with_a_sentence(name: str) -> None:
    content, sentence = HOSTILE[name]
    with pytest.raises(JsonError, match=sentence) as caught:
        parse(content)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_the_bounds_themselves_are_accepted() -> None:
    for text in (str(2**64 - 1), str(-(2**63)), "1e308", "5e-324", "[" * MOST_DEPTH + "]" * MOST_DEPTH):
        assert parse(text) == json.loads(text)
    brackets = "[" * MOST_DEPTH + "]" * (MOST_DEPTH - 1)
    parse(f"{brackets}, []]")  # as deep, with more brackets
    wide: Any = [[[]] for _ in range(10 * MOST_DEPTH)]
    assert parse(json.dumps(wide)) == wide
    deep: Any = []
    for _ in range(MOST_DEPTH):
        deep = [deep]
    with pytest.raises(JsonError, match="levels deep"):
        require_shallow(deep)


@pytest.mark.rest
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20,
    )
)  # fmt: skip
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_everything_else_is_what_the_standard_library_reads(value: Any) -> None:
    assert parse(json.dumps(value)) == value


def test_fifty_thousand_keys_are_told_apart_in_one_pass() -> None:
    keys = ",".join(f'"k{number}":1' for number in range(50_000))
    assert len(parse("{" + keys + "}")) == 50_000
    with pytest.raises(JsonError, match="'k7' appears twice"):
        parse("{" + keys + ',"k7":2}')


# Whoever reads a file calls the same function: one of each sentence is enough.
AT_DOORS = ("65 bits", "lists, 50,000 deep", "huge exponent", "equal keys", "UTF-16", "nothing")


@pytest.mark.parametrize("name", AT_DOORS)
def test_a_hostile_certificate_is_refused_by_name(tmp_path: Path, name: str) -> None:
    certified(whole_run(tmp_path))
    verify(tmp_path)
    content, sentence = HOSTILE[name]
    (tmp_path / "certificate.json").write_bytes(content)
    with pytest.raises(CertificateError, match=rf"certificate\.json .*{sentence}"):
        verify(tmp_path)
    with pytest.raises(CertificateError, match="restore it"):
        verify(tmp_path / "certificate.json")


@pytest.mark.parametrize("name", AT_DOORS)
def test_a_hostile_line_of_the_ledger_and_a_hostile_manifest_are_refused_by_name(tmp_path: Path, name: str) -> None:
    journal = whole_run(tmp_path)
    journal.ledger.close()
    folder = tmp_path / "checkpoints" / "phase00-step00000003"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(HOSTILE[name][0])
    with pytest.raises(CertificateError, match=r"manifest\.json is damaged"):
        verify(tmp_path)
    (folder / "manifest.json").unlink()
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + HOSTILE[name][0] + b"\n" + b"".join(lines[3:]))
    with pytest.raises(LedgerError, match=r"line 3"):
        verify(tmp_path)


WRONG = (None, True, "8", 1.5, -1, 2**63, 1e308, 5e-324, [], {}, ["x"], {"x": 1}, "x" * 5000)


def places(value: Any, where: tuple = ()) -> list[tuple]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in [(*where, key), *places(item, (*where, key))]]


def changed(document: dict, place: tuple, value: object) -> dict:
    document = json.loads(json.dumps(document))
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return document


@pytest.mark.rest
def test_no_type_in_a_certificate_ends_in_anything_but_a_refusal(tmp_path: Path, monkeypatch) -> None:
    journal = whole_run(tmp_path)
    document = document_of(journal, {"siblings": []})
    journal.ledger.close()
    expected = document_of(journal)
    # The ledger stays as it is.
    monkeypatch.setattr("murmuration.accounting.certificate.verify.compose", lambda *_: expected)
    document = json.loads(json.dumps(document))
    for place in places(document):
        for value in WRONG:
            wrong = changed(document, place, value)
            wrong = wrong if place[0] == "signature" else signed(wrong, KEY)  # which is asked for last
            (tmp_path / "certificate.json").write_text(json.dumps(wrong))
            try:
                verify(tmp_path)
            except CertificateError as error:
                assert "\n" not in str(error) and len(str(error)) < 4000
            # What verifies must make pages, too: an export writes them anew.
            else:
                pages.write(parse((tmp_path / "certificate.json").read_bytes()), tmp_path / ".")


def test_no_type_in_a_ledger_that_is_chained_anew_ends_in_anything_but_a_refusal(tmp_path: Path) -> None:
    journal = whole_run(tmp_path, steps=1)
    journal.ledger.close()
    entries = journal.ledger.entries
    for number, entry in enumerate(entries):
        for place in places(entry.fields):
            for value in (*WRONG, "missing", "more"):
                fields = changed(entry.fields, place, value)
                if value in ("missing", "more"):
                    holder = fields
                    for key in place[:-1]:
                        holder = holder[key]
                    holder["unknown"] = holder.pop(place[-1]) if value == "missing" else 1
                try:
                    reread(entries, number, fields)
                except (LedgerError, AccountingError) as error:
                    assert "\n" not in str(error)


def reread(entries: Lines, number: int, fields: dict) -> None:
    """All that a reader of a ledger asks of it, with one entry changed and every hash made anew."""
    previous, chained = GENESIS, Lines(Path("ledger.jsonl"))
    history = History()
    for each in entries:
        entry = make_entry(each.index, each.kind, fields if each.index == number else each.fields, previous)
        chained.note(entry)
        history.take(entry)
        previous = entry.hash
    if history.plans:
        assert history.epsilon() >= 0
        compose(history, chained, {})
