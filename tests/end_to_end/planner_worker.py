"""Run by a launcher with allocations.cpp preloaded: what one rank holds at each ZeRO stage; with `--sharded`, only
where the model is sharded, FSDP2 included."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import Offload, Optimizer, ZeroOptimization
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import Engine
from murmuration.train.engines.choose import EngineSettings, make_engine
from murmuration.train.engines.deepspeed_zero import start_ranks
from murmuration.train.engines.forward import PlainForward
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.update import NoisyUpdate, PlainUpdate
from murmuration.train.optim.optimizers import make_optimizer
from murmuration.train.self_test.probes import synthetic_batch
from tests.support.answering import answer

SHAPE = ModelSettings(
    family="captioner", image_size=64, patch_size=8, width=256, depth=1, heads=4, decoder_width=256, decoder_depth=1,
    decoder_heads=4, text_length=16, vocabulary=2048, qkv_bias=True,
).resolved()  # fmt: skip
BUCKET = 100_000
MICRO_BATCHES = (4, 12)
ALLOCATIONS = ctypes.CDLL(None)
for count in (ALLOCATIONS.allocations_held, ALLOCATIONS.allocations_most):
    count.restype = ctypes.c_longlong


def traced(act: Callable[[], None]) -> tuple[int, int]:
    """Bytes that stay when `act` is done, and the most that there were at one time, above what lay there before."""
    gc.collect()
    ALLOCATIONS.allocations_restart()
    before = ALLOCATIONS.allocations_held()
    act()
    gc.collect()
    return ALLOCATIONS.allocations_held() - before, ALLOCATIONS.allocations_most() - before


RANKS_PER_COPY = 2  # of "hsdp"


def measured(
    ranks: Ranks, stage: int | Literal["fsdp2", "hsdp"], offload: bool, private: bool
) -> dict[str, object]:  # fmt: skip
    kept: list[Engine] = []
    noisy = partial(NoisyUpdate, AESNoise(b"n" * 32, 1.0, 1.0))
    zero = ZeroOptimization(
        stage=3 if isinstance(stage, str) else stage, reduce_bucket_size=BUCKET, allgather_bucket_size=BUCKET,  # pyright: ignore[reportArgumentType]
        stage3_param_persistence_threshold=0 if stage == 3 else None,
        offload_optimizer=Offload() if offload else None,
    )  # fmt: skip

    def make() -> None:
        model = build(SHAPE, "caption")
        name = "fsdp2" if isinstance(stage, str) else "deepspeed"
        settings = EngineSettings(name, MICRO_BATCHES[0], zero, RANKS_PER_COPY if stage == "hsdp" else None)
        if private:
            rule = ClipRule("flat", 1.0, 0.0)
            kept.append(clipping_engine(model, rule, Optimizer(), settings, ranks, Computation()).engine)
        else:
            optimizer = make_optimizer(Optimizer(), model.named_parameters())
            kept.append(make_engine(settings, PlainForward(model), optimizer, ranks))
        step(MICRO_BATCHES[0], 1)

    def step(size: int, number: int) -> None:
        kept[0].accumulate(batches[size])
        kept[0].update(noisy(number) if private else PlainUpdate(size, number), 1e-4)

    batches = {size: synthetic_batch(SHAPE, "caption", size, 1) for size in MICRO_BATCHES}
    stays, _ = traced(make)
    engine: Any = kept[0]
    engine._unproven = set(engine.shapes)  # the update below is as large as an engine's first
    first, small = traced(lambda: engine.accumulate(batches[MICRO_BATCHES[0]]))
    second, large = traced(lambda: engine.accumulate(batches[MICRO_BATCHES[1]]))
    last = noisy(2) if private else PlainUpdate(sum(MICRO_BATCHES), 2)
    _, update = traced(lambda: (engine.update(last, 1e-4), None)[1])
    largest = max(shape.numel() for shape in engine.shapes.values())
    described = {"stage": stage, "offload": offload, "private": private, "world": ranks.world,
                 "elements": engine.trainable_elements, "largest": largest}  # fmt: skip
    engine.close()
    return described | {"stays": stays, "kept": first + second, "accumulate": [small, large], "update": update}


def main() -> None:
    ranks = start_ranks()
    torch.set_num_threads(1)
    layouts = [(0, False), (1, False), (1, True), (2, False), (3, False), (3, True)]
    if "--sharded" in sys.argv:
        layouts = [(3, False), ("fsdp2", False)]
        if ranks.world > RANKS_PER_COPY and ranks.world % RANKS_PER_COPY == 0:
            layouts.append(("hsdp", False))
    for stage, offload in layouts:
        # What PyTorch and DeepSpeed load and keep at their first use is not a phase's.
        measured(ranks, stage, offload, private=True)
    rows = [measured(ranks, stage, offload, private) for private in (True, False) for stage, offload in layouts]
    answer(ranks, rows)


if __name__ == "__main__":
    main()
