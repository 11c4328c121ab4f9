"""Units of several records: found by a field or by keys, numbered like a slow loop does, kept from shard to shard."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from murmuration.data.draw.node_placement import place_units
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.data.index import build as building
from murmuration.data.index.contents import shards_of
from murmuration.data.index.folders import FolderIndex, build_folder
from murmuration.data.index.open import open_units, unit_known
from murmuration.data.index.public_cut import PublicSplit
from murmuration.data.index.public_split import SplitIndex, apart
from murmuration.data.index.shard_index import ShardIndex, Wanted, build
from murmuration.data.index.unit_table import UnitTable
from murmuration.data.index.units import DIGESTS, FACTS, OF, RECORDS, STARTS, group
from murmuration.data.store.place import ShardError
from tests.data.test_data_remote import Quiet
from tests.support.tars import tar

BY = "patient_id"
KEY = b"k" * 32


def write_shard(path: Path, first: int, owners: Sequence[Any], keys: Sequence[str] | None = None) -> Path:
    """One record per owner, with a picture's name, its text, and the owner in its .json; `...`: no .json."""
    records = list[tuple[str, dict[str, bytes]]]()
    for place, owner in enumerate(owners):
        members = {"jpg": b"x" * (1 + place % 5), "txt": b"words"}
        if owner is not ...:
            members["json"] = json.dumps({"other": 1, BY: owner}).encode()
        records.append((keys[place] if keys else f"{first + place:06d}", members))
    path.write_bytes(tar(records))
    return path


