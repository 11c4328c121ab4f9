"""One set cut in a public and a private part."""

from __future__ import annotations

import pytest

from murmuration.data.index.public_split import SplitIndex, apart, public_share
from murmuration.data.synthetic.index import SyntheticIndex


def records_of(seed: int, public: bool, fraction: float = 0.1) -> list[int]:
    part = SplitIndex(SyntheticIndex("spectrum", 997, seed, 16), fraction, public)
    return [part.original(record) for record in range(part.records)]


def test_the_parts_share_no_record_and_miss_none() -> None:
    public, private = records_of(1, True), records_of(1, False)
    assert len(public) == public_share(997, 0.1) == 100
    assert sorted(public + private) == list(range(997))
    assert public != sorted(public), "taken from all over the set"


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
    with pytest.raises(ValueError, match="cannot be split in two"):
        SplitIndex(SyntheticIndex("spectrum", 1, 1, 16), 0.5, True)
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
