"""JAX Privacy: its sampler, clipping, noise and accountant in a plain loop. Of the modules, the meter alone runs."""

from __future__ import annotations

import os

import jax
import numpy as np
import torch
from jax_privacy import batch_selection, clipping, noise_addition
from jax_privacy.accounting import DpParams, DpsgdTrainingAccountant, PldAccountantConfig

from conformance.worker import DELTA, Unsupported

DISTRIBUTIONS = ("jax-privacy", "jax", "dp-accounting")


def loss(weights, x):
    return ((x[:, :-1] @ weights) * x[:, -1]).sum()


def train(model, data, job, folder, until, seen):
    if job.module != "meter":
        raise Unsupported("its modules are JAX's, not PyTorch's")
    if job.stop:
        raise Unsupported("it has no checkpoints")
    records, weights = data.tensors[0].numpy(), jax.numpy.zeros(job.n + 8192)
    # The library asks for seeds; a script that has none takes them from the system.
    seed = int.from_bytes(os.urandom(7)) if job.seed is None else job.seed
    gradient = clipping.clipped_grad(loss, l2_clip_norm=1.0, normalize_by=job.batch, microbatch_size=job.micro)
    noise = noise_addition.gaussian_privatizer(stddev=job.sigma * gradient.sensitivity(), prng_key=jax.random.key(seed))
    state = noise.init(weights)
    strategy = batch_selection.CyclicPoissonSampling(sampling_prob=job.batch / job.n, iterations=job.steps)
    for drawn in strategy.batch_iterator(job.n, rng=seed):
        size = job.micro or 8
        padded = batch_selection.pad_to_multiple_of(drawn, size) if len(drawn) else np.full(size, -1)
        taken = gradient(weights, records[padded], is_padding_example=padded < 0)
        noised, state = noise.update(taken, state)
        weights = weights - noised
        seen({"weight": torch.tensor(np.asarray(weights))})
    if not job.claim:
        return None
    parameters = DpParams(noise_multipliers=job.sigma, num_samples=job.n, delta=DELTA, batch_size=job.batch)
    return float(DpsgdTrainingAccountant(PldAccountantConfig()).compute_epsilon(job.steps, parameters))