def write_shards(folder: Path, owners: Sequence[Sequence[Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    first = 0
    for number, part in enumerate(owners):
        write_shard(folder / f"{number:06d}.tar", first, part)
        first += len(part)
    time.sleep(0.1)  # older than the resolution of time stamps
    return folder


def by_hand(owners: Sequence[Any]) -> list[list[int]]:
    """The records of each unit, units in the order of their first record."""
    found: dict[Any, list[int]] = {}
    for record, owner in enumerate(owners):
        found.setdefault(("alone", record) if owner in (None, "", ...) else str(owner), []).append(record)
    return list(found.values())


def table(folder: Path, missing: str = "refuse") -> UnitTable:
    index = build(folder, wanted=Wanted(unit=BY, missing=missing))  # pyright: ignore[reportArgumentType]
    return open_units(index, BY)


def as_lists(found: UnitTable) -> list[list[int]]:
    return [found.records_of(unit).tolist() for unit in range(found.count)]


@pytest.mark.parametrize("seed", range(6))
def test_units_are_those_of_a_slow_loop(tmp_path: Path, seed: int) -> None:
    """Uneven, over many shards, numbers and words mixed, one with most of the records, some without a unit."""
    draw = random.Random(seed)
    names: list[Any] = ["7", 7, "ä b", "p/1", "", None, ..., *map(str, range(draw.randrange(1, 60)))]
    owners = [
        [draw.choice([*names, *["often"] * 20]) for _ in range(draw.randrange(1, 40))]
        for _ in range(draw.randrange(1, 12))
    ]  # fmt: skip
    flat = [owner for part in owners for owner in part]
    found = table(write_shards(tmp_path / "shards", owners), "own")
    wanted = by_hand(flat)
    assert as_lists(found) == wanted
    assert [found.unit_of(record) for record in range(len(flat))] == [
        next(unit for unit, records in enumerate(wanted) if record in records) for record in range(len(flat))
    ]
    some = np.array(sorted(draw.sample(range(len(wanted)), min(5, len(wanted)))))
    assert found.records_of_all(some).tolist() == sorted(record for unit in some for record in wanted[unit])
    assert found.units_of(found.records_of_all(some)).tolist() == some.tolist()


def test_records_without_a_unit_are_refused_with_their_number_or_alone(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", [["a", ..., "a"], [None, "", 1.5, True, ["a"], "b"]])
    with pytest.raises(ShardError, match="6 of 9 records lack a text or whole number 'patient_id'"):
        table(folder)
    assert as_lists(table(folder, "own")) == [[0, 2], [1], [3], [4], [5], [6], [7], [8]]


def test_files_of_units_are_for_the_owner_alone(tmp_path: Path) -> None:
    table(write_shards(tmp_path / "shards", [["a", "b"]]))
    for name in (FACTS, DIGESTS, OF, RECORDS, STARTS):
        assert (tmp_path / "shards" / "index" / name).stat().st_mode & 0o777 == 0o600, name


def test_a_shard_is_read_once_and_what_was_known_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = building.scan
    monkeypatch.setattr(building, "scan", lambda place, unit: (read.append(place.name), real(place, unit))[1])
    owners = [["a", "b"], ["b", "c"], ["a", "d"]]
    folder = write_shards(tmp_path / "shards", owners[:2])
    first = build(folder)
    assert len(read) == 2 and not (first.folder / FACTS).exists()
    assert as_lists(table(folder)) == [[0], [1, 2], [3]] and len(read) == 4  # the names of units were not known yet
    write_shard(folder / "000002.tar", 4, owners[2])
    index = build(folder)  # --unit need not be repeated
    assert as_lists(open_units(index, BY)) == [[0, 4], [1, 2], [3], [5]]
    assert read[4:] == ["000002.tar"]
    assert as_lists(table(tmp_path / "shards")) == as_lists(table(write_shards(tmp_path / "again", owners)))


def test_a_build_that_was_refused_continues_without_reading_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_shards(tmp_path / "shards", [["a", "b"], [...], ["a"]])
    index = folder / "index"
    with pytest.raises(ShardError, match="1 of 4 records"):
        table(folder)
    monkeypatch.setattr(building, "scan", lambda place, unit: pytest.fail(f"{place} is read again"))
    assert as_lists(table(folder, "own")) == [[0, 3], [1], [2]]
    assert not (index / ".work").exists()


def test_a_table_of_other_records_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", [["a", "b", "a"]])
    table(folder)
    with pytest.raises(ShardError, match=r"named by 'patient_id', not by 'person'.*--unit person"):
        open_units(ShardIndex.open(folder), "person")
    of = np.load(folder / "index" / OF)
    for changed in ([0, 1, 1], [1, 0, 1], [0, 1, 2]):
        np.save(folder / "index" / OF, np.array(changed, dtype="<i8"))
        with pytest.raises(ShardError, match="do not belong together"):
            open_units(ShardIndex.open(folder), BY)
    np.save(folder / "index" / OF, of)
    order = np.load(folder / "index" / RECORDS)
    for changed in ([0, 2, 2], [2, 0, 1], [0, 1, 2], [0, 2, 3], [0, 2, -1]):
        np.save(folder / "index" / RECORDS, np.array(changed, dtype="<i8"))
        with pytest.raises(ShardError, match="do not belong together"):
            open_units(ShardIndex.open(folder), BY)
    np.save(folder / "index" / RECORDS, order)
    assert as_lists(open_units(ShardIndex.open(folder), BY)) == [[0, 2], [1]]
    other = write_shards(tmp_path / "other", [["a", "b", "c"]])
    write_shard(other / "000000.tar", 5, ["a", "b", "c"])
    index = build(other)
    for name in (FACTS, DIGESTS, OF, RECORDS, STARTS):
        (index.folder / name).write_bytes((folder / "index" / name).read_bytes())
    with pytest.raises(ShardError, match="made for other records"):
        open_units(index, BY)
    (other / "index" / FACTS).unlink()
    with pytest.raises(ShardError, match=r"knows no units.*--unit patient_id"):
        open_units(index, BY)


@pytest.mark.parametrize(("pattern", "wanted"), [
    ("key:[^_]+", [[0, 1, 2], [3], [4]]),
    ("key:(.*)_", [[0, 2], [1], [3], [4]]),
    ("key:b|c", [[0], [1], [2], [3], [4]]),
])  # fmt: skip
def test_units_by_key(tmp_path: Path, pattern: str, wanted: list[list[int]]) -> None:
    keys = ["a_1_x", "a_2_x", "a_1_y", "b_1", "c_1"]
    write_shard(tmp_path / "0.tar", 0, [...] * 5, keys)
    index = build(tmp_path, wanted=Wanted(unit=pattern, missing="own"))
    assert as_lists(open_units(index, pattern)) == wanted


def test_units_of_single_images_by_their_paths(tmp_path: Path) -> None:
    for name in ("ill/p1_a", "ill/p1_b", "ill/p2_a", "well/p1_c", "well/p3_a"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / f"{name}.png")
    pattern = "key:.*/([^_]+)"
    index = build_folder(tmp_path / "images", unit=pattern)
    assert as_lists(open_units(index, pattern)) == [[0, 1, 3], [2], [4]]
    assert as_lists(open_units(build_folder(tmp_path / "images"), pattern)) == [[0, 1, 3], [2], [4]]  # kept
    with pytest.raises(ShardError, match=r"have no \.json with such a field"):
        build_folder(tmp_path / "images", unit=BY)
    with pytest.raises(ShardError, match="some records are skipped"):
        open_units(FolderIndex.open(tmp_path / "images").without({"ill"}), pattern)


@pytest.mark.parametrize("damaged", ["{", "[]", '{"unit": 3, "missing": "own"}'])
def test_a_table_that_cannot_be_read_is_no_word_for_single_records(tmp_path: Path, damaged: str) -> None:
    """Runs take what the index knows as their unit; where it knows one and does not say which, they are refused."""
    write_shards(tmp_path / "shards", [["a", "b"]])
    folder = build(tmp_path / "shards", wanted=Wanted(unit=BY)).folder
    assert unit_known(str(folder)) == BY and unit_known(str(tmp_path / "nowhere")) is None
    (folder / FACTS).write_text(damaged)
    with pytest.raises(ShardError, match="cannot be read"):
        unit_known(str(folder))


@pytest.mark.parametrize(("name", "said"), [("", "is no name"), ("key:", "is no name"), ("key:(", "not a regular"),
                                            ("a\nb", "is no name"), ("x" * 201, "is no name")])  # fmt: skip
def test_what_names_no_unit_is_refused_before_a_shard_is_read(tmp_path: Path, name: str, said: str) -> None:
    write_shards(tmp_path / "shards", [["a"]])
    with pytest.raises(ShardError, match=said):
        build(tmp_path / "shards", wanted=Wanted(unit=name))


def test_records_of_a_large_unit_are_chosen_by_key_and_evenly(tmp_path: Path) -> None:
    found = table(write_shards(tmp_path / "shards", [["a"] * 3 + ["b"] * 9 + ["c"] + ["b"] * 3]))
    assert found.chosen(0, KEY, 1, 3).tolist() == [0, 1, 2] and found.chosen(2, KEY, 1, 1).tolist() == [12]
    times, counted = 6000, Counter[int]()
    for step in range(times):
        chosen = found.chosen(1, KEY, step, 4)
        assert len(set(chosen.tolist())) == 4 and set(chosen.tolist()) <= set(found.records_of(1).tolist())
        assert chosen.tolist() == sorted(chosen.tolist()) == found.chosen(1, KEY, step, 4).tolist()
        counted.update(chosen.tolist())
    share = 4 / 12
    assert all(abs(counted[record] / times - share) < 5 * (share * (1 - share) / times) ** 0.5 for record in counted)
    assert len(counted) == 12
    other = [found.chosen(1, b"o" * 32, step, 4).tolist() for step in range(20)]
    assert other != [found.chosen(1, KEY, step, 4).tolist() for step in range(20)]


def test_remote_shards_give_the_same_units(tmp_path: Path) -> None:
    owners = [["a", "b"], ["b", "c", "a"]]
    folder = write_shards(tmp_path / "shards", owners)
    near = table(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        pattern = f"http://127.0.0.1:{server.server_port}/{{000000..000001}}.tar"
        far = open_units(build(pattern, tmp_path / "index", wanted=Wanted(unit=BY, workers=1)), BY)
    finally:
        server.shutdown()
        server.server_close()
    assert as_lists(far) == as_lists(near) == [[0, 4], [1, 2], [3]] and far.digest == near.digest


@pytest.mark.parametrize("owner", ["one", None])
def test_a_table_of_a_single_record(tmp_path: Path, owner: str | None) -> None:
    assert as_lists(table(write_shards(tmp_path, [[owner]]), "own")) == [[0]]


# Units are drawn, cut and placed whole: none is in two parts of a set or on two nodes, and each is drawn as often as
# any other, however many records it has.


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


def test_a_cut_between_units_is_no_cut_between_records(whole: tuple[ShardIndex, UnitTable]) -> None:
    index, units = whole
    by_units = [SplitIndex(index, 0.3, part, units) for part in (True, False)]
    by_records = [SplitIndex(index, 0.3, part) for part in (True, False)]
    assert apart(*by_units) and apart(*by_records)
    assert not apart(by_units[0], by_records[1]) and not apart(by_records[0], by_units[1])
    assert len({part.manifest_digest for part in (*by_units, *by_records)}) == 4
    assert by_units[0].cut == by_units[1].cut == PublicSplit(units.count, 0.3, BY) != by_records[0].cut


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
