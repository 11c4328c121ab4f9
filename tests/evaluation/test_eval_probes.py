"""The two linear probes against an independent package and a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from murmuration.evaluation.measures import rows as rows_module
from murmuration.evaluation.measures.interval import mean, share
from murmuration.evaluation.measures.logistic import fit_logistic, normalised
from murmuration.evaluation.measures.rows import Rows
from murmuration.evaluation.protocols.linear_probe import LarsSettings, fit_lars
from murmuration.train.measures.ranking import hits

CPU = torch.device("cpu")
CLASSES, WIDTH = 4, 12


def clusters(records: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping classes, so that no probe gets everything right."""
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(size=(CLASSES, WIDTH))
    labels = draw.integers(0, CLASSES, records)
    return (centres[labels] + 1.5 * draw.normal(size=(records, WIDTH)) + 3.0).astype(np.float32), labels


def whole(features: np.ndarray, labels: np.ndarray) -> Rows:
    return Rows(features, labels, np.arange(len(labels)))


def test_the_logistic_probe_is_scikit_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.linear_model import LogisticRegression

    monkeypatch.setattr(rows_module, "CHUNK_VALUES", 70 * WIDTH)  # several parts, the last one smaller
    features, labels = clusters(300, 0)
    unseen, truth = clusters(400, 1)
    ours = fit_logistic(whole(features, labels), CLASSES, CPU)
    # Their penalty is ½‖W‖² beside C times the summed cross-entropy: C = 1 / (n · lambda) = 1 / 0.0025.
    theirs = LogisticRegression(C=1 / 0.0025, fit_intercept=False, tol=1e-9, max_iter=10_000)
    theirs.fit(normalised(torch.from_numpy(features)).numpy(), labels)
    found = ours.scores(torch.from_numpy(unseen)).argmax(dim=1).numpy()
    expected = theirs.predict(normalised(torch.from_numpy(unseen)).numpy())
    assert (found != expected).sum() <= 1
    assert 0.5 < (found == truth).mean() < 0.95, "too easy or too hard to tell two probes apart"
    assert ours.gradient < 1e-5


def test_features_are_centred_and_of_length_one_each_for_itself() -> None:
    found = normalised(torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [1.0, 2.0, 3.0]]))
    torch.testing.assert_close(found[0], torch.tensor([-1.0, 0.0, 1.0]).double() / math.sqrt(2))
    assert found[1].tolist() == [0, 0, 0] and torch.equal(found[0], found[2])


@pytest.mark.parametrize("views", [1, 3])
def test_the_lars_probe_is_a_plain_loop(views: int) -> None:
    settings = LarsSettings(epochs=7, warmup=2, batch=64, base_rate=20.0, seed=5)
    labels = clusters(150, 0)[1]
    crops = [clusters(150, 0)[0] + np.float32(0.1 * view) for view in range(views)]
    probe = fit_lars([whole(each, labels) for each in crops], CLASSES, CPU, settings, lambda done, total: None)
    scores = textbook([torch.from_numpy(each).double() for each in crops], torch.from_numpy(labels), settings)
    found = probe.scores(torch.from_numpy(crops[0])).detach().double()
    torch.testing.assert_close(found, scores, rtol=0, atol=1e-6)
    assert float(scores.std()) > 0.05, "nothing was trained"


def textbook(crops: list[torch.Tensor], labels: torch.Tensor, settings: LarsSettings) -> torch.Tensor:
    """In double precision, with every formula written out; logits of the first crops."""
    draw = torch.Generator().manual_seed(settings.seed)
    weight = (0.01 * torch.randn(CLASSES, WIDTH, generator=draw)).double()
    bias = torch.zeros(CLASSES).double()
    moving = [torch.zeros_like(weight), torch.zeros_like(bias)]
    running_mean, running_variance = torch.zeros(WIDTH).double(), torch.ones(WIDTH).double()
    steps = len(labels) // settings.batch
    for epoch in range(settings.epochs):
        order = np.random.default_rng([settings.seed, epoch]).permutation(len(labels))
        for step in range(steps):
            ids = order[step * settings.batch : (step + 1) * settings.batch]
            x, y = crops[epoch % len(crops)][ids], labels[ids]
            running_mean = 0.9 * running_mean + 0.1 * x.mean(0)
            running_variance = 0.9 * running_variance + 0.1 * x.var(0)
            x = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-6).sqrt()
            residual = ((x @ weight.T + bias).softmax(1) - F.one_hot(y, CLASSES)) / len(y)
            gradients = [residual.T @ x, residual.sum(0)]
            gradients[0] = gradients[0] * 0.001 * weight.norm() / gradients[0].norm()
            at, peak = epoch + step / steps, 20.0 * settings.batch / 256
            cosine = 0.5 * (1 + math.cos(math.pi * (at - 2) / (7 - 2)))
            rate = peak * at / 2 if at < 2 else peak * cosine
            moving = [0.9 * old + new for old, new in zip(moving, gradients, strict=True)]
            weight, bias = weight - rate * moving[0], bias - rate * moving[1]
    return (crops[0] - running_mean) / (running_variance + 1e-6).sqrt() @ weight.T + bias


def test_a_small_set_is_one_batch_with_the_rate_for_its_size() -> None:
    published = LarsSettings()
    assert published.batch_of(1_281_167) == 16384 and published.rate(10, 16384) == pytest.approx(6.4)
    assert published.batch_of(100) == 100 and published.rate(10, 100) == pytest.approx(0.1 * 100 / 256)
    assert published.rate(0, 16384) == 0 and published.rate(90, 16384) == pytest.approx(0, abs=1e-12)


def test_a_small_set_is_trained_until_its_features_tell() -> None:
    """Logistic regression has .775 of these records right, and chance .25."""
    published, longer = LarsSettings(), LarsSettings(longer=True)
    assert longer.of(1_281_167) == longer and (longer.of(2000).epochs, longer.of(2000).warmup) == (738, 82)
    assert longer.of(4).epochs == 4500
    features, labels = clusters(400, 0)
    held, answers = clusters(2000, 1)
    right = []
    for settings in (published, longer):
        probe = fit_lars([whole(features, labels)], CLASSES, CPU, settings, lambda done, total: None)
        right.append(float((probe.scores(torch.from_numpy(held)).argmax(1).numpy() == answers).mean()))
    assert right[0] < 0.4 and right[1] > 0.7, right


def test_hits_count_each_place_and_ties_go_to_the_lower_class() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [0.0, 5.0, 4.0]])
    assert hits(scores, torch.tensor([0, 1, 2]), 2).tolist() == [1, 2]


def test_intervals_cover_what_they_should() -> None:
    """Wilson's by its own formula; Student's of a textbook example; and both always hold the value."""
    found, z = share(8, 10), 1.959963984540054
    middle, half = (0.8 + z * z / 20) / (1 + z * z / 10), z * math.sqrt(0.016 + z * z / 400) / (1 + z * z / 10)
    assert (found.low, found.high) == pytest.approx((middle - half, middle + half))
    assert share(0, 5).low == 0 and share(5, 5).high == 1
    # Of 1, 2, 3: t(0.975, 2) = 4.302653 times a standard error of 1/√3.
    of_three = mean([1.0, 2.0, 3.0])
    assert of_three.value == 2 and of_three.high - 2 == pytest.approx(4.302652729911275 / math.sqrt(3))
    with pytest.raises(ValueError, match="at least one"):
        share(0, 0)
