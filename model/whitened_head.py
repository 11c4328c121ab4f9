"""A classifier's head whose inputs are whitened by what a head in one pass has released of them.

The features of a public body share most of their length, and vary most along a few more directions. Those limit the
learning rate, so all others are learned slowly while every step adds noise. So a record's features z are multiplied by
the matrix √(λ / (X + λ)), where X is the noised mean of z·zᵀ that the phase before has released
(`statistics_head.py`) and λ the larger of X's mean eigenvalue and the largest one that noise alone would have: along
what X does not show z keeps its length. The matrix is post-processing and stays as it is, so W·(P·z) = (W·P)·z makes an
ordinary head again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.model.statistics_head import GRAM, SOLVING, eigen_of_sums

WHITENING = "whitening"


class WhitenedHead(nn.Linear):
    """Replaces a linear head, under its names."""

    whitening: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.register_buffer(WHITENING, torch.eye(base.in_features, dtype=base.weight.dtype, device=base.weight.device))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.linear(input, self.whitening.to(input.dtype)))

    @torch.no_grad()
    def whiten(self, state: Mapping[str, Tensor]) -> None:
        """By the sums in the state dict of the phase before; the head then starts from zero."""
        values, vectors, hidden = eigen_of_sums(state[f"head.{GRAM}"], state[f"head.{SOLVING}"])
        kept = max(hidden, 1 / len(values))  # X is a mean over vectors of length 1: its eigenvalues sum to 1
        self.whitening.copy_((vectors * (kept / (values + kept)).sqrt()) @ vectors.T)
        self.weight.zero_()
        self.bias.zero_()


@torch.no_grad()
def folded_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An equivalent state dict with an ordinary head in place of a whitened one; unchanged if there is none."""
    plain = dict(state)
    for name in [name for name in state if name.endswith(f".{WHITENING}")]:
        weight, whitening = f"{name.removesuffix(f'.{WHITENING}')}.weight", plain.pop(name)
        plain[weight] = (state[weight].double() @ whitening.double()).to(state[weight].dtype)
    return plain
