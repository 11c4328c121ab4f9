"""The protocols of `evaluate`: each is declared here, and runs in the module that it names."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.protocols import options
from murmuration.evaluation.protocols.protocol import LEARNT_AND_SCORED, Protocol

HERE = "murmuration.evaluation.protocols"


def _few_shot(parser: ArgumentParser) -> None:
    options.draws(parser, "what is learnt from, at least one of")
    options.linear(parser)


def _check_few_shot(arguments: Namespace) -> None:
    if not (arguments.shots or arguments.percent or arguments.list):
        raise EvaluationError(
            "few-shot needs to know from how many records to learn; pass --shots, --percent or --list"
        )


def _fine_tune(parser: ArgumentParser) -> None:
    options.draws(parser, "to learn from few records of --data, once for each draw")
    options.labels(parser)
    options.training(parser, warmup=5, batch=1024, base_rate=5e-4, layer_decay=0.65, weight_decay=0.05)
    parser.add_argument("--drop-path", type=options.part, default=0.1, help="of the last block; default 0.1")
    parser.add_argument("--mixup", type=options.part, default=0.8, help="its α; 0: none; default 0.8")
    parser.add_argument("--cutmix", type=options.part, default=1.0, help="its α; 0: none; default 1")
    parser.add_argument("--erase", type=options.part, default=0.25, help="probability; default 0.25")
    parser.add_argument("--smoothing", type=options.part, default=0.1, help="of labels; default 0.1")
    parser.add_argument("--rand-augment", default="rand-m9-mstd0.5-inc1", help="as timm writes it; empty: none")


def _zero_shot(parser: ArgumentParser) -> None:
    parser.add_argument("--way", choices=("label", "trie"), default="label",
                        help="label: the least surprising name; trie: the name it writes, token by token")  # fmt: skip
    options.labels(parser)
    parser.add_argument(
        "--names", type=Path, metavar="JSON", help="{class: [name, synonym, ...]}; default: the classes"
    )
    parser.add_argument(
        "--template", action="append", metavar="TEXT",
        help='with {} for the name; several are averaged; default: "this is a photo of a {}", or "a photo of a {}" if '
        "the tokenizer does not know all of its words",
    )  # fmt: skip
    options.tokenizer(parser)
    options.records(parser, "trie: default 10000")


def _retrieval(parser: ArgumentParser) -> None:
    options.references(parser)
    options.tokenizer(parser)
    options.records(parser, "default: all; not with --captions")


def _aro(parser: ArgumentParser) -> None:
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
    parser.add_argument("--seed", type=options.natural, default=0, help="of the orders")
    options.tokenizer(parser)


def _check_aro(arguments: Namespace) -> None:
    if (arguments.cases is None) == (arguments.captions is None):
        raise EvaluationError("aro reads cases or makes them of captions; pass either --cases or --captions")
    if arguments.tags is not None and arguments.captions is None:
        raise EvaluationError("--tags are of captions to put in other orders; pass --captions with them")


def _caption(parser: ArgumentParser) -> None:
    parser.add_argument("--decode", choices=("greedy", "beam", "nucleus"), default="greedy")
    parser.add_argument("--beams", type=options.count, default=5, help="of a beam search; default 5")
    parser.add_argument("--p", type=options.probability, default=0.9, help="of the nucleus; default 0.9")
    parser.add_argument("--seed", type=options.natural, default=0, help="of the nucleus' draws")
    options.references(parser)
    options.tokenizer(parser)
    options.records(parser, "default: all; not with --captions")
    options.gallery(parser)


def _check_captions(arguments: Namespace) -> None:
    if arguments.captions is not None and arguments.records is not None:
        raise EvaluationError("--records draws from --data, and --captions lists the pictures; pass one of them")


def _classify(parser: ArgumentParser) -> None:
    options.labels(parser, default=None)
    parser.add_argument(
        "--multi-label", action="store_true", help="--label is a field that lists any number of classes: mean average "
        "precision",
    )  # fmt: skip
    parser.add_argument("--real", type=Path, metavar="JSON", help="ReaL: all right classes, {picture: [class, ...]}, "
                        "or the published real.json for ImageNet's validation set")  # fmt: skip
    options.records(parser, "default: all")
    options.gallery(parser)


def _reconstruct(parser: ArgumentParser) -> None:
    options.records(parser, "default: all")
    options.gallery(parser)


def _text(parser: ArgumentParser) -> None:
    parser.add_argument("--length", type=options.count, help="tokens at which texts are cut; default: as in the "
                        "training, for a folder of transformers 512 or its positions")  # fmt: skip
    options.tokenizer(parser)
    options.records(parser, "default: all")


def _attack(parser: ArgumentParser) -> None:
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
    options.labels(parser, default=None)
    options.tokenizer(parser)
    options.records(parser, "of each kind; default: as many as there are of the fewer")


def _check_attack(arguments: Namespace) -> None:
    if wrong := next((each for each in arguments.shadow if len(each) > 2), None):
        raise EvaluationError(f"--shadow takes a model and a list, but was given {len(wrong)} names; repeat it")


PROTOCOLS = (
    Protocol(
        "probe", "a linear classifier on frozen features, trained on --data", options.linear, f"{HERE}.linear_probe",
        LEARNT_AND_SCORED, files=("classes",),
    ),
    Protocol(
        "few-shot", "linear classifiers that learn from few records of --data", _few_shot, f"{HERE}.few_shot",
        LEARNT_AND_SCORED, files=("classes", "list"), check=_check_few_shot,
    ),
    Protocol(
        "fine-tune", "a classifier of which all weights learn from --data", _fine_tune, f"{HERE}.fine_tune",
        LEARNT_AND_SCORED, files=("classes", "list"),
    ),
    Protocol(
        "zero-shot", "labels by a captioner that was trained on none", _zero_shot, f"{HERE}.zero_shot",
        files=("classes", "names"),
    ),
    Protocol(
        "retrieval", "captions for pictures and pictures for captions, by likelihood", _retrieval, f"{HERE}.retrieval",
        files=("captions",), check=_check_captions,
    ),
    Protocol(
        "aro", "the true one of several captions: relations, attributes, order", _aro, f"{HERE}.aro",
        files=("captions", "cases", "tags"), check=_check_aro,
    ),
    Protocol(
        "caption", "captions of pictures, on a page", _caption, f"{HERE}.caption", files=("captions",),
        check=_check_captions,
    ),
    Protocol(
        "classify", "a classifier's predictions, scored where classes are known", _classify, f"{HERE}.classify",
        files=("classes", "real"),
    ),
    Protocol(
        "reconstruct", "hidden patches filled in by a masked autoencoder, on a page", _reconstruct,
        f"{HERE}.reconstruct",
    ),
    Protocol("text", "a language model's loss and perplexity", _text, f"{HERE}.text", texts=True),
    Protocol(
        "attack", "membership inference: were the records of --data trained on, and those of --others not?", _attack,
        f"{HERE}.attack", {"members": "data", "others": "others"}, files=("classes",), check=_check_attack,
        private=True,
    ),
)  # fmt: skip
