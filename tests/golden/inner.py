"""The one place where golden values are asked of modules instead of commands: what no command tells.

Whoever moves or renames these changes the imports here, and nothing else of the golden values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from murmuration.accounting.keys import RunKey, StepPurpose
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.data.index.epochs import PublicEpochs
from murmuration.train.config.load import load
from murmuration.train.config.root import OF_NO_RELEASE, Config
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.chacha import ChaChaNoise

KEY, DIGEST_KEY = bytes(range(32)), bytes(range(32, 64))


def config_digests(recipe: Path) -> dict[str, str]:
    """Each phase's, as the ledger holds them; contents of files, which are not at hand, count as the word `golden`."""
    config = load(recipe, [])
    return {phase.name: config.digest(number, {"data": "golden"}) for number, phase in enumerate(config.phases)}


def defaults(section: Any = Config, out: Mapping[str, Any] = OF_NO_RELEASE, place: str = "") -> dict[str, Any]:
    """Those of all keys that shape a release. A config's digest leaves a key at its default out, so another default
    would change what a run does under the same digest."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        without = out.get(name, {})
        if without is True:
            continue
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            found[f"{place}{name}"] = value.model_dump(exclude_defaults=True) if hasattr(value, "model_dump") else value
        waiting = [field.annotation]
        while waiting:
            kind = waiting.pop()
            if isinstance(kind, type) and hasattr(kind, "model_fields"):
                found |= defaults(kind, without.get("__all__", without), f"{place}{name}.{kind.__name__}.")
            waiting += reversed(get_args(kind))
    return found


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
