"""Per-record gradients from Opacus's hooks: an independent engine, to check ours on models of plain layers.

It keeps all gradients of all records in memory, and refuses what Opacus cannot handle: bare parameters, tied weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from murmuration.train.clip.engine import Clipped
from murmuration.train.clip.precision import Precision
from murmuration.train.clip.rows import slot_losses
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.clip.sums import GradientSums


class OpacusClip:
    scaling = None

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
        hooked = GradSampleModule(model, loss_reduction="sum")
        try:
            losses = slot_losses(hooked, inputs, len(present))
            losses.sum().backward()
            found = {n: p.grad_sample for n, p in model.named_parameters() if p.requires_grad}  # pyright: ignore[reportAttributeAccessIssue]
            with torch.no_grad():
                return self._add(found, losses.detach(), present, sums, rule)
        finally:
            for p in model.parameters():
                p.grad = None
            hooked.to_standard_module()

    def _add(
        self, found: Mapping[str, Tensor], losses: Tensor, present: Tensor, sums: GradientSums, rule: ClipRule
    ) -> Clipped:  # fmt: skip
        """In fp64 throughout: speed does not matter here."""
        samples = {name: g.double().unflatten(0, (len(present), -1)).sum(1) for name, g in found.items()}
        parts = [g.reshape(len(g), -1) for g in samples.values()]
        norms = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dim=1) for g in parts]), dim=0)
        keep = present & torch.isfinite(losses) & torch.isfinite(norms)
        factors = torch.where(keep, rule.factors(norms, torch.float64), 0.0)
        for name, g in samples.items():
            kept = torch.where(keep.view(-1, *[1] * (g.dim() - 1)), g, 0.0)
            sums.add(name, torch.tensordot(factors, kept, dims=1).to(losses.dtype))
        return Clipped(losses, norms, factors, rule.sensitivity)
