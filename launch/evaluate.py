"""evaluate PROTOCOL WHAT --data PUBLIC --public --out DIR: what a trained model can do, measured on public records.

WHAT is a run directory (its last checkpoint), an export, a published ViP, DP-Cap or AlexNet file, or a folder of timm
or Hugging Face. DIR gets result.json and result.html. If it is stopped, start the same command again, and it continues
where it was. Processes that torchrun or deepspeed starts share the work. `compare RESULT...` prints results side by
side.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project

from murmuration.accounting.errors import DONE, RESUME_ME, RunError
from murmuration.accounting.escaping import escape_output
from murmuration.contrib.dense.protocols import DENSE
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.models.subject import Subject
from murmuration.evaluation.protocols.options import count, natural
from murmuration.evaluation.protocols.protocol import Protocol, Request
from murmuration.evaluation.protocols.table import PROTOCOLS
from murmuration.train.commands.exit_codes import complain_per_machine, guarded, leave

if TYPE_CHECKING:
    from murmuration.data.decode.augment import Augment
    from murmuration.evaluation.models.weights import Reader
    from murmuration.model.settings import NamedPixels, PixelSettings

RESULT = "result.json"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it to each process
    commands = parser.add_subparsers(dest="command", required=True)
    for protocol in (*PROTOCOLS, *DENSE):
        declared = commands.add_parser(protocol.name, help=protocol.help)
        protocol.arguments(declared)
        _common(declared)
        declared.set_defaults(protocol=protocol)
    compare = commands.add_parser("compare", help="results side by side, and accuracy against ε")
    compare.add_argument("results", type=Path, nargs="+", help="result.json, or the folder it lies in")
    compare.add_argument("--plot", type=Path, metavar="FILE", help="draw accuracy against ε (.svg, .png or .pdf)")
    compare.add_argument("--by", choices=("epsilon", "parameters", "batch", "records"), default="epsilon",
                         help="what the plot has accuracy against: ε (default), or the size of the model, or batch and "
                         "number of records of the private training")  # fmt: skip
    return parser.parse_args(argv)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", type=Path, help="run directory, export, file of weights, or timm or Hugging Face folder"
    )
    data = parser.add_argument_group("records")
    data.add_argument("--data", required=True, help="an index, a folder of pictures, or a picture")
    data.add_argument("--public", action="store_true", help="say that these records are public, which they must be")
    data.add_argument("--public-part", action="store_true", help="only the part of them that was made public")
    data.add_argument("--view", choices=("resize-crop", "center"),
                      help="resize-crop: resize, then crop the middle, as published; center: all of the middle square; "
                      "default: as the model's own run measured, or else as published")  # fmt: skip
    data.add_argument("--resize", type=count, help="shorter side before the crop (default 256)")
    data.add_argument("--crop", type=count, help="side of the crop (default 224); for a model of another side, both "
                      "are scaled alike")  # fmt: skip
    data.add_argument("--pixels", metavar="PIXELS", help='imagenet, half, or {"mean": [r, g, b], "std": [r, g, b]}, '
                      "where nothing beside the weights says how their pixels were normalised")  # fmt: skip
    model = parser.add_argument_group("model")
    model.add_argument(
        "--config", type=Path, help="the JSON of the training, where weights do not describe their model"
    )
    model.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a key of it")
    model.add_argument("--best", action="store_true", help="a run's best checkpoint by run.keep_best, not its last one")
    model.add_argument("--heads", type=count, help="of the encoder, where a published file is of an unknown width")
    model.add_argument("--decoder-heads", type=count, help="of the decoder, likewise")
    model.add_argument("--image-size", type=count, help="other than the model's; positions are interpolated")
    work = parser.add_argument_group("computation")
    work.add_argument("--out", type=Path, required=True, help="folder for the result")
    work.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    work.add_argument("--micro-batch", type=count, default=64, help="pictures computed together (default 64)")
    work.add_argument("--workers", type=natural, help="decoding processes (default: one per core but one; 0: none)")


def main(argv: list[str] | None = None) -> int:
    escape_output()
    arguments = parse(argv)
    try:
        if arguments.command == "compare":
            return _compare(arguments)
        request = _checked(arguments)
    except (RunError, OSError) as error:
        return complain_per_machine(error)
    main_rank = os.environ.get("RANK", "0") == "0"
    try:
        code = guarded(lambda: _measured(request), main_rank)
    except KeyboardInterrupt:
        if main_rank:
            print("stopped; start the same command again", file=sys.stderr)
        code = RESUME_ME
    if os.environ.get("WORLD_SIZE", "1") != "1":
        leave(code)
    return code


def _measured(request: Request) -> int:
    # Heavy imports only now: bad input is refused within a second.
    from murmuration.evaluation.evaluate import run

    told = run(request)
    if told is not None:
        print(told)
    return DONE


def _baselines() -> tuple[Reader, ...]:
    from murmuration.contrib.alexnet import read_alexnet

    return (read_alexnet,)


def _checked(arguments: argparse.Namespace) -> Request:
    """Everything that can be refused without torch."""
    from murmuration.evaluation.session.public_records import place_of  # with NumPy, which --help need not wait for

    protocol: Protocol = arguments.protocol
    places = {
        name: place_of(getattr(arguments, option), f"--{option}", arguments.public)
        for name, option in protocol.records.items()
    }
    for name in protocol.files:
        given = getattr(arguments, name) or []
        for path in given if isinstance(given, list) else [given]:
            if not path.is_file():
                raise EvaluationError(f"--{name.replace('_', '-')} {path} does not exist; name a file")
    protocol.check(arguments)
    view = _view_of(arguments)
    if (arguments.out / RESULT).exists():
        raise EvaluationError(f"{arguments.out} holds a result; name another folder for --out")
    pixels = _pixels_of(arguments.pixels)
    subject = Subject.at(arguments.what, arguments.config, arguments.set, arguments.best)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if protocol.private:
        arguments.out.chmod(0o700)
    return Request(protocol, arguments, subject, places, view, pixels, _baselines)


def _pixels_of(text: str | None) -> NamedPixels | PixelSettings | None:
    from murmuration.model.settings import SettingsError, read_pixels

    try:
        return None if text is None else read_pixels(text)
    except SettingsError as error:
        raise EvaluationError(str(error)) from None


def _view_of(arguments: argparse.Namespace) -> Augment | None:
    from murmuration.data.decode.augment import ResizeCrop, require_known

    if arguments.view == "center":
        if arguments.resize or arguments.crop:
            raise EvaluationError("--view center neither resizes nor crops; leave --resize and --crop out, or the view")
        return "center"
    given = {name: value for name in ResizeCrop._fields if (value := getattr(arguments, name)) is not None}
    if not given and arguments.view is None:
        return None
    view = ResizeCrop(**given)
    try:
        require_known(view)
    except ValueError as error:
        raise EvaluationError(f"--resize and --crop: {error}") from None
    return view


def _compare(arguments: argparse.Namespace) -> int:
    from murmuration.evaluation.session.compare import lines_of, plot, table

    lines = lines_of(arguments.results)
    print(table(lines))
    seen: dict[str, set[str]] = {}
    for line in lines:
        seen.setdefault(line.protocol, set()).add(line.records)
    for protocol, records in seen.items():
        if len(records) > 1:
            print(f"note: the results of {protocol} were measured on different records, and do not compare")
    if arguments.plot is not None:
        plot(lines, arguments.plot, arguments.by)
        print(arguments.plot)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
