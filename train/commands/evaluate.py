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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murmuration.accounting.errors import DONE, RESUME_ME, RunError
from murmuration.train.commands.exits import complain_per_machine, guarded, leave

if TYPE_CHECKING:
    from murmuration.data.decode.augment import Augment
    from murmuration.model.settings import NamedPixels, PixelSettings
    from murmuration.train.evaluate.public_records import RecordsPlace
    from murmuration.train.evaluate.subject import EvaluationRequest

RESULT = "result.json"
TRAINED = ("fine-tune", "detect", "segment")
"""Protocols that train all weights."""
LEARNING = ("probe", "few-shot", *TRAINED)
"""Protocols that learn from --data and score --test."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it to each process
    protocols = parser.add_subparsers(dest="protocol", required=True)
    learning = (_probe, _few_shot, _fine_tune, _detect, _segment)
    captioning = (_zero_shot, _retrieval, _aro, _caption)
    for declare in (*learning, *captioning, _classify, _reconstruct, _attack):
        _common(declare(protocols))
    compare = protocols.add_parser("compare", help="results side by side, and accuracy against ε")
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
    data.add_argument("--view", choices=("resize-crop", "center"), default="resize-crop",
                      help="resize-crop: resize, then crop the middle, as published; center: all of the middle square, "
                      "as during training")  # fmt: skip
    data.add_argument("--resize", type=_count, help="shorter side before the crop (default 256)")
    data.add_argument("--crop", type=_count, help="side of the crop (default 224); for a model of another side, both "
                      "are scaled alike")  # fmt: skip
    data.add_argument("--pixels", metavar="PIXELS", help='imagenet, half, or {"mean": [r, g, b], "std": [r, g, b]}, '
                      "where nothing beside the weights says how their pixels were normalised")  # fmt: skip
    model = parser.add_argument_group("model")
    model.add_argument(
        "--config", type=Path, help="the JSON of the training, where weights do not describe their model"
    )
    model.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a key of it")
    model.add_argument("--best", action="store_true", help="a run's best checkpoint by run.keep_best, not its last one")
    model.add_argument("--heads", type=_count, help="of the encoder, where a published file is of an unknown width")
    model.add_argument("--decoder-heads", type=_count, help="of the decoder, likewise")
    model.add_argument("--image-size", type=_count, help="other than the model's; positions are interpolated")
    work = parser.add_argument_group("computation")
    work.add_argument("--out", type=Path, required=True, help="folder for the result")
    work.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    work.add_argument("--micro-batch", type=_count, default=64, help="pictures computed together (default 64)")
    work.add_argument("--workers", type=_natural, help="decoding processes (default: one per core but one; 0: none)")


def _probe(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("probe", help="a linear classifier on frozen features, trained on --data")
    _linear(parser)
    return parser


def _few_shot(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("few-shot", help="linear classifiers that learn from few records of --data")
    _draws(parser, "what is learnt from, at least one of")
    _linear(parser)
    return parser


def _draws(parser: argparse.ArgumentParser, what: str) -> None:
    draws = parser.add_argument_group(what)
    draws.add_argument("--shots", type=_count, nargs="+", default=[], metavar="K", help="records of each class")
    draws.add_argument("--percent", type=_percent, nargs="+", default=[], metavar="P", help="of each class")
    draws.add_argument("--list", type=Path, nargs="+", default=[], metavar="FILE", help="with one file name per line; "
                       "several are draws of one measure")  # fmt: skip
    draws.add_argument("--draws", type=_count, default=3, help="of --shots and --percent, by seeds 0, 1, …; default 3")


def _fine_tune(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("fine-tune", help="a classifier of which all weights learn from --data")
    _draws(parser, "to learn from few records of --data, once for each draw")
    _labels(parser)
    _training(parser, warmup=5, batch=1024, base_rate=5e-4, layer_decay=0.65, weight_decay=0.05)
    parser.add_argument("--drop-path", type=_part, default=0.1, help="of the last block; default 0.1")
    parser.add_argument("--mixup", type=_part, default=0.8, help="its α; 0: none; default 0.8")
    parser.add_argument("--cutmix", type=_part, default=1.0, help="its α; 0: none; default 1")
    parser.add_argument("--erase", type=_part, default=0.25, help="probability; default 0.25")
    parser.add_argument("--smoothing", type=_part, default=0.1, help="of labels; default 0.1")
    parser.add_argument("--rand-augment", default="rand-m9-mstd0.5-inc1", help="as timm writes it; empty: none")
    return parser


def _detect(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("detect", help="Mask R-CNN on the encoder, trained on --data, laid out as COCO is")
    parser.add_argument("--objects", type=Path, metavar="JSON", help="COCO's instances for --data; default: "
                        "../annotations/instances_FOLDER.json beside it")  # fmt: skip
    parser.add_argument("--test-objects", type=Path, metavar="JSON", help="the same for --test")
    _training(parser, warmup=1, batch=64, base_rate=4e-4, layer_decay=0.7, weight_decay=0.1)
    parser.add_argument("--channels", type=_count, default=256, help="of the pyramid; default 256")
    return parser


def _segment(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("segment", help="UPerNet on the encoder, trained on --data, laid out as ADE20K is")
    parser.add_argument("--marks", type=Path, metavar="FOLDER", help="PNG files with a class for each pixel of --data; "
                        "default: ../../annotations/FOLDER beside it")  # fmt: skip
    parser.add_argument("--test-marks", type=Path, metavar="FOLDER", help="the same for --test")
    parser.add_argument("--class-names", type=Path, metavar="FILE", help="one per line, or ADE20K's objectInfo150.txt, "
                        "which is found two folders above --data")  # fmt: skip
    _training(parser, warmup=1, batch=16, base_rate=1.6e-3, layer_decay=0.65, weight_decay=0.05)
    parser.add_argument("--channels", type=_count, default=512, help="of pyramid and UPerNet; default 512")
    return parser


def _training(
    parser: argparse.ArgumentParser, warmup: int, batch: int, base_rate: float, layer_decay: float, weight_decay: float
) -> None:
    """Options for training all weights; the numbers are the protocol's defaults."""
    parser.add_argument("--test", required=True, help="records to score, an index or a folder; public ones, too")
    parser.add_argument("--epochs", type=_count, default=100, help="default 100")
    parser.add_argument("--warmup", type=_natural, default=warmup, help=f"epochs; default {warmup}")
    parser.add_argument("--batch", type=_count, default=batch, help=f"default {batch}, or all records if fewer")
    parser.add_argument(
        "--base-rate", type=_positive, default=base_rate, help=f"for a batch of 256; default {base_rate:g}"
    )
    parser.add_argument(
        "--layer-decay", type=_probability, default=layer_decay, help=f"of the rate per block; default {layer_decay}"
    )
    parser.add_argument("--weight-decay", type=_part, default=weight_decay, help=f"default {weight_decay}")
    parser.add_argument("--seed", type=_natural, default=0, help="of order, augmentation and everything else drawn")


