"""Trains with one library, job by job, and writes what can be seen from outside: the weights after each step, and ε.

It runs in the Python that has the library, so it needs no more than PyTorch and NumPy.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import random
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance import modules

DELTA = 1e-5


@dataclass(frozen=True)
class Job:
    """What the library is asked to do: plain SGD with learning rate 1, flat clipping to norm 1."""

    module: str
    n: int
    # Its expected size, where batches are drawn at random.
    batch: int
    steps: int
    sigma: float
    # Records at a time, where the library can accumulate gradients.
    micro: int | None = None
    # What the user's script gives to random, NumPy and PyTorch at its top; None: it seeds nothing.
    seed: int | None = None
    # The library may fix its noise by a seed of its own, so that two runs can be subtracted.
    pinned: bool = False
    # The script is ended after this step, started again, and goes on from the library's checkpoint.
    stop: int | None = None
    # A record that is taken out: in its place is one whose loss is 0.
    without: int | None = None
    # ε is asked for.
    claim: bool = True


class Unsupported(Exception):
    """The library has nothing of the kind, by its adapter's word."""


@dataclass
class Run:
    weights: list[dict[str, torch.Tensor]]
    epsilon: float | None = None
    refused: str = ""
    unsupported: str = ""


def seed_everything(seed: int | None) -> None:
    if seed is None:
        seed = int.from_bytes(os.urandom(8))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def run(adapter: Any, job: Job) -> Run:
    """`adapter.train(model, data, job, folder, until, seen)` returns ε, or None where it is not asked for."""
    seen: list[dict[str, torch.Tensor]] = []

    def look(state: dict[str, torch.Tensor]) -> None:
        seen.append({name: value.detach().clone().cpu() for name, value in state.items()})

    epsilon = None
    model = modules.make(job.module, job.n)
    look(dict(model.named_parameters()))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for until in (job.steps,) if job.stop is None else (job.stop, job.steps):
                seed_everything(job.seed)
                model, data = modules.make(job.module, job.n), modules.records(job.module, job.n, job.without)
                epsilon = adapter.train(model, data, job, Path(folder), until, look)
    except Unsupported as reason:
        return Run(seen, unsupported=str(reason))
    except Exception as reason:
        return Run(seen, refused=f"{type(reason).__name__}: {' '.join(str(reason).split())}")
    return Run(seen, None if epsilon is None else float(epsilon))


def versions(adapter: Any) -> dict[str, str]:
    """Of the library, of what it computes with, and of Python."""
    found = {}
    for name in (*adapter.DISTRIBUTIONS, "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**getattr(adapter, "VERSIONS", {}), **found, "Python": platform.python_version()}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name, jobs, out = sys.argv[1:]
    adapter = importlib.import_module(f"conformance.adapters.{name}")
    with contextlib.redirect_stdout(sys.stderr):
        runs = [vars(run(adapter, Job(**job))) for job in json.loads(Path(jobs).read_text())]
    torch.save({"versions": versions(adapter), "runs": runs}, out)
