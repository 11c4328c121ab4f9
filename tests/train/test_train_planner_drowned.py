"""Plans by which nothing can be learned are told, with a plan that is useful when it is calibrated."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.plan import PrivacyPlan, threshold_for
from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.config.load import load
from murmuration.train.planner.drowned import DROWNED, USEFUL, drowned, noise_over_signal
from tests.support.planner_world import ask, config
from tests.support.shipped_recipes import PLANS


def plan(records: int, batch: float, steps: int, epsilon: float) -> PrivacyPlan:
    threshold, delta = threshold_for(records, batch), 1 / (2 * records)
    sigma = calibrate_sigma(threshold / 2**32, steps, epsilon, delta)
    return PrivacyPlan(
        records=records, threshold=threshold, clip_norm=1.0, noise_multiplier=sigma, steps=steps, delta=delta,
        epsilon_budget=epsilon,
    )  # fmt: skip


def test_the_ratio_is_how_far_noise_moves_weights_over_how_far_agreeing_gradients_do() -> None:
    settings, weights = replace(plan(1000, 50, 40, 1.0), clip_norm=0.3), 4000
    torch.manual_seed(1)
    divisor, std = settings.divisor, settings.noise_std
    noise = sum((torch.randn(weights) * std / divisor for _ in range(settings.steps)), torch.zeros(weights)).norm()
    gradients = settings.steps * divisor * settings.clip_norm / divisor
    assert float(noise) / gradients == pytest.approx(noise_over_signal(settings, weights), rel=0.05)


def test_the_named_epsilon_is_useful_and_a_smaller_one_is_not() -> None:
    weights = 1_000_000
    said = drowned(plan(20_000, 1000, 50, 0.002), weights, calibrated=True)
    assert said is not None and "nothing can be learned" in said and "expected_batch" not in said
    named = float(re.findall(r"privacy.epsilon = (\S+)", said)[0])
    assert noise_over_signal(plan(20_000, 1000, 50, named), weights) <= USEFUL
    assert noise_over_signal(plan(20_000, 1000, 50, 0.8 * named), weights) > USEFUL


def test_the_named_batch_is_useful_at_the_same_epsilon() -> None:
    weights = 10**8
    said = drowned(plan(1_000_000, 20, 100, 8.0), weights, calibrated=True)
    assert said is not None
    batch = int(re.findall(r"privacy.expected_batch = (\d+)", said)[0])
    assert noise_over_signal(plan(1_000_000, batch, 100, 8.0), weights) <= USEFUL
    assert noise_over_signal(plan(1_000_000, batch / 4, 100, 8.0), weights) > USEFUL


def test_given_noise_is_answered_with_noise_that_fits_the_budget() -> None:
    given = replace(plan(20_000, 1000, 50, 8.0), noise_multiplier=2503.0)
    said = drowned(given, 1_377_088, calibrated=False)
    assert said is not None and said.startswith("σ = 2,503: nothing can be learned")
    sigma, spent = re.findall(r"privacy.noise_multiplier = (\S+), which spends ε = (\S+)$", said)[0]
    useful = replace(given, noise_multiplier=float(sigma))
    assert noise_over_signal(useful, 1_377_088) <= USEFUL and float(spent) <= 8.0


def test_where_nothing_helps_it_says_so() -> None:
    said = drowned(plan(100, 10, 5, 0.1), 10**9, calibrated=True)
    assert said is not None and "nearest useful plan: none" in said and 'trainable = "head"' in said


def test_no_published_recipe_is_called_useless() -> None:
    for records, batch, steps, budget, sigma in PLANS.values():
        published = PrivacyPlan(
            records=records, threshold=threshold_for(records, batch), clip_norm=1.0, noise_multiplier=sigma,
            steps=steps, delta=1 / (2 * records), epsilon_budget=budget,
        )  # fmt: skip
        assert noise_over_signal(published, 2 * 10**9) < DROWNED, "even with two billion weights"


def test_a_dry_run_and_the_planner_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path)
    raw = json.loads(path.read_text())
    raw["phases"][0]["privacy"] |= {"noise_multiplier": 1e8}
    path.write_text(json.dumps(raw))
    warned = "  warning       σ = 1e+08: nothing can be learned"
    assert warned in as_text(meaning(load(path, [])))
    assert ask(path) == 0 and warned in capsys.readouterr().out
