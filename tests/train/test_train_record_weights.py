"""A record's weight multiplies its loss before its gradient is clipped, so that it moves nobody's bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from murmuration.data.batch.reader import WEIGHT
from murmuration.model.build import build
from murmuration.model.inputs import RECORD_WEIGHT
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.data import ShardData
from murmuration.train.config.phase import Mixing
from murmuration.train.config.root import Config
from murmuration.train.engines.forward import PlainForward
from murmuration.train.recipe.ready_phase import RecipeError, prepare
from murmuration.train.run.public_mixing import mixed_spec
from tests.support import brute_force
from tests.support.config_base import put
from tests.support.drops_world import ready
from tests.support.parity_engines import contribution, only, prepared, summed
from tests.support.train_helpers import SHAPE, nano_inputs

WEIGHTS = [1.0, 0.0, 0.03, 2.5, 1e6, 1e-6]


def records(objective: Literal["mae", "caption"]) -> tuple[Any, dict[str, torch.Tensor], list[brute_force.Record]]:
    """A model, weighted inputs, and each record's own gradient times its weight, found without the engine's way."""
    model, inputs = build(SHAPE, objective), nano_inputs(objective, len(WEIGHTS))
    found = [
        replace(one, loss=one.loss * weight, gradient={name: g * weight for name, g in one.gradient.items()})
        for one, weight in zip(brute_force.records_of(model, inputs), WEIGHTS, strict=True)
    ]
    return model, inputs | {RECORD_WEIGHT: torch.tensor(WEIGHTS)}, found


@pytest.mark.parametrize("engine", ["book-keeping", "reference"])
@pytest.mark.parametrize("objective", ["mae", "caption"])
def test_sums_are_of_weighted_gradients_that_are_clipped_afterwards(
    objective: Literal["mae", "caption"], engine: str
) -> None:
    model, inputs, own = records(objective)
    bound = own[0].norm()
    clip, everyone = prepared(engine, ClipRule("flat", bound, 0.0), model), torch.ones(len(WEIGHTS), dtype=torch.bool)
    totals, (seen,) = summed(clip, model, [(inputs, everyone)])
    factors = brute_force.factors_of(own, everyone, brute_force.flat(bound))
    assert brute_force.relative_error(totals, brute_force.clipped_sum(own, factors)) <= 1e-5
    assert seen.losses.tolist() == pytest.approx([record.loss for record in own], rel=1e-5)
    added = [contribution(clip, model, inputs, row) / bound for row in range(len(WEIGHTS))]
    assert max(added) <= 1 + 1e-5 and added[1] == 0.0
    assert added[3] == pytest.approx(1, abs=1e-4) and added[4] == pytest.approx(1, abs=1e-4), "weight buys no more"


def test_without_privacy_losses_are_added_up_by_weight() -> None:
    model, inputs, own = records("mae")
    here = torch.tensor([True, True, True, True, False, True])
    loss = PlainForward(model)(inputs, here).detach()
    expected = sum(record.loss for record, there in zip(own, here.tolist(), strict=True) if there)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    plain = PlainForward(model)(only(inputs, slice(None)) | {RECORD_WEIGHT: torch.ones(len(WEIGHTS))}, here).detach()
    assert float(plain) != pytest.approx(expected, rel=0.1)


def test_training_reads_them_and_measurements_do_not(loaded: Callable[..., Config]) -> None:
    known = ready()
    settings = loaded(put("phases.0.data.weight", "score")).phases[0]
    phase = replace(known, settings=settings)
    assert phase.data_spec(augment=True).weight == "score" and phase.data_spec(augment=False).weight is None
    assert known.data_spec(augment=True).weight is None and WEIGHT == RECORD_WEIGHT


def test_data_to_mix_in_have_a_field_of_their_own() -> None:
    phase = ready()
    data = {"path": "x", "public": True}
    for own in ("phase", None):
        for mixed in ("mixed", None):
            mixing = Mixing.model_validate({"data": {**data, "weight": mixed}, "batch": 4})
            weighted = ShardData.model_validate({**data, "weight": own})
            settings = phase.settings.model_copy(update={"mixing": mixing, "data": weighted})
            known = replace(phase, settings=settings)
            assert known.data_spec(augment=True).weight == own and mixed_spec(known).weight == mixed
    made = Mixing.model_validate({"data": {"source": "synthetic", "kind": "shapes", "records": 64}, "batch": 8})
    settings = phase.settings.model_copy(update={"mixing": made, "data": weighted.model_copy(update={"weight": "own"})})
    assert mixed_spec(replace(phase, settings=settings)).weight is None


def test_single_images_have_none(loaded: Callable[..., Config], single_images: Path) -> None:
    change = [put("phases.0.data.path", str(single_images)), put("phases.0.batch", 2)]
    with pytest.raises(RecipeError, match=r"phases.0.data.weight is a number in a record's .json"):
        prepare(loaded(*change, put("phases.0.data.weight", "score")))
