"""opake: the loop of its README, with its Poisson sampler, and its own serialization across a restart."""

from __future__ import annotations

import opake.dpsgd.accounting as accounting
import torch
from opake.dpsgd.clipping import clipped_grad
from opake.dpsgd.noise import gaussian_noise
from opake.dpsgd.sampling import PoissonSampler
from opake.functional import make_functional
from opake.random import fold_in, key, random_key
from opake.serialization import from_state_dict, state_dict

from conformance.worker import DELTA

DISTRIBUTIONS = ("opake", "opake-dpsgd", "opake-accounting")


def train(model, data, job, folder, until, seen):
    forward, trained, frozen = make_functional(model, disable_autograd_tracking=True, partition_trainable=True)
    rate = job.batch / job.n
    secret = random_key() if job.seed is None else key(job.seed)
    sampler = PoissonSampler(data, sample_rate=rate, n_steps=job.steps, key=fold_in(secret, 0))
    gradient, clip_state = clipped_grad(
        lambda parameters, x: forward({**parameters, **frozen}, x[None]).sum(), clipping_norm=1.0, batch_argnums=1,
        normalize_by=job.batch, microbatch_size=job.micro,
    )  # fmt: skip
    noise, noise_state = gaussian_noise(noise_multiplier=job.sigma, key=fold_in(secret, 1))
    done, saved = 0, folder / "checkpoint.pt"
    if saved.exists():
        old = torch.load(saved, weights_only=False)
        done, trained = old["done"], old["trained"]
        sampler, noise_state = from_state_dict(sampler, old["sampler"]), from_state_dict(noise_state, old["noise"])
    for drawn in sampler:
        clipped, clip_state = gradient(trained, data.tensors[0][drawn], state=clip_state)
        noised, noise_state = noise(clipped, noise_state)
        trained = {name: value - noised.pytree[name] for name, value in trained.items()}
        seen({**trained, **frozen})
        done += 1
        if done == until:
            break
    checkpoint = {"done": done, "trained": trained, "sampler": state_dict(sampler), "noise": state_dict(noise_state)}
    torch.save(checkpoint, saved)
    if job.claim:
        one = accounting.gaussian(job.sigma)
        return ((accounting.poisson(one, sample_rate=rate) if rate < 1 else one) * done).epsilon_at(DELTA)
    return None
