"""The four-way study runs the parts of a private step on public data, and says NOT PRIVATE wherever it speaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from murmuration.contrib.four_way import VARIANTS, Study, _one, first_weights, main, run_study, write
from murmuration.model.build import build
from murmuration.train.config.root import Config
from murmuration.train.recipe.ready_phase import RecipeError, prepare
from murmuration.train.run.phase import StillEngine
from murmuration.train.storage.checkpoint import Checkpoints, Keep, Position
from tests.support import drops_world
from tests.support.texture_samples import texture_samples
from tests.support.train_helpers import alone, local

STUDY = Study("flat", 0.05, 0.01, 0.4, [3e-4, 3e-3], 8, 32)


def config(**changes: Any) -> Config:
    phase = {
        "name": "public", "objective": "mae", "data": {"source": "synthetic", "kind": "shapes", "records": 128},
        "batch": 32, "schedule": {"peak": 1e-3, "shape": "constant"}, "steps": 12,
    }  # fmt: skip
    model = {
        "family": "mae", "image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2,
        "mae_decoder_width": 16, "mae_decoder_depth": 1, "mae_decoder_heads": 2,
    }  # fmt: skip
    return Config.model_validate(
        {"train_micro_batch_size_per_gpu": 16, "model": model, "phases": [phase | changes]}
    )  # fmt: skip


def test_four_variants_each_at_its_own_rate_and_all_marked(tmp_path: Path) -> None:
    said: list[str] = []
    whole = config()
    outcome = run_study(whole, prepare(whole)[0], STUDY, alone(), said.append, local)
    assert len(outcome.curves) == 8 and len(said) == 8
    best = {variant.name: outcome.best(variant) for variant in VARIANTS}
    start = {curve.losses[0][1] for curve in outcome.curves}
    assert len(start) == 1, "all begin with the same weights"
    assert best["neither"].final < min(start), "public training learns"
    assert best["neither"].final <= best["noise only"].final, "noise is no help"
    assert best["neither"].clip_factor == best["noise only"].clip_factor == 1.0
    assert best["clipping only"].clip_factor < 0.9 and best["both"].clip_factor < 0.9
    write(outcome, tmp_path)
    stored = json.loads((tmp_path / "four_way.json").read_text())
    assert all("NOT PRIVATE" in text for text in said) and "NOT PRIVATE" in stored["marked"]
    assert b"NOT PRIVATE" in (tmp_path / "four_way.png").read_bytes()
    assert {name: curve["rate"] for name, curve in stored["best"].items()} == {n: c.rate for n, c in best.items()}


def test_neither_is_plain_training_on_the_same_draws() -> None:
    """Without clipping and noise the update is the plain mean gradient: compared by hand for the first step."""
    from murmuration.data.batch.reader import BatchReader
    from murmuration.data.draw.poisson import PoissonSampler

    whole = config()
    phase = prepare(whole)[0]
    kept: list[Any] = []

    def keep(config: Config, forward: Any, optimizer: Any, ranks: Any) -> Any:
        kept.append(local(config, forward, optimizer, ranks))
        return kept[-1]

    _one(whole, phase, Study("flat", 0.05, 0.01, 0.4, [1e-3], 1, 16), VARIANTS[0], 1e-3, [], alone(), keep)
    model = build(phase.shape, "mae")
    before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters() if p.requires_grad])
    ids = PoissonSampler(b"four-way sampling".ljust(32), b"four-way digest".ljust(32), 128, 2**30).draw(1).ids
    reader = BatchReader(phase.index, phase.data_spec(augment=True), None, augment_key=b"a" * 32, mask_key=b"m" * 32)
    model(reader.read(ids, 1).inputs).sum().backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    after = torch.cat([p.detach().reshape(-1) for p in kept[0].model.parameters() if p.requires_grad])
    moved = before - after
    sure = gradient.abs() > 1e-6  # AdamW's first step is the sign of the gradient, decay apart
    assert float((moved[sure].sign() == gradient[sure].sign()).float().mean()) > 0.999
    assert float(cosine_similarity(moved[sure], gradient[sure].sign(), dim=0)) > 0.99


def test_what_is_dropped_at_random_is_dropped_here_too() -> None:
    whole = drops_world.config(0.4, 0.5)
    study = Study("flat", 0.05, 0.01, 0.4, [1e-3], 2, 16)
    curve = _one(whole, prepare(whole)[0], study, VARIANTS[1], 1e-3, [], alone(), local)
    assert len(curve.losses) >= 2 and curve.clip_factor <= 1


def test_a_phase_begins_with_the_weights_that_it_begins_with_in_a_run(tmp_path: Path) -> None:
    whole = config()
    given = build(prepare(whole)[0].shape, "mae")
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.add_(0.1)
    engine = StillEngine(given, torch.device("cpu"))
    Checkpoints(tmp_path / "checkpoints", alone(), Keep()).save(Position(0, 0), engine, 1, {})
    start = {
        "name": "start",
        "objective": "mae",
        "data": {"source": "checkpoint", "path": str(tmp_path), "public": True},
    }
    after = whole.model_dump(by_alias=True, exclude_unset=True)
    after["phases"].insert(0, start)
    begun = Config.model_validate(after)
    once = replace(STUDY, rates=[1e-3], steps=1)
    found = first_weights(prepare(begun)[1])
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in given.state_dict().items())
    losses = [
        run_study(each, prepare(each)[-1], once, alone(), lambda _: None, local).curves[0].losses[0][1]
        for each in (whole, begun)
    ]
    assert losses[0] != losses[1]


def test_a_phase_that_goes_on_from_a_trained_one_is_refused() -> None:
    phases = config().model_dump(by_alias=True, exclude_unset=True)
    phases["phases"].insert(0, phases["phases"][0] | {"name": "before"})
    whole = Config.model_validate(phases)
    with pytest.raises(RecipeError, match="continues from what phase 'before' trains"):
        run_study(whole, prepare(whole)[1], STUDY, alone(), lambda _: None, local)


def test_private_or_undeclared_data_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    from murmuration.data.index.shard_index import build as build_index
    from murmuration.data.synthetic.index import write_shards

    write_shards(tmp_path / "set", texture_samples(1, 40, 16), 40)
    build_index(tmp_path / "set")
    data = {"source": "shards", "path": str(tmp_path / "set")}
    whole = config(data=data)
    with pytest.raises(RecipeError, match="takes public data alone"):
        run_study(whole, prepare(whole)[0], STUDY, alone(), print, local)
    path = tmp_path / "config.json"
    path.write_text(whole.model_dump_json(by_alias=True, exclude_unset=True))
    out = str(tmp_path / "o")
    asked = ["--config", str(path), "--phase", "public", "--noise-multiplier", "1", "--out", out]
    assert main(asked) == 2
    assert "takes public data alone" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    # The same shards, called public here and protected by another phase.
    both = json.loads(path.read_text())
    both["phases"][0]["data"]["public"] = True
    private = both["phases"][0] | {"name": "private", "data": data, "privacy": {"epsilon": 8.0, "expected_batch": 8}}
    del private["batch"]
    both["phases"].append(private)
    path.write_text(json.dumps(both))
    assert main(asked) == 2
    assert "belongs to the private records" in capsys.readouterr().err
