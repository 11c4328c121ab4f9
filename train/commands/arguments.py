"""The arguments of every command that takes a config."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config(parser: argparse.ArgumentParser, launched: bool = True) -> None:
    """`launched`: by `deepspeed`, which passes each rank its number as --local_rank unasked."""
    parser.add_argument("--config", type=Path, required=True, help="one of ds_configs/*.json, or your own")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a key; may be repeated")
    if launched:
        parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