def _linear(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--way", choices=("dpcap", "vip"), default="dpcap",
                        help="dpcap: logistic regression on normalised mean tokens; vip: BatchNorm and LARS on the "
                        "pooled tokens of all blocks")  # fmt: skip
    parser.add_argument("--test", required=True, help="records to score, an index or a folder; public ones, too")
    _labels(parser)
    parser.add_argument("--iterations", type=_count, default=1000, help="most of L-BFGS's (dpcap; default 1000)")
    parser.add_argument("--views", type=_natural, default=0, help="random crops per training record (vip; published: "
                        "a new one in each epoch; default 0: one view, not random)")  # fmt: skip
    parser.add_argument("--epochs", type=_count, default=90, help="vip; default 90")
    parser.add_argument("--warmup", type=_natural, default=10, help="epochs; vip; default 10")
    parser.add_argument("--batch", type=_count, default=16384, help="vip; default 16384, or all records if fewer")
    parser.add_argument("--base-rate", type=_positive, default=0.1, help="for a batch of 256; vip; default 0.1")
    parser.add_argument("--seed", type=_natural, default=0, help="of the first weights and the batches; vip")


def _zero_shot(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("zero-shot", help="labels by a captioner that was trained on none")
    parser.add_argument("--way", choices=("label", "trie"), default="label",
                        help="label: the least surprising name; trie: the name it writes, token by token")  # fmt: skip
    _labels(parser)
    parser.add_argument(
        "--names", type=Path, metavar="JSON", help="{class: [name, synonym, ...]}; default: the classes"
    )
    parser.add_argument(
        "--template", action="append", metavar="TEXT",
        help='with {} for the name; several are averaged; default: "this is a photo of a {}", or "a photo of a {}" if '
        "the tokenizer does not know all of its words",
    )  # fmt: skip
    _text(parser)
    _some(parser, "trie: default 10000")
    return parser


def _retrieval(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("retrieval", help="captions for pictures and pictures for captions, by likelihood")
    _references(parser)
    _text(parser)
    _some(parser, "default: all; not with --captions")
    return parser


def _aro(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("aro", help="the true one of several captions: relations, attributes, order")
    parser.add_argument(
        "--cases", type=Path, metavar="JSON",
        help="visual_genome_relation.json, visual_genome_attribution.json, or [{image, options, true}]",
    )  # fmt: skip
    parser.add_argument(
        "--captions", type=Path, metavar="JSON",
        help="instead of --cases: a Karpathy split or [{image, caption}], whose words are put in other orders",
    )  # fmt: skip
    parser.add_argument("--split", help="of a Karpathy file; default: all of it")
    parser.add_argument("--tags", type=Path, metavar="JSON", help="parts of speech, [{caption, words, tags}], for the "
                        "two orders that need them")  # fmt: skip
    parser.add_argument("--seed", type=_natural, default=0, help="of the orders")
    _text(parser)
    return parser


def _classify(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("classify", help="a classifier's predictions, scored where classes are known")
    _labels(parser, default=None)
    parser.add_argument(
        "--multi-label", action="store_true", help="--label is a field that lists any number of classes: mean average "
        "precision",
    )  # fmt: skip
    parser.add_argument("--real", type=Path, metavar="JSON", help="ReaL: all right classes, {picture: [class, ...]}, "
                        "or the published real.json for ImageNet's validation set")  # fmt: skip
    _some(parser, "default: all")
    _gallery(parser)
    return parser


def _caption(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("caption", help="captions of pictures, on a page")
    parser.add_argument("--decode", choices=("greedy", "beam", "nucleus"), default="greedy")
    parser.add_argument("--beams", type=_count, default=5, help="of a beam search; default 5")
    parser.add_argument("--p", type=_probability, default=0.9, help="of the nucleus; default 0.9")
    parser.add_argument("--seed", type=_natural, default=0, help="of the nucleus' draws")
    _references(parser)
    _text(parser)
    _some(parser, "default: all; not with --captions")
    _gallery(parser)
    return parser


def _reconstruct(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser("reconstruct", help="hidden patches filled in by a masked autoencoder, on a page")
    _some(parser, "default: all")
    _gallery(parser)
    return parser


def _attack(protocols: Any) -> argparse.ArgumentParser:
    parser = protocols.add_parser(
        "attack", help="membership inference: were the records of --data trained on, and those of --others not?"
    )
    parser.add_argument("--others", required=True, help="records that were not trained on, of the same kind")
    parser.add_argument(
        "--stand-in", action="store_true",
        help="say that --data are public or synthetic records that only play the private set of a run; it is logged "
        "with them, and the result is for the owner alone",
    )  # fmt: skip
    parser.add_argument(
        "--shadow", type=Path, nargs="+", action="append", default=[], metavar=("WHAT", "FILE"),
        help="for LiRA: a model trained likewise, and a list of those of the records it was trained on; at least two "
        "without each record",
    )  # fmt: skip
    _labels(parser, default=None)
    _text(parser)
    _some(parser, "of each kind; default: as many as there are of the fewer")
    return parser


def _references(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--captions", type=Path, metavar="JSON",
        help="pictures of --data with their captions: a Karpathy split or [{image, caption}]; default: the .txt beside "
        "each picture",
    )  # fmt: skip
    parser.add_argument("--split", help="of a Karpathy file; default: all of it")


def _labels(parser: argparse.ArgumentParser, default: str | None = "cls") -> None:
    parser.add_argument("--label", default=default, help="number in a record's .json, or cls: its .cls or class folder")
    parser.add_argument("--classes", type=Path, help="file with one class per line; default: the class folders")


def _text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", help='file, or "clip"; default: that of the training')


def _some(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--records", type=_count, help=f"score so many, drawn by a fixed seed ({default})")


def _gallery(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gallery", type=_natural, default=48, help="pictures on the page (default 48)")


def _number(kind: Callable[[str], float], fits: Callable[[float], bool], what: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        with suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {what}")

    return read


_count = _number(int, lambda value: 1 <= value < 1 << 40, "a whole number above 0")
_natural = _number(int, lambda value: 0 <= value < 1 << 40, "a whole number")
_positive = _number(float, lambda value: 0 < value < float("inf"), "a number above 0")
_percent = _number(float, lambda value: 0 < value <= 100, "a percentage above 0")
_part = _number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
_probability = _number(float, lambda value: 0 < value <= 1, "a probability above 0")


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        if arguments.protocol == "compare":
            return _compare(arguments)
        asked = _checked(arguments)
    except (RunError, OSError) as error:
        return complain_per_machine(error)
    main_rank = os.environ.get("RANK", "0") == "0"
    try:
        code = guarded(lambda: _measured(asked), main_rank)
    except KeyboardInterrupt:
        if main_rank:
            print("stopped; start the same command again", file=sys.stderr)
        code = RESUME_ME
    if os.environ.get("WORLD_SIZE", "1") != "1":
        leave(code)
    return code


def _measured(asked: EvaluationRequest) -> int:
    # Heavy imports only now: bad input is refused within a second.
    from murmuration.train.evaluate.protocols import run

    told = run(asked)
    if told is not None:
        print(told)
    return DONE


def _checked(arguments: argparse.Namespace) -> EvaluationRequest:
    """Everything that can be refused without torch."""
    from murmuration.train.evaluate.errors import EvaluationError
    from murmuration.train.evaluate.subject import EvaluationRequest, Subject

    places = _places(arguments)
    _check_options(arguments)
    view = _view_of(arguments)
    if (arguments.out / RESULT).exists():
        raise EvaluationError(f"{arguments.out} holds a result; name another folder for --out")
    pixels = _pixels_of(arguments.pixels)
    subject = Subject.at(arguments.what, arguments.config, arguments.set, arguments.best)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.protocol == "attack":
        arguments.out.chmod(0o700)
    return EvaluationRequest(arguments, subject, places, view, pixels)


def _pixels_of(text: str | None) -> NamedPixels | PixelSettings | None:
    from pydantic import ValidationError

    from murmuration.model.settings import NAMED_PIXELS, PixelSettings
    from murmuration.train.evaluate.errors import EvaluationError

    if text is None:
        return None
    for name in NAMED_PIXELS:
        if name == text:
            return name
    try:
        return PixelSettings.model_validate_json(text)
    except ValidationError:
        raise EvaluationError(
            f'--pixels {text}: write imagenet, half, or {{"mean": [r, g, b], "std": [r, g, b]}} with deviations above 0'
        ) from None


def _view_of(arguments: argparse.Namespace) -> Augment:
    from murmuration.data.decode.augment import ResizeCrop, require_known
    from murmuration.train.evaluate.errors import EvaluationError

    if arguments.view == "center":
        if arguments.resize or arguments.crop:
            raise EvaluationError("--view center neither resizes nor crops; leave --resize and --crop out, or the view")
        return "center"
    given = {name: getattr(arguments, name) for name in ResizeCrop._fields}
    view = ResizeCrop(**{name: value for name, value in given.items() if value is not None})
    try:
        require_known(view)
    except ValueError as error:
        raise EvaluationError(f"--resize and --crop: {error}") from None
    return view


def _places(arguments: argparse.Namespace) -> dict[str, RecordsPlace]:
    from murmuration.train.evaluate.public_records import place_of

    data = place_of(arguments.data, "--data", arguments.public)
    if arguments.protocol in LEARNING:
        return {"train": data, "test": place_of(arguments.test, "--test", arguments.public)}
    if arguments.protocol == "attack":
        return {"members": data, "others": place_of(arguments.others, "--others", arguments.public)}
    return {"test": data}


def _check_options(arguments: argparse.Namespace) -> None:
    from murmuration.train.evaluate.errors import EvaluationError

    files = ("classes", "names", "real", "list", "captions", "cases", "tags", "objects", "test_objects", "class_names")
    for name in files:
        given = getattr(arguments, name, None) or []
        for path in given if isinstance(given, list) else [given]:
            if not path.is_file():
                raise EvaluationError(f"--{name.replace('_', '-')} {path} does not exist; name a file")
    if arguments.protocol == "few-shot" and not (arguments.shots or arguments.percent or arguments.list):
        raise EvaluationError(
            "few-shot needs to know from how many records to learn; pass --shots, --percent or --list"
        )
    if arguments.protocol == "aro" and (arguments.cases is None) == (arguments.captions is None):
        raise EvaluationError("aro reads cases or makes them of captions; pass either --cases or --captions")
    if arguments.protocol == "aro" and arguments.tags is not None and arguments.captions is None:
        raise EvaluationError("--tags are of captions to put in other orders; pass --captions with them")
    if getattr(arguments, "captions", None) is not None and getattr(arguments, "records", None) is not None:
        raise EvaluationError("--records draws from --data, and --captions lists the pictures; pass one of them")
    if wrong := next((each for each in getattr(arguments, "shadow", []) if len(each) > 2), None):
        raise EvaluationError(f"--shadow takes a model and a list, but was given {len(wrong)} names; repeat it")


def _compare(arguments: argparse.Namespace) -> int:
    from murmuration.train.evaluate.compare import different_records, lines_of, plot, table

    lines = lines_of(arguments.results)
    print(table(lines))
    for protocol in different_records(lines):
        print(f"note: the results of {protocol} were measured on different records, and do not compare")
    if arguments.plot is not None:
        plot(lines, arguments.plot, arguments.by)
        print(arguments.plot)
    return DONE
