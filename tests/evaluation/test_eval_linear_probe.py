"""The linear probe of benchmarks/learning.py against scipy's own minimum, and what it must not look at."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from murmuration.model.build import build
from murmuration.model.settings import ModelSettings


@pytest.fixture
def linear(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("linear_probe")


def clusters(count: int, classes: int, width: int, apart: float, seed: int) -> tuple[Tensor, Tensor]:
    """Features around one centre per class; the centres depend on the sizes alone."""
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(7)) * apart
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    return centres[labels] + torch.randn(count, width, generator=generator), labels


@pytest.mark.parametrize("penalty", [1.0, 1e-2])
def test_the_minimum_is_scipys(linear: ModuleType, penalty: float) -> None:
    features, labels = clusters(80, 3, 4, 1.0, 0)
    features = features * torch.tensor([1.0, 100.0, 0.01, 3.0]) + 5.0
    probe = linear.fit(features, labels, 3, penalty)
    x = features.double().numpy()
    x = (x - x.mean(axis=0)) / x.std(axis=0)

    def objective(flat: np.ndarray) -> float:
        weight, bias = flat[:12].reshape(3, 4), flat[12:]
        logits = x @ weight.T + bias
        chosen = logits[np.arange(80), labels.numpy()]
        return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen) + penalty / 2 * np.sum(weight**2))

    least = minimize(objective, np.zeros(15), method="BFGS", options={"gtol": 1e-7})
    mine = np.concatenate([probe.weight.flatten().numpy(), probe.bias.numpy()])
    assert objective(mine) <= least.fun + 1e-9
    np.testing.assert_allclose(probe.weight.numpy(), least.x[:12].reshape(3, 4), atol=1e-4)
    expected = (x @ least.x[:12].reshape(3, 4).T + least.x[12:]).argmax(axis=1)
    assert (probe.predict(features).numpy() == expected).all()


def test_clear_classes_are_told_apart_on_new_records_and_noise_is_not(linear: ModuleType) -> None:
    features, labels = clusters(400, 5, 8, 3.0, 1)
    others, truth = clusters(400, 5, 8, 3.0, 2)
    probe = linear.fit(features, labels, 5)
    assert probe.accuracy(others, truth) > 0.95
    mixed = labels[torch.randperm(400, generator=torch.Generator().manual_seed(3))]
    assert linear.fit(features, mixed, 5).accuracy(others, truth) < 0.4


def test_units_and_constant_features_change_nothing(linear: ModuleType) -> None:
    features, labels = clusters(200, 3, 4, 1.0, 4)
    others, _ = clusters(100, 3, 4, 1.0, 5)
    units, constant = torch.tensor([1e-3, 1.0, 50.0, 1e4]), torch.ones(200, 1)
    plain = linear.fit(features, labels, 3, 1e-2).predict(others)
    changed = linear.fit(torch.cat([features * units - 2, constant], 1), labels, 3, 1e-2)
    assert torch.equal(changed.predict(torch.cat([others * units - 2, constant[:100]], 1)), plain)


def test_the_same_twice_whatever_the_global_random_state(linear: ModuleType) -> None:
    features, labels = clusters(150, 4, 6, 1.0, 6)
    torch.manual_seed(0)
    first = linear.fit(features, labels, 4)
    torch.manual_seed(1)
    again = linear.fit(features, labels, 4)
    assert torch.equal(first.weight, again.weight) and first.penalty == again.penalty


@pytest.mark.parametrize("seed", [9, 10])
def test_the_penalty_is_chosen_on_the_kept_back_records(linear: ModuleType, seed: int) -> None:
    """Many useless features and few records: little penalty fits the noise, and only the last fifth can tell."""
    features, labels = clusters(100, 2, 4, 0.5, seed)
    noise = torch.randn(100, 60, generator=torch.Generator().manual_seed(9))
    wide, penalties = torch.cat([features, noise], 1), (3.0, 1e-1, 1e-3)
    cut = 100 - 100 // linear.CHOSEN_ON
    tried = {penalty: linear.fit(wide[:cut], labels[:cut], 2, penalty) for penalty in penalties}
    seen, kept_back = (
        {penalty: probe.accuracy(wide[part], labels[part]) for penalty, probe in tried.items()}
        for part in (slice(cut), slice(cut, None))
    )
    best = max(kept_back.values())
    expected = max(penalty for penalty, score in kept_back.items() if score == best)
    assert seen[expected] < max(seen.values()), "the case must tell the two apart"
    assert linear.fit(wide, labels, 2, penalties=penalties).penalty == expected


def test_of_equally_good_penalties_the_largest_is_taken(linear: ModuleType) -> None:
    features, labels = clusters(200, 2, 4, 20.0, 10)
    assert linear.fit(features, labels, 2, penalties=(1e-3, 1e-1, 1e-2)).penalty == 1e-1


def test_features_are_the_mean_of_the_patches_tokens(linear: ModuleType) -> None:
    settings = ModelSettings(
        family="captioner", image_size=16, patch_size=8, width=32, depth=2, heads=2, decoder_depth=1, vocabulary=12
    )
    encoder = build(settings, "caption")
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tokens = encoder.tokens(images).detach()
    expected = sum(tokens[:, number] for number in range(1, 5)) / 4
    found = linear.pooled_tokens(encoder, images, rows=2)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_bad_requests_are_refused(linear: ModuleType) -> None:
    features, labels = clusters(20, 3, 2, 1.0, 0)
    with pytest.raises(ValueError, match="20 features with 19 labels"):
        linear.fit(features, labels[:19], 3)
    with pytest.raises(ValueError, match="but there are 2 classes"):
        linear.fit(features, labels, 2)
