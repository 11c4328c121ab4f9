"""Run by several ranks: every shipped recipe at toy size, each through what stands behind the command line.

`recipes_worker.py begin DATA RUNS NAME …` trains them in this order, and stops the private ones after a few steps;
`resume` goes on with those.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from murmuration.accounting.errors import DONE
from murmuration.train.commands.exit_codes import guarded, joined
from murmuration.train.commands.train import parse
from murmuration.train.config.load import load
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.recipe.read_options import agree
from murmuration.train.recipe.ready_phase import prepare
from murmuration.train.run.run import run_all
from murmuration.train.storage.run_dir import run_dir_of
from tests.end_to_end.toy_recipes import overrides
from tests.support.answering import answer
from tests.support.shipped_recipes import FILES

STOP_AT = 3


def command(name: str, data: Path, runs: Path) -> list[str]:
    settings = [f"{key}={json.dumps(value)}" for key, value in overrides(FILES[name], data, runs).items()]
    return ["--config", str(FILES[name]), *(part for each in settings for part in ("--set", each))]


def trained(argv: list[str], ranks: Ranks | None) -> tuple[int, Ranks]:
    arguments = parse(argv)
    config = load(arguments.config, arguments.set)
    phases = prepare(config)
    ranks = ranks or joined(config)

    def act() -> int:
        run_all(arguments, config, agree(phases, ranks), run_dir_of(config, arguments.config), ranks)
        return DONE

    return guarded(act, ranks.main), ranks


def stop_at(run_dir: Path, step: int, done: threading.Event) -> None:
    ledger = run_dir / "ledger.jsonl"
    while not done.is_set():
        if ledger.exists() and ledger.read_text().count('"kind":"open"') >= step:
            (run_dir / "stop").touch()
            return
        time.sleep(0.005)


def main() -> None:
    act, *given = (each for each in sys.argv[1:] if not each.startswith("--"))  # the launcher's own --local_rank
    data, runs = Path(given[0]), Path(given[1])
    ranks: Ranks | None = None
    found: dict[str, int] = {}
    for name in given[2:]:
        done = threading.Event()
        asking = threading.Thread(target=stop_at, args=(runs / name, STOP_AT, done), daemon=True)
        if act == "begin" and (ranks is None or ranks.main):
            asking.start()
        found[name], ranks = trained(command(name, data, runs), ranks)
        done.set()
        if ranks.main:
            print(f"{name} ended with {found[name]}", flush=True)
        ranks.barrier()
    assert ranks is not None
    answer(ranks, found)


if __name__ == "__main__":
    main()
