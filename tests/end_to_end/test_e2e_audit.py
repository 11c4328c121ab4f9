"""The audit has power and raises no false alarm: in process, through DeepSpeed (slow), and for faults of their own."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import murmuration.train.step
from murmuration.accounting.epsilon.audit_evidence import ACCUSED
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.facts import StepFacts
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.train.audit.canaries import CANARY, CanaryBatches, toss
from murmuration.train.audit.checks import check_sampling
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.commands import audit as audit_app
from murmuration.train.noise.update import NoisyUpdate
from tests.end_to_end.audit_toy import (
    CANARIES,
    CLAIM,
    DELTA,
    HONEST,
    WIDTH,
    Faults,
    ToyReader,
    canary_clip,
    toy_audit,
    toy_divisor,
    toy_plan,
)
from tests.support import forking
from tests.support.launching import ROOT, TIMEOUT, environment
from tests.support.train_helpers import Toy, alone

RATE, RECORDS, DRAWS = 0.25, 400, 40


# At this confidence, an honest run's bound exceeds its claim once in a million runs.
SURE = 1 - 1e-6
WEAK = Faults(scale=0.3)


@pytest.mark.parametrize(("world", "replicated"), [(1, False), (2, False), (2, True)])
def test_honest_noise_stays_below_its_claim_and_a_third_of_it_does_not(
    tmp_path: Path, world: int, replicated: bool
) -> None:
    honest, claim = toy_audit(tmp_path / "honest", HONEST, world, replicated)
    weak, same = toy_audit(tmp_path / "weak", WEAK, world, replicated)
    assert claim.epsilon == same.epsilon and CLAIM - 1e-3 < claim.epsilon <= CLAIM, "the ledger does not see the fault"
    assert weak.evidence.p_value(claim) < ACCUSED <= honest.evidence.p_value(claim)
    low, high = (each.evidence.bound(claim, SURE) for each in (honest, weak))
    print(f"claim {claim.epsilon:.3f}; lower bound, honest {low.epsilon:.3f}, with 0.3·σ {high.epsilon:.3f}")
    assert low.epsilon <= claim.epsilon < high.epsilon


BANDS, MANY, SMALL = 3, 16, 0.5


def test_correlated_noise_stays_below_its_claim_and_weaker_draws_do_not(tmp_path: Path) -> None:
    """Canaries of all parts, each of which takes part in one step of every block."""
    honest, claim = toy_audit(tmp_path / "honest", bands=BANDS)
    weak, _ = toy_audit(tmp_path / "weak", WEAK, bands=BANDS)
    (event,) = claim.events
    assert (event.rate, event.count) == (1.0, 4) and CLAIM - 1e-3 < claim.epsilon <= CLAIM
    assert weak.evidence.p_value(claim) < ACCUSED <= honest.evidence.p_value(claim)
    low, high = (each.evidence.bound(claim, SURE) for each in (honest, weak))
    assert low.epsilon <= claim.epsilon < high.epsilon
    pairs = honest.evidence.pairs
    assert pairs is not None and pairs.there + pairs.absent == 4 * CANARIES
    assert honest.evidence.bound(claim).epsilon > 0.3 * claim.epsilon, "turns are seen as what they are"


def test_a_part_that_is_charged_at_the_rate_of_all_records_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that amplifies by q, where each turn draws at b·q, and a noise that is calibrated to that."""
    real = StepFacts.event

    def diluted(self: StepFacts) -> Event:
        return replace(real(self), rate=real(self).rate / self.sampling.rule.parts)

    monkeypatch.setattr(StepFacts, "event", diluted)
    sigma = calibrate_sigma(Event(1 / MANY, 1.0, 4), SMALL, DELTA)
    found, claim = toy_audit(tmp_path, bands=MANY, claim=SMALL, sigma=sigma, canaries=2500)
    (event,) = claim.events
    assert event == Event(1 / MANY, sigma, 4) and claim.epsilon <= SMALL, "the ledger does not see the fault"
    assert found.evidence.p_value(claim) < ACCUSED and found.evidence.bound(claim, SURE).epsilon > claim.epsilon


SLOTS = 2


