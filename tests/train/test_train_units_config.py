"""`data.unit`: what a config may ask for, what the plan makes of it, and that nothing changes where none is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.unit import Unit
from murmuration.train.config.root import Config
from murmuration.train.recipe.ready_phase import make_plan, unit_of
from tests.support.config_base import drop, put, refusal

Make = Callable[..., Config]
DATA = "phases.1.data"
UNIT = (drop(f"{DATA}.expected_records"), put(f"{DATA}.unit", "patient_id"))
CLASSIFY = (
    put("phases.1.objective", "classify"), put(f"{DATA}.label", "cls"), put("model.family", "classifier"),
    drop(f"{DATA}.tokenizer"), drop("phases.1.evaluation"),
)  # fmt: skip
ACCURACY = {"name": "accuracy", "noise_multiplier": 6.0, "share": 0.1}


def test_the_plan_names_the_unit_and_n_is_what_it_is_given(loaded: Make) -> None:
    config = loaded(*UNIT, put(f"{DATA}.rows_per_unit", 3), put(f"{DATA}.unit_reduce", "sum"))
    phase = config.phases[1]
    assert phase.privacy is not None and unit_of(phase) == Unit("patient_id", 3, "sum") and phase.rows_of_a_slot == 3
    plan = make_plan(phase, phase.privacy, 100, "phases.1", table="digest")
    assert plan.units == Unit("patient_id", 3, "sum", "digest") and "'patient_id'" in plan.unit
    assert (plan.records, plan.delta, plan.divisor) == (100, 1 / 200, pytest.approx(20))
    assert PrivacyPlan(**plan.as_dict()) == plan  # pyright: ignore[reportArgumentType]
    twin = loaded(*UNIT, put(f"{DATA}.rows_per_unit", 3), put("phases.1.privacy", None), put("phases.1.batch", 4))
    assert twin.phases[1].rows_of_a_slot == 3


def test_a_config_without_units_keeps_its_digest_and_each_setting_changes_it(loaded: Make) -> None:
    contents = {"data": "0" * 64}
    plain = loaded().digest(1, contents)
    # As the version before there were units computed it.
    assert plain == loaded(put(f"{DATA}.unit", None), put(f"{DATA}.rows_per_unit", None)).digest(1, contents)
    seen = {plain}
    for changes in ((), (put(f"{DATA}.unit", "person"),), (put(f"{DATA}.rows_per_unit", 2),),
                    (put(f"{DATA}.unit_reduce", "sum"),)):  # fmt: skip
        seen.add(loaded(*UNIT, *changes).digest(1, contents))
    assert len(seen) == 5
    counted = loaded(*UNIT, put(f"{DATA}.expected_units", 90)).digest(1, contents)
    assert counted in seen, "what stands in for n shapes no release"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([put(f"{DATA}.rows_per_unit", 2)], "rows_per_unit needs `unit`"),
        ([put(f"{DATA}.unit_reduce", "mean")], "unit_reduce needs `unit`"),
        ([put(f"{DATA}.expected_units", 2)], "expected_units needs `unit`"),
        ([put(f"{DATA}.unit", "patient_id")], "as expected_units, not expected_records"),
        ([*UNIT, put(f"{DATA}.unit", "key:")], "is no name"),
        ([*UNIT, put(f"{DATA}.rows_per_unit", 0)], "greater than 0"),
        ([put("phases.0.data.unit", "patient_id")], "public records need none"),
        ([*UNIT, *CLASSIFY, put("phases.1.trainable", "head"), put("phases.1.features", {})], "of single records"),
        ([*UNIT, *CLASSIFY, put("phases.1.privacy.release", [ACCURACY])], "holds out single records"),
        ([put("phases.1.mixing", {"data": {"path": "x", "public": True, "public_fraction": 0.1, "unit": "person",
                                           "rows_per_unit": 2}, "batch": 2})], "single records are mixed in"),
    ],
)  # fmt: skip
def test_what_would_mean_nothing_or_something_else_is_refused(loaded: Make, changes: list[Any], message: str) -> None:
    assert message in refusal(loaded, *changes)
