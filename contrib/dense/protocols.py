"""Detection and segmentation as protocols of `evaluate`. Free of torch."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from murmuration.evaluation.protocols import options
from murmuration.evaluation.protocols.protocol import LEARNT_AND_SCORED, Protocol

HERE = "murmuration.contrib.dense"


def _detect(parser: ArgumentParser) -> None:
    parser.add_argument("--objects", type=Path, metavar="JSON", help="COCO's instances for --data; default: "
                        "../annotations/instances_FOLDER.json beside it")  # fmt: skip
    parser.add_argument("--test-objects", type=Path, metavar="JSON", help="the same for --test")
    options.training(parser, warmup=1, batch=64, base_rate=4e-4, layer_decay=0.7, weight_decay=0.1)
    parser.add_argument("--channels", type=options.count, default=256, help="of the pyramid; default 256")


def _segment(parser: ArgumentParser) -> None:
    parser.add_argument("--marks", type=Path, metavar="FOLDER", help="PNG files with a class for each pixel of --data; "
                        "default: ../../annotations/FOLDER beside it")  # fmt: skip
    parser.add_argument("--test-marks", type=Path, metavar="FOLDER", help="the same for --test")
    parser.add_argument("--class-names", type=Path, metavar="FILE", help="one per line, or ADE20K's objectInfo150.txt, "
                        "which is found two folders above --data")  # fmt: skip
    options.training(parser, warmup=1, batch=16, base_rate=1.6e-3, layer_decay=0.65, weight_decay=0.05)
    parser.add_argument("--channels", type=options.count, default=512, help="of pyramid and UPerNet; default 512")


DENSE = (
    Protocol(
        "detect", "Mask R-CNN on the encoder, trained on --data, laid out as COCO is", _detect, f"{HERE}.detect",
        LEARNT_AND_SCORED, files=("objects", "test_objects"),
    ),
    Protocol(
        "segment", "UPerNet on the encoder, trained on --data, laid out as ADE20K is", _segment, f"{HERE}.segment",
        LEARNT_AND_SCORED, files=("class_names",),
    ),
)  # fmt: skip