@pytest.mark.slow
def test_random_allocation_stays_below_its_claim_and_weaker_noise_or_a_second_place_do_not(tmp_path: Path) -> None:
    """A record that takes part in two steps of each epoch, where it is charged for one, moves the sum of all steps of
    an epoch twice."""
    honest, claim = toy_audit(tmp_path / "honest", slots=SLOTS)
    (event,) = claim.events
    assert (event.slots, event.count) == (SLOTS, 4) and CLAIM - 1e-3 < claim.epsilon <= CLAIM
    assert honest.evidence.p_value(claim) >= ACCUSED and honest.noise is not None and honest.noise.passed
    assert honest.evidence.bound(claim, SURE).epsilon <= claim.epsilon
    pairs = honest.evidence.pairs
    assert pairs is not None and (pairs.terms, pairs.there + pairs.absent) == (SLOTS, 4 * CANARIES)
    for name, fault in (("weak", WEAK), ("twice", Faults(twice=True))):
        found, same = toy_audit(tmp_path / name, fault, slots=SLOTS)
        assert same.events == claim.events, "the ledger does not see the fault"
        assert found.evidence.p_value(claim) < ACCUSED
        assert found.evidence.bound(claim, SURE).epsilon > claim.epsilon


def test_honest_epochs_have_the_ratio_that_is_claimed_and_doubled_ones_twice_that(tmp_path: Path) -> None:
    """The pairs' confidence limits hold the planned ratio of contribution to noise, at whatever number of steps."""
    for slots in (2, 3):
        made: dict[str, Any] = dict(slots=slots, claim=9.0, sigma=2.0, canaries=1500)
        honest, claim = toy_audit(tmp_path / f"honest {slots}", **made)
        twice, _ = toy_audit(tmp_path / f"twice {slots}", Faults(twice=True), **made)
        low, high = (each.evidence.pairs for each in (honest, twice))
        assert low is not None and high is not None
        ratio = 1 / claim.sigma
        assert low.mu_bound(1e-6) <= ratio and low.p_value(0.0) < 0.01
        assert ratio < high.mu_bound(1e-6) <= 2 * ratio


