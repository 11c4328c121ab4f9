"""Opens the scales of a phase's gradients: second moments that another run left in its last checkpoint.

Those of a run on public records are used as they are, so nothing private may be in them: runs that had a private phase
are refused, and so are runs on the very records that this run protects. Those of a private run are what it released
(`released_moments.py`), and must be asked for as that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.warm_start_origin import Origin
from murmuration.accounting.scale_table import Moments, ScaleError, ScaleTable, scales_of
from murmuration.train.clip.rule import ClipError
from murmuration.train.clip.scaling import Scaling, as_matrix
from murmuration.train.config import privacy
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.released_moments import ProtectedRecords, noise_in, origins_of, without_noise
from murmuration.train.storage.checkpoint import Checkpoints
from murmuration.train.storage.checkpoint_read import CheckpointError, Loaded
from murmuration.train.storage.run_dir import RunDir

SECOND_MOMENT = "exp_avg_sq"
WHOLE_BITS = 62


@dataclass(frozen=True)
class Scales:
    table: ScaleTable
    origins: tuple[Origin, ...] = ()
    """The private runs that released what the table was made of; none: it was made of public records."""
    used: frozenset[str] = frozenset()
    """Digests of the records that the run of the table, and those before it, used without noise."""


def open_scales(
    settings: privacy.Scaling, where: str, trained: Mapping[str, torch.Size], protected: Sequence[ProtectedRecords]
) -> Scales:
    """`trained`: shapes of the phase's trained weights; `protected`: the records of every private phase of this run."""
    root, released = Path(settings.path), settings.source == "released"
    origins: tuple[Origin, ...] = ()
    try:
        if released:
            origins = origins_of(root, protected)
        else:
            _require_public(root, protected)
        used = History.read(RunDir(root).ledger)[0].without_noise()
        loaded = Checkpoints.newest(RunDir(root).checkpoints)
        if loaded is None:
            raise RecipeError(f"{root} has no finished checkpoint; name a run that has one")
        moments = _moments(loaded, trained)
        if released:
            moments = without_noise(moments, noise_in(root, loaded, settings.decay))
        table = scales_of(moments, settings.floor)
        Scaling(table).require_fit(trained)
    except (RecipeError, LedgerError, CheckpointError, ScaleError, ClipError, OSError) as error:
        raise RecipeError(f"{where}.path: {error}") from None
    return Scales(table, origins, used)


def _require_public(root: Path, protected: Sequence[ProtectedRecords]) -> None:
    history, _ = History.read(RunDir(root).ledger)
    if history.plans or history.origins:
        raise RecipeError(
            f"{root} trained on private records, or began with weights that were, and what that spent would have to be "
            "added; name a run on public records alone, or source = released"
        )
    undeclared = [history.phase_names[number] for number, public in history.nonprivate.items() if not public]
    if undeclared:
        raise RecipeError(
            f"phase {undeclared[0]!r} of {root} trained on records that are not declared public; name another run"
        )
    for records in protected:
        if records.digests & history.without_noise():
            raise RecipeError(
                f"{root} trained without noise on the records that phase {records.phase!r} protects; name another"
            )


def _moments(loaded: Loaded, trained: Mapping[str, torch.Size]) -> dict[str, Moments]:
    """Moments of the weights that both runs train under one name, in one shape."""
    stored = set(loaded.names(SECOND_MOMENT))
    if not stored or not loaded.manifest["optimizer_step"]:
        raise RecipeError("its last checkpoint has no second moments; name a run whose last phase trained with AdamW")
    shapes = loaded.manifest["shapes"]
    common = [name for name, shape in trained.items() if name in stored and torch.Size(shapes[name]) == shape]
    if not common:
        raise RecipeError("it trained none of this phase's weights, by name and shape; name a run of the same model")
    return {name: moments_of(loaded.whole(SECOND_MOMENT, name), name) for name in common}


def moments_of(second: Tensor, name: str) -> Moments:
    """Sums are of whole numbers, which come to the same in whichever order a machine adds them: ranks and resumed runs
    must find the same scales."""
    rows, columns = as_matrix(second.shape)
    values = second.double().view(rows, columns)
    largest = float(values.max())
    if not (math.isfinite(largest) and float(values.min()) >= 0):
        raise RecipeError(f"the second moments of {name} are not finite numbers from 0 on; name another run")
    # 2^places · values below 2^62 / elements: products with powers of two are exact, and only the floor rounds.
    places = WHOLE_BITS - values.numel().bit_length() - math.frexp(largest)[1]
    whole = (values * math.ldexp(1.0, places)).floor().to(torch.int64)

    def mean(total: int, count: int) -> float:
        return math.ldexp(float(total), -places) / count

    of_rows, of_columns = whole.sum(1).tolist(), whole.sum(0).tolist()
    return Moments(
        [mean(total, columns) for total in of_rows], [mean(total, rows) for total in of_columns],
        mean(sum(of_rows), rows * columns),
    )  # fmt: skip
