"""A private loop, one pass of autograd per record, that all conformance probes must pass, and its faults, each of which
a probe must find."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from conformance.probes import poisson_epsilon
from conformance.worker import Job

FAULTS = {
    "shuffled": "sampling", "fixed size": "sampling", "half the rate": "sampling", "twice in a batch": "sampling",
    "skips empty draws": "empty draws", "divides by the drawn size": "divisor", "divides by n over steps": "divisor",
    "half the noise": "noise", "one noise for all steps": "noise", "noise of the script's seed": "seed",
    "a constant seed": "seed", "noise begins again": "noise after a restart", "counts half the steps": "accounting",
    "noise of each part": "accounting in parts", "forgets at a restart": "accounting after a restart",
    "a bias without noise": "parameters", "leaves one out": "parameters", "LoRA stays": "LoRA",
    "trains the base": "LoRA",
    "no clipping": "sensitivity: plain", "keeps infinity": "sensitivity: infinite input",
    "one batch for the module": "sensitivity: batch mean", "norm of one call": "sensitivity: called twice",
}  # fmt: skip


def loop(fault: str = "") -> Any:
    def train(model, data, job: Job, folder: Path, until: int, seen) -> float | None:
        x, rate, saved = data.tensors[0], job.batch / job.n, folder / "saved.pt"
        secret = 5 if fault == "a constant seed" or job.pinned else int.from_bytes(os.urandom(7))
        if fault in ("noise of the script's seed", "noise begins again") and job.seed is not None:
            secret = job.seed
        random = torch.Generator().manual_seed(secret)
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        if fault == "trains the base":
            trained = dict(model.named_parameters())
            model.requires_grad_(True)
        done = counted = 0
        if saved.exists():
            done, state, generator = torch.load(saved)
            model.load_state_dict(state)
            counted = 0 if fault == "forgets at a restart" else done
            if fault != "noise begins again":
                random.set_state(generator)
        while done < until:
            drawn = torch.rand(job.n, generator=random) < (rate / 2 if fault == "half the rate" else rate)
            taken = drawn.nonzero().flatten().tolist()
            if fault == "fixed size":
                taken = torch.randperm(job.n, generator=random)[: job.batch].tolist()
            if fault == "shuffled":
                at = done * job.batch % job.n
                taken = list(range(job.n))[at : at + job.batch]
            if fault == "twice in a batch":
                taken += taken[:1]
            if fault == "skips empty draws" and not taken:
                continue
            total = {name: torch.zeros_like(value) for name, value in trained.items()}
            for record in taken:
                loss = model(x[None, record])[0]
                if fault == "one batch for the module":
                    loss = model(x[taken])[taken.index(record)]
                found = dict(
                    zip(trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True), strict=True)
                )
                found = {name: torch.zeros_like(trained[name]) if g is None else g for name, g in found.items()}
                norm = float(torch.cat([g.flatten() for g in found.values()]).norm())
                if fault == "norm of one call":
                    norm /= 2
                if not norm < float("inf") and fault != "keeps infinity":
                    continue
                for name, gradient in found.items():
                    total[name] += gradient * (1 if fault == "no clipping" else min(1.0, 1 / max(norm, 1e-12)))
            divisor = len(taken) if fault == "divides by the drawn size" else job.batch
            if fault == "divides by n over steps":
                divisor = job.n // -(-job.n // job.batch)
            if fault == "one noise for all steps":
                random.manual_seed(secret)
            for name, value in trained.items():
                sigma = job.sigma * (0.5 if fault == "half the noise" else 1)
                if fault == "a bias without noise" and name.endswith("bias"):
                    sigma = 0.0
                if fault == "noise of each part" and job.micro:  # meant for the sum, shared by the parts
                    sigma *= 0.5
                noised = (total[name] + sigma * torch.randn(value.shape, generator=random)) / max(divisor, 1)
                left_out = {"leaves one out": "position", "LoRA stays": "up.weight"}
                if name != left_out.get(fault):
                    value.data -= noised
            done, counted = done + 1, counted + 1
            seen(dict(model.named_parameters()))
        torch.save((done, model.state_dict(), random.get_state()), saved)
        if not job.claim:
            return None
        return poisson_epsilon(job.sigma, rate, counted // 2 if fault == "counts half the steps" else counted)

    return SimpleNamespace(DISTRIBUTIONS=(), train=train)
