"""Correlated noise as it is added: its covariance over the steps, on any shards, drawn ahead or not, after any stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.accounting.banded import BandedNoise, best_banded
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.event import Event
from murmuration.accounting.key_chain import KeyChain, forgettable
from murmuration.accounting.keys import KeyFileError, Link, load
from murmuration.accounting.ledger.history import History
from murmuration.accounting.noise import NoiseKind
from murmuration.train.core import Computation
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import NOISE_CHUNK, AESNoise
from murmuration.train.noise.chacha import ChaChaNoise
from murmuration.train.noise.correlated import CorrelatedNoise
from murmuration.train.noise.prefetch import NoiseAhead
from murmuration.train.recipe.ready_phase import RecipeError, planned_epsilon
from tests.support.config_base import plan_of, private_phase
from tests.support.own_module import RATE, run, training
from tests.support.whole_history import steps_of

CPU = torch.device("cpu")
KEY = bytes(range(32))
STEPS, BANDS, ELEMENTS, STD = 64, 8, 20_000, 1.5
MATRIX = best_banded(BANDS, STEPS)
SIX_DEVIATIONS = 6.0


def correlated(matrix: BandedNoise = MATRIX, first: int = 1, draws: type[Any] = AESNoise) -> CorrelatedNoise:
    return CorrelatedNoise(draws(KEY, STD, 10.0), matrix, first)


def emitted(noise: CorrelatedNoise, steps: range) -> np.ndarray:
    return np.stack([noise.draw(step, 0, 0, ELEMENTS, np.float64) for step in steps])


def furthest(noise: np.ndarray, matrix: BandedNoise, steps: range, first: int = 1) -> float:
    """The largest deviation of the measured covariance of all pairs of steps from the matrix', in standard errors."""
    weights = np.zeros((len(steps), steps.stop))
    for row, step in enumerate(steps):
        for at, weight in matrix.weights(step, first):
            weights[row, at] = weight * STD
    expected = weights @ weights.T
    variances = np.diag(expected)
    error = np.sqrt((variances[:, None] * variances + expected**2) / noise.shape[1])
    return float(np.abs((noise @ noise.T / noise.shape[1] - expected) / error).max())


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    return emitted(correlated(), range(1, STEPS + 1))


def test_the_covariance_over_64_steps_is_the_matrix(drawn: np.ndarray) -> None:
    assert furthest(drawn, MATRIX, range(1, STEPS + 1)) < SIX_DEVIATIONS


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(best_banded(BANDS - 1, STEPS), id="a band less"),
        pytest.param(best_banded(BANDS, 4 * STEPS), id="a longer horizon"),
        pytest.param(best_banded(BANDS, STEPS // 2), id="a shorter horizon"),
    ],
)
def test_another_matrix_is_told_from_it(drawn: np.ndarray, wrong: BandedNoise) -> None:
    assert furthest(drawn, wrong, range(1, STEPS + 1)) > 2 * SIX_DEVIATIONS


def test_noise_of_independent_steps_is_told_from_it() -> None:
    steps = range(1, STEPS + 1)
    plain = np.stack([AESNoise(KEY, STD, 1.0).draw(step, 0, 0, ELEMENTS, np.float64) for step in steps])
    scaled = plain * np.array([[MATRIX.spread(step)] for step in steps])  # each step's own variance is right
    assert furthest(scaled, MATRIX, steps) > 2 * SIX_DEVIATIONS


def test_a_segment_that_begins_in_a_block_has_the_covariance_of_its_own_draws() -> None:
    steps = range(6, 25)
    found = emitted(correlated(first=6), steps)
    assert furthest(found, MATRIX, steps, first=6) < SIX_DEVIATIONS < furthest(found, MATRIX, steps) / 2


def test_what_is_stated_is_what_is_added(drawn: np.ndarray) -> None:
    for step in (1, 5, 8, 9, 64):
        fact = correlated().correlation(step)
        assert fact.matrix == MATRIX.digest
        assert drawn[step - 1].std() == pytest.approx(fact.added, rel=0.04)
    assert correlated().at(3 * STD).correlation(5).added == pytest.approx(3 * correlated().correlation(5).added)
    assert np.allclose(correlated().at(3 * STD).draw(5, 0, 0, 9), 3 * drawn[4, :9], rtol=1e-6)


FRAGMENTS = [
    Fragment("a", 0, 11, NOISE_CHUNK + 77, 0), Fragment("b", 1, 0, 5, NOISE_CHUNK + 77),
    Fragment("c", 2, 1, 3000, NOISE_CHUNK + 90),
]  # fmt: skip


@pytest.mark.parametrize("draws", [AESNoise, ChaChaNoise])
def test_every_element_gets_the_same_noise_on_whatever_shard_it_lies(draws: type[Any]) -> None:
    noise = correlated(draws=draws)
    for chunk, found in noise.chunks(13, FRAGMENTS, CPU):
        begin, length = chunk.start, min(chunk.length, 1000)
        alone = noise.draw(13, chunk.parameter, begin, length, np.float64)
        assert np.array_equal(found.numpy()[:length], alone)
        odd = noise.draw(13, chunk.parameter, begin + 3, length - 3, np.float64)
        assert np.array_equal(odd, alone[3:])


