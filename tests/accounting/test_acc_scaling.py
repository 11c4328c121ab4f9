"""Scales of gradients in the books: how moments become powers of two, and what plan, ledger and verify hold them to."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.facts import StepFacts
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.plan import PrivacyPlan, ScaledSpace
from murmuration.accounting.scale_table import Moments, ScaleError, ScaleTable, nearest_exponent, scales_name, scales_of
from tests.support import acc_world
from tests.support.acc_world import CONFIG, DATA, SIGNER, certified, reopen, rewritten

TABLE = ScaleTable({"a": ((1, -2), (0, 3, 0)), "b": ((-5, 0), (0,))})
OTHER = ScaleTable({"a": ((1, -2), (0, 3, 1)), "b": ((-5, 0), (0,))})
PLAN = replace(acc_world.PLAN, scaling=ScaledSpace(TABLE.digest, *TABLE.span))


def facts(step: int, clipped: str | None = TABLE.digest, noised: str | None = TABLE.digest) -> StepFacts:
    honest = acc_world.facts(step, PLAN)
    return replace(
        honest, clipping=replace(honest.clipping, scales=clipped), noise=replace(honest.noise, scales=noised)
    )


def begun(folder: Path, declared: str | None = TABLE.digest) -> Journal:
    journal = reopen(folder)
    journal.start_run("tiny", "check", False, {"dp-accounting": "0.6.0"}, "hmac-sha256", SIGNER)
    journal.declare_plan(0, "private", PLAN, describe("pld"))
    if declared is not None:
        journal.declare_public(0, "scaling", declared)
    journal.begin_segment(0, CONFIG, DATA, 0, "first")
    return journal


def scaled_run(folder: Path) -> Path:
    journal = begun(folder)
    for step in (1, 2):
        journal.open_step(0, step, facts(step))
        journal.commit_step(0, step, facts(step))
    journal.finish()
    (folder / scales_name(0)).write_text(TABLE.text())
    certified(journal)
    return folder


def test_the_nearest_power_of_two_is_that_of_a_logarithm() -> None:
    squares = np.exp(np.random.default_rng(1).uniform(-30, 30, 2000))
    for square in squares:
        wanted = -0.5 * math.log2(square)
        assert abs(nearest_exponent(float(square)) - wanted) <= 0.5 + 1e-9
    assert [nearest_exponent(square) for square in (1.0, 4.0, 0.25, 2.0**-40)] == [0, -1, 1, 20]


def test_scaled_gradients_of_the_usual_shape_are_even_and_keep_their_length() -> None:
    """Second moments that are a product of rows and columns, over six orders of magnitude."""
    draw = np.random.default_rng(2)
    second = {
        name: np.outer(np.exp(draw.uniform(-4, 4, rows)), np.exp(draw.uniform(-4, 4, columns))) * 10.0**level
        for name, rows, columns, level in (("a", 40, 30, -4), ("b", 20, 1, 0), ("c", 1, 50, -2))
    }
    moments = {n: Moments(v.mean(1).tolist(), v.mean(0).tolist(), float(v.mean())) for n, v in second.items()}
    table = scales_of(moments, 1e-9)
    before = after = count = 0.0
    for name, v in second.items():
        rows, columns = (2.0 ** np.array(each) for each in table.weights[name])
        scaled = v * np.outer(rows, columns) ** 2
        before, after, count = before + v.sum(), after + scaled.sum(), count + v.size
        assert np.log2(scaled).max() - np.log2(scaled).min() <= 4.1  # from 2^-2 to 2^2 by rounding rows and columns
    assert 0.5 < after / before < 2.0


def test_a_floor_bounds_the_scales_and_a_weight_without_gradients_gets_no_more() -> None:
    moments = {"a": Moments([1.0, 0.0], [1.0, 0.0], 0.5), "dead": Moments([0.0], [0.0, 0.0], 0.0)}
    for floor in (1e-2, 1e-4, 1e-10):
        table = scales_of(moments, floor)
        (level,), columns = table.weights["dead"]
        assert level == nearest_exponent(floor) and columns == (0, 0)
        assert table.span[1] <= 3 * nearest_exponent(floor)
    with pytest.raises(ScaleError, match="are 0"):
        scales_of({"dead": moments["dead"]}, 1e-4)
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(ScaleError, match="finite"):
            Moments([wrong], [1.0], 1.0)


def test_a_table_survives_its_file_and_other_numbers_are_refused() -> None:
    assert ScaleTable.read(TABLE.text().encode()).digest == TABLE.digest != OTHER.digest
    shuffled = ScaleTable(dict(reversed(TABLE.weights.items())))
    assert shuffled.digest == TABLE.digest and TABLE.span == (-5, 4)
    for text in ("{}", "[]", TABLE.text().replace("scales/1", "scales/2"), TABLE.text().replace("-5", "-500"),
                 TABLE.text().replace("-5", "0.5"), TABLE.text().replace("-5", "true"), "nonsense"):  # fmt: skip
        with pytest.raises(ScaleError):
            ScaleTable.read(text.encode())
    with pytest.raises(ScaleError, match="no weight"):
        ScaleTable({})


def test_plans_survive_json_and_plans_without_scales_are_as_before() -> None:
    told = json.loads(json.dumps(PLAN.as_dict()))
    assert PrivacyPlan(**told) == PLAN and "scaling" not in acc_world.PLAN.as_dict()
    plain = acc_world.facts(1).as_dict()
    assert "scales" not in plain["clipping"] and "scales" not in plain["noise"]
    assert ScaledSpace("x", -3, 5).noise_on_weights(2.0) == (2.0 / 32, 2.0 * 8)


@pytest.mark.parametrize(
    ("clipped", "noised"),
    [(OTHER.digest, OTHER.digest), (OTHER.digest, TABLE.digest), (TABLE.digest, OTHER.digest),
     (None, TABLE.digest), (TABLE.digest, None), (None, None)],
    ids=["others", "clipped by others", "mapped back by others", "clipped as they are", "not mapped back", "none"],
)  # fmt: skip
def test_a_step_in_another_space_than_the_plans_is_never_opened(
    tmp_path: Path, clipped: str | None, noised: str | None
) -> None:
    journal = begun(tmp_path)
    with pytest.raises(LedgerError, match="other scales than its plan"):
        journal.open_step(0, 1, facts(1, clipped, noised))
    journal.open_step(0, 1, facts(1))
    with pytest.raises(LedgerError, match="had announced"):
        journal.commit_step(0, 1, facts(1, clipped, noised))
    assert journal.history.faults and "other numbers than was announced" in str(journal.history.why_not_private())


def test_scales_that_nobody_declared_public_open_no_step(tmp_path: Path) -> None:
    journal = begun(tmp_path, declared=None)
    with pytest.raises(LedgerError, match="nobody declared public"):
        journal.open_step(0, 1, facts(1))
    journal.declare_public(0, "scaling", OTHER.digest)
    with pytest.raises(LedgerError, match="nobody declared public"):
        journal.open_step(0, 1, facts(1))


def test_a_plan_without_scales_takes_no_step_with_them(tmp_path: Path) -> None:
    journal = acc_world.begin(tmp_path)
    with pytest.raises(LedgerError, match="other scales than its plan"):
        journal.open_step(0, 1, facts(1))


def test_verify_recomputes_it_and_the_certificate_says_where_noise_and_sensitivity_are_meant(tmp_path: Path) -> None:
    verdict = verify(scaled_run(tmp_path))
    assert verdict.objection is None and verdict.attached is not None
    assert any(scales_name(0) in text for text in verdict.attached.checked)
    told = json.loads((tmp_path / "certificate.json").read_text())
    assert "scaled gradients" in told["mechanism"]
    assert told["phases"][0]["scaled_space"] == {
        "sensitivity": 1.0, "noise": 20.0, "noise_on_weights": {"lowest": 20 / 2**4, "highest": 20 * 2.0**5},
    }  # fmt: skip
    assert any("public by the word" in text and TABLE.digest[:16] in text for text in told["known_deviations"])
    plain = acc_world.whole_run(Path(tmp_path / "plain"), 2)
    assert plain.history.epsilon() == verdict.epsilon, "epsilon does not depend on the space"


def _other_plan(fields: dict[str, Any]) -> None:
    if fields["kind"] == "plan":
        fields["plan"]["scaling"]["scales"] = OTHER.digest


def _other_steps(fields: dict[str, Any]) -> None:
    if fields["kind"] in ("open", "commit"):
        for part in ("clipping", "noise"):
            fields["facts"][part]["scales"] = OTHER.digest


def _other_everywhere(fields: dict[str, Any]) -> None:
    _other_plan(fields)
    _other_steps(fields)
    if fields["kind"] == "public":
        fields["digest"] = OTHER.digest


@pytest.mark.parametrize(
    ("forged", "error", "said"),
    [
        (_other_plan, LedgerError, "other scales than its plan"),
        (_other_steps, LedgerError, "other scales than its plan"),
        (_other_everywhere, CertificateError, "other scales than those of the plan"),
    ],
)
def test_a_ledger_with_other_scales_is_refused_however_consistent_it_is(
    tmp_path: Path, forged: Any, error: type[Exception], said: str
) -> None:
    scaled_run(tmp_path)
    rewritten(tmp_path, forged)
    with pytest.raises(error, match=said):
        verify(tmp_path)
    if forged is _other_everywhere:  # without the table it is another run, with another certificate
        (tmp_path / scales_name(0)).unlink()
        assert History.read(tmp_path / "ledger.jsonl")[0].plans[0].scaling != PLAN.scaling
        with pytest.raises(CertificateError):
            verify(tmp_path)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    path = scaled_run(tmp_path) / scales_name(0)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CertificateError, match="damaged"):
        verify(tmp_path)


def test_the_span_is_that_of_all_elements_and_of_weights_that_keep_their_gradient() -> None:
    assert ScaleTable({"a": ((-3, 2), (1, 5)), "b": ((0,), (-1, 1))}).span == (-2, 7)
    assert ScaleTable({"a": ((2, 3), (1,))}).span == (0, 4) and ScaleTable({"a": ((-2,), (-1, 0))}).span == (-3, 0)
