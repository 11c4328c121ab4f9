"""The one place where golden values are asked of modules instead of commands: what no command tells.

Whoever moves or renames these changes the imports here, and nothing else of the golden values.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np

from murmuration.accounting.keys import RunKey, StepPurpose
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.data.index.epochs import PublicEpochs
from murmuration.train.config.load import load
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.chacha import ChaChaNoise

KEY, DIGEST_KEY = bytes(range(32)), bytes(range(32, 64))


def config_digests(recipe: Path) -> dict[str, str]:
    """Each phase's, as the ledger holds them; contents of files, which are not at hand, count as the word `golden`."""
    config = load(recipe, [])
    return {phase.name: config.digest(number, {"data": "golden"}) for number, phase in enumerate(config.phases)}


def derived_keys(seed: int) -> dict[str, str]:
    key = RunKey.from_debug_seed(seed)
    purposes = ("sampling", "sampling-digest", "noise", "augmentation", "masks", "dropout", "metric-noise", "self-test",
                "public-order")  # fmt: skip
    found = {f"{name} {phase}": key.derive(name, phase, f"{phase}:salt").hex() for name in purposes for phase in (0, 3)}
    return found | {"check value": key.check_value()}


def chained_keys(seed: int) -> dict[str, str]:
    """Keys of private steps, which are derived link by link."""
    first = RunKey.from_debug_seed(seed).first_link("phase 3, segment 0:salt", 5)
    return {
        f"{purpose} {step}": first.at(step).key(purpose).hex()
        for purpose in get_args(StepPurpose) for step in (5, 6, 1000)
    }  # fmt: skip


def drawn_ids(records: int, threshold: int, step: int) -> tuple[np.ndarray, str]:
    draw = PoissonSampler(KEY, DIGEST_KEY, records, threshold).draw(step)
    return draw.ids, draw.digest


def public_ids(records: int, batch: int, step: int) -> np.ndarray:
    return PublicEpochs(records, batch, KEY).ids(step)


def noise(generator: str, std: float, step: int, parameter: int, start: int, length: int, single: bool) -> np.ndarray:
    made = {"aes": AESNoise, "chacha20": ChaChaNoise}[generator](KEY, std, 1.0)
    return made.draw(step, parameter, start, length, np.float32 if single else np.float64)
