"""How long a micro-batch takes, what happens once per logical step, and whether reading keeps up."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from clip_timing import interleaved
from gpu_cases import Case, Found, Setting, batch_of, engine_of, model_of, shape_of, synchronise
from gpu_probe import median_seconds
from torch.profiler import ProfilerActivity, profile

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.draw.micro_batch import IMAGES, MicroBatch
from murmuration.data.draw.normalisation import Normalisation, Pixels
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.forward import PrivateForward
from murmuration.train.engines.local import LocalEngine
from murmuration.train.engines.micro_batch_graph import WARM_UPS, CudaRecorder
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.chacha import ChaChaNoise
from murmuration.train.noise.update import Noise, NoisyUpdate

MICRO_BATCHES = (32, 64, 128, 256, 512)
PROFILED, SHOWN = 128, 40
KEY = bytes(range(32))


def _benchmark_of_reading() -> ModuleType:
    """benchmarks/data.py, by its path: the package `data` has the same name."""
    spec = spec_from_file_location("reading_benchmark", Path(__file__).with_name("data.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def micro_batches(setting: Setting) -> Iterator[Case]:
    for model in setting.models:
        for records in (4,) if setting.smoke else MICRO_BATCHES:
            yield Case(f"{model} {records}", partial(micro_batch, model, records, setting))


def micro_batch(model: str, records: int, setting: Setting) -> Found:
    """Plain and private, each as written and with compiled blocks, kernel by kernel and replayed as a CUDA graph, in
    turns: times as ratios to the plain ones just before and after."""
    batch = batch_of(model, records, setting)
    plain, private = (engine_of(model_of(model), kind, records, setting) for kind in (False, True))
    steps: dict[str, Callable[[], None]] = {"private": partial(private.accumulate, batch)}
    found: Found = {"plain": _watched(plain, batch, setting), "private": _watched(private, batch, setting)}
    if setting.compile:
        compiled = engine_of(model_of(model), False, records, setting, compiled=True)
        steps["compiled"] = partial(compiled.accumulate, batch)
        # The honest baseline: as fast as a plain micro-batch can be made by the same means.
        if setting.device.type == "cuda":
            try:
                steps["compiled_replayed"] = _replay(compiled, batch, setting)
            except RuntimeError as error:
                found["compiled_replayed"] = {"how": str(error)}
    replayed = {"graph": False, **({"compiled_graph": True} if setting.compile else {})}
    for name, blocks in replayed.items() if setting.device.type == "cuda" else ():
        graph = engine_of(model_of(model), True, records, setting, graph=True, compiled=blocks)
        found[name] = _watched(graph, batch, setting)
        assert isinstance(graph._forward, PrivateForward)
        found[name]["how"] = graph._forward.about_graph()
        steps[name] = partial(graph.accumulate, batch)
    timed = interleaved(partial(plain.accumulate, batch), steps, setting.rounds, setting.device)
    found["plain"]["seconds"] = timed[""].summary()["seconds"]
    for name in steps:
        found.setdefault(name, {}).update(timed[name].summary())
    found["private_over_plain"] = 1 / found["private"]["time_ratio"]
    if "graph" in steps:
        found["graph_over_plain"] = 1 / found["graph"]["time_ratio"]
    if {"compiled_graph", "compiled_replayed"} <= steps.keys():
        private_ratio, plain_ratio = (found[name]["time_ratio"] for name in ("compiled_graph", "compiled_replayed"))
        found["private_over_plain_both_compiled_and_replayed"] = plain_ratio / private_ratio
    found["records_per_second"] = records / found["private"]["seconds"]
    return found


def _replay(engine: LocalEngine, batch: MicroBatch, setting: Setting) -> Callable[[], None]:
    """A plain micro-batch of these inputs as one launch."""
    recorder, run = CudaRecorder(setting.device), partial(engine.accumulate, batch)
    for _ in range(WARM_UPS):
        recorder.warm_up(run)
    return recorder.record(run)[1]


def _watched(engine: LocalEngine, batch: MicroBatch, setting: Setting) -> Found:
    """Kernels, waits and memory of one micro-batch; and how long the host needs to ask for it."""
    engine.accumulate(batch)
    synchronise(setting.device)
    if setting.device.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    engine.accumulate(batch)
    host = time.perf_counter() - began
    synchronise(setting.device)
    found: Found = {"host_seconds": host, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            engine.accumulate(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found["waits"] = sum("synchroniz" in str(each.message) for each in seen)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.accumulate(batch)
        torch.cuda.synchronize()
    found["kernels"] = sum(event.count for event in profiled.key_averages())
    return found


def kernels(setting: Setting) -> Iterator[Case]:
    for model in setting.models:
        records = 4 if setting.smoke else PROFILED
        yield Case(f"{model} {records}", partial(by_kernel, model, records, setting))


def by_kernel(model: str, records: int, setting: Setting) -> Found:
    """Launches and milliseconds of each kernel of one micro-batch, without a graph; those that cost most first."""
    batch, table = batch_of(model, records, setting), dict[str, list[float]]()
    milliseconds = []
    for column, private in enumerate((False, True)):
        engine, total = engine_of(model_of(model), private, records, setting), 0.0
        for _ in range(2):
            engine.accumulate(batch)
        synchronise(setting.device)
        with profile(
            activities=[ProfilerActivity.CUDA if setting.device.type == "cuda" else ProfilerActivity.CPU]
        ) as seen:
            engine.accumulate(batch)
            synchronise(setting.device)
        for event in seen.key_averages():
            spent = event.self_device_time_total if setting.device.type == "cuda" else event.self_cpu_time_total
            row = table.setdefault(event.key, [0, 0.0, 0, 0.0])
            row[2 * column] += event.count
            row[2 * column + 1] += spent / 1e3
            total += spent / 1e3
        milliseconds.append(total)
        del engine
    first = sorted(table.items(), key=lambda row: -row[1][1] - row[1][3])[:SHOWN]
    return {
        "plain_ms": milliseconds[0],
        "private_ms": milliseconds[1],
        "kernels": [[name, *row] for name, row in first],
    }


def once_per_step(setting: Setting) -> Iterator[Case]:
    for model in setting.models:
        for noise in (ChaChaNoise(KEY, 1.0, 1e4), AESNoise(KEY, 1.0, 1e4)):
            yield Case(f"{model} {noise.generator}", partial(updated, model, noise, setting))


def updated(model: str, noise: Noise, setting: Setting) -> Found:
    """The whole update, and the noise alone; what processors draw can be drawn ahead, while micro-batches run."""
    engine = engine_of(model_of(model), True, 2, setting)
    engine.accumulate(batch_of(model, 2, setting))
    steps = iter(range(10**9))
    whole = median_seconds(lambda: engine.update(NoisyUpdate(noise, next(steps)), 1e-4), setting, 5)
    fragments = [
        Fragment(name, number, 0, size.numel(), 0) for number, (name, size) in enumerate(engine.shapes.items())
    ]

    def drawn() -> None:
        for _ in noise.chunks(next(steps), fragments, setting.device):
            pass

    alone = median_seconds(drawn, setting, 5)
    return {
        "elements": engine.trainable_elements, "update_milliseconds": 1e3 * whole, "noise_milliseconds": 1e3 * alone,
        "elements_per_second": engine.trainable_elements / alone,
    }  # fmt: skip


def feeding(setting: Setting) -> Iterator[Case]:
    for workers in (1,) if setting.smoke else (1, 4, 8, 16):
        yield Case(f"reading with {workers} workers", partial(read, workers, setting))
    for model in setting.models:
        yield Case(f"to the device {model}", partial(sent, model, setting))


def read(workers: int, setting: Setting) -> Found:
    """Random records of webdataset shards, decoded and cropped to 224 pixels, as a private phase reads them."""
    reading = _benchmark_of_reading()
    with tempfile.TemporaryDirectory() as scratch:
        index = reading.make_shards(Path(scratch), 2, 200 if setting.smoke else 2000)
        reader = BatchReader(
            index, DataSpec(reading.SIDE, "random_resized_crop"), augment_key=reading.KEY,
            reading=ReadOptions(workers=workers, in_flight=workers + 2), pin_memory=setting.device.type == "cuda",
        )  # fmt: skip
        try:
            batches = reading.sampled(reading.loader_of(index, reader, 0.25, setting.device))
            turns = [reading.one_turn(batches, 128 if setting.smoke else 2000) for _ in range(setting.rounds)]
        finally:
            reader.close()
    rate = statistics.median(turn[0] for turn in turns)
    return {"records_per_second": rate, "cpu_ms_per_record": statistics.median(turn[1] for turn in turns)}


def sent(model: str, setting: Setting) -> Found:
    """As bytes from page-locked memory, and with what makes the model's input of them there."""
    records, side = 4 if setting.smoke else 64, shape_of(model).image_size
    made = batch_of(model, records, Setting(torch.device("cpu"), setting.smoke))
    others = {name: tensor for name, tensor in made.inputs.items() if name != IMAGES}
    pixels = torch.zeros(records, side, side, 3, dtype=torch.uint8, pin_memory=setting.device.type == "cuda")
    batch = MicroBatch(others, made.present, Pixels(pixels, Normalisation()))
    size = sum(x.numel() * x.element_size() for x in batch.tensors())
    copied = median_seconds(lambda: batch.copied(setting.device), setting)
    return {
        "records": records, "megabytes": size / 1e6, "copy_milliseconds": 1e3 * copied,
        "milliseconds": 1e3 * median_seconds(lambda: batch.to(setting.device), setting), "pixels": side,
        "gigabytes_per_second": size / copied / 1e9,
    }  # fmt: skip
