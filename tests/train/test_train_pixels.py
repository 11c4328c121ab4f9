"""Pictures travel as bytes and are normalised where the model runs: whoever reads pictures still gets the same bits."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from webdataset.writer import TarWriter

from murmuration.data.batch.held_out import HeldOutReader
from murmuration.data.batch.loader import Loader
from murmuration.data.batch.reader import BatchReader
from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.channels import IMAGENET_MEAN, IMAGENET_STD
from murmuration.data.decode.record import PictureMaker
from murmuration.data.draw.micro_batch import EMPTY, IMAGES, MicroBatch
from murmuration.data.draw.normalisation import Normalisation, zeros
from murmuration.data.index.epochs import PublicEpochs, PublicOrder
from murmuration.data.index.shard_index import build
from murmuration.data.text.encoder import word_tokenizer
from murmuration.model.build import build as build_model
from murmuration.train.config.phase import Evaluation, Mixing, Monitor
from murmuration.train.config.root import Config
from murmuration.train.engines.forward import PlainForward
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.public.monitor import LossMonitor
from murmuration.train.recipe.ready_phase import ReadyPhase, prepare
from murmuration.train.run.cached_features import fill
from murmuration.train.run.phase import PhaseTraining
from murmuration.train.run.public_mixing import MixingEngine
from tests.support.train_helpers import LocalEngine, alone, plan_for, private_engine

RECORDS, BAD, SIDE = 14, 5, 16
AUGMENT_KEY, MASK_KEY = b"a" * 32, b"m" * 32
FAMILIES = {"mae": "mae", "caption": "captioner", "classify": "classifier"}


@pytest.fixture
def ready(tmp_path: Path) -> Callable[[str], ReadyPhase]:
    """A phase for each objective, over the same pictures of noise; one of them is cut off."""
    draw = np.random.default_rng(0)
    (tmp_path / "set").mkdir()
    with TarWriter(str(tmp_path / "set" / "0.tar"), encoder=False) as writer:
        for record in range(RECORDS):
            out = io.BytesIO()
            Image.fromarray(draw.integers(0, 256, (24, 30, 3), dtype=np.uint8)).save(out, "PNG")
            content = out.getvalue()[: 40 if record == BAD else None]
            more = {"txt": b"a red circle", "cls": b"%d" % (record % 3)}
            writer.write({"__key__": f"{record:03d}", "png": content, **more})
    build(tmp_path / "set")
    tokenizer = word_tokenizer(["a", "red", "circle"], tmp_path / "tokenizer.json")

    def prepared(objective: str) -> ReadyPhase:
        more = {"caption": {"tokenizer": str(tokenizer)}, "classify": {"label": "cls"}}.get(objective, {})
        data = {"path": str(tmp_path / "set"), "public": True, "augment": "random_resized_crop", **more}
        phase = {
            "name": "public", "objective": objective, "data": data, "batch": 6,
            "schedule": {"peak": 1e-3, "shape": "constant"}, "steps": 4,
        }  # fmt: skip
        model = {
            "family": FAMILIES[objective], "image_size": SIDE, "patch_size": 8, "width": 16, "depth": 1, "heads": 2,
            "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2, "mae_decoder_width": 16,
            "mae_decoder_depth": 1, "mae_decoder_heads": 2, "vocabulary": 32, "text_length": 8, "classes": 3,
        }  # fmt: skip
        whole = {"train_micro_batch_size_per_gpu": 4, "model": model, "phases": [phase]}
        found = prepare(Config.model_validate(whole))[0]
        parts = {
            "evaluation": Evaluation(path="-", public=True, records=RECORDS),
            "monitor": Monitor(path="-", public=True, records=RECORDS, probes=1),
        }
        settings = found.settings.model_copy(update=parts)
        return replace(found, settings=settings, held_out=found.index, monitored=found.index)

    return prepared


def expected(phase: ReadyPhase, augment: str, records: Iterator[int] | range, step: int) -> list[bytes]:
    """What models were given when the host normalised: this formula, operation by operation."""
    std, mean = (np.asarray(each, dtype=np.float32) for each in (IMAGENET_STD, IMAGENET_MEAN))
    scale, shift = (1 / (255 * std)).reshape(3, 1, 1), (-mean / std).reshape(3, 1, 1)
    maker, reader = PictureMaker(SIDE, augment, AUGMENT_KEY), ShardReader(phase.index)  # pyright: ignore
    found = []
    for record in records:
        if record == BAD:
            continue
        pixels = maker.make(reader.read(record)["png"], step, record)
        image = np.multiply(pixels.transpose(2, 0, 1), scale, dtype=np.float32)
        image += shift
        found.append(image.tobytes())
    return sorted(found)


def rows(batches: list[Tensor]) -> list[bytes]:
    """The pictures in it; an empty slot must be all zeros, and no -0 either."""
    images = [image for batch in batches for image in batch.contiguous().numpy()]
    empty = bytes(images[0].nbytes)
    assert all(image.any() or image.tobytes() == empty for image in images)
    return sorted(image.tobytes() for image in images if image.any())


@contextmanager
def noting(model: nn.Module) -> Iterator[list[Tensor]]:
    """The pictures that a model is given."""
    seen: list[Tensor] = []
    hook = model.register_forward_pre_hook(lambda _, given: seen.append(given[0][IMAGES].detach().clone()))
    yield seen
    hook.remove()


def reader_of(phase: ReadyPhase) -> BatchReader:
    return BatchReader(
        phase.index, phase.data_spec(augment=True), phase.text, augment_key=AUGMENT_KEY, mask_key=MASK_KEY
    )


@pytest.mark.parametrize("held_out", [0.0, 0.25])
@pytest.mark.parametrize("objective", FAMILIES)
def test_a_phase_computes_on_the_bits_that_the_host_made(
    ready: Callable[[str], ReadyPhase], objective: str, held_out: float
) -> None:
    phase = ready(objective)
    run: Any = SimpleNamespace(ranks=alone())
    epochs = PublicEpochs(RECORDS, 6, b"order")
    engine, _, _ = private_engine(alone(), plan_for(), False, build_model(phase.shape, objective))
    training = PhaseTraining(run, phase)
    with training.at_end:
        reader = HeldOutReader(reader_of(phase), held_out) if held_out else reader_of(phase)
        loader = training.load(reader, PublicOrder(epochs), 4)
        for step in (1, 2, 3):
            draw, batches = loader.step(step)
            given = list(batches)
            assert rows([b.inputs[IMAGES] for b in given]) == expected(phase, "random_resized_crop", draw.ids, step)
            assert all(b.inputs[IMAGES].is_contiguous() and b.pixels is None for b in given)
            if not held_out:
                engine.accumulate(given[0])


@pytest.mark.parametrize("objective", FAMILIES)
def test_evaluation_and_monitor(ready: Callable[[str], ReadyPhase], objective: str) -> None:
    phase = ready(objective)
    engine, _, _ = private_engine(alone(), plan_for(), False, build_model(phase.shape, objective))
    whole = expected(phase, "center", range(RECORDS), 0)
    for measurement in (
        PublicEvaluator(phase, engine, alone(), 4, MASK_KEY),
        LossMonitor(phase, engine, alone(), 4, MASK_KEY),
    ):
        for _ in range(2):
            with noting(engine.model) as seen:
                measurement.measure()
            assert sorted(set(rows(seen))) == whole


def test_mixed_in_records(ready: Callable[[str], ReadyPhase]) -> None:
    phase = ready("mae")
    mixing = Mixing.model_validate({"data": {"path": "-", "public": True}, "batch": RECORDS})
    phase = replace(phase, settings=phase.settings.model_copy(update={"mixing": mixing}), mixed=phase.index)
    model = build_model(phase.shape, "mae")
    run: Any = SimpleNamespace(
        ranks=alone(), config=SimpleNamespace(micro_batch=4, run=SimpleNamespace(precision="fp32"))
    )
    engine = MixingEngine.of(run, phase, 6.0, LocalEngine(PlainForward(model), alone()), b"k" * 32)  # pyright: ignore
    try:
        with noting(model) as seen:
            engine._gradient.of_step(1)
    finally:
        engine.close_public()
    assert rows(seen) == expected(phase, "none", range(RECORDS), 1)


def test_cached_features(ready: Callable[[str], ReadyPhase]) -> None:
    phase = ready("classify")
    model: Any = build_model(phase.shape, "classify")
    seen, present, before = list[Tensor](), list[bool](), model.features
    model.features = lambda images: seen.append(images.clone()) or before(images)
    writer: Any = SimpleNamespace(put=lambda ids, values, labels, there: present.extend(there.tolist()))
    stop: Any = SimpleNamespace(check=lambda ranks: None)
    reader = reader_of(phase)
    told = list[tuple[int, int]]()

    def said(done: int, of: int) -> None:
        told.append((done, of))

    fill(writer, model, reader, every := np.arange(RECORDS), every, 4, alone(), "fp32", stop, said)
    assert rows(seen) == expected(phase, "random_resized_crop", range(RECORDS), 0)
    assert present == [record != BAD for record in range(RECORDS)] and reader.bad_records == [BAD]
    assert not told, "a short pass needs no bar"
    fill(writer, model, reader, np.arange(2 * RECORDS), np.tile(every, 2), 1, alone(), "fp32", stop, said)
    assert told == [(done, 2 * RECORDS) for done in range(1, 2 * RECORDS + 1)]


def test_a_reader_of_pixels_that_forgets_to_normalise_gets_no_picture_at_all(
    ready: Callable[[str], ReadyPhase],
) -> None:
    fetched = reader_of(ready("mae")).fetch(np.array([0, 1]), 0).batch
    assert IMAGES not in fetched.inputs and fetched.pixels is not None
    assert fetched.pixels.values.dtype == torch.uint8 and fetched.pixels.values.shape == (2, SIDE, SIDE, 3)
    again = fetched.to("cpu").to("cpu")
    assert list(again.inputs) == [IMAGES, "mask_noise"] and again.pixels is None


def test_the_kernels_of_a_gpu_compute_the_host_s_bits() -> None:
    """Here on the CPU: the same operations in the same order, each of which IEEE 754 rounds once on any device."""
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3 * 4).view(4, 16, 16, 3)
    pixels[1] = 255 - pixels[1]
    present = torch.tensor([True, True, False, True])
    for normalisation in (Normalisation(), Normalisation((0.5, 0.1, 0.0), (0.3, 1.0, 0.07))):
        host, device = normalisation._on_host(pixels, present), normalisation._by_kernels(pixels, present)
        assert host.numpy().tobytes() == device.numpy().tobytes() and device.is_contiguous()
        assert not host[2].any() and host[[0, 1, 3]].flatten(1).unique(dim=0).shape[0] == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (5,), (7, 3, 30, 30), (16, 3, 224, 224)])
def test_memory_for_batches_is_as_pytorch_s_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Where memory begins may decide which kernel adds in which order."""
    made, theirs = zeros(shape, dtype), torch.zeros(shape, dtype=dtype)
    assert torch.equal(made, theirs) and made.dtype == dtype and made.stride() == theirs.stride()
    assert made.data_ptr() % 64 == 0 and made.is_contiguous()


def test_a_quarter_of_the_bytes_is_sent(ready: Callable[[str], ReadyPhase]) -> None:
    batch = reader_of(ready("mae")).fetch(np.array([0, EMPTY, 2]), 0).batch
    sent = {tensor.dtype: tensor.numel() * tensor.element_size() for tensor in batch.tensors()}
    image = MicroBatch.to(batch, "cpu").inputs[IMAGES]
    assert 4 * sent[torch.uint8] == image.numel() * image.element_size()


def test_loaders_hand_out_what_readers_read(ready: Callable[[str], ReadyPhase]) -> None:
    """Without a device, too: a loader of a library's user takes no device."""
    phase = ready("caption")
    loader = Loader(reader_of(phase), PublicOrder(PublicEpochs(RECORDS, 6, b"order")), 0, 1, 4, last=2)
    try:
        draw, batches = loader.step(1)
        expected = reader_of(phase).read(draw.ids[:4], 1)
        first = next(iter(batches))
        assert first.inputs.keys() == expected.inputs.keys()
        assert all(torch.equal(first.inputs[name], tensor) for name, tensor in expected.inputs.items())
    finally:
        loader.close()
