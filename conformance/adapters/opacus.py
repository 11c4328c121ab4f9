"""Opacus: `PrivacyEngine.make_private` in its default mode, and its `BatchMemoryManager` where gradients accumulate."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager

from conformance.worker import DELTA

DISTRIBUTIONS = ("opacus",)


def train(model, data, job, folder, until, seen):
    engine = PrivacyEngine()
    loader = torch.utils.data.DataLoader(data, batch_size=job.batch)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    wrapped, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=job.sigma, max_grad_norm=1.0
    )
    done, saved = 0, folder / "checkpoint.pt"
    if saved.exists():
        done = engine.load_checkpoint(path=saved, module=wrapped, optimizer=optimizer)["done"]
    wrapped.train()
    while done < until:
        if job.micro:
            batches = BatchMemoryManager(data_loader=loader, max_physical_batch_size=job.micro, optimizer=optimizer)
        else:
            batches = nullcontext(loader)
        with batches as epoch:
            for (x,) in epoch:
                optimizer.zero_grad()
                wrapped(x).mean().backward()
                optimizer.step()
                if not optimizer._is_last_step_skipped:
                    done += 1
                    seen(dict(model.named_parameters()))
                if done == until:
                    break
    engine.save_checkpoint(path=saved, module=wrapped, optimizer=optimizer, checkpoint_dict={"done": done})
    return engine.get_epsilon(DELTA) if job.claim else None
