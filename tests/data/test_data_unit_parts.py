"""Units are drawn, cut and placed whole: none is in two parts of a set or on two nodes, and each is drawn as often as
any other, however many records it has."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.data.draw.node_placement import place_units
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.data.index.contents import shards_of
from murmuration.data.index.open import open_units
from murmuration.data.index.public_split import PublicSplit, SplitIndex, apart
from murmuration.data.index.shard_index import ShardIndex, Wanted, build
from murmuration.data.index.units import UnitTable, group
from murmuration.data.store.place import ShardError
from tests.data.test_data_units import BY, write_shards

KEY = b"k" * 32


def table_of(owners: list[int]) -> UnitTable:
    """A table in memory."""
    digests = np.zeros((len(owners), 16), dtype=np.uint8)
    digests[:, 0] = np.array(owners) + 1
    of = group(digests)
    starts = np.concatenate([[0], np.cumsum(np.bincount(of))])
    return UnitTable(BY, "refuse", starts, np.argsort(of, kind="stable"), of, "digest")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardIndex, UnitTable]:
    draw = random.Random(5)
    owners = [[draw.choice(["big"] * 60 + [f"p{number}" for number in range(60)]) for _ in range(23)] for _ in range(7)]
    index = build(write_shards(tmp_path_factory.mktemp("set") / "shards", owners), wanted=Wanted(unit=BY))
    return index, open_units(index, BY)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.93])
def test_no_unit_is_public_and_private(whole: tuple[ShardIndex, UnitTable], fraction: float) -> None:
    index, units = whole
    public, private = (SplitIndex(index, fraction, part, units) for part in (True, False))
    seen = []
    for part in (public, private):
        assert part.units is not None and part.records == part.units.records
        originals = part.originals(np.arange(part.records))
        assert [part.original(record) for record in range(part.records)] == originals.tolist()
        assert part.locate(part.records - 1) == index.locate(int(originals[-1]))
        theirs = set(units.units_of(originals).tolist())
        assert len(theirs) == part.units.count
        for unit in range(part.units.count):
            own = originals[part.units.records_of(unit)]
            [original] = set(units.units_of(own).tolist())
            assert own.tolist() == units.records_of(original).tolist(), "a unit is there with all of its records"
            assert {part.units.unit_of(int(record)) for record in part.units.records_of(unit)} == {unit}
        seen.append((theirs, set(originals.tolist())))
    (one, records), (other, others) = seen
    assert not one & other and len(one) + len(other) == units.count
    assert not records & others and len(records) + len(others) == index.records
    assert public.units.count == max(1, round(units.count * fraction))  # pyright: ignore[reportOptionalMemberAccess]


def test_a_cut_between_units_is_no_cut_between_records(whole: tuple[ShardIndex, UnitTable], tmp_path: Path) -> None:
    index, units = whole
    by_units = [SplitIndex(index, 0.3, part, units) for part in (True, False)]
    by_records = [SplitIndex(index, 0.3, part) for part in (True, False)]
    assert apart(*by_units) and apart(*by_records)
    assert not apart(by_units[0], by_records[1]) and not apart(by_records[0], by_units[1])
    assert len({part.manifest_digest for part in (*by_units, *by_records)}) == 4
    by_units[0].cut.freeze(tmp_path)
    assert PublicSplit.frozen(tmp_path) == by_units[1].cut == PublicSplit(units.count, 0.3, BY) != by_records[0].cut
    (tmp_path / "older").mkdir()
    by_records[0].cut.freeze(tmp_path / "older")
    assert b"unit" not in (tmp_path / "older" / "public_split.json").read_bytes()
    assert PublicSplit.frozen(tmp_path / "older") == by_records[0].cut


def test_the_shards_of_a_draw_are_those_of_all_records_of_its_units(whole: tuple[ShardIndex, UnitTable]) -> None:
    index, units = whole
    big = int(np.argmax(units.sizes))
    assert shards_of(index, units.records_of_all(np.array([big]))) == list(range(7))
    lone = next(unit for unit in range(units.count) if len(set(units.records_of(unit) // 23)) == 1)
    assert shards_of(index, units.records_of_all(np.array([lone]))) == [int(units.records_of(lone)[0]) // 23]


def test_units_are_drawn_alike_however_many_records_they_have(whole: tuple[ShardIndex, UnitTable]) -> None:
    _, units = whole
    steps, rate = 4000, 1 / 8
    sampler = PoissonSampler(KEY, KEY, units.count, int(rate * 2**32))
    counted, together = np.zeros(units.count), 0
    big, small = int(np.argmax(units.sizes)), int(np.argmin(units.sizes))
    for step in range(1, steps + 1):
        ids = sampler.draw(step).ids
        counted[ids] += 1
        together += int(big in ids and small in ids)
    error = (rate * (1 - rate) / steps) ** 0.5
    assert units.sizes[big] > 50 > units.sizes[small] == 1
    assert np.abs(counted / steps - rate).max() < 5 * error
    assert abs(together / steps - rate**2) < 5 * (rate**2 / steps) ** 0.5


@given(data=st.data())
def test_a_unit_is_computed_where_all_of_its_records_lie_or_refused(data: st.DataObject) -> None:
    shards, nodes = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=shards, max_size=shards))
    records = sum(sizes)
    if not records:
        sizes[0], records = 1, 1
    units = table_of(data.draw(st.lists(st.integers(0, 5), min_size=records, max_size=records)))
    held = [data.draw(st.lists(st.booleans(), min_size=shards, max_size=shards)) for _ in range(nodes)]
    for shard in range(shards):
        held[data.draw(st.integers(0, nodes - 1))][shard] = True
    ends = np.cumsum(sizes)
    of_record = np.searchsorted(ends, np.arange(records), side="right")
    names = [f"{number}.tar" for number in range(shards)]
    ids = np.arange(units.count)
    try:
        placement = place_units(names, ends, list(np.array(held)), units)
    except ShardError as error:
        assert "begins in a shard of another node" in str(error)
        whole_somewhere = all(
            any(all(held[node][of_record[record]] for record in units.records_of(unit)) for node in range(nodes))
            for unit in range(units.count)
        )
        assert not whole_somewhere or len({tuple(row) for row in held}) > 1, "one node can always do it"
        return
    rows = [placement.rows(ids, rank, 2) for rank in range(nodes)]
    assert sorted(np.concatenate([row[row >= 0] for row in rows]).tolist()) == ids.tolist()
    for rank, row in enumerate(rows):
        for unit in row[row >= 0].tolist():
            assert all(held[rank][of_record[record]] for record in units.records_of(unit))


def test_a_unit_on_two_nodes_is_refused_with_the_shard(tmp_path: Path) -> None:
    units = table_of([0, 1, 1, 2])
    with pytest.raises(ShardError, match=r"^1\.tar holds records of a unit that begins in a shard of another node"):
        place_units(["0.tar", "1.tar"], np.array([2, 4]), list(np.array([[True, False], [False, True]])), units)
    found = place_units(["0.tar", "1.tar"], np.array([2, 4]), list(np.array([[True, True], [False, True]])), units)
    assert found.ends.tolist() == [2, 3]
