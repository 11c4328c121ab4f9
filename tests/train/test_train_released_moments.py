"""Scales from what an earlier private run released: whose promise they carry, and what is left without its noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.accounting.banded import best_banded
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.ledger.chain import Ledger, LedgerError
from murmuration.accounting.ledger.facts import ClippingFact, CorrelationFact, NoiseFact, SamplingFact, StepFacts
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.ledger.warm_start_origin import Origin
from murmuration.accounting.plan import PrivacyPlan, ScaledSpace
from murmuration.accounting.scale_table import Moments, scales_of
from murmuration.train.config.privacy import Scaling as Settings
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.released_moments import NoiseShare, ProtectedRecords, without_noise
from murmuration.train.recipe.scaling import open_scales
from murmuration.train.storage.checkpoint import Checkpoints, Keep, Position
from tests.support.checkpoint_world import HEADER, trained
from tests.support.train_helpers import Toy, alone, plan_for

TRAINED = {name: p.shape for name, p in Toy().named_parameters() if p.requires_grad}
HERE = [ProtectedRecords("private", frozenset({"people here"}))]
STEPS = 4
LOUD: dict[str, Any] = dict(noise_multiplier=0.3, epsilon_budget=1e3)


def facts_of(plan: PrivacyPlan, step: int = 1, std: float | None = None) -> StepFacts:
    noise = NoiseFact(plan.noise_std if std is None else std, plan.divisor, 100)
    if plan.banded is not None:
        correlation = CorrelationFact(plan.banded.digest, plan.noise_std * plan.banded.spread(step))
        noise = replace(noise, correlation=correlation)
    return StepFacts(
        SamplingFact(plan.threshold, plan.records, "d", plan.bands), ClippingFact("flat", plan.clip_norm), noise
    )  # fmt: skip


def source(
    root: Path, steps: int = STEPS, records: str = "people there", mark: bool = True,
    tell: Callable[[Journal], Any] = lambda journal: None, opened: int = STEPS, finish: bool = True, **changes: Any,
) -> Settings:  # fmt: skip
    """The run directory of a private run of AdamW, whose gradients had their noise when it saw them."""
    plan = plan_for(**changes)
    engine = trained(alone(), steps=steps)
    digest = Checkpoints(root / "checkpoints", alone(), Keep(2)).save(Position(0, steps), engine, 0, HEADER)
    journal = Journal(Ledger.open(root / "ledger.jsonl"))
    journal.start_run(root.name, "check", False, {}, "hmac-sha256", "signer")
    journal.declare_plan(0, "private", plan, describe("pld"))
    tell(journal)
    journal.begin_segment(0, "config", records, 0, "first")
    for step in range(1, opened + 1):
        journal.open_step(0, step, facts_of(plan, step))
        journal.commit_step(0, step, facts_of(plan, step))
    if mark:
        journal.checkpointed(0, steps, digest)
    if finish:
        journal.finish()
    journal.ledger.close()
    return Settings(source="released", path=str(root))


# Noise.


@pytest.mark.parametrize("bands", [1, 3])
def test_the_share_of_noise_is_what_adamw_makes_of_noise_alone(bands: int) -> None:
    """Against the recursion itself, on many elements that get nothing but noise."""
    banded = None if bands == 1 else best_banded(bands, 30)
    plan, decay, steps, elements = plan_for(steps=30, banded=banded), 0.9, 30, 100_000
    draw, second = np.random.default_rng(1), np.zeros(elements)
    told = []
    for step in range(1, steps + 1):
        told.append(facts_of(plan, step))
        spread = 1.0 if banded is None else banded.spread(step)
        gradient = plan.noise_std * spread * draw.standard_normal(elements) / plan.divisor
        second = decay * second + (1 - decay) * gradient**2
    share = NoiseShare.of(told, decay)
    assert share.mean == pytest.approx(second.mean(), rel=0.01)
    assert share.deviation == pytest.approx(second.std(), rel=0.02)
    assert NoiseShare.of(told[:3], decay).mean < 0.5 * share.mean, "moments begin at zero"
    assert abs(second.mean() - share.mean) < 5 * share.deviation / elements**0.5
    assert share.without(second.mean(), elements) < 0.02 * share.mean, "nothing is left"


def test_without_its_noise_a_run_gives_the_scales_of_its_gradients() -> None:
    """Gradients whose rows differ by eight in size, of which noise drowns the lower ones."""
    draw, decay, steps, shape = np.random.default_rng(2), 0.99, 400, (6, 500)
    plan = plan_for(steps=steps)
    deviation = plan.noise_std / plan.divisor
    sizes = deviation * np.array([2.0, 1.0, 0.5, 0.5, 0.25, 0.0])[:, None]
    noisy, clean = np.zeros(shape), np.zeros(shape)
    for _ in range(steps):
        gradient = sizes * draw.standard_normal(shape)
        clean = decay * clean + (1 - decay) * gradient**2
        noisy = decay * noisy + (1 - decay) * (gradient + deviation * draw.standard_normal(shape)) ** 2

    def moments(v: np.ndarray) -> dict[str, Moments]:
        return {"w": Moments(v.mean(1).tolist(), v.mean(0).tolist(), float(v.mean()))}

    share = NoiseShare.of([facts_of(plan)] * steps, decay)
    corrected = without_noise(moments(noisy), share)
    wanted, found, raw = (scales_of(each, 1e-2).weights["w"][0] for each in (moments(clean), corrected, moments(noisy)))
    assert found[:5] == wanted[:5] and raw != wanted
    (last,) = corrected["w"].rows[5:]
    assert last == pytest.approx(share.least(500)), "a row without gradients: what cannot be told from noise"
    only = {"w": Moments([share.mean] * 2, [share.mean] * 3, share.mean)}
    with pytest.raises(RecipeError, match="those of its noise alone"):
        without_noise(only, share)


# Whose promise.


def test_what_a_run_on_other_records_released_is_taken_with_its_promise(tmp_path: Path) -> None:
    settings = source(tmp_path / "r", **LOUD)
    found = open_scales(settings, "phases.1.privacy.scaling", TRAINED, HERE)
    assert found.table.weights.keys() == TRAINED.keys()
    history, entries = History.read(tmp_path / "r" / "ledger.jsonl")
    own = Origin("r", entries[0].hash, 1e3, history.delta(), ("people there",), used="scales")
    assert found.origins == (own,)
    assert open_scales(settings, "", TRAINED, HERE) == found
    assert "scaled by what was released by run 'r'" in own.deviation() and "sum of both" in own.deviation()
    assert "used" not in replace(own, used=None).as_dict() and own.as_dict()["used"] == "scales"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(records="people here"), "the records that phase 'private' protects"),
        (dict(mark=False), "does not name its last checkpoint"),
        (dict(opened=STEPS - 1), "not of the 4 steps of its last phase alone"),
        (dict(tell=lambda j: j.declare_nonprivate(1, "warm", False, "people")), "made no promise"),
        (dict(finish=False), "is not finished"),
        (
            dict(tell=lambda j: j.declare_origin(Origin("x", "e" * 64, 1.0, 1e-5, ("still others",)))),
            "began from what another run had made",
        ),
        (
            dict(tell=lambda j: j.declare_nonprivate(1, "warm", True, "people here")),
            "used the records that phase 'private' protects without noise",
        ),
        *(
            (
                dict(tell=lambda j, use=use: j.declare_public(0, use, "people here")),
                "used the records that phase 'private' protects without noise",
            )
            for use in ("mixing", "evaluation", "monitor")
        ),
        (dict(noise_multiplier=1e4), "those of its noise alone"),
    ],
)
def test_moments_that_another_promise_does_not_cover_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    settings = source(tmp_path / "r", **(LOUD | changes))
    with pytest.raises(RecipeError, match=said):
        open_scales(settings, "phases.1.privacy.scaling", TRAINED, HERE)


def test_a_run_that_the_log_beside_these_records_knows_is_refused_whatever_it_calls_them(tmp_path: Path) -> None:
    """The index was made anew since, with a shard more, and has another digest."""
    settings = source(tmp_path / "r", **LOUD)
    history, _ = History.read(tmp_path / "r" / "ledger.jsonl")
    known = [ProtectedRecords("private", frozenset({"people here"}), lambda run: run == history.run_id)]
    with pytest.raises(RecipeError, match="or on some of them"):
        open_scales(settings, "", TRAINED, known)


def test_a_run_without_private_phases_released_nothing_in_this_sense(tmp_path: Path) -> None:
    engine = trained(alone(), steps=2)
    Checkpoints(tmp_path / "checkpoints", alone(), Keep(2)).save(Position(0, 2), engine, 0, HEADER)
    journal = Journal(Ledger.open(tmp_path / "ledger.jsonl"))
    journal.start_run("public", "check", False, {}, "hmac-sha256", "signer")
    journal.declare_nonprivate(0, "warm", True, "textures")
    journal.ledger.close()
    with pytest.raises(RecipeError, match="made no promise"):
        open_scales(Settings(source="released", path=str(tmp_path)), "", TRAINED, HERE)


# The ledger.


def test_a_step_scaled_by_released_moments_needs_the_run_that_released_them(tmp_path: Path) -> None:
    plan = replace(plan_for(), scaling=ScaledSpace("t" * 64, -2, 2))
    told = facts_of(plan)
    told = replace(
        told, clipping=replace(told.clipping, scales="t" * 64), noise=replace(told.noise, scales="t" * 64)
    )  # fmt: skip
    journal = Journal(Ledger.open(tmp_path / "ledger.jsonl"))
    journal.start_run("r", "check", False, {}, "hmac-sha256", "signer")
    journal.declare_plan(0, "private", plan, describe("pld"))
    journal.declare_public(0, "released", "t" * 64)
    journal.begin_segment(0, "config", "people", 0, "first")
    journal.declare_origin(Origin("start", "b" * 64, 2.0, 1e-5, ("others",)))  # of the weights, not of the scales
    with pytest.raises(LedgerError, match="or released by a run that it names"):
        journal.open_step(0, 1, told)
    journal.declare_origin(Origin("earlier", "e" * 64, 2.0, 1e-5, ("others",), used="scales"))
    journal.open_step(0, 1, told)
    (line,) = journal.history.public_uses
    assert "released, with noise" in line.deviation("private") and "word" not in line.deviation("private")
    journal.ledger.close()
    again, _ = History.read(tmp_path / "ledger.jsonl")
    assert again.origins == journal.history.origins and again.protected() == {"people", "others"}
    assert json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[-2])["used"] == "scales"
