"""One set cut in a public and a private part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.data.index.public_split import SplitIndex, apart, public_share
from murmuration.data.index.selection import Selection
from murmuration.data.store.place import ShardError
from murmuration.data.synthetic.index import SyntheticIndex


def records_of(seed: int, public: bool, fraction: float = 0.1) -> list[int]:
    part = SplitIndex(SyntheticIndex("spectrum", 997, seed, 16), fraction, public)
    return [part.original(record) for record in range(part.records)]


def test_the_parts_share_no_record_and_miss_none() -> None:
    public, private = records_of(1, True), records_of(1, False)
    assert len(public) == public_share(997, 0.1) == 100
    assert sorted(public + private) == list(range(997))
    assert public != sorted(public), "taken from all over the set"


class Numbered:
    """An index that answers with the number of the record that it was asked for."""

    records, folder, shards, manifest_digest, excluded_digest = 20, Path("whole"), (), "whole", "excluded"

    def left_out(self, record: int) -> int:
        return record

    def locate(self, record: int) -> tuple[int, int, int]:
        return record, record, record

    def owner(self, record: int) -> str:
        return str(record)

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        return {"png": str(record).encode() + raw}

    def check_unchanged(self, *, contents: bool = False) -> None:
        raise ShardError(f"changed, contents {contents}")


def test_what_a_view_says_of_a_record_is_what_the_whole_set_says_of_it() -> None:
    """Excluded records above all: under another number, an excluded one would be trained on."""
    whole: Any = Numbered()
    views: list[Any] = [SplitIndex(whole, 0.5, False), Selection(whole, np.array([7, 3, 19]))]
    for view in views:
        assert (view.folder, view.shards, view.excluded_digest) == (Path("whole"), (), "excluded")
        originals = [view.original(record) for record in range(view.records)]
        assert originals != list(range(view.records))
        for record, number in enumerate(originals):
            assert view.left_out(record) == number and view.owner(record) == str(number)
            assert view.locate(record) == (number, number, number)
            assert view.members(record, b"!") == {"png": f"{number}!".encode()}
        with pytest.raises(ShardError, match="contents True"):
            view.check_unchanged(contents=True)


def test_sets_that_differ_in_their_contents_alone_are_cut_alike() -> None:
    """Neighbours have different manifests; if the cut followed them, a protected record might be public next door."""
    one, other = SyntheticIndex("spectrum", 997, 1, 16), SyntheticIndex("spectrum", 997, 2, 16)
    assert one.manifest_digest != other.manifest_digest
    assert records_of(1, True) == records_of(2, True)


def test_a_larger_public_part_holds_the_smaller_one() -> None:
    assert set(records_of(1, True, 0.1)) < set(records_of(1, True, 0.3))


def test_only_two_parts_of_one_cut_are_apart() -> None:
    whole = SyntheticIndex("spectrum", 100, 1, 16)
    parts = [SplitIndex(whole, 0.1, True), SplitIndex(whole, 0.1, False), SplitIndex(whole, 0.2, False)]
    assert apart(parts[0], parts[1])
    assert not apart(parts[0], parts[0]) and not apart(parts[0], parts[2]) and not apart(parts[0], whole)
    with pytest.raises(IndexError, match="outside the 10 of this part"):
        parts[0].original(10)


def test_every_part_of_every_cut_has_a_name_of_its_own_and_parts_of_two_sets_are_never_apart() -> None:
    sets = [SyntheticIndex("spectrum", 100, seed, 16) for seed in (1, 2)]
    parts = {
        (number, share, public): SplitIndex(whole, share, public)
        for number, whole in enumerate(sets) for share in (0.1, 0.2) for public in (True, False)
    }  # fmt: skip
    assert len({part.manifest_digest for part in (*parts.values(), *sets)}) == 10
    assert not apart(parts[0, 0.1, True], parts[1, 0.1, False])
