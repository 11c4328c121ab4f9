"""Scales in a run: where they come from, what the noise becomes on weights, and what the self-test would see."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmuration.accounting.banded import best_banded
from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.plan import ScaledSpace
from murmuration.accounting.scale_table import ScaleTable
from murmuration.train.clip.scaling import Scaling
from murmuration.train.config.privacy import Scaling as Settings
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.correlated import CorrelatedNoise
from murmuration.train.noise.exact import ExactNoise
from murmuration.train.noise.update import NoisyUpdate
from murmuration.train.recipe.ready_phase import make_plan
from murmuration.train.recipe.released_moments import ProtectedRecords
from murmuration.train.recipe.scaling import moments_of, open_scales
from murmuration.train.self_test.self_test import SelfTestError
from murmuration.train.storage.checkpoint import Checkpoints, Keep, Position
from tests.support.checkpoint_world import HEADER, trained
from tests.support.config_base import put
from tests.support.scaling_world import random_table, scales
from tests.support.self_test_world import caption_model, tried
from tests.support.train_helpers import Toy, alone, plan_for, private_engine, toy_batch

KEY = b"k" * 32
SHAPES = {"matrix": torch.Size([7, 60]), "vector": torch.Size([33]), "kernel": torch.Size([4, 3, 2, 2])}
TABLE = ScaleTable(
    {
        "matrix": (tuple(range(-3, 4)), tuple(n % 5 - 2 for n in range(60))),
        "vector": (tuple(n % 7 - 3 for n in range(33)), (0,)),
    }
)


def whole(noise: Any, step: int, scaling: Scaling | None) -> dict[str, Tensor]:
    """What an update makes of a sum of zeros."""
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        flat = torch.zeros(shape.numel(), dtype=torch.float64)
        NoisyUpdate(noise, step, scaling).finish(flat, [Fragment(name, number, 0, shape.numel(), 0)])
        found[name] = flat.view(shape)
    return found


def test_times_and_undo_are_inverse_to_the_last_bit_wherever_a_shard_is_cut() -> None:
    scaling, factors = Scaling(TABLE), scales(TABLE, SHAPES)
    for name, shape in SHAPES.items():
        value = torch.randn(shape)
        assert torch.equal(scaling.times(name, value), (value.double() * factors[name]).float())
        several = torch.randn(5, *shape)
        assert torch.equal(scaling.times(name, several), (several.double() * factors[name]).float())
        flat, count = scaling.times(name, value).flatten(), shape.numel()
        for start in range(0, count, 11):
            length = min(11, count - start)
            scaling.undo(flat[start : start + length], Fragment(name, 0, start, length, 0))
        assert torch.equal(flat.view(shape), value)


def test_noise_on_weights_has_the_stated_deviation_row_by_row_and_another_table_is_told_from_it() -> None:
    """Each row's and column's variance, in units of what the table says; a scale that is off by one power is seen."""
    noise, steps = AESNoise(KEY, 3.0, 50.0), 400
    drawn = {name: torch.stack([whole(noise, t, Scaling(TABLE))[name] for t in range(1, steps + 1)]) for name in SHAPES}

    def furthest(table: ScaleTable) -> float:
        """The largest departure of a line's mean square from 1, in its own standard deviations."""
        worst = 0.0
        for name, factors in scales(table, SHAPES).items():
            rows, columns = len(factors), factors.numel() // len(factors)
            unit = (drawn[name] * factors * 50.0 / 3.0).square().view(steps, rows, columns)
            for mean, count in ((unit.mean((0, 2)), steps * columns), (unit.mean((0, 1)), steps * rows)):
                worst = max(worst, float(((mean - 1) / (2 / count) ** 0.5).abs().max()))
        return worst

    assert furthest(TABLE) < 5
    rows, columns = TABLE.weights["matrix"]
    for wrong in ((rows[0] + 1, *rows[1:]), (*rows[:-1], rows[-1] - 1)):
        assert furthest(ScaleTable(dict(TABLE.weights) | {"matrix": (wrong, columns)})) > 20
    changed = (rows, (columns[0] + 1, *columns[1:]))
    assert furthest(ScaleTable(dict(TABLE.weights) | {"matrix": changed})) > 20
    assert furthest(ScaleTable({"vector": TABLE.weights["vector"]})) > 20


