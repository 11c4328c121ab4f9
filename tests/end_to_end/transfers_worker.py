"""Run by several ranks: checkpoints of every layout of the shards, and their next update under every other one.

`save FOLDER` trains two steps at each layout, saves, and notes what the third step makes of weights and moments;
`load FOLDER` resumes each checkpoint found there at each layout, and compares its third step with the one noted.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from murmuration.data.draw.micro_batch import MicroBatch, slots
from murmuration.model.build import build
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import Engine
from murmuration.train.engines.deepspeed_zero import start_ranks
from murmuration.train.noise.update import NoisyUpdate
from murmuration.train.run.phase import carry_over
from murmuration.train.storage.checkpoint import Checkpoints, Keep, Loaded, Position
from tests.support.answering import answer
from tests.support.sharded_engines import LAYOUTS as ALL_LAYOUTS
from tests.support.sharded_engines import (
    MICRO_BATCH,
    RATES,
    SHAPE,
    Layout,
    drawn,
    engine_of,
    noise,
    rows_of,
    settings_of,
)

SETTINGS = Optimizer.model_validate({"params": {"weight_decay": 0.1, "ema_decay": 0.9}})
IN_TURN = "--in-turn" in sys.argv
"""Each layout is resumed at itself and at the next one, and of two that are cut alike there is one."""
LAYOUTS = [layout for layout in ALL_LAYOUTS if layout != 2 or not IN_TURN]
SAVED_AFTER, NEXT = 2, "next.safetensors"


def micro_batch(ids) -> MicroBatch:
    """For the masked autoencoder, two of whose parameters have a single row: no shard for most ranks."""
    batch = rows_of(ids)
    noises = [torch.rand(SHAPE.patches, generator=torch.Generator().manual_seed(int(i) + 99)) for i in ids]
    return MicroBatch({"images": batch.inputs["images"], "mask_noise": torch.stack(noises)}, batch.present)


def make(ranks: Ranks, layout: Layout, loaded: Loaded | None = None) -> Engine:
    model: nn.Module = build(SHAPE, "mae")
    if loaded is not None:
        model.load_state_dict(loaded.state_dict(model.state_dict()))
    engine = engine_of(ranks, settings_of(layout), model, SETTINGS).engine
    if loaded is not None:
        loaded.restore_optimizer(engine)
    return engine


def train(engine: Engine, ranks: Ranks, step: int) -> None:
    for row in slots(drawn(step), ranks.rank, ranks.world, MICRO_BATCH):
        engine.accumulate(micro_batch(row))
    engine.update(NoisyUpdate(noise(), step), RATES["AdamW"])


def state_of(engine: Engine, ranks: Ranks) -> dict[str, Tensor]:
    """Weights as the model computes with them, moments and averages as all ranks together hold them; flat, fp32."""
    found = {f"weights|{name}": t.flatten().clone() for name, t in engine.whole_weights().items()}
    pieces = [
        (f"{kind}|{f.name}", f.start, f.of(tensor).detach().clone())
        for shard in engine.shards()
        for kind, tensor in shard.state.items()
        for f in shard.fragments
    ]
    for name, start, values in (piece for part in ranks.gather(pieces) for piece in part):
        size = engine.shapes[name.partition("|")[2]].numel()
        found.setdefault(name, torch.full((size,), float("nan")))[start : start + len(values)] = values
    return found


def save(ranks: Ranks, root: Path) -> None:
    for layout in LAYOUTS:
        engine = make(ranks, layout)
        for step in range(1, SAVED_AFTER + 1):
            train(engine, ranks, step)
        folder = root / f"{layout}-of-{ranks.world}"
        checkpoints = Checkpoints(folder, ranks, Keep())
        checkpoints.save(Position(0, SAVED_AFTER), engine, settings_of(layout).ranks_per_copy, {})
        train(engine, ranks, SAVED_AFTER + 1)
        state = state_of(engine, ranks)
        ranks.on_main(lambda folder=folder, state=state: save_file(state, folder / NEXT))
        engine.close()


def load(ranks: Ranks, root: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for folder in sorted(root.glob("*-of-*")):
        loaded = Checkpoints(folder, ranks, Keep()).latest()
        assert loaded is not None
        expected = load_file(folder / NEXT)
        saved = next(layout for layout in LAYOUTS if folder.name.startswith(f"{layout}-of-"))
        following = LAYOUTS[(LAYOUTS.index(saved) + 1) % len(LAYOUTS)]
        for layout in (saved, following) if IN_TURN else LAYOUTS:
            engine = make(ranks, layout, loaded)
            train(engine, ranks, SAVED_AFTER + 1)
            state = state_of(engine, ranks)
            assert state.keys() == expected.keys(), state.keys() ^ expected.keys()
            apart: dict[str, list[float]] = {}
            for name, value in expected.items():
                kind, _, parameter = name.partition("|")
                if parameter not in engine.shapes:
                    assert torch.equal(state[name], value), f"{name} is fixed"
                    continue
                before = loaded.whole(kind, parameter).flatten()
                sums = apart.setdefault(kind, [0.0, 0.0])
                sums[0] += float((state[name] - value).double().square().sum())
                sums[1] += float((value - before).double().square().sum())
            found.append({"from": folder.name, "to": f"{layout}-of-{ranks.world}", "steps": engine.optimizer_step(),
                          "apart": {kind: (off / moved) ** 0.5 for kind, (off, moved) in apart.items()}})  # fmt: skip
            engine.close()
            if folder.name == f"{layout}-of-{ranks.world}":
                handed_over(ranks, layout, loaded)
    return found


def handed_over(ranks: Ranks, layout: Layout, loaded: Loaded) -> None:
    """Bu et al.'s surgery: the next update has a first moment of its own gradient alone, and the second one goes on."""
    engine = make(ranks, layout)
    carry_over(loaded, engine, "second-moment")
    assert engine.optimizer_step() == SAVED_AFTER
    train(engine, ranks, SAVED_AFTER + 1)
    state, (first, second) = state_of(engine, ranks), SETTINGS.params.betas
    for name in engine.shapes:
        before = loaded.whole("exp_avg_sq", name).flatten()
        squares = (state[f"exp_avg_sq|{name}"] - second * before) / (1 - second)
        expected = (1 - first) * squares.clamp_min(0).sqrt()
        assert torch.allclose(state[f"exp_avg|{name}"].abs(), expected, rtol=2e-2, atol=1e-3 * float(expected.max()))
    assert engine.optimizer_step() == SAVED_AFTER + 1
    engine.close()


def main() -> None:
    ranks = start_ranks()
    acts, root = sys.argv[-2].split("+"), Path(sys.argv[-1])
    if "save" in acts:
        save(ranks, root)
    found = load(ranks, root) if "load" in acts else []
    answer(ranks, found)


if __name__ == "__main__":
    main()
