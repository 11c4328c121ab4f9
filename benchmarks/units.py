"""What protecting patients costs a classifier at toy size, at equal ε for a patient: as units, or as groups of records.

    python benchmarks/units.py --seeds 3 --out benchmarks/results/units.json --plot benchmarks/results/units.png

The setting of views.py, whose pictures belong to patients of four. Three ways to the same ε and δ for a patient, at the
same number of pictures per step and of steps: the patient is the unit (`data.unit`) and contributes one of its pictures
to a step, or the mean over all four; or the record is the unit, with so much noise that a group of four has that ε
(`account.py explain --records-per-person 4`). A patient's pictures are independent of each other, unlike those of a
real one, all patients have equally many, and the learning rate is the same: it does not show what is best elsewhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from views import EPSILON, PER_PATIENT, Size, config, measured, study  # noqa: E402

from murmuration.accounting.epsilon.accountant import epsilon  # noqa: E402
from murmuration.accounting.epsilon.neighbours import group_epsilon  # noqa: E402
from murmuration.accounting.event import Event  # noqa: E402
from murmuration.accounting.ledger.history import History  # noqa: E402
from murmuration.accounting.sampling import RATE_DENOMINATOR, threshold_for  # noqa: E402

HALVINGS = 14


def sigma_for_groups(rate: float, steps: int, delta: float) -> float:
    """The least noise, to four digits, with which a patient's records together have EPSILON."""
    low, high = 0.3, 20.0
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        enough = group_epsilon([Event(rate, middle, steps)], delta, PER_PATIENT) <= EPSILON
        low, high = (low, middle) if enough else (middle, high)
    return math.ceil(high * 1e4) / 1e4


def arms(folder: Path, size: Size, seed: int) -> Iterator[dict[str, Any]]:
    data, runs = folder / "data", folder / "runs"
    delta = 1 / (2 * size.private)  # as much as a promise about records may have
    for rows, arm in ((1, "patient, 1 picture"), (PER_PATIENT, f"patient, {PER_PATIENT} pictures")):
        privacy = {"expected_batch": size.batch // rows, "delta": delta}
        made = config(data, size, seed, privacy, rows, unit="patient", rows_per_unit=rows)
        found = measured(runs, arm, seed, made)
        yield found | {"epsilon_of_a_patient": found["epsilon"]}
    rate = threshold_for(size.private, size.batch) / RATE_DENOMINATOR
    sigma = sigma_for_groups(rate, size.steps, delta)
    one = epsilon([Event(rate, sigma, size.steps)], delta)
    privacy = {"noise_multiplier": sigma, "delta": delta, "epsilon": one * (1 + 1e-6)}
    found = measured(runs, f"record, groups of {PER_PATIENT}", seed, config(data, size, seed, privacy))
    charged = History.read(runs / found["run"] / "ledger.jsonl")[0].charged()
    yield found | {"epsilon_of_a_patient": group_epsilon(charged, delta, PER_PATIENT), "noise_multiplier": sigma}


if __name__ == "__main__":
    study(__doc__, arms)
