"""Micro-batches: equal plans on all ranks, fixed shapes, and bad records that touch nobody else."""

from __future__ import annotations

import errno
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from murmuration.data.batch.loader import Loader, iterate
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.channels import HALF, IMAGENET_MEAN, IMAGENET_STD
from murmuration.data.decode.augment import ResizeCrop
from murmuration.data.decode.record import PictureMaker
from murmuration.data.draw.micro_batch import Fetched, MicroBatch, slots
from murmuration.data.draw.normalisation import Normalisation
from murmuration.data.index.epochs import PublicEpochs, PublicOrder
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import ShardError
from murmuration.data.store.stored import LocalFiles
from murmuration.data.store.tar import walk
from murmuration.data.synthetic.index import SyntheticIndex
from murmuration.data.text.encoder import TextEncoder, word_tokenizer
from tests.support.hostile_files import one_bit_png

AUGMENT_KEY, MASK_KEY = b"a" * 32, b"m" * 32


@pytest.fixture
def text(tmp_path: Path) -> TextEncoder:
    return TextEncoder(word_tokenizer(["a", "red", "circle"], tmp_path / "tokenizer.json"), 8)


def _reader(index: ShardIndex, text: TextEncoder | None = None, **options) -> BatchReader:
    spec = DataSpec(24, augment="random_resized_crop", mask_patches=36)
    return BatchReader(index, spec, text, AUGMENT_KEY, MASK_KEY, **options)


def _same(left: MicroBatch, right: MicroBatch) -> bool:
    return torch.equal(left.present, right.present) and all(
        torch.equal(left.inputs[name], right.inputs[name]) for name in left.inputs | right.inputs
    )


