"""Per-record gradients from Opacus's hooks: an independent engine, to check ours on models of plain layers.

It runs one record after the other, and keeps all gradients in memory. It refuses what Opacus cannot handle: bare
parameters, tied weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from murmuration.train.clip.engine import Clipped, Precision
from murmuration.train.clip.losses import of_slots, slot_losses
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.clip.sums import GradientSums


class OpacusClip:
    def __init__(self, rule: ClipRule) -> None:
        self.rule = rule
        self.precision: Precision = "fp32"

    def prepare(self, model: nn.Module) -> None:
        if self.rule.grouping != "all":
            raise ClipError("the Opacus engine clips all parameters together; set privacy.clip.groups to 'all'")
        tied = len(list(model.named_parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
        bare = [
            name
            for name, module in model.named_modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
            and any(True for _ in module.children())  # a leaf without a rule is run by Opacus through functorch
        ]
        if tied or bare:
            what = "weights that are tied" if tied else f"parameters of {bare[0] or 'the model itself'}"
            raise ClipError(
                f'Opacus has no per-record gradients for {what}; use run.clip_engine = "book-keeping" or "reference"'
            )

    def add_clipped(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        rule = rule or self.rule
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        losses: list[Tensor] = []
        found: dict[str, list[Tensor]] = {name: [] for name in trained}
        hooked = GradSampleModule(model, loss_reduction="sum")
        try:
            for record in range(len(present)):  # forward() is given no other
                alone = of_slots(inputs, torch.tensor([record], device=present.device), len(present))
                loss = slot_losses(hooked, alone, 1)
                loss.sum().backward()
                losses.append(loss.detach())
                for name, p in trained.items():
                    found[name].append(p.grad_sample.double().sum(0))  # pyright: ignore[reportAttributeAccessIssue]
                    p.grad = p.grad_sample = None  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            for p in model.parameters():
                p.grad = None
            hooked.to_standard_module()
        samples = {name: torch.stack(gradients) for name, gradients in found.items()}
        with torch.no_grad():
            return self._add(samples, torch.cat(losses), present, sums, rule)

    def _add(
        self, samples: Mapping[str, Tensor], losses: Tensor, present: Tensor, sums: GradientSums, rule: ClipRule
    ) -> Clipped:  # fmt: skip
        """In fp64 throughout: speed does not matter here."""
        parts = [g.reshape(len(g), -1) for g in samples.values()]
        norms = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dim=1) for g in parts]), dim=0)
        keep = present & torch.isfinite(losses) & torch.isfinite(norms)
        factors = torch.where(keep, rule.factors(norms, torch.float64), 0.0)
        for name, g in samples.items():
            kept = torch.where(keep.view(-1, *[1] * (g.dim() - 1)), g, 0.0)
            sums.add(name, torch.tensordot(factors, kept, dims=1).to(losses.dtype))
        return Clipped(losses, norms, factors, rule.sensitivity)
