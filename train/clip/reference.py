"""The reference clip engine: every record's whole gradient, by vmap, then norms, factors and the weighted sum.

It keeps B gradients in memory, so it is for small models and for checking faster engines. It follows the definition
literally.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from murmuration.model.attention import use_fused
from murmuration.train.clip.engine import Clipped, Precision
from murmuration.train.clip.isolated import OneMicroBatch
from murmuration.train.clip.losses import slot_losses
from murmuration.train.clip.refusal import refused
from murmuration.train.clip.rule import LONGEST_ROW, ClipError, ClipRule, groups_of, stretches
from murmuration.train.clip.sums import GradientSums

# Outside this range, squares may overflow or vanish in fp32, and the norm is computed again in fp64.
SMALLEST, LARGEST = 1e-12, 1e12


class ReferenceClip:
    def __init__(self, rule: ClipRule) -> None:
        self.rule = rule
        self.precision: Precision = "fp32"

    def prepare(self, model: nn.Module) -> None:
        """Turns fused attention off: without a vmap rule on CPU it is correct, but slower than the written-out form."""
        use_fused(model, False)
        self.rule.require_groups([name for name, p in model.named_parameters() if p.requires_grad])
        longest = max(p.shape[-1] for p in model.parameters() if p.requires_grad and p.dim())
        if longest > LONGEST_ROW:
            raise ClipError(
                f"norms add squares in fp32 along rows of up to {LONGEST_ROW} elements, but the model has {longest}; "
                "use a smaller vocabulary or width"
            )

    def add_clipped(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        rule = rule or self.rule
        trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        buffers = dict(model.named_buffers())

        def loss_of_one(parameters: dict[str, Tensor], record: dict[str, Tensor]) -> Tensor:
            def run(rows: dict[str, Tensor]) -> Tensor:
                return functional_call(model, (parameters, fixed, buffers), (rows,))

            return slot_losses(run, record, 1).squeeze(0)

        with torch.no_grad():
            records = {name: tensor.unflatten(0, (len(present), -1)) for name, tensor in inputs.items()}
            try:
                with OneMicroBatch():
                    per_record, losses = vmap(grad_and_value(loss_of_one), in_dims=(None, 0))(trainable, records)
            except RuntimeError as error:
                raise refused(error, model) or error from error
            group_of = groups_of(per_record, rule.grouping)
            norms = torch.stack(
                [
                    _norms([gradient for name, gradient in per_record.items() if group_of[name] == number])
                    for number in range(max(group_of.values()) + 1)
                ]
            )
            # A record that is absent, or whose loss or gradient is not finite, contributes exactly zero: its factor is
            # zero, and so is its gradient where that is not finite, since 0·inf is NaN.
            broken = ~torch.isfinite(norms).all(0)
            usable = present & ~broken & torch.isfinite(losses)
            precise = torch.float64 if losses.dtype == torch.float64 else torch.float32
            factors = torch.where(usable, rule.group_factors(norms, precise), 0.0)
            if bool(broken.any()):
                for gradient in per_record.values():
                    gradient[broken] = 0.0
            for name, gradient in per_record.items():
                own = factors[group_of[name]].to(gradient.dtype)  # gradients may be fp64 where the loss is not
                for rows in stretches(len(gradient)):
                    sums.add(name, torch.tensordot(own[rows], gradient[rows], dims=1))
        whole = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(norms, dim=0)
        return Clipped(losses, whole, factors.amin(0), rule.sensitivity)


def _norms(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all parameters: fp32 along the last dimension, fp64 beyond it and wherever fp32 lacks range."""
    rows = [g.flatten(1, -2) if g.dim() > 2 else g.reshape(len(g), -1) for g in gradients]
    parts = [torch.linalg.vector_norm(g, dim=-1).double() for g in rows]
    norms = torch.linalg.vector_norm(torch.cat([part.reshape(len(part), -1) for part in parts], dim=1), dim=1)
    odd = ~((norms > SMALLEST) & (norms < LARGEST))
    if bool(odd.any()):
        exact = [torch.linalg.vector_norm(g[odd].double().reshape(int(odd.sum()), -1), dim=1) for g in gradients]
        norms[odd] = torch.linalg.vector_norm(torch.stack(exact), dim=0)
    return norms