SHARED: dict[str, dict[str, Any]] = {
    "independent noise": dict(rate=0.5, steps=2, again=2),
    "correlated noise": dict(rate=0.5, steps=2, again=2, bands=4),
    "random allocation": dict(slots=2, steps=2, again=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARED)
def test_a_second_segment_that_draws_the_noise_of_the_first_is_caught(tmp_path: Path, kind: str) -> None:
    """It begins within a block or an epoch. Where a canary was drawn in one of the two steps alone, their difference is
    its whole gradient, without noise."""
    honest, claim = toy_audit(tmp_path / "honest", claim=1.0, **SHARED[kind])
    shared, same = toy_audit(tmp_path / "shared", Faults(reused=True), claim=1.0, **SHARED[kind])
    assert claim.events == same.events and sum(event.count for event in claim.events) == 4
    assert honest.evidence.p_value(claim) >= ACCUSED and honest.noise is not None and honest.noise.passed
    assert honest.evidence.bound(claim, SURE).epsilon <= claim.epsilon
    assert shared.noise is not None and not shared.noise.passed, "the draws themselves"
    assert shared.evidence.p_value(claim) < ACCUSED, "the guesses"
    assert shared.evidence.bound(claim, SURE).epsilon > claim.epsilon


LOUD = 40.0  # a claim that leaves little noise, of which the canaries then measure each per cent


def test_a_tenth_less_noise_is_found_and_honest_noise_is_found_to_be_nearly_what_is_claimed(tmp_path: Path) -> None:
    """16,000 values along the canaries' directions; the pairs' power says how likely this test is to fail by chance."""
    honest, claim = toy_audit(tmp_path / "honest", claim=LOUD, steps=8)
    weak, _ = toy_audit(tmp_path / "weak", Faults(scale=0.9), claim=LOUD, steps=8)
    pairs = weak.evidence.pairs
    assert pairs is not None
    level = ACCUSED / weak.evidence.looks
    assert 1 - pairs.power(1 / claim.sigma, 0.99 / (0.9 * claim.sigma), level) < 1e-6
    assert weak.evidence.p_value(claim) < ACCUSED <= honest.evidence.p_value(claim)
    found = honest.evidence.bound(claim)
    assert found.best.method == "white-box Gaussian pairs" and found.best.assumes
    assert 0.8 * claim.epsilon < found.epsilon, "the goal of a tight audit"
    assert found.proven.epsilon < found.epsilon and not found.proven.assumes


def test_a_canary_adds_its_bound_at_its_coordinate_and_one_left_out_adds_exactly_nothing() -> None:
    plan = toy_plan(20, 1.0, 2, CLAIM)
    model = Toy(WIDTH)
    clip = canary_clip(plan, model, 10)
    clip.prepare(model)
    included = np.array([True, False] * 5)

    def gradient(ids: list[int], coins: np.ndarray) -> torch.Tensor:
        batches = CanaryBatches(ToyReader(), alone(), 20, 10, coins, None)  # pyright: ignore
        (batch,) = batches(np.array(ids), 1)
        found, _ = clipped_totals(clip, model, batch.inputs, batch.present)
        return torch.cat([found[name].flatten() for name in clip.coordinates.names])

    everybody, nobody = list(range(20)), np.zeros(10, bool)
    moved = gradient(everybody, included) - gradient(everybody, nobody)
    expected = torch.zeros_like(moved)
    expected[torch.from_numpy(clip.coordinates.flat[included])] = clip.rule.bound
    assert torch.allclose(moved, expected, atol=1e-6) and clip.rule.bound < clip.rule.sensitivity
    alone_there = [10 + int(i) for i in np.flatnonzero(included)]
    assert torch.equal(gradient(alone_there, included), expected)
    assert torch.equal(gradient(everybody, nobody), gradient([*range(19)], nobody)), "left out, it adds exactly zero"


def test_under_poisson_sampling_with_steps_of_noise_alone_the_honest_claim_stands(tmp_path: Path) -> None:
    """60 records at q = 0.01: most steps draw few, some nobody."""
    found, claim = toy_audit(tmp_path, rate=0.01, steps=12, canaries=20)
    assert found.evidence.p_value(claim) >= ACCUSED and claim.epsilon <= CLAIM
    assert found.evidence.bound(claim, SURE).epsilon <= claim.epsilon


def test_an_input_canary_takes_its_own_inputs_and_one_left_out_is_padding() -> None:
    coins = np.array([True, False, True])
    own = {"images": torch.full((3, 3, 4, 4), 7.0) + torch.arange(3).view(3, 1, 1, 1)}
    batches = CanaryBatches(ToyReader(), alone(), 4, 10, coins, own)  # pyright: ignore
    (batch,) = batches(np.array([9, 10, 11, 12]), 1)
    assert batch.present.tolist() == [True, True, False, True] and CANARY not in batch.inputs
    images = batch.inputs["images"]
    assert torch.equal(images[1], own["images"][0]) and torch.equal(images[3], own["images"][2])
    assert not images[2].any() and images[0].any()


def test_what_is_no_canary_passes_through_and_the_rule_reaches_the_engine() -> None:
    plan = toy_plan(20, 1.0, 2, CLAIM)
    model = Toy(WIDTH)
    clip = canary_clip(plan, model, 10)
    clip.prepare(model)
    batch = ToyReader().read(np.arange(6), 1)
    with_key = {**batch.inputs, CANARY: torch.full((6,), -1)}
    a, _ = clipped_totals(clip, model, batch.inputs, batch.present)
    b, _ = clipped_totals(clip, model, with_key, batch.present)
    c, _ = clipped_totals(clip.inner, model, batch.inputs, batch.present)
    assert all(torch.equal(a[k], c[k]) and torch.equal(b[k], c[k]) for k in c)
    assert clip.inner.rule == clip.rule


# Shuffled sampling that is claimed as Poisson, and its relatives.


def honest_draws(number: int) -> list[np.ndarray]:
    sampler = PoissonSampler(number.to_bytes(32, "big"), b"d" * 32, RECORDS, round(RATE * 2**32))
    return [sampler.draw(t).ids for t in range(1, DRAWS + 1)]


def shuffled_draws(draw: np.random.Generator) -> list[np.ndarray]:
    size = round(RATE * RECORDS)
    epochs = [np.split(draw.permutation(RECORDS), RECORDS // size) for _ in range(DRAWS * size // RECORDS)]
    return [np.sort(batch) for epoch in epochs for batch in epoch]


def test_our_sampler_passes_as_poisson_and_p_values_are_honest() -> None:
    found = [check_sampling(honest_draws(number), RECORDS, RATE) for number in range(200)]
    assert all(each.passed for each in found)
    for name in found[0].p_values:
        low = np.mean([each.p_values[name] < 0.1 for each in found])
        assert 0.03 < low < 0.19, (name, low)


def test_shuffled_epochs_are_told_from_poisson_by_every_sign_of_them() -> None:
    check = check_sampling(shuffled_draws(np.random.default_rng(0)), RECORDS, RATE)
    assert not check.passed
    assert max(check.p_values[name] for name in ("sizes", "participation", "overlap")) < 1e-6, check
    assert check.p_values["total"] > 0.5, "in total they look right"


@pytest.mark.parametrize("fault", ["fixed size", "the same batch again", "another rate", "random parts of an epoch"])
def test_other_samplers_under_a_poisson_claim_are_told_apart(fault: str) -> None:
    draw = np.random.default_rng(3)
    size = round(RATE * RECORDS)
    if fault == "fixed size":
        draws = [draw.choice(RECORDS, size, replace=False) for _ in range(DRAWS)]
    elif fault == "the same batch again":
        draws = [batch for batch in honest_draws(1)[: DRAWS // 2] for _ in range(2)]
    elif fault == "another rate":
        draws = [np.flatnonzero(draw.random(RECORDS) < 1.2 * RATE) for _ in range(DRAWS)]
    else:  # once per epoch, in a batch of chance: sizes vary as they should
        places = [draw.integers(0, 4, RECORDS) for _ in range(DRAWS // 4)]
        draws = [np.flatnonzero(place == part) for place in places for part in range(4)]
    assert not check_sampling(draws, RECORDS, RATE).passed


# A divisor that follows the realised batch.


@pytest.mark.parametrize("world", [1, 2])
def test_our_divisor_is_the_constant(tmp_path: Path, world: int) -> None:
    check = toy_divisor(tmp_path, world)
    assert check.passed and set(check.p_values) == {"scale", "follows the batch size"}


@pytest.mark.parametrize("fault", ["realised size", "constant, but another"])
def test_a_divisor_that_leaks_or_is_wrong_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    drawn: dict[int, int] = {}
    real_draw = PoissonSampler.draw

    def noted(self: PoissonSampler, step: int) -> Any:
        found = real_draw(self, step)
        drawn[step] = len(found.ids)
        return found

    class Leaky(NoisyUpdate):
        """Reports q·n to the ledger and divides by something else."""

        def finish(self, flat: Any, fragments: Any) -> None:
            super().finish(flat, fragments)
            other = drawn[self.step] if fault == "realised size" else 1.1 * self.mechanism.divisor
            for fragment in fragments:
                fragment.of(flat).mul_(self.mechanism.divisor / other)

    monkeypatch.setattr(PoissonSampler, "draw", noted)
    monkeypatch.setattr(murmuration.train.step, "NoisyUpdate", Leaky)
    check = toy_divisor(tmp_path, steps=16)  # of eight draws, the sizes sometimes hardly vary
    assert not check.passed
    assert (check.p_values["follows the batch size"] < 1e-6) == (fault == "realised size"), check


# The command.


def audit_command(config: Path, *arguments: str, ranks: int = 2) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, str(ROOT / "launch" / "audit.py"), "--config", str(config), "--json", *arguments]
    done = forking.run(
        command, ranks=ranks, cwd=config.parent, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"phase"')]
    assert lines, done.stdout + done.stderr
    return done.returncode, json.loads(lines[-1]), done.stdout + done.stderr


@pytest.fixture
def small_file(tmp_path: Path, small_config: dict[str, Any]) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(small_config | {"train_micro_batch_size_per_gpu": 48}))
    return path


def show(found: dict[str, Any]) -> None:
    print(
        f"\n{found['kind']} canaries, noise × {found['planted_noise_scale'] or 1}: claim ε ≤ "
        f"{found['claimed_epsilon']:.3f} at δ = {found['delta']:g}, lower bound ε ≥ {found['lower_bound']:.3f} "
        f"({found['confidence']:.0%}; {found['correct']} of {found['guesses']} right), "
        f"{found['lower_bound_if_assumed']:.3f} by {found['lower_bound_if_assumed_by']}"
    )


@pytest.mark.slow
def test_audit_through_deepspeed_does_not_refute_the_honest_run(small_file: Path) -> None:
    code, found, output = audit_command(small_file)
    show(found)
    assert code == 0, output
    assert found["ranks"] == 2 and found["engine"] == "DeepSpeed, ZeRO-1" and found["canaries"] == CANARIES
    assert found["lower_bound"] <= found["lower_bound_if_assumed"] and found["claimed_epsilon"] <= 2.0
    assert found["p_value_of_claim"] >= ACCUSED and found["refuted"] == []
    assert found["power_at_0.3_sigma"] > 0.999 > found["power_at_0.9_sigma"] and found["false_alarms"] == ACCUSED
    assert not (small_file.parent / "runs").exists(), "an audit leaves no run directory"


@pytest.mark.slow
def test_audit_through_deepspeed_refutes_noise_of_a_third(small_file: Path) -> None:
    code, found, output = audit_command(small_file, "--noise-scale", "0.3")
    show(found)
    assert code == 6, output
    assert found["lower_bound_if_assumed"] > found["claimed_epsilon"] > 1.99 and found["planted_noise_scale"] == 0.3
    assert found["assumed"].startswith("the noise is Gaussian")
    # Everything that the run says of itself is in order: only the auditor sees it.
    assert found["sigma"] == pytest.approx(found["measured_sigma_at_self_test"], rel=0.05)


MECHANISMS = {
    "allocation": ["--set", 'phases.0.privacy.sampling="allocation"', "--epsilon", "1"],
    "banded": ["--set", 'phases.0.privacy.noise={"kind":"banded","bands":3}'],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_audit_through_deepspeed_of_other_mechanisms_across_two_segments(small_file: Path, name: str) -> None:
    phase = next(i for i, p in enumerate(json.loads(small_file.read_text())["phases"]) if "privacy" in p)
    arguments = [each.replace("phases.0", f"phases.{phase}") for each in MECHANISMS[name]]
    arguments += ["--steps", "2", "--again", "1"]
    if name == "allocation":
        arguments += ["--set", f"phases.{phase}.privacy.expected_batch=100"]
    code, found, output = audit_command(small_file, *arguments)
    show(found)
    assert code == 0 and found["refuted"] == [], output
    assert found["noise_p_values"]["shared draws"] > ACCUSED and found["lower_bound"] <= found["claimed_epsilon"]
    assert found["claimed_epsilon"] > 0.99 and ("steps from epoch to epoch" in found["sampling_p_values"]) == (
        name == "allocation"
    )
    code, found, output = audit_command(small_file, *arguments, "--noise-scale", "0.3")
    show(found)
    assert code == 6 and found["lower_bound_if_assumed"] > found["claimed_epsilon"], output


@pytest.mark.slow
def test_an_audit_draws_the_noise_that_the_config_names(small_file: Path) -> None:
    exact = ("--set", 'run.noise="exact"')
    code, found, output = audit_command(small_file, *exact)
    show(found)
    assert code == 0 and found["refuted"] == [], output
    command = [sys.executable, str(ROOT / "launch" / "audit.py"), "--config", str(small_file), *exact]
    refused = forking.run(
        [*command, "--noise-scale", "0.3"], cwd=small_file.parent, env=environment(), capture_output=True, text=True
    )
    assert refused.returncode == 2 and "weakens AES noise only" in refused.stderr, refused.stderr


@pytest.mark.slow
def test_audit_with_input_canaries_runs_and_does_not_refute(small_file: Path) -> None:
    code, found, output = audit_command(small_file, "--kind", "input", "--canaries", "200", "--records", "64")
    show(found)
    assert code == 0 and found["kind"] == "input" and found["p_value_of_claim"] >= ACCUSED, output
    assert not any("pairs" in each["method"] for each in found["tried"])


def test_what_makes_no_audit_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = str(ROOT / "ds_configs" / "demo.json")
    for extra in (
        [demo, "--canaries", "1"],
        [demo, "--noise-scale", "0"],
        [demo, "--noise-scale", "0.3", "--kind", "input"],
        [demo, "--again", "5"],
        [demo, "--again", "-1"],
        [str(tmp_path / "none.json")],
    ):
        assert audit_app.main(["--config", *extra]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "words"), [(["--rate", "1"], "--rate 1 is not 1 over"), (["--replay"], "a replay counts on Poisson")]
)
def test_what_an_audit_cannot_do_with_allocation_is_refused(
    small_file: Path, kind: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("phases.1.privacy.sampling=allocation", "phases.1.privacy.expected_batch=100")
    overrides = [word for change in changes for word in ("--set", change)]
    assert audit_app.main([*kind, "--config", str(small_file), *overrides]) == 2
    assert words in capsys.readouterr().err


def test_a_training_run_knows_no_way_to_weaken_its_noise(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(ROOT / "ds_configs" / "demo.json")]
    done = forking.run(
        [*script, "--noise-scale", "0.3"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 2 and "--noise-scale" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_coins_are_fair() -> None:
    heads = int(toss(100_000).sum())
    assert abs(heads - 50_000) < 6 * 158
