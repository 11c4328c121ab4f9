"""What is said of a damaged record reaches the console: no length and no place that tells which one was drawn."""

from __future__ import annotations

import re

import pytest

from murmuration.data.store.place import ShardError
from murmuration.data.store.tar import parse
from tests.support.tars import tar


def record() -> bytes:
    raw = tar([("a" * 120, {"jpg": b"x" * 700, "txt": b"words"})])
    members = raw.rstrip(b"\0")  # without the archive's end
    return members + b"\0" * (-len(members) % 512)


def test_a_whole_record_is_read() -> None:
    assert {name: len(content) for name, content in parse(record(), "s.tar").items()} == {"jpg": 700, "txt": 5}


@pytest.mark.parametrize("cut", [100, 512, 700, 1024, 1536, 2048, 2500])
def test_a_record_that_was_cut_anywhere_is_named_by_its_shard_alone(cut: int) -> None:
    with pytest.raises(ShardError) as caught:
        parse(record()[:cut], "s.tar")
    assert str(caught.value).startswith("s.tar: ") and not re.search(r"\d{2,}", str(caught.value))


@pytest.mark.parametrize("at", [0, 130, 160, 520, 1600])
def test_a_record_with_any_byte_flipped_tells_no_place(at: int) -> None:
    raw = bytearray(record())
    raw[at] ^= 0xFF
    try:
        parse(bytes(raw), "s.tar")
    except ShardError as error:
        assert not re.search(r"\d{2,}", str(error)), error
