"""Run under `deepspeed` by step.py: one world size, all stages; prints one JSON line with the seconds of each part."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from murmuration.accounting.errors import DONE  # noqa: E402
from murmuration.accounting.plan import PrivacyPlan  # noqa: E402
from murmuration.accounting.sampling import Poisson, threshold_for  # noqa: E402
from murmuration.data.batch.reader import BatchReader, DataSpec  # noqa: E402
from murmuration.data.draw.micro_batch import slots  # noqa: E402
from murmuration.data.draw.poisson import PoissonSampler  # noqa: E402
from murmuration.data.index.shard_index import build as build_index  # noqa: E402
from murmuration.data.synthetic.index import shape_samples, write_shards  # noqa: E402
from murmuration.data.synthetic.shapes import GRAMMAR_WORDS  # noqa: E402
from murmuration.data.text.encoder import TextEncoder, word_tokenizer  # noqa: E402
from murmuration.model.build import build  # noqa: E402
from murmuration.model.settings import ModelSettings, Shape  # noqa: E402
from murmuration.train.clip.rule import ClipRule  # noqa: E402
from murmuration.train.commands.exit_codes import leave  # noqa: E402
from murmuration.train.config.optimizer import Optimizer, ZeroOptimization  # noqa: E402
from murmuration.train.core import Computation, clipping_engine  # noqa: E402
from murmuration.train.distributed.ranks import Ranks  # noqa: E402
from murmuration.train.distributed.shards import Fragment  # noqa: E402
from murmuration.train.engines.choose import EngineSettings, start_ranks  # noqa: E402
from murmuration.train.noise.aes import AESNoise  # noqa: E402
from murmuration.train.noise.update import NoisyUpdate  # noqa: E402

RECORDS_ON_DISK, RECORDS_TO_DRAW = 512, 233_804_767
UPDATES, MICRO_BATCH = 3, 16


@dataclass
class Clock:
    """Adds up the seconds of one part."""

    seconds: float = 0.0
    started: float = 0.0

    def start(self) -> None:
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.started


class TimedUpdate:
    """The real update, with a clock around the noise."""

    def __init__(self, inner: NoisyUpdate, clock: Clock) -> None:
        self.inner, self.clock = inner, clock

    @property
    def elements(self) -> int:
        return self.inner.elements

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        self.clock.start()
        self.inner.finish(flat, fragments)
        self.clock.stop()


def shape_of(model: str) -> Shape:
    return ModelSettings(family="captioner", size=model, image_size=224, text_length=40, vocabulary=32_768).resolved()  # pyright: ignore[reportArgumentType]


def data(folder: Path, ranks: Ranks, length: int) -> BatchReader:
    """Real shards of 256-pixel JPEGs with captions, read and decoded as in training."""

    def write() -> None:
        write_shards(folder / "shards", shape_samples(1, RECORDS_ON_DISK, 256), RECORDS_ON_DISK // 2)
        build_index(folder / "shards")
        word_tokenizer(GRAMMAR_WORDS, folder / "tokenizer.json")

    ranks.on_main(write)
    from murmuration.data.index.shard_index import ShardIndex

    spec = DataSpec(image_size=224, augment="random_resized_crop")
    text = TextEncoder(str(folder / "tokenizer.json"), length)
    return BatchReader(ShardIndex.open(folder / "shards"), spec, text, augment_key=b"a" * 32)


def rows(reader: BatchReader, ranks: Ranks, samples: int) -> Iterator[np.ndarray]:
    ids = np.sort(np.arange(samples) % RECORDS_ON_DISK)
    yield from slots(ids, ranks.rank, ranks.world, MICRO_BATCH)


def measured(ranks: Ranks, stage: int, model_name: str, samples: list[int], reader: BatchReader) -> dict[str, object]:
    shape = shape_of(model_name)
    settings = EngineSettings("deepspeed", MICRO_BATCH, ZeroOptimization(stage=stage))  # pyright: ignore[reportArgumentType]
    rule, model = ClipRule("flat", 1.0, 0.0), build(shape, "caption")
    built = clipping_engine(model, rule, Optimizer(), settings, ranks, Computation())
    engine, stepping = built.engine, Clock()
    # These run after the engine's own hook, which adds the noise.
    built.optimizer.register_step_pre_hook(lambda *_: stepping.start())
    built.optimizer.register_step_post_hook(lambda *_: stepping.stop())
    noise = AESNoise(b"n" * 32, 1.0, 1.0)
    warm = reader.read(next(rows(reader, ranks, MICRO_BATCH * ranks.world)), 0)
    engine.accumulate(warm)
    engine.update(NoisyUpdate(noise, 1), 0.0)

    compute, waiting = {}, 0.0
    for count in samples:
        reading, began = Clock(), time.perf_counter()
        for row in rows(reader, ranks, count):
            reading.start()
            batch = reader.read(row, 1)
            reading.stop()
            engine.accumulate(batch)
        ranks.barrier()
        compute[count] = time.perf_counter() - began - reading.seconds
        waiting = reading.seconds / count
        engine.update(NoisyUpdate(noise, 2), 0.0)
    parts: dict[str, list[float]] = {"noise": [], "optimizer": [], "reduction": []}
    for number in range(UPDATES):
        engine.accumulate(warm)
        noising, stepping.seconds = Clock(), 0.0
        ranks.barrier()
        began = time.perf_counter()
        engine.update(TimedUpdate(NoisyUpdate(noise, 3 + number), noising), 0.0)
        whole = time.perf_counter() - began
        parts["noise"].append(noising.seconds)
        parts["optimizer"].append(stepping.seconds)
        parts["reduction"].append(whole - noising.seconds - stepping.seconds)  # hand-over, reduction, gather, guard
    engine.close()
    own = {name: statistics.median(values) for name, values in parts.items()}
    slowest = {name: max(other[name] for other in ranks.gather(own)) for name in own}
    return {"stage": stage, "world": ranks.world, "model": model_name, "parameters": engine.trainable_elements,
            "compute_seconds": compute, "read_seconds_per_sample": max(ranks.gather(waiting)), **slowest}  # fmt: skip


def draw_seconds(batch: int) -> float:
    """Seconds of a draw that expects `batch` records of DP-Cap's 233.8 million."""
    plan = PrivacyPlan(
        records=RECORDS_TO_DRAW, sampling=Poisson(threshold_for(RECORDS_TO_DRAW, batch)), clip_norm=1.0,
        noise_multiplier=1.0, steps=1, delta=1e-9, epsilon_budget=1e9,
    )  # fmt: skip
    sampler = PoissonSampler(b"s" * 32, b"d" * 32, plan.records, plan.sampling.threshold)
    began = time.perf_counter()
    sampler.draw(1)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--samples", type=int, nargs="+", default=[256])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = start_ranks("deepspeed")
    folder = Path(ranks.on_main(lambda: tempfile.mkdtemp(prefix="murmuration-bench-")))
    reader = data(folder, ranks, 40)
    found = [measured(ranks, stage, arguments.model, arguments.samples, reader) for stage in arguments.stages]
    draw = ranks.on_main(lambda: statistics.median(draw_seconds(1_310_720) for _ in range(3)))
    if ranks.main:
        print("RESULTS " + json.dumps({"rows": found, "draw_seconds": draw}), flush=True)
    ranks.barrier()
    leave(DONE)


if __name__ == "__main__":
    main()
