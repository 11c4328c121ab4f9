"""What a step saw of its records. Private by construction in a private phase: for `Board.private` alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from train.ranks import Ranks


@dataclass
class Observed:
    records: int = 0
    loss_sum: float = 0.0
    norms: list[Tensor] = field(default_factory=list)
    released: dict[str, float] = field(default_factory=dict)
    """Public once a checkpoint is durable: noised, and charged with the step."""
    sensitivity: float = 0.0
    """The largest that a micro-batch's sum had. Public: it depends on the rule alone."""
    bound: float | None = None
    """What gradients were clipped to, where steps differ in it."""

    def add(self, present: Tensor, losses: Tensor, norms: Tensor | None, sensitivity: float = 0.0) -> None:
        self.sensitivity = max(self.sensitivity, sensitivity)
        mask = present.cpu()
        self.records += int(mask.sum())
        self.loss_sum += float(torch.nan_to_num(losses.detach().float().cpu()[mask]).sum())
        if norms is not None:
            self.norms.append(norms.detach().cpu()[mask])

    def over_ranks(self, ranks: Ranks, bound: float | None) -> dict[str, float]:
        """Summary of the whole logical batch."""
        norms = torch.cat(self.norms) if self.norms else torch.zeros(0)
        bound = self.bound or bound
        over = float((norms > bound).sum()) if bound is not None else 0.0
        parts = ranks.gather((self.records, self.loss_sum, float(torch.nan_to_num(norms).sum()), over))
        records, loss, norm, clipped = (sum(part[i] for part in parts) for i in range(4))
        summary = {"records": float(records), "loss": loss / max(1, records)}
        if self.norms:
            summary |= {"gradient_norm": norm / max(1, records), "clipped_fraction": clipped / max(1, records)}
        return summary
