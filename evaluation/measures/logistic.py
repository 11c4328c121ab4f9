"""DP-Cap's linear probe: multinomial logistic regression without intercept on centred, normalised features.

Each record's feature loses its own mean and is scaled to length 1, so nothing is learnt from the other records but the
weights. The penalty, lambda / 2 · ‖W‖² beside the mean cross-entropy with lambda = 0.0025 / n, is the published one.
L-BFGS of scipy minimises in double precision; every pass reads the features a part at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from murmuration.evaluation.measures.rows import Rows

PENALTY_TIMES_N = 0.0025
ITERATIONS = 1000
GRADIENT = 1e-7
"""The largest entry of the gradient at which the minimum counts as found."""


@dataclass(frozen=True)
class Logistic:
    """`weight` [classes, width]; `gradient` is the largest entry that was left of it, where the search ended."""

    weight: Tensor
    iterations: int
    gradient: float

    def scores(self, features: Tensor) -> Tensor:
        return normalised(features).to(self.weight.device) @ self.weight.T


def normalised(features: Tensor) -> Tensor:
    """Each row without its mean, at length 1; a row of equal values becomes 0. In double precision."""
    centred = features.double()
    centred = centred - centred.mean(dim=1, keepdim=True)
    length = centred.norm(dim=1, keepdim=True)
    return torch.where(length > 0, centred / torch.where(length > 0, length, 1.0), 0.0)


def fit_logistic(
    rows: Rows, classes: int, device: torch.device, iterations: int = ITERATIONS,
    tell: Callable[[int, int], object] = lambda done, total: None,
) -> Logistic:  # fmt: skip
    """`tell` gets the iterations done, and the most there will be."""
    from scipy.optimize import minimize  # not above: scipy takes a second to import

    shape = (classes, rows.width)
    penalty = PENALTY_TIMES_N / len(rows)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weight = torch.from_numpy(flat.reshape(shape)).to(device)
        value, gradient = 0.0, torch.zeros_like(weight)
        for features, labels in rows.chunks():
            x, wanted = normalised(features).to(device), labels.to(device)
            logits = x @ weight.T
            value += float(F.cross_entropy(logits, wanted, reduction="sum"))
            residual = logits.softmax(dim=1)
            residual[torch.arange(len(wanted), device=device), wanted] -= 1
            gradient += residual.T @ x
        gradient = gradient / len(rows) + penalty * weight
        value = value / len(rows) + penalty / 2 * float(weight.square().sum())
        return value, gradient.cpu().numpy().reshape(-1)

    # No stop on slow progress: near the minimum of a weak penalty progress is slow long before the weights are right.
    options = {"maxiter": iterations, "maxfun": 10 * iterations, "maxcor": 20, "ftol": 0.0, "gtol": GRADIENT}
    done = 0

    def count(_: np.ndarray) -> None:
        nonlocal done
        done += 1
        tell(done, iterations)

    tell(0, iterations)
    start = np.zeros(classes * rows.width)
    found = minimize(loss, start, method="L-BFGS-B", jac=True, callback=count, options=options)
    weight = torch.from_numpy(found.x.reshape(shape)).to(device)
    return Logistic(weight, int(found.nit), float(np.abs(found.jac).max()))
