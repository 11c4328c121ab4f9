"""Plans that promise nothing are refused; keys are independent, private, and never reused."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from murmuration.accounting.adaptive import AdaptiveRule
from murmuration.accounting.errors import PlanError
from murmuration.accounting.keys import KeyFileError, Purpose, RunKey, destroy, load, store
from murmuration.accounting.metrics import ClippedShare, HeldOutAccuracy, LossProbe, PlannedMetric
from murmuration.accounting.plan import PrivacyPlan, parse_delta
from murmuration.accounting.sampling import RATE_DENOMINATOR, Poisson, threshold_for
from tests.support.acc_world import PLAN


def test_plan_is_frozen_and_consistent() -> None:
    plan = replace(PLAN, sampling=Poisson(2**31))
    assert (plan.sampling_rate, plan.divisor, plan.noise_std, plan.added_noise) == (0.5, 50.0, 20.0, 20.0)
    assert PLAN.sampling_rate == 1.0 and not PLAN.mechanisms and replace(PLAN, views=2).mechanisms == {"views"}
    with pytest.raises(AttributeError):
        plan.steps = 9  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("records", [1, 7, 20_000, 2_100_000_000])
def test_threshold_is_the_nearest(records: int) -> None:
    for batch in {1, (records + 1) // 2, records}:
        threshold = threshold_for(records, batch)
        assert 1 <= threshold <= RATE_DENOMINATOR
        assert abs(threshold / RATE_DENOMINATOR - batch / records) <= 0.5 / RATE_DENOMINATOR


def test_delta_words() -> None:
    assert parse_delta(None, 100) == parse_delta("1/(2n)", 100) == parse_delta(" 1 / 2N", 100) == 0.005
    assert parse_delta("1/n", 100) == 0.01 and parse_delta("1e-6", 100) == 1e-6 and parse_delta(1e-7, 100) == 1e-7


def test_every_purpose_phase_and_segment_has_its_own_key() -> None:
    key, other = RunKey.fresh(), RunKey.fresh()
    places = list(itertools.product(get_args(Purpose), range(3), ["0:a", "1:a", "0:b", "public"]))
    found = {one.derive(*place) for place in places for one in (key, other)}
    assert len(found) == 2 * len(places)
    assert all(len(k) == 32 for k in found)
    assert key.derive("noise", 0, "0:a") == RunKey(key.secret).derive("noise", 0, "0:a")
    with pytest.raises(KeyFileError, match="purpose"):
        key.derive("gossip", 0, "0:a")  # pyright: ignore[reportArgumentType]


def test_a_key_shows_nothing_of_itself() -> None:
    key = RunKey.fresh()
    assert key.secret.hex() not in repr(key) and repr(key.secret) not in repr(key)
    assert key.check_value() != RunKey.fresh().check_value() and key.secret.hex() not in key.check_value()
    assert RunKey.from_debug_seed(1).debug and not key.debug


def test_key_file(tmp_path: Path) -> None:
    path = tmp_path / "secret" / "run.key"
    old = os.umask(0)
    try:
        key = RunKey.fresh()
        store(key, path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert load(path) == key
    with pytest.raises(FileExistsError):
        store(RunKey.fresh(), path)
    for mode in (0o640, 0o604, 0o660, 0o601):
        path.chmod(mode)
        with pytest.raises(KeyFileError, match="can be read by others"):
            load(path)
    path.chmod(0o600)
    inode = os.open(path, os.O_RDONLY)
    assert destroy(path) and not path.exists() and not destroy(path)
    assert os.read(inode, 100) != key.secret, "overwritten before it was removed"
    os.close(inode)
    with pytest.raises(KeyFileError, match="missing"):
        load(path)


def test_debug_keys_stay_marked_on_disk(tmp_path: Path) -> None:
    store(RunKey.from_debug_seed(3), tmp_path / "a")
    assert load(tmp_path / "a").debug


def test_planned_metrics_belong_to_the_plan_and_weaken_its_noise() -> None:
    plan = replace(PLAN, metrics=(PlannedMetric("loss", 2.0, 80.0),))
    assert PrivacyPlan(**json.loads(json.dumps(plan.as_dict()))) == plan != PLAN
    assert "metrics" not in PLAN.as_dict() and PLAN.effective_noise_multiplier == 20.0
    assert plan.effective_noise_multiplier == pytest.approx((1 / 400 + 1 / 1600) ** -0.5)


@pytest.mark.parametrize(
    ("metric", "signed", "apart", "offset", "about"),
    [
        (PlannedMetric("loss", 2.0, 80.0), False, False, 0.0, 75.0),
        (LossProbe("loss_slope", 2.0, 80.0), True, True, 0.0, 75.0),
        (HeldOutAccuracy.of(80.0, 0.25), False, True, 0.0, 25.0),
        (ClippedShare.of(80.0, AdaptiveRule(0.5, 0.1, 0.1, 10.0)), True, False, 0.5, 75.0),
    ],
)  # fmt: skip
def test_what_a_record_adds_to_a_metric_and_how_many_it_is_about(
    metric: PlannedMetric, signed: bool, apart: bool, offset: float, about: float
) -> None:
    """Of 100 records in an expected batch a quarter is held out."""
    assert (metric.signed, metric.apart, metric.offset) == (signed, apart, offset)
    assert metric.expected(100.0, 0.25) == about
    for std in (0.0, -80.0, math.inf, math.nan):
        with pytest.raises(PlanError, match="needs a finite positive bound and noise"):
            replace(metric, std=std)
