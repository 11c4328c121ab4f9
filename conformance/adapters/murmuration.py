"""Murmuration: `PrivateTraining` in one process, saved when it is left and resumed from its folder."""

from __future__ import annotations

from functools import partial

import torch

import murmuration
from conformance.worker import DELTA

DISTRIBUTIONS = ("dp-accounting",)
VERSIONS = {"murmuration": "this checkout"}


def train(model, data, job, folder, until, seen):
    settings = murmuration.Settings(
        privacy=murmuration.Privacy(
            # A budget that no run here can spend: the noise is given.
            epsilon=1e5, delta=DELTA, noise_multiplier=job.sigma, expected_batch=job.batch,
            clip=murmuration.Clip(norm=1.0),
        ),
        steps=job.steps, dataset="conformance", run_dir=str(folder / "run"), log_every=10**6,
        micro_batch=job.micro or "auto", debug_seed=job.seed if job.pinned else None,
    )  # fmt: skip
    training = murmuration.PrivateTraining(
        model, data, settings, loss=lambda module, batch: module(batch[0]), schedule=1.0,
        optimizer=partial(torch.optim.SGD, lr=1.0), example=(torch.zeros_like(data[0][0]),),
    )  # fmt: skip
    with training:
        for number in training:
            seen(dict(training.model.named_parameters()))
            if number == until:
                training.save()
                break
        return training.epsilon()