@pytest.mark.parametrize("kind", ["aes", "exact", "banded"])
def test_the_noise_of_the_clipped_space_is_the_one_without_scales(kind: str) -> None:
    """Every kind of noise is added as ever; what is mapped back is its quotient, to the last bit."""
    count = sum(shape.numel() for shape in SHAPES.values())
    noise: Any = AESNoise(KEY, 3.0, 50.0)
    if kind == "exact":
        noise = ExactNoise.of(KEY, plan_for(grid_growth=1e-6), count)
    if kind == "banded":
        noise = CorrelatedNoise(noise, best_banded(4, 40), 1)
    factors, scaling = scales(TABLE, SHAPES), Scaling(TABLE)
    for step in (1, 2, 7):
        plain, found = whole(noise, step, None), whole(noise, step, scaling)
        assert all(torch.equal(found[name] * factors[name], plain[name]) for name in SHAPES)
    facts = [NoisyUpdate(noise, 1, each).fact(count) for each in (None, scaling)]
    assert facts[0].std == facts[1].std and [f.scales for f in facts] == [None, TABLE.digest]


def test_an_engine_with_scales_takes_the_step_of_brute_force() -> None:
    """One record at a time: its gradient scaled, clipped to C there, summed; noised, divided by q·n and the scales."""
    plan = plan_for(clip_norm=0.3)
    table = random_table(Toy())
    built, clip, _ = private_engine(alone(), plan)
    clip.scaling = Scaling(table)
    batch = toy_batch(6, absent=(4,))
    model, total = Toy(), dict[str, Tensor]()
    trained_ones = {name: p for name, p in model.named_parameters() if p.requires_grad}
    factors = scales(table, {name: p.shape for name, p in trained_ones.items()})
    for row in batch.present.nonzero().flatten().tolist():
        loss = model({"images": batch.inputs["images"][row : row + 1]}).sum()
        own = torch.autograd.grad(loss, list(trained_ones.values()))
        scaled = {n: g.double() * factors[n] for n, g in zip(trained_ones, own, strict=True)}
        norm = float(torch.stack([g.norm() for g in scaled.values()]).norm())
        for name, gradient in scaled.items():
            total[name] = total.get(name, 0) + min(1.0, clip.rule.bound / norm) * gradient
    built.accumulate(batch)
    seen: dict[str, Tensor] = {}

    class Seen(NoisyUpdate):
        def finish(self, flat: Tensor, fragments: Any) -> None:
            super().finish(flat, fragments)
            seen.update({f.name: f.of(flat).double().clone() for f in fragments})

    built.update(Seen(AESNoise(KEY, 1e-13, plan.divisor), 1, clip.scaling), 1e-3)
    for name, expected in total.items():
        mean = (expected / factors[name] / plan.divisor).flatten()
        assert float((seen[name] - mean).norm()) <= 1e-6 * float(mean.norm())


class NotMappedBack(Scaling):
    def undo(self, values: Tensor, fragment: Fragment) -> None:
        pass


class MappedBackTwice(Scaling):
    def undo(self, values: Tensor, fragment: Fragment) -> None:
        super().undo(values, fragment)
        super().undo(values, fragment)


def test_the_self_test_passes_with_scales_and_sees_noise_of_another_space() -> None:
    table = random_table(caption_model())

    def given(kind: Callable[[ScaleTable], Scaling]) -> Callable[..., None]:
        def change(built: Any, clip: Any, noise: Any) -> None:
            clip.scaling = kind(table)

        return change

    report = tried(alone(), change=given(Scaling))
    assert abs(report.measured_sigma / 1.5 - 1) < 0.05 and report.largest_hostile <= 1.0
    for wrong in (NotMappedBack, MappedBackTwice):
        with pytest.raises(SelfTestError, match="the noise has sigma"):
            tried(alone(), change=given(wrong))


def test_moments_are_means_and_do_not_depend_on_the_order_of_a_sum() -> None:
    draw = np.random.default_rng(3)
    second = torch.from_numpy(np.exp(draw.uniform(-25, 3, (64, 48)))).float()
    found = moments_of(second, "w")
    assert found.rows == pytest.approx(second.double().mean(1).tolist(), rel=1e-6)
    assert found.columns == pytest.approx(second.double().mean(0).tolist(), rel=1e-6)
    assert found.mean == pytest.approx(float(second.double().mean()), rel=1e-6)
    order = torch.randperm(64)
    mixed = moments_of(second[order], "w")
    assert mixed.columns == found.columns and mixed.rows == [found.rows[n] for n in order.tolist()]
    assert moments_of(torch.zeros(3, 2), "w").mean == 0.0
    assert moments_of(torch.tensor(4.0), "w").mean == 4.0
    for wrong in (float("nan"), float("inf"), -1.0):
        with pytest.raises(RecipeError, match="not finite numbers"):
            moments_of(torch.tensor([1.0, wrong]), "w")


TRAINED = {name: p.shape for name, p in Toy().named_parameters() if p.requires_grad}


