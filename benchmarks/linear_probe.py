"""How much a frozen encoder knows: multinomial logistic regression on its features, scored on held-out records.

Deterministic: standardised features, the whole batch, L-BFGS in fp64 from zero weights. The weight of the L2 penalty is
fixed by the caller, or chosen on the last fifth of the records to fit, never on those to score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from murmuration.model.encoder import Encoder

PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)
CHOSEN_ON = 5
"""One record in this many, the last ones, is kept back to choose the penalty."""
ITERATIONS = 1000


@dataclass(frozen=True)
class Probe:
    """A fitted probe; `mean` and `scale` are those of the features it was fitted to."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor
    penalty: float

    def predict(self, features: Tensor) -> Tensor:
        standardised = (features.double() - self.mean) / self.scale
        return (standardised @ self.weight.T + self.bias).argmax(dim=1)

    def accuracy(self, features: Tensor, labels: Tensor) -> float:
        return float((self.predict(features) == labels).double().mean())


@torch.no_grad()
def pooled_tokens(encoder: Encoder, images: Tensor, rows: int = 256) -> Tensor:
    """[B, width]: the mean of the patches' tokens after the last norm; the class token is left out."""
    return torch.cat([encoder.tokens(part)[:, 1:].mean(dim=1) for part in images.split(rows)])


def fit(
    features: Tensor, labels: Tensor, classes: int, penalty: float | None = None, penalties: Sequence[float] = PENALTIES
) -> Probe:
    """`penalty` None: the one of `penalties` that predicts the kept-back fifth best, the larger on a tie."""
    if len(features) != len(labels) or len(labels) < CHOSEN_ON:
        raise ValueError(f"{len(features)} features with {len(labels)} labels; give one label each, and at least five.")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"labels go from {int(labels.min())} to {int(labels.max())}, but there are {classes} classes.")
    if penalty is None:
        cut = len(labels) - len(labels) // CHOSEN_ON
        scores = {
            weight: _fitted(features[:cut], labels[:cut], classes, weight).accuracy(features[cut:], labels[cut:])
            for weight in penalties
        }
        penalty = max(scores, key=lambda weight: (scores[weight], weight))
    return _fitted(features, labels, classes, penalty)


def _fitted(features: Tensor, labels: Tensor, classes: int, penalty: float) -> Probe:
    """Least mean cross-entropy + penalty / 2 · ‖weight‖²; biases are free."""
    x = features.detach().double()
    mean, scale = x.mean(dim=0), x.std(dim=0, correction=0)
    # A feature that never changes says nothing; divided by its spread it would be 0/0.
    scale = torch.where(scale > 1e-12, scale, torch.ones_like(scale))
    x = (x - mean) / scale
    weight = torch.zeros(classes, x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=ITERATIONS, tolerance_grad=1e-6, tolerance_change=1e-12, history_size=20,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> float:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weight.T + bias, labels) + 0.5 * penalty * weight.square().sum()
        value.backward()
        return float(value.detach())

    with torch.enable_grad():
        optimizer.step(loss)
    return Probe(mean, scale, weight.detach(), bias.detach(), penalty)
