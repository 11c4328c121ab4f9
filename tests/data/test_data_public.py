"""Public epochs: exact permutations, uniform, of any size at once; resumed and split over ranks to the same bytes."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
import webdataset

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.draw.micro_batch import slots
from murmuration.data.index.epochs import PublicEpochs
from murmuration.data.index.shard_index import ShardIndex

KEY = b"public order"


@pytest.mark.parametrize("records", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 4095, 100_003])
def test_each_epoch_is_a_permutation(records: int) -> None:
    epochs = PublicEpochs(records, records, KEY)
    for epoch in range(3):
        assert np.array_equal(epochs.ids(epoch), np.arange(records))
    # Cut into single steps, so that the order is seen and not only the set.
    single = PublicEpochs(records, 1, KEY)
    count = min(records, 300)
    order = [int(single.ids(step)[0]) for step in range(count)]
    assert len(set(order)) == count and (records < 5 or order != sorted(order))


def test_small_sets_are_shuffled_evenly() -> None:
    """All 120 orders of 5 records occur equally often; each of 40 records is first equally often."""
    orders: Counter[tuple[int, ...]] = Counter()
    single = PublicEpochs(5, 1, KEY)
    for epoch in range(3000):
        orders[tuple(int(single.ids(5 * epoch + place)[0]) for place in range(5))] += 1
    counts = [orders[order] for order in itertools.permutations(range(5))]
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    first = PublicEpochs(40, 8, KEY)
    drawn = np.bincount(np.concatenate([first.ids(5 * epoch) for epoch in range(4000)]), minlength=40)
    assert scipy.stats.chisquare(drawn).pvalue > 1e-3


def test_neighbours_of_one_epoch_are_not_neighbours_of_the_next() -> None:
    single = PublicEpochs(1000, 1, KEY)
    orders = np.array([[int(single.ids(1000 * epoch + place)[0]) for place in range(1000)] for epoch in range(3)])
    assert abs(np.corrcoef(orders[0], orders[1])[0, 1]) < 0.12
    for order in orders:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.12
        assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.12
        assert (np.abs(np.diff(order)) == 1).sum() < 12
    places = np.argsort(orders, axis=1)
    together = np.abs(places[0][:-1] - places[0][1:]) < 50
    assert (together & (np.abs(places[1][:-1] - places[1][1:]) < 50)).sum() < 30


def test_two_billion_records_cost_what_a_thousand_do() -> None:
    epochs = PublicEpochs(2_170_000_000, 4096, KEY)
    tracemalloc.start()
    try:
        first, late = epochs.ids(0), epochs.ids(10**9)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20, "bytes for 4096 ids"
    for ids in (first, late):
        assert len(set(ids.tolist())) == 4096 and ids[0] < 10**7 and 2_160_000_000 < ids[-1] < 2_170_000_000


def test_an_epoch_is_what_webdataset_reads(small_set: ShardIndex) -> None:
    """The same records as webdataset's own pipeline gives, each once: nothing lost at the ends of shards."""
    urls = [str(small_set.place(number)) for number in range(len(small_set.shards))]
    dataset = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    theirs = sorted((sample["txt"], sample["jpg"]) for sample in dataset)
    reader, epochs = ShardReader(small_set), PublicEpochs(small_set.records, 5, KEY)
    ours = [reader.read(int(record)) for step in range(5) for record in epochs.ids(step)]
    assert sorted((members["txt"], members["jpg"]) for members in ours) == theirs and len(theirs) == 25


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_resumed_and_split_runs_see_the_same_bytes(
    small_set: ShardIndex, world: int, picture: Callable[..., bytes]
) -> None:
    """From step 4 on, on another number of ranks, with the step number as the only state; across an epoch's end."""
    spec = DataSpec(16, augment="random_resized_crop")

    def step_bytes(step: int, ranks: int) -> torch.Tensor:
        epochs = PublicEpochs(small_set.records, 10, KEY)
        rows = []
        for rank in range(ranks):
            reader = BatchReader(small_set, spec, augment_key=b"a" * 32)
            for row in slots(epochs.ids(step), rank, ranks, 4):
                batch = reader.read(row, step)
                rows.append(batch.inputs["images"][batch.present])
        return torch.cat(rows)

    for step in (4, 5):
        assert torch.equal(step_bytes(step, world), step_bytes(step, 1))
    assert not torch.equal(step_bytes(4, 1), step_bytes(5, 1))
