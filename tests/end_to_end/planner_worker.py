"""Run under `deepspeed`: what one rank holds at each ZeRO stage, from the record of every allocation and release."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from model.build import build  # noqa: E402
from model.settings import ModelSettings  # noqa: E402
from tests.end_to_end.answering import answer  # noqa: E402
from train.clip_bookkeeping import BookKeepingClip  # noqa: E402
from train.clip_rule import ClipRule  # noqa: E402
from train.config import Offload, ZeroOptimization  # noqa: E402
from train.engine_deepspeed import DeepSpeedEngine, start_ranks  # noqa: E402
from train.forward import PrivateForward  # noqa: E402
from train.gradient import NoisyUpdate  # noqa: E402
from train.noise import NoiseMechanism  # noqa: E402
from train.optim import make_optimizer  # noqa: E402
from train.optim_settings import Optimizer  # noqa: E402
from train.probes import synthetic_batch  # noqa: E402
from train.ranks import Ranks  # noqa: E402

SHAPE = ModelSettings(
    family="captioner", image_size=64, patch_size=8, width=128, depth=1, heads=4, decoder_width=128, decoder_depth=1,
    decoder_heads=4, text_length=16, vocabulary=2048, qkv_bias=True,
).resolved()  # fmt: skip
BUCKET = 100_000
MICRO_BATCHES = (4, 12)


def traced(act: Callable[[], None]) -> tuple[int, int]:
    """Bytes that stay when `act` is done, and the most that there were at one time, above what lay there before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        act()
        gc.collect()
    events = recorded.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    memory = [event for event in events if event.name() == "[memory]"]
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(memory))  # pyright: ignore[reportAttributeAccessIssue]
    held = peak = 0
    for _, _, change in changes:
        held += change
        peak = max(peak, held)
    return held, peak


def measured(ranks: Ranks, stage: int, offload: bool) -> dict[str, object]:
    kept: list[DeepSpeedEngine] = []
    noise = NoiseMechanism(b"n" * 32, 1.0, 1.0)
    zero = ZeroOptimization(
        stage=stage, reduce_bucket_size=BUCKET, allgather_bucket_size=BUCKET,  # pyright: ignore[reportArgumentType]
        stage3_param_persistence_threshold=0 if stage == 3 else None,
        offload_optimizer=Offload() if offload else None,
    )  # fmt: skip

    def make() -> None:
        model = build(SHAPE, "caption")
        optimizer = make_optimizer(Optimizer(), model.named_parameters(), 0.0)
        forward = PrivateForward(model, BookKeepingClip(ClipRule("flat", 1.0, 0.0)))
        kept.append(DeepSpeedEngine(forward, optimizer, zero, MICRO_BATCHES[0], ranks))
        step(MICRO_BATCHES[0], 1)

    def step(size: int, number: int) -> None:
        kept[0].accumulate(batches[size])
        kept[0].update(NoisyUpdate(noise, number), 1e-4)

    batches = {size: synthetic_batch(SHAPE, "caption", size, 1) for size in MICRO_BATCHES}
    stays, making = traced(make)
    engine = kept[0]
    _, small = traced(lambda: engine.accumulate(batches[MICRO_BATCHES[0]]))
    _, large = traced(lambda: engine.accumulate(batches[MICRO_BATCHES[1]]))
    _, update = traced(lambda: (engine.update(NoisyUpdate(noise, 2), 1e-4), None)[1])
    elements = engine.trainable_elements
    largest = max(shape.numel() for shape in engine.shapes.values())
    engine.close()
    return {"stage": stage, "offload": offload, "world": ranks.world, "elements": elements, "largest": largest,
            "stays": stays, "making": making, "accumulate": [small, large], "update": update}  # fmt: skip


def main() -> None:
    ranks = start_ranks()
    torch.set_num_threads(1)
    layouts = [(0, False), (1, False), (1, True), (2, False), (3, False)]
    rows = [measured(ranks, stage, offload) for stage, offload in layouts]
    answer(ranks, rows)


if __name__ == "__main__":
    main()
