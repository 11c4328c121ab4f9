"""Options that several protocols share, and the kinds of numbers that they take."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def _number(kind: Callable[[str], float], fits: Callable[[float], bool], what: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        with suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {what}")

    return read


count = _number(int, lambda value: 1 <= value < 1 << 40, "a whole number above 0")
natural = _number(int, lambda value: 0 <= value < 1 << 40, "a whole number")
positive = _number(float, lambda value: 0 < value < float("inf"), "a number above 0")
percent = _number(float, lambda value: 0 < value <= 100, "a percentage above 0")
part = _number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
probability = _number(float, lambda value: 0 < value <= 1, "a probability above 0")


def labels(parser: ArgumentParser, default: str | None = "cls") -> None:
    parser.add_argument("--label", default=default, help="number in a record's .json, or cls: its .cls or class folder")
    parser.add_argument("--classes", type=Path, help="file with one class per line; default: the class folders")


def references(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--captions", type=Path, metavar="JSON",
        help="pictures of --data with their captions: a Karpathy split or [{image, caption}]; default: the .txt beside "
        "each picture",
    )  # fmt: skip
    parser.add_argument("--split", help="of a Karpathy file; default: all of it")


def tokenizer(parser: ArgumentParser) -> None:
    parser.add_argument("--tokenizer", help='file, or "clip"; default: that of the training')


def records(parser: ArgumentParser, default: str) -> None:
    parser.add_argument("--records", type=count, help=f"score so many, drawn by a fixed seed ({default})")


def gallery(parser: ArgumentParser) -> None:
    parser.add_argument("--gallery", type=natural, default=48, help="pictures on the page (default 48)")


def draws(parser: ArgumentParser, what: str) -> None:
    group = parser.add_argument_group(what)
    group.add_argument("--shots", type=count, nargs="+", default=[], metavar="K", help="records of each class")
    group.add_argument("--percent", type=percent, nargs="+", default=[], metavar="P", help="of each class")
    group.add_argument("--list", type=Path, nargs="+", default=[], metavar="FILE", help="with one file name per line; "
                       "several are draws of one measure")  # fmt: skip
    group.add_argument("--draws", type=count, default=3, help="of --shots and --percent, by seeds 0, 1, …; default 3")


def linear(parser: ArgumentParser) -> None:
    parser.add_argument("--way", choices=("dpcap", "vip"), default="dpcap",
                        help="dpcap: logistic regression on normalised mean tokens; vip: BatchNorm and LARS on the "
                        "pooled tokens of all blocks")  # fmt: skip
    parser.add_argument("--test", required=True, help="records to score, an index or a folder; public ones, too")
    labels(parser)
    parser.add_argument("--iterations", type=count, default=1000, help="most of L-BFGS's (dpcap; default 1000)")
    parser.add_argument("--views", type=natural, default=0, help="random crops per training record (vip; published: "
                        "a new one in each epoch; default 0: one view, not random)")  # fmt: skip
    parser.add_argument("--epochs", type=count, help="vip; default 90, up to 50 times as many on small sets")
    parser.add_argument("--warmup", type=natural, default=10, help="epochs; vip; default 10")
    parser.add_argument("--batch", type=count, default=16384, help="vip; default 16384, or all records if fewer")
    parser.add_argument("--base-rate", type=positive, default=0.1, help="for a batch of 256; vip; default 0.1")
    parser.add_argument("--seed", type=natural, default=0, help="of the first weights and the batches; vip")


def training(
    parser: ArgumentParser, warmup: int, batch: int, base_rate: float, layer_decay: float, weight_decay: float
) -> None:
    """For training all weights; the numbers are the protocol's defaults."""
    parser.add_argument("--test", required=True, help="records to score, an index or a folder; public ones, too")
    parser.add_argument("--epochs", type=count, default=100, help="default 100")
    parser.add_argument("--warmup", type=natural, default=warmup, help=f"epochs; default {warmup}")
    parser.add_argument("--batch", type=count, default=batch, help=f"default {batch}, or all records if fewer")
    parser.add_argument(
        "--base-rate", type=positive, default=base_rate, help=f"for a batch of 256; default {base_rate:g}"
    )
    parser.add_argument(
        "--layer-decay", type=probability, default=layer_decay, help=f"of the rate per block; default {layer_decay}"
    )
    parser.add_argument("--weight-decay", type=part, default=weight_decay, help=f"default {weight_decay}")
    parser.add_argument("--seed", type=natural, default=0, help="of order, augmentation and everything else drawn")
