"""murmuration COMMAND ...: every script of launch/ under one name; `python -m murmuration` is the same."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "init": ("murmuration.launch.init", "write a first config for your own data"),
    "train": (
        "murmuration.train.commands.train",
        "train a config (on several GPUs: deepspeed --module murmuration train ...)",
    ),
    "prepare": ("murmuration.launch.prepare", "index, pack and check data, draw synthetic data"),
    "account": ("murmuration.accounting.cli.main", "epsilon, calibration, and the verification of finished runs"),
    "plan": ("murmuration.train.commands.forecast", "time and memory of a config before it is trained"),
    "audit": ("murmuration.train.commands.audit", "test the privacy claim with canaries"),
    "evaluate": ("murmuration.launch.evaluate", "what a trained model can do, on public records"),
    "study": ("murmuration.launch.study", "train arms, values and seeds of a study; one table and one figure"),
    "use": ("murmuration.launch.use", "captions, classes or features of your own pictures by a trained model"),
    "doctor": ("murmuration.train.commands.doctor", "what this machine lacks for training"),
    "retire": ("murmuration.train.commands.retire", "certify a run that will not be continued; destroy its key"),
    "export": ("murmuration.train.commands.export", "weights and certificate for release"),
}  # fmt: skip


def main() -> int:
    # `deepspeed --module murmuration train ...` starts `python -m murmuration --local_rank=0 train ...`.
    launched = [sys.argv.pop(1)] if sys.argv[1:2] and sys.argv[1].startswith("--local_rank=") else []
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: murmuration COMMAND ...; each command explains itself with --help\n")
        print("\n".join(f"  {command:{width}}  {about}" for command, (_, about) in COMMANDS.items()))
        return 0
    if name not in COMMANDS:
        print(f"murmuration: no command {name!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    sys.argv[:2] = [f"murmuration {name}", *launched]
    return import_module(COMMANDS[name][0]).main()


if __name__ == "__main__":
    sys.exit(main())