def source(root: Path, tell: Callable[[Journal], Any], steps: int = 2) -> Settings:
    """A run directory with a checkpoint after a few steps of AdamW, and a ledger that says what was trained on."""
    engine = trained(alone(), steps=steps)
    Checkpoints(root / "checkpoints", alone(), Keep(2)).save(Position(0, steps), engine, 0, HEADER)
    journal = Journal(Ledger.open(root / "ledger.jsonl"))
    journal.start_run(root.name, "check", False, {}, "hmac-sha256", "signer")
    tell(journal)
    journal.ledger.close()
    return Settings(source="checkpoint", path=str(root), public=True)


def on_public(journal: Journal) -> None:
    journal.declare_nonprivate(0, "warm", True, "textures")


def test_scales_are_read_from_a_run_on_public_records(tmp_path: Path) -> None:
    settings = source(tmp_path, on_public)
    found = open_scales(
        settings, "phases.1.privacy.scaling", TRAINED, [ProtectedRecords("private", frozenset({"people"}))]
    )
    assert found.table.weights.keys() == TRAINED.keys() and found.origins == ()
    assert open_scales(settings, "", TRAINED, []) == found
    fewer = {name: shape for name, shape in TRAINED.items() if "first" in name} | {"head": torch.Size([3])}
    assert set(open_scales(settings, "", fewer, []).table.weights) == {"first.weight", "first.bias"}


@pytest.mark.parametrize(
    ("tell", "said"),
    [
        (lambda j: j.declare_nonprivate(0, "warm", False, "people"), "not declared public"),
        (lambda j: j.declare_plan(0, "private", plan_for(), {}), "trained on private records"),
        (lambda j: j.declare_nonprivate(0, "warm", True, "people"), "the records that phase 'private' protects"),
    ],
)
def test_moments_of_private_records_are_refused(tmp_path: Path, tell: Callable[[Journal], Any], said: str) -> None:
    settings = source(tmp_path, tell)
    with pytest.raises(RecipeError, match=said):
        open_scales(settings, "phases.1.privacy.scaling", TRAINED, [ProtectedRecords("private", frozenset({"people"}))])


def test_a_run_without_fitting_moments_is_refused(tmp_path: Path) -> None:
    settings = source(tmp_path / "a", on_public)
    with pytest.raises(RecipeError, match=r"scaling\.path: it trained none of this phase's weights"):
        open_scales(settings, "phases.1.privacy.scaling", {"first.weight": torch.Size([48, 6])}, [])
    with pytest.raises(RecipeError, match="no second moments"):
        open_scales(source(tmp_path / "b", on_public, steps=0), "", TRAINED, [])
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RecipeError, match="no ledger"):
            open_scales(Settings(source="checkpoint", path=str(path), public=True), "", TRAINED, [])


SCALING = {"source": "checkpoint", "path": "runs/warm", "public": True}


def test_a_plan_states_the_space_and_keeps_its_sigma_only_in_the_same_one(loaded: Callable[..., Config]) -> None:
    phase = loaded(put("phases.1.privacy.noise_multiplier", None)).phases[1]
    assert phase.privacy is not None
    plan = make_plan(phase, phase.privacy, 1000, "phases.1", scales=TABLE)
    assert plan.scaling == ScaledSpace(TABLE.digest, *TABLE.span)
    assert make_plan(phase, phase.privacy, 1000, "phases.1").noise_multiplier == plan.noise_multiplier
    known = replace(plan, noise_multiplier=plan.noise_multiplier + 1)
    again = make_plan(phase, phase.privacy, 1000, "phases.1", known, scales=TABLE)
    assert again.noise_multiplier == known.noise_multiplier
    assert make_plan(phase, phase.privacy, 1000, "phases.1", known).noise_multiplier == plan.noise_multiplier


def test_the_digest_has_the_scales_in_the_place_of_their_path(loaded: Callable[..., Config]) -> None:
    plain, contents = loaded(), {"data": "d1"}
    scaled = [loaded(put("phases.1.privacy.scaling", SCALING | {"path": path})) for path in ("a", "b")]
    assert scaled[0].digest(1, contents) == scaled[1].digest(1, contents) != plain.digest(1, contents)
    assert scaled[0].digest(1, contents) != scaled[0].digest(1, contents | {"scaling": "x"})
    lower = loaded(put("phases.1.privacy.scaling", SCALING | {"floor": 1e-3}))
    assert lower.digest(1, contents) != scaled[0].digest(1, contents)
    released = {"source": "released", "path": "a"}
    others = [loaded(put("phases.1.privacy.scaling", released | {"decay": decay})) for decay in (0.9, 0.99)]
    assert len({other.digest(1, contents) for other in others}) == 2
    assert "scaling" not in json.dumps(plain.phases[1].model_dump(exclude_none=True))
