"""A head from two sums: no record adds more than 1 to them, and without noise it is ridge regression."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from murmuration.model.build import build
from murmuration.model.classifier import Classifier
from murmuration.model.settings import ModelSettings
from murmuration.model.statistics_head import StatisticsHead, ridge_against, solved_state
from murmuration.model.trainable import merged, select

WIDTH, CLASSES, RECORDS = 12, 4, 200
TOY = ModelSettings(family="classifier", image_size=32, patch_size=8, width=32, depth=1, heads=2, classes=CLASSES)


def records() -> tuple[Tensor, Tensor]:
    """Features of very different lengths, which tell their labels."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (RECORDS,), generator=draw)
    features = torch.randn(RECORDS, WIDTH, generator=draw) + 2 * torch.eye(CLASSES, WIDTH)[labels]
    return features * torch.rand(RECORDS, 1, generator=draw).exp(), labels


def shares(head: StatisticsHead, features: Tensor, labels: Tensor) -> Tensor:
    """[B, elements]: what each record adds to the sums, by autograd."""
    found = []
    for row in range(len(features)):
        head.zero_grad()
        head(features[row : row + 1], labels[row : row + 1]).sum().backward()
        assert head.gram.grad is not None and head.cross.grad is not None
        found.append(torch.cat([head.gram.grad.flatten(), head.cross.grad.flatten()]))
    return torch.stack(found)


def after_one_step(head: StatisticsHead, features: Tensor, labels: Tensor) -> StatisticsHead:
    head.zero_grad()
    head(features, labels).mean().backward()
    with torch.no_grad():
        for sums in (head.gram, head.cross):
            assert sums.grad is not None
            sums -= sums.grad
    return head


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("length", [None, 6.0, 0.5])
def test_no_record_adds_more_than_1(length: float | None, noise: float) -> None:
    head = StatisticsHead(nn.Linear(WIDTH, CLASSES))
    head.settle(noise, length=length)
    features, labels = records()
    features = torch.cat([features[:20], torch.full((1, WIDTH), 1e30), torch.zeros(1, WIDTH), features[:1] * 1e-30])
    labels = torch.cat([labels[:20], torch.tensor([0, 1, CLASSES + 5])])
    found = shares(head, features, labels).norm(dim=1)
    assert bool((found <= 1 + 1e-6).all()) and bool(found.isfinite().all())
    assert float(found[0]) == pytest.approx(1.0, rel=1e-5) or length == 6.0
    several = torch.zeros(3, CLASSES)
    several[0, :3], several[1] = 1, torch.tensor([1.0, 0, 0, 0])
    assert bool((shares(head, features[:3], several).norm(dim=1) <= 1 + 1e-6).all())


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("length", [None, 4.0])
def test_it_is_ridge_regression(length: float | None, noise: float) -> None:
    """Against scikit-learn, on sums without noise, whatever was expected: weights, and biases where there are any."""
    features, labels = records()
    ridge = 0.01
    head = StatisticsHead(nn.Linear(WIDTH, CLASSES))
    head.settle(noise, ridge, length)
    weight, bias = after_one_step(head, features, labels).solved()
    lengths = features.norm(dim=1, keepdim=True)
    if length is None:
        inputs = features / lengths
    else:
        inputs = torch.cat([features / lengths.clamp(min=length), torch.ones(RECORDS, 1)], 1) * math.sqrt(0.5)
    theirs = Ridge(alpha=ridge * RECORDS, fit_intercept=False, solver="cholesky")
    theirs.fit(inputs.double().numpy(), np.eye(CLASSES)[labels.numpy()])
    expected = torch.from_numpy(theirs.coef_).float()
    if length is not None:
        assert torch.allclose(bias, expected[:, -1] * math.sqrt(0.5), atol=1e-5)
        expected = expected[:, :-1] * math.sqrt(0.5) / length
    assert torch.allclose(weight, expected, atol=1e-5)
    assert length is not None or not bias.any()


def test_its_answers_are_those_of_the_ordinary_head_it_becomes() -> None:
    model = build(TOY, "classify")
    assert isinstance(model, Classifier)
    assert select(model, "statistics") == ["head.gram", "head.cross"] == select(model, "statistics")
    head = model.head
    assert isinstance(head, StatisticsHead)
    head.settle(0.0, 0.1, 3.0)
    features = torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    after_one_step(head, features, torch.arange(40) % CLASSES)
    plain = build(TOY, "classify")
    assert isinstance(plain, Classifier)
    assert plain.load_state_dict(merged(model.state_dict()), strict=True)
    assert torch.allclose(plain.head(features), head(features), atol=1e-6)
    assert head(features).argmax(1).tolist() != [0] * 40
    untouched = plain.state_dict()
    assert all(solved_state(untouched)[name] is tensor for name, tensor in untouched.items())
    with torch.no_grad():
        head.cross.mul_(2)
    assert torch.allclose(head(features), 2 * plain.head(features), atol=1e-5), "solved anew once the sums change"


def test_balanced_answers_do_not_favour_the_common_class() -> None:
    """Overlapping classes of which one has 90 % of the records: the share of each that is recognised becomes alike."""
    draw = torch.Generator().manual_seed(4)
    labels = (torch.rand(4000, generator=draw) > 0.9).long()
    features = torch.randn(4000, WIDTH, generator=draw) + torch.eye(2, WIDTH)[labels]
    recognised = []
    for balanced in (False, True):
        head = StatisticsHead(nn.Linear(WIDTH, 2))
        head.settle(0.0, 1e-4, 10.0, balanced)
        answers = after_one_step(head, features, labels)(features).argmax(1)
        recognised.append([float((answers[labels == each] == each).float().mean()) for each in (0, 1)])
    (common, rare), (one, other) = recognised
    assert common > 0.95 and rare < 0.3
    assert abs(one - other) < 0.1 and min(one, other) > 0.6


def test_noise_alone_is_damped() -> None:
    """The ridge that is taken against noise is its largest eigenvalue, so that no direction is noise blown up."""
    draw, width, deviation = torch.Generator().manual_seed(3), 300, 1e-3
    noise = torch.randn(width, width, generator=draw) * deviation
    largest = float(torch.linalg.eigvalsh((noise + noise.T) / 2).abs().max())
    assert 0.9 * largest < ridge_against(deviation, width) < 1.15 * largest
