"""fastDP: the loop of its README, on one process; it has neither a sampler nor checkpoints of its own."""

from __future__ import annotations

import torch
from fastDP import PrivacyEngine

from conformance.worker import DELTA, Unsupported

DISTRIBUTIONS = ()
VERSIONS = {"fastDP": "2.0.0, its repository at 3d5cc56"}


def train(model, data, job, folder, until, seen):
    if job.stop:
        raise Unsupported("it has no checkpoint of its engine")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    engine = PrivacyEngine(
        model, batch_size=job.batch, sample_size=job.n, num_steps=job.steps, noise_multiplier=job.sigma,
        target_delta=DELTA, max_grad_norm=1.0, clipping_fn="Abadi",
    )  # fmt: skip
    engine.attach(optimizer)
    loader = torch.utils.data.DataLoader(data, batch_size=job.batch, shuffle=True)
    done = 0
    while done < until:
        for (batch,) in loader:
            parts = batch.split(job.micro or len(batch))
            for x in parts:
                model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            seen(dict(model.named_parameters()))
            if done == until:
                break
    return engine.get_privacy_spent()["eps_rdp"] if job.claim else None
