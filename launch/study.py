"""study FILE: trains every arm of a study with every seed, evaluates it, and writes one table and one figure.

FILE is one of ds_configs/studies, or your own. OUT gets study.json, study.html, study.png, and the runs with their
certificates. If it is stopped, start the same command again: what is finished is not trained again.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project

from murmuration.accounting.errors import BAD_INPUT, DONE, RESUME_ME, InputError, RunError
from murmuration.accounting.escaping import escape_output
from murmuration.train.commands.exit_codes import complain

if TYPE_CHECKING:
    from murmuration.evaluation.study.study_file import Run, Study
    from murmuration.evaluation.study.train_runs import Folder


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="study.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path, metavar="FILE", help="one of ds_configs/studies/*.json, or your own")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C",
                        help="override a key of the study, such as size=cifar or seeds=1; may be repeated")  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of the runs and results (default: runs/studies/NAME)")
    parser.add_argument("--jobs", type=int, help="runs trained at a time (default: one per core; with GPUs or a "
                        "launcher: 1)")  # fmt: skip
    parser.add_argument("--launcher", default="", metavar="COMMAND",
                        help="start each run by it: 'deepspeed --num_gpus 8'; default: one process")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check every run, say what it would be, and stop")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    escape_output()
    arguments = parse(argv)
    from murmuration.evaluation.study.plan_runs import plan_in_words, require_budgets, require_sound
    from murmuration.evaluation.study.study_file import load_study, runs_of

    try:
        if arguments.jobs is not None and arguments.jobs < 1:
            raise InputError(f"--jobs must be at least 1, but is {arguments.jobs}")
        study = load_study(arguments.study, arguments.set)
        out = (arguments.out or Path("runs") / "studies" / arguments.study.stem).absolute()
        runs = runs_of(study, out)
        trained = [run for run in runs if run.weights is None]
        configs = require_sound(trained)
        if arguments.dry_run:
            print(plan_in_words(study, runs, configs))
            return DONE
        from murmuration.evaluation.study.train_runs import Folder

        folder = Folder(out)
        left = [(run, config) for run, config in zip(trained, configs, strict=True) if not folder.trained(run)]
        require_budgets([config for _, config in left], {folder.id_of(run) for run, _ in left} - {None})
        with folder.held():
            folder.claim(runs)
            return carry_out(study, runs, folder, arguments)
    except (RunError, OSError) as error:
        return complain(error)


def carry_out(study: Study, runs: list[Run], folder: Folder, arguments: argparse.Namespace) -> int:
    from murmuration.evaluation.session.compare import aligned
    from murmuration.evaluation.study.outcome import cost_in_words, outcome_of, table_of, write
    from murmuration.evaluation.study.train_runs import Forked, Launched, train_all

    jobs = arguments.jobs or (1 if arguments.launcher or has_gpu() else len(os.sched_getaffinity(0)))
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    start = partial(Launched, arguments.launcher) if arguments.launcher else partial(Forked, threads)
    ended = train_all(study, runs, folder, start, jobs, partial(print, flush=True))
    found = outcome_of(study, runs, ended, folder)
    write(study, found, folder.root)
    print(f"\n{aligned(table_of(study, found))}\n\n{cost_in_words(found['cost'])}\n{folder.root / 'study.html'}")
    if len(ended) < len(runs):
        print(f"stopped with {len(runs) - len(ended)} of {len(runs)} runs left; start the same command again")
        return RESUME_ME
    failed = [each for each in ended if each.fault is not None]
    for each in failed:
        print(f"error: {each.run.name} failed: {each.fault} ({folder.log(each.run)})", file=sys.stderr)
    return (failed[0].code or BAD_INPUT) if failed else DONE


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