@given(
    ids=st.lists(st.integers(0, 10_000), unique=True, max_size=300).map(sorted),
    world=st.integers(1, 4) | st.integers(1, 70),
    micro_batch=st.integers(1, 4) | st.integers(1, 33),
)
@example(ids=[5, 6, 9], world=2, micro_batch=1)  # where a rank's own slice would give another count
def test_rows_plan(ids: list[int], world: int, micro_batch: int) -> None:
    array = np.array(ids, dtype=np.int64)
    plans = [slots(array, rank, world, micro_batch) for rank in range(world)]
    assert len({plan.shape for plan in plans}) == 1
    count, width = plans[0].shape
    assert width == micro_batch and plans[0].dtype == np.int64
    # No more rows than the fullest rank needs, and never none.
    assert count == max(1, -(-max(int((plan >= 0).sum()) for plan in plans) // micro_batch))
    assert [int(i) for plan in plans for i in plan.ravel() if i >= 0] == ids
    sizes = [int((plan >= 0).sum()) for plan in plans]
    assert max(sizes) - min(sizes) <= 1
    for plan in plans:
        flat = plan.ravel()
        assert np.all(flat[np.count_nonzero(flat >= 0) :] == -1), "padding comes last"


def test_plan_refuses_what_would_desynchronise() -> None:
    with pytest.raises(ValueError, match="sorted"):
        slots(np.array([3, 1]), 0, 2, 4)
    with pytest.raises(ValueError, match="layout"):
        slots(np.array([1]), 2, 2, 4)


def test_shapes_and_values(small_set: ShardIndex, text: TextEncoder) -> None:
    batch = _reader(small_set, text).read(np.array([3, -1, 24, -1]), 5)
    assert batch.inputs["images"].shape == (4, 3, 24, 24) and batch.inputs["images"].dtype == torch.float32
    assert batch.inputs["images"].is_contiguous()
    assert batch.inputs["tokens"].shape == (4, 8) and batch.inputs["tokens"].dtype == torch.int64
    assert batch.inputs["mask_noise"].shape == (4, 36) and batch.inputs["mask_noise"].dtype == torch.float32
    assert batch.present.tolist() == [True, False, True, False] and batch.present.dtype == torch.bool
    for tensor in batch.inputs.values():
        assert not tensor[1].any() and not tensor[3].any(), "padding is exactly zero"
    assert batch.inputs["mask_noise"][0].unique().numel() == 36
    assert set(_reader(small_set).read(np.array([0]), 0).inputs) == {"images", "mask_noise"}
    moved = batch.to("cpu")
    assert _same(moved, batch)


def test_normalisation(tmp_path: Path, write_tar: Callable[..., Path]) -> None:
    out = io.BytesIO()
    Image.new("RGB", (16, 16), (255, 0, 51)).save(out, "PNG")
    write_tar(tmp_path / "a.tar", [{"__key__": "0", "png": out.getvalue()}])
    images = BatchReader(build(tmp_path), DataSpec(16)).read(np.array([0]), 0).inputs["images"]
    for channel, value in enumerate((1.0, 0.0, 0.2)):
        expected = (value - IMAGENET_MEAN[channel]) / IMAGENET_STD[channel]
        assert torch.allclose(images[0, channel], torch.tensor(expected), atol=1e-5)


def test_a_record_does_not_depend_on_its_batch(small_set: ShardIndex, text: TextEncoder) -> None:
    """Same pixels, tokens and mask at any world size, row, neighbour and thread count."""
    ids = np.arange(25)
    reader = _reader(small_set, text)
    alone = {int(i): reader.read(np.array([i]), 7) for i in ids}
    threaded = _reader(small_set, text, reading=ReadOptions(in_flight=3))
    for world, size in ((1, 25), (2, 4), (3, 5), (7, 2)):
        for rank in range(world):
            for row in slots(ids, rank, world, size):
                batch = threaded.read(row, 7)
                for place, record in enumerate(row):
                    for name, tensor in batch.inputs.items():
                        if record >= 0:
                            assert torch.equal(tensor[place], alone[int(record)].inputs[name][0])
    assert not torch.equal(reader.read(np.array([3]), 8).inputs["images"], alone[3].inputs["images"])
    assert not torch.equal(reader.read(np.array([3]), 8).inputs["mask_noise"], alone[3].inputs["mask_noise"])


@pytest.fixture
def hostile(tmp_path: Path, write_tar: Callable[..., Path], picture: Callable[..., bytes]) -> ShardIndex:
    """Good records at even ids, a bad one at each odd id."""
    good, caption = picture(1), b"a red circle"
    bad: list[dict[str, bytes]] = [
        {"jpg": b"", "txt": caption},
        {"jpg": good[: len(good) // 2], "txt": caption},
        {"jpg": b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "txt": caption},
        {"jpg": good},
        {"jpg": good, "txt": b"a \xff\xfe circle"},
        {"txt": caption},
        {"png": one_bit_png(14_000), "txt": caption},
        {"png": one_bit_png(9_800), "txt": caption},  # between Pillow's limit and twice that: it would only warn
    ]
    samples = []
    for number, content in enumerate(bad):
        samples.append({"__key__": f"{2 * number:04d}", "jpg": picture(number), "txt": caption})
        samples.append({"__key__": f"{2 * number + 1:04d}", **content})
    samples.append({"__key__": "9999", "jpg": picture(99), "txt": caption})
    write_tar(tmp_path / "bad" / "a.tar", samples)
    return build(tmp_path / "bad")


@pytest.mark.parametrize("threads", [1, 3])
def test_bad_records_are_like_absent_ones(hostile: ShardIndex, text: TextEncoder, threads: int) -> None:
    ids = np.arange(hostile.records)
    absent = np.where(ids % 2 == 0, ids, -1)
    reader, clean = _reader(hostile, text, reading=ReadOptions(in_flight=threads)), _reader(hostile, text)
    with_bad, without = reader.read(ids, 3), clean.read(absent, 3)
    assert with_bad.present.tolist() == [i % 2 == 0 for i in range(hostile.records)]
    assert _same(with_bad, without), "a bad record must be bit-identical to an empty slot, neighbours included"
    assert all(torch.isfinite(tensor).all() for tensor in with_bad.inputs.values())
    reader.read(ids, 4)
    assert sorted(reader.bad_records) == list(range(1, hostile.records, 2)), "each bad id once"
    assert clean.bad_records == []
    assert len(set(reader.bad_reasons)) == 8


def test_images_alone_need_no_caption(hostile: ShardIndex) -> None:
    reader = _reader(hostile)
    assert reader.read(np.array([7, 9, 11]), 0).present.tolist() == [True, True, False]


def test_labels(tmp_path: Path, write_tar: Callable[..., Path], picture: Callable[..., bytes]) -> None:
    records = [json.dumps({"colour": 3, "shape": 2}).encode(), b"{}", b"no json", None]
    samples = []
    for number, labels in enumerate(records):
        samples.append({"__key__": str(number), "jpg": picture(number)} | ({"json": labels} if labels else {}))
    write_tar(tmp_path / "a.tar", samples)
    reader = BatchReader(build(tmp_path), DataSpec(16, labels=("colour", "shape")))
    batch = reader.read(np.arange(4), 0)
    assert batch.present.tolist() == [True, False, False, False]
    assert batch.inputs["colour"].tolist() == [3, 0, 0, 0] and batch.inputs["shape"].tolist() == [2, 0, 0, 0]


class _Flaky(LocalFiles):
    """Fails `times` times in one of the ways that storage fails."""

    def __init__(self, how: str, times: int) -> None:
        super().__init__()
        self.how, self.times = how, times

    def read(self, path: Path, start: int, end: int) -> bytes:
        raw = super().read(path, start, end)
        self.times -= 1
        if self.times < 0:
            return raw
        if self.how == "error":
            raise OSError(errno.EIO, "Input/output error")
        if self.how == "one member":  # the treacherous cut: what is left parses, and looks like a missing caption
            return raw[: next(walk(lambda at, count: raw[at : at + count], len(raw), "", whole=False)).end]
        return raw[: len(raw) // 2] if self.how == "short" else bytes(len(raw))


@pytest.mark.parametrize("how", ["error", "short", "zeros", "one member"])
def test_storage_failures_are_retried_then_stop(
    small_set: ShardIndex, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("murmuration.data.store.retry.random.uniform", lambda _low, _high: 0.0)
    expected = _reader(small_set).read(np.array([4]), 0)
    patient = _reader(small_set, source=_Flaky(how, 2))
    assert _same(patient.read(np.array([4]), 0), expected)
    broken = _reader(small_set, source=_Flaky(how, 99))
    with pytest.raises(ShardError, match=r"000000\.tar"):
        broken.read(np.array([4]), 0)
    assert broken.bad_records == [], "a failing disk must never pass for a bad record"


def test_iterate_equals_read(small_set: ShardIndex, text: TextEncoder) -> None:
    rows = slots(np.arange(25), 0, 1, 4)
    reader = _reader(small_set, text)
    batches = list(iterate(reader, rows, 2))
    assert len(batches) == 7
    assert all(_same(batch.to("cpu"), reader.read(row, 2)) for batch, row in zip(batches, rows, strict=True))
    assert list(iterate(reader, rows[:0], 2)) == []


def test_iterate_reads_ahead_and_passes_errors_on(small_set: ShardIndex) -> None:
    started = [threading.Event() for _ in range(3)]

    class Watched(BatchReader):
        def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
            started[int(ids_row[0])].set()
            if ids_row[0] == 2:
                raise ShardError("gone")
            return super().fetch(ids_row, step)

    batches: Iterator[MicroBatch] = iterate(Watched(small_set, DataSpec(16)), np.array([[0], [1], [2]]), 0)
    next(batches)
    assert started[1].wait(10), "the next micro-batch is read while the caller holds this one"
    assert not started[2].is_set(), "and only that one: memory stays bounded"
    next(batches)
    with pytest.raises(ShardError, match="gone"):
        next(batches)


def test_iterate_can_be_left_early(small_set: ShardIndex) -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile: no count
    batches = iterate(_reader(small_set), np.arange(25).reshape(25, 1), 0)
    next(batches)
    assert set(threading.enumerate()) - before, "it reads ahead in threads of its own"
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not set(threading.enumerate()) - before


REFUSED: dict[str, tuple[Callable[[ShardIndex], object], str]] = {
    "no augmentation key": (lambda index: BatchReader(index, DataSpec(8, "random_resized_crop")), "augmentation key"),
    "no mask key": (lambda index: BatchReader(index, DataSpec(8, mask_patches=4)), "mask key"),
    "no dropout key": (lambda index: BatchReader(index, DataSpec(8, drop_keys=True), mask_key=MASK_KEY),
                       "drop keys need a dropout key; derive one from the run key"),
    "no unit key": (lambda index: SlotRows(units=[], records=2), "needs a key"),  # pyright: ignore[reportArgumentType]
    "an unknown view": (lambda index: DataSpec(8, augment="mixup"), "unknown"),  # pyright: ignore[reportArgumentType]
    "a label called labels": (lambda index: DataSpec(16, labels=("a", "labels"), target="a"), "one of the labels"),
    "a target that is no label": (lambda index: DataSpec(16, labels=("a",), target="b"), "one of the labels"),
    "fewer classes than none": (lambda index: DataSpec(16, classes=-1), "classes"),
    "no view": (lambda index: SlotRows(views=0), "at least one row"),
    "several records of none": (lambda index: SlotRows(records=2), "each record is its own"),
    "no deviation": (lambda index: Normalisation((0.5, 0.5, 0.5), (0.5, 0.0, 0.5)), "not positive"),
    "a crop beyond the picture": (lambda index: PictureMaker(16, ResizeCrop(224, 256)), "give 1 ≤ crop ≤ resize"),
    "a crop of nothing": (lambda index: PictureMaker(16, ResizeCrop(8, 0)), "give 1 ≤ crop ≤ resize"),
    "few of CLIP's words": (lambda index: TextEncoder("clip:100", 9), "515 to 49409 tokens, not 100"),
    "many of CLIP's words": (lambda index: TextEncoder("clip:50000", 9), "not 50000"),
    "half of CLIP's words": (lambda index: TextEncoder("clip:half", 9), 'write "clip"'),
    "words of nowhere": (lambda index: TextEncoder("nowhere/vocab.txt", 9), "no tokenizer here"),
    "one record in two parts": (lambda index: SplitIndex(SyntheticIndex("spectrum", 1, 1, 16), 0.5, True),
                                "cannot be split in two"),
    "pictures of no kind": (lambda index: SyntheticIndex("noise", 9, 1, 32), "unknown"),  # pyright: ignore
    "pictures of none": (lambda index: SyntheticIndex("mixed", 0, 1, 32), "at least 1 of at least 8 px"),
    "nothing ahead": (lambda index: Loader(_reader(index), PublicOrder(PublicEpochs(25, 5, MASK_KEY)), 0, 1, 2, last=1,
                                           ahead=0), "ahead"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_so_is_refused(small_set: ShardIndex, what: str) -> None:
    act, words = REFUSED[what]
    with pytest.raises(ValueError, match=words):
        act(small_set)


def test_the_constants_of_imagenet_are_the_published_ones() -> None:
    assert (IMAGENET_MEAN, IMAGENET_STD) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert HALF == (0.5, 0.5, 0.5)
