"""Shards streamed by webdataset: every record once per epoch, shuffled, exactly resumable, on any number of ranks."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterable
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset

from murmuration.data.batch.loader import Loader
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.draw.stream import PLACES, Lane, StreamEpochs, StreamIndex, lane_placement, portions
from murmuration.data.index.epochs import PublicOrder
from murmuration.data.index.public_split import SplitIndex, places_of
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import ShardError, UnreadableError
from tests.support.range_server import Fault, RangeServer

KEY = b"order"
TarMaker = Callable[..., Path]


@pytest.fixture
def shards(tmp_path: Path, write_tar: TarMaker, picture: Callable[..., bytes]) -> Path:
    """50 records in 5 shards of unequal size; the caption tells which."""
    folder, number = tmp_path / "public", 0
    for shard, count in enumerate((4, 13, 9, 1, 23)):
        numbers = range(number, number + count)
        write_tar(
            folder / f"{shard}.tar",
            [{"__key__": f"{i:03d}", "jpg": picture(i, 20 + i % 7), "txt": str(i).encode()} for i in numbers],
        )
        number += count
    return folder


def _texts(index: StreamIndex, batch: int, steps: range, key: bytes = KEY) -> list[list[int]]:
    epochs, stream = StreamEpochs(index.lanes, batch), index.begin(key, batch)
    return [[int(stream.read(int(record))["txt"]) for record in epochs.ids(step)] for step in steps]


def test_one_lane_gives_every_record_once_per_epoch_as_webdataset_reads_it(shards: Path) -> None:
    steps = _texts(StreamIndex(str(shards), 1, 16), 10, range(15))
    epochs = [list(chain(*steps[first : first + 5])) for first in (0, 5, 10)]
    theirs = webdataset.WebDataset([str(path) for path in sorted(shards.glob("*.tar"))], shardshuffle=False)
    everybody = sorted(int(sample["txt"]) for sample in theirs)
    assert everybody == list(range(50))
    assert all(sorted(epoch) == everybody for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each epoch has an order of its own"
    for one, other in pairwise(epochs):
        assert abs(np.corrcoef(np.argsort(one), np.argsort(other))[0, 1]) < 0.45
    before = os.listdir("/proc/self/fd")
    assert _texts(StreamIndex(str(shards), 1, 16), 10, range(5), b"another key") != steps[:5]
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1, "a shard is closed when it was read"


def test_each_lane_goes_through_its_own_shards(shards: Path) -> None:
    """Lane 0 has shards 0, 2 and 4: 36 records; lane 1 has 1 and 3: 14. Dealt out as webdataset splits by node."""
    index = StreamIndex(str(shards), 2, 8)
    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    assert [str(place) for place in index.places[0::2]] == list(islice(urls, 0, None, 2))
    steps = _texts(index, 9, range(28))
    lanes = [list(chain(*(step[:5] for step in steps))), list(chain(*(step[5:] for step in steps)))]
    assert portions(9, 2) == [5, 4] and [len(lane) for lane in lanes] == [140, 112]
    for lane, length in zip(lanes, (36, 14), strict=True):
        whole = [lane[start : start + length] for start in range(0, len(lane) - length, length)]
        assert all(set(epoch) == set(whole[0]) and len(set(epoch)) == length for epoch in whole)
    assert set(chain(*steps)) == set(range(50))


@pytest.mark.parametrize(("lanes", "batch", "buffer"), [(1, 7, 5), (2, 9, 50), (5, 13, 3), (3, 2, 8)])
def test_resumed_at_any_step_it_gives_what_it_would_have(shards: Path, lanes: int, batch: int, buffer: int) -> None:
    """In the first epoch, at its end, in the fourth; also backwards, and where a lane gives nothing at all."""
    index = StreamIndex(str(shards), lanes, buffer)
    expected = _texts(index, batch, range(30))
    for start in (0, 1, 2, 5, 6, 7, 13, 27):
        assert _texts(index, batch, range(start, 30)) == expected[start:]
    epochs, stream = StreamEpochs(lanes, batch), index.begin(KEY, batch)
    for step in (20, 3, 3, 4, 29, 28):
        assert [int(stream.read(int(record))["txt"]) for record in epochs.ids(step)] == expected[step]


def test_resuming_late_costs_two_passes_at_most(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counted(url: str, timeout_seconds: float):
        opened.append(url)
        return open_tape(url, timeout_seconds)

    from murmuration.data.draw.stream import open_tape

    monkeypatch.setattr("murmuration.data.draw.stream.open_tape", counted)
    stream = StreamIndex(str(shards), 1, 4).begin(KEY, 10)
    stream.read(10_037)
    assert 5 < len(opened) <= 10, "the first epoch to learn its length, and the one that holds the place"


def test_threads_out_of_order_get_their_own_records(shards: Path) -> None:
    expected = _texts(StreamIndex(str(shards), 2, 8), 8, range(12))
    stream = StreamIndex(str(shards), 2, 8).begin(KEY, 8)
    epochs = StreamEpochs(2, 8)
    chance = np.random.default_rng(0)
    for step in range(4, 12, 2):  # as the loader does it: two steps on their way, their records in any order
        ids = [*epochs.ids(step).tolist(), *epochs.ids(step + 1).tolist()]
        found = {i: int(stream.read(i)["txt"]) for i in chance.permutation(ids).tolist()}
        assert [found[i] for i in ids] == expected[step] + expected[step + 1]
    assert sum(len(lane._waiting) for lane in stream._lanes) <= 3 * 8, "what nobody asks for is not kept for ever"


@pytest.mark.parametrize("asked", [sorted, reversed])
def test_in_any_order_within_two_steps_nothing_is_read_twice(
    shards: Path, monkeypatch: pytest.MonkeyPatch, asked: Callable[[range], Iterable[int]]
) -> None:
    opened: list[int] = []
    real = Lane._open
    monkeypatch.setattr(Lane, "_open", lambda self, epoch: (opened.append(epoch), real(self, epoch))[1])
    stream = StreamIndex(str(shards), 1, 8).begin(KEY, 8)
    for first in (0, 16, 32):
        for place in asked(range(first, first + 16)):
            stream.read(place)
    assert opened == [0]


def test_what_decides_the_order_is_in_the_digest_and_lanes_have_orders_of_their_own(shards: Path) -> None:
    assert len({StreamIndex(str(shards), lanes, buffer).manifest_digest for lanes in (1, 2) for buffer in (4, 8)}) == 4
    first, second = StreamIndex(str(shards), 2, 8).begin(KEY, 8)._lanes
    assert len({lane._seed(epoch, use) for lane in (first, second) for epoch in (0, 1) for use in (0, 1)}) == 8
    assert first._seed(2, 1) == 0x5DC062393B90AE8E0AF1283D941C27F2, "a run goes on with the order that it began with"


def _step_bytes(index: StreamIndex, steps: range, world: int, batch: int = 10) -> list[dict[int, bytes]]:
    """Pixels by record number, through loaders on `world` ranks that begin at the first of the steps."""
    placement, found = lane_placement(index.lanes, world), [dict[int, bytes]() for _ in steps]
    counts = []
    for rank in range(world):
        reader = BatchReader(
            index.begin(KEY, batch), DataSpec(16, augment="random_resized_crop"), augment_key=KEY,
            reading=ReadOptions(in_flight=4),
        )  # fmt: skip
        epochs = StreamEpochs(index.lanes, batch)
        plan = lambda ids, rank=rank: placement.rows(ids, rank, 3)  # noqa: E731
        loader = Loader(reader, PublicOrder(epochs), rank, world, 3, last=100, plan=plan)
        counts.append([])
        for at, step in enumerate(steps):
            rows, batches = plan(epochs.ids(step - 1)), loader.step(step)[1]
            for row, micro_batch in zip(rows, batches, strict=True):
                for slot, record in enumerate(row.tolist()):
                    assert bool(micro_batch.present[slot]) == (record >= 0)
                    if record >= 0:
                        found[at][record] = micro_batch.inputs["images"][slot].numpy().tobytes()
            counts[-1].append(len(rows))
        loader.close()
    assert all(each == counts[0] for each in counts), "equal micro-batch counts on all ranks"
    assert all(len(step) == batch for step in found)
    return found


def test_ranks_split_the_same_stream_and_any_number_of_them_resumes_it(shards: Path) -> None:
    index = StreamIndex(str(shards), 5, 6)
    whole = _step_bytes(index, range(1, 13), 1)
    for world, start in ((1, 8), (2, 1), (3, 11), (5, 7)):
        assert _step_bytes(index, range(start, 13), world) == whole[start - 1 :]
    with pytest.raises(ShardError, match="5 lanes cannot feed 6 ranks"):
        lane_placement(5, 6)


def test_bad_records_keep_their_slot(tmp_path: Path, write_tar: TarMaker, picture: Callable[..., bytes]) -> None:
    contents = [{"jpg": picture(0)}, {"jpg": b"no picture"}, {"txt": b"lonely"}, {"jpg": b""}, {"jpg": picture(4)}]
    write_tar(tmp_path / "x" / "0.tar", [{"__key__": str(i), **content} for i, content in enumerate(contents)])
    reader = BatchReader(StreamIndex(str(tmp_path / "x"), 1, 2).begin(KEY, 5), DataSpec(16))
    for step in (0, 1):
        batch = reader.read(StreamEpochs(1, 5).ids(step), step + 1)
        assert int(batch.present.sum()) == 2 and not batch.inputs["images"][~batch.present].any()
    assert len(reader.bad_records) == 6, "known by their place in the stream"


def _damage(how: str, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    if how == "cut in a member":
        raw = raw[: members[-1].offset_data + 5]
    elif how == "cut in a header":
        raw = raw[: members[-1].offset_data - 100]
    elif how == "cut before the end marker":
        raw = raw[: members[-1].offset_data + 512]
    elif how == "cut in the end marker":
        raw = raw[: members[-1].offset_data + 1024]
    elif how == "zeroed hole":
        raw[members[-4].offset : members[-3].offset] = bytes(members[-3].offset - members[-4].offset)
    elif how == "last header flipped":
        raw[members[-1].offset + 3] ^= 255
    else:
        raw = bytearray()
    path.write_bytes(raw)


DAMAGES = (
    "cut in a member", "cut in a header", "cut before the end marker", "cut in the end marker", "zeroed hole",
    "last header flipped", "empty",
)  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_shard_stops_the_run_though_tarfile_is_silent(shards: Path, how: str) -> None:
    _damage(how, shards / "1.tar")
    with pytest.raises(UnreadableError, match=r"1\.tar: ") as caught:
        _texts(StreamIndex(str(shards), 1, 4), 10, range(5))
    assert "object at" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_shard_that_is_gone_and_a_lane_without_a_record_stop_the_run(
    shards: Path, write_tar: TarMaker, no_pauses: None
) -> None:
    index = StreamIndex(str(shards), 1, 4)
    (shards / "1.tar").rename(shards / "other")
    with pytest.raises(
        UnreadableError, match=r"^\S+/1\.tar: cannot be read \(No such file or directory\); restore access$"
    ):
        _texts(index, 10, range(5))
    write_tar(shards / "1.tar", [])
    with pytest.raises(UnreadableError, match=r"1\.tar: no record in it or in the other shards of its lane"):
        _texts(StreamIndex(str(shards / "1.tar"), 1, 4), 10, range(1))


def test_a_shard_that_changes_between_epochs_stops_the_run(shards: Path, write_tar: TarMaker) -> None:
    index = StreamIndex(str(shards), 1, 4)
    stream = index.begin(KEY, 10)
    for record in range(60):
        stream.read(record)
    write_tar(shards / "1.tar", [{"__key__": "x", "txt": b"1"}])
    with pytest.raises(UnreadableError, match="changed while it was streamed"):
        for record in range(60, 160):
            stream.read(record)
    with pytest.raises(ShardError, match=r"1\.tar: changed since the run began"):
        index.check_unchanged()
    assert index.manifest_digest != StreamIndex(str(shards), 1, 4).manifest_digest


def _flaky(fault: Fault) -> Callable[[str, int], Fault]:
    return lambda _path, attempt: fault if attempt % 3 else "ok"


@pytest.mark.parametrize("fault", ["500", "reset", "truncate"])
def test_from_a_server_that_fails_now_and_then(
    small_set: ShardIndex, server: RangeServer, no_pauses: None, fault: Fault
) -> None:
    pattern = server.url + "/{000000..000002}.tar"
    local = _texts_of(StreamIndex(str(small_set.folder.parent), 1, 6))
    server.fault = _flaky(fault)
    assert _texts_of(StreamIndex(pattern, 1, 6, timeout_seconds=2.0)) == local and len(local) == 30
    server.fault = lambda _path, _attempt: fault
    with pytest.raises(UnreadableError, match=r"00000\d\.tar: cannot be read"):
        _texts_of(StreamIndex(pattern, 1, 6, timeout_seconds=2.0))
    server.fault = lambda _path, _attempt: "ok"


def _texts_of(index: StreamIndex) -> list[bytes]:
    stream = index.begin(KEY, 10)
    return [stream.read(record)["txt"] for record in range(30)]


def test_what_cannot_be_streamed_is_refused(shards: Path, small_set: ShardIndex) -> None:
    with pytest.raises(ShardError, match="5 shards cannot feed 6 lanes"):
        StreamIndex(str(shards), 6, 4)
    with pytest.raises(ShardError, match="twice"):
        StreamIndex(str(shards / "{0,0,1}.tar"), 1, 4)
    with pytest.raises(ShardError, match=r"9\.tar: cannot be read"):
        StreamIndex(str(shards / "{0,9}.tar"), 1, 4)
    with pytest.raises(ShardError, match="plain"):
        StreamIndex("http://host/{0..3}.tar.gz", 1, 4)
    with pytest.raises(ShardError, match="no place of their own"):
        StreamIndex(str(shards), 1, 4).members(0, b"")


def test_a_copy_of_a_private_shard_is_found(shards: Path, small_set: ShardIndex) -> None:
    """By content, under another name; another file of equal size is none."""
    index = StreamIndex(str(shards), 1, 4)
    assert index.shared_with(small_set.shards) is None
    raw = bytearray(small_set.place(2).read_bytes())  # pyright: ignore[reportAttributeAccessIssue]
    (shards / "harmless.tar").write_bytes(raw)
    shared = StreamIndex(str(shards), 1, 4).shared_with(small_set.shards)
    assert shared is not None and shared.name.endswith("harmless.tar")
    raw[raw.index(b"a red 12")] ^= 1
    (shards / "harmless.tar").write_bytes(raw)
    assert StreamIndex(str(shards), 1, 4).shared_with(small_set.shards) is None


def test_a_private_shard_behind_a_url_is_known_by_it(small_set: ShardIndex) -> None:
    index = StreamIndex("http://127.0.0.1:9/{0..3}.tar", 1, 4)
    assert index.shared_with(small_set.shards, frozenset({"http://127.0.0.1:9/4.tar"})) is None
    shared = index.shared_with(small_set.shards, frozenset({"http://127.0.0.1:9/2.tar"}))
    assert shared is not None and shared.name == "http://127.0.0.1:9/2.tar"
    assert {Path(place).name for place in places_of(SplitIndex(small_set, 0.5, True))} == {
        shard.name for shard in small_set.shards
    }


def test_numbers_reach_far(shards: Path) -> None:
    ids = StreamEpochs(3, 8).ids(10**9)
    assert ids.tolist() == sorted(set(ids.tolist())) and np.bincount(ids // PLACES).tolist() == [3, 3, 2]
    assert torch.tensor(ids).dtype == torch.int64
