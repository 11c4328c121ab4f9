"""The micro-batch that a run found for itself. It rounds the sums, so it is part of what the run is: it is found once
and written beside the ledger, where every later start finds it, whatever memory that start has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from murmuration.accounting.durable import atomic
from murmuration.accounting.strict_json import JsonError, parse
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.ranks import Ranks

NAME = "micro_batch.json"
KEY = "train_micro_batch_size_per_gpu"


def kept(run_dir: Path) -> int | None:
    """The number that the run in this directory began with."""
    path = run_dir / NAME
    try:
        found = parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (JsonError, OSError) as error:
        raise RecipeError(f"{path} cannot be read ({error}); restore it, or set {KEY} to its number") from None
    if not isinstance(found, dict) or type(number := found.get(KEY)) is not int or number < 1:
        raise RecipeError(f"{path} names no micro-batch; restore it, or set {KEY} to the run's number")
    return number


def found_once(run_dir: Path, ranks: Ranks, find: Callable[[], int]) -> tuple[int, bool]:
    """The run's own number, and whether it had one; else that which `find` gives on all ranks together. Kept."""
    known = ranks.on_main(lambda: kept(run_dir))
    if known is not None:
        return known, True
    found = find()
    ranks.on_main(lambda: _keep(run_dir, found))
    return found, False


def _keep(run_dir: Path, number: int) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    with atomic(run_dir / NAME) as file:
        file.write(json.dumps({KEY: number}).encode() + b"\n")
