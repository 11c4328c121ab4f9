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
from murmuration.train.clip.isolated import OneMicroBatch, no_rules_of_others
from murmuration.train.clip.losses import of_slots, slot_losses
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
                with OneMicroBatch() as mode, no_rules_of_others():
                    per_record, losses = vmap(grad_and_value(loss_of_one), in_dims=(None, 0))(trainable, records)
                mode.require_none_caught()
            except ClipError:
                raise
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


# Per-record gradients from Opacus's hooks: an independent engine, to check ours on models of plain layers.
#
# It runs one record after the other, and keeps all gradients in memory. Opacus hooks layers: a parameter outside of
# them, such as a class token, has autograd's gradient of that one record. Tied weights are refused.


class OpacusClip:
    def __init__(self, rule: ClipRule) -> None:
        self.rule = rule
        self.precision: Precision = "fp32"

    def prepare(self, model: nn.Module) -> None:
        if self.rule.grouping != "all":
            raise ClipError("the Opacus engine clips all parameters together; set privacy.clip.groups to 'all'")
        if len(list(model.named_parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
            raise ClipError(
                "Opacus has no per-record gradients for weights that are tied; "
                'use run.clip_engine = "book-keeping" or "reference"'
            )

    def add_clipped(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        rule = rule or self.rule
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        losses: list[Tensor] = []
        found: dict[str, list[Tensor]] = {name: [] for name in trained}
        from opacus.grad_sample import GradSampleModule  # takes seconds

        layers = [module for module in model.modules() if not any(True for _ in module.children())]
        within = {id(p) for layer in layers for p in layer.parameters()}
        outside = [p for p in trained.values() if id(p) not in within]
        for p in outside:  # it hooks the modules that have trained parameters of their own
            p.requires_grad_(False)
        hooked = GradSampleModule(model, loss_reduction="sum")
        for p in outside:
            p.requires_grad_(True)
        modes = [layer.training for layer in layers]
        for layer in layers:  # its hooks see nothing in evaluation mode, in which no layer that it knows differs
            layer.training = layer.training or any(p.requires_grad for p in layer.parameters())
        try:
            for record in range(len(present)):  # forward() is given no other
                alone = of_slots(inputs, torch.tensor([record], device=present.device), len(present))
                loss = slot_losses(hooked, alone, 1)
                loss.sum().backward()
                losses.append(loss.detach())
                for name, p in trained.items():
                    sample = getattr(p, "grad_sample", None)
                    gradient = p.grad if sample is None else sample.sum(0)
                    found[name].append(torch.zeros_like(p).double() if gradient is None else gradient.double())
                    p.grad = p.grad_sample = None  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            for p in model.parameters():
                p.grad = None
            hooked.to_standard_module()
            for layer, mode in zip(layers, modes, strict=True):
                layer.training = mode
                for left in ("activations", "max_batch_len"):
                    vars(layer).pop(left, None)
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