def test_noise_drawn_ahead_has_the_same_bits() -> None:
    ahead = NoiseAhead(correlated(), FRAGMENTS)
    ahead.prepare(13)
    for (_, one), (_, other) in zip(
        ahead.chunks(13, FRAGMENTS, CPU), correlated().chunks(13, FRAGMENTS, CPU), strict=True
    ):
        assert torch.equal(one, other)
    assert ahead.correlation(13) == correlated().correlation(13) and ahead.std == STD
    ahead.close()


def test_a_chain_that_forgets_keeps_the_keys_of_the_block_that_goes_on() -> None:
    link = Link("segment", 1, b"s" * 32)

    def noise(chain: KeyChain) -> CorrelatedNoise:
        draws = AESNoise(lambda step: chain.key("noise", step), STD, 1.0)
        return CorrelatedNoise(draws, MATRIX, 1)

    kept, forgetting = KeyChain(link, together=BANDS), KeyChain(link, together=BANDS)
    for step in range(1, 20):
        expected = noise(kept).draw(step, 0, 0, 50)
        assert np.array_equal(noise(forgetting).draw(step, 0, 0, 50), expected)
        forgetting.forget(forgettable(step, BANDS))
        assert forgetting.first == step + 1 if step % BANDS == 0 else forgetting.first == step - step % BANDS + 1
    with pytest.raises(KeyFileError, match="forgotten"):
        noise(forgetting).draw(16, 0, 0, 1)


# Whole runs: `murmuration.PrivateTraining` on a module of one's own.

LONG: dict[str, Any] = {"bands": 3, "steps": 10, "epsilon": 20, "expected_batch": 8}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["aes", "chacha20"])
def test_a_run_saved_anywhere_or_stopped_between_blocks_makes_the_same_steps(tmp_path: Path, kind: NoiseKind) -> None:
    """Where the program says that records have the same numbers."""
    settings = LONG | {"computation": Computation(noise=kind), "order": "as before"}
    whole = run(tmp_path / "whole", 10, **settings)
    with training(tmp_path / "parts", **settings) as found:
        found.prove()
        for step in (1, 2, 3):
            found.step(step, RATE)
            found.save()
    for part in (6, 1):
        parts = run(tmp_path / "parts", part, **settings)
    assert same(whole, parts)
    history, _ = History.read(tmp_path / "parts" / "ledger.jsonl")
    assert len(history.segments) == 1 and [event.count for event in history.charged()] == [4]


def test_the_secret_file_gives_no_key_of_an_earlier_block(tmp_path: Path) -> None:
    with training(tmp_path, **LONG) as found:
        found.prove()
        for step in (1, 2, 3, 4, 5):
            found.step(step, RATE)
        found.save()
        chain = load(tmp_path / "secret" / "run.key").chain
        assert chain is not None and chain.step == 6, "step 6 needs the draws of 4 and 5, which this process alone has"
        found.step(6, RATE)
        found.save()
        chain = load(tmp_path / "secret" / "run.key").chain
        assert chain is not None and chain.step == 7


def test_a_new_segment_begins_in_the_middle_of_a_block_with_draws_of_its_own(tmp_path: Path) -> None:
    with training(tmp_path, **LONG) as found:
        found.prove()
        for step in (1, 2, 3, 4, 5):
            found.step(step, RATE)
            if step == 4:
                found.save()
        found.close()  # nothing more is saved
    run(tmp_path, 6, **LONG)  # step 5 was opened, and its weights may have been seen
    history, _ = History.read(tmp_path / "ledger.jsonl")
    assert [segment.from_step for segment in history.segments] == [0, 4]
    added = {(s.segment, s.step): facts.noise.correlation for s, facts in steps_of(tmp_path).opened.items()}
    matrix, std = history.plans[0].noise, history.plans[0].noise_std
    assert matrix is not None and added[1, 5] is not None and added[0, 5] is not None
    assert added[1, 5].added == std * matrix.spread(5, 5) != added[0, 5].added == std * matrix.spread(5)
    assert [event.count for event in history.charged()] == [4], "step 5's part had turns at 2, 5, 5 and 8"


def test_a_config_becomes_a_plan_for_its_turns_and_keeps_the_matrix_of_the_ledger() -> None:
    phase = private_phase({"noise": {"kind": "banded", "bands": 4, "horizon": 12}})
    plan = plan_of(phase)
    assert plan.noise == best_banded(4, 12)
    assert (plan.sampling_rate, plan.divisor) == pytest.approx((0.2, 50), rel=1e-8)
    assert 3.99 < planned_epsilon(plan) <= 4.0
    assert planned_epsilon(plan) == epsilon([Event(plan.sampling_rate, plan.noise_multiplier, 5)], plan.delta)
    digits = tuple(tuple(1.001 * entry for entry in row) for row in best_banded(4, 12).rows)
    known = replace(plan, noise=BandedNoise(digits, 12))
    assert plan_of(phase, known=known).noise == known.noise
    longer = private_phase({"noise": {"kind": "banded", "bands": 4}})
    assert plan_of(longer, known=known).noise == best_banded(4, 20)


@pytest.mark.parametrize(
    ("privacy", "noise", "words"),
    [
        ({"bands": 30}, "aes", "use at most 20 bands"),
        ({"bands": 4}, "exact", "whole numbers"),
        ({"bands": 4, "horizon": 3}, "aes", "at least as many steps and horizon"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(privacy: dict[str, int], noise: NoiseKind, words: str) -> None:
    phase = private_phase({"noise": {"kind": "banded", **privacy}})
    with pytest.raises(RecipeError, match=words):
        plan_of(phase, noise=noise)
