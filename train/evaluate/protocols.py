"""From what was asked to a result: opens the model and the records, runs the protocol, writes what it found."""

from __future__ import annotations

from argparse import Namespace

from murmuration.data.decode.class_list import ClassList
from murmuration.data.store.place import RecordIndex
from murmuration.evaluation.lars_probe import LarsSettings
from murmuration.train.evaluate.caption import CaptionSettings, run_caption
from murmuration.train.evaluate.classify import run_classify
from murmuration.train.evaluate.features import Computing
from murmuration.train.evaluate.probe import ProbeSettings, run_probe
from murmuration.train.evaluate.public_records import open_public, refuse_training_records
from murmuration.train.evaluate.reconstruct import run_reconstruct
from murmuration.train.evaluate.result import PAGE, RESULT, Outcome, shown, statement, write
from murmuration.train.evaluate.session import Chosen, Session
from murmuration.train.evaluate.subject import Asked
from murmuration.train.evaluate.weights import Sizes, open_model, open_text
from murmuration.train.evaluate.zero_shot import TRIE_RECORDS, ZeroShotSettings, run_zero_shot, usual_template
from murmuration.train.recipe.warm_start import WarmStart

DRAWN_BY = 0
"""The seed of every draw of records, so that all models are scored on the same ones."""
SCRATCH = "index"


def run(asked: Asked) -> str:
    """Evaluates, writes the result and gives its lines for the console."""
    arguments = asked.arguments
    classes = ClassList.read(arguments.classes) if getattr(arguments, "classes", None) else None
    scratch = arguments.out / SCRATCH
    opened = {name: open_public(place, scratch, arguments.public_part, classes) for name, place in asked.places.items()}
    _refuse_own_records(asked, list(opened.values()))
    sizes = Sizes(arguments.heads, arguments.decoder_heads, arguments.image_size)
    model = open_model(asked.subject, sizes, asked.pixels, headless=arguments.protocol == "probe")
    computing = Computing.here(arguments.precision, arguments.micro_batch, arguments.workers)
    model.model.to(computing.device)
    session = Session(asked.subject, model, computing, asked.view, arguments.out)
    outcome = _measured(session, arguments, opened, classes)
    write(outcome, arguments.out)
    result = outcome.result
    lines = [f"{name}: {shown(number)}" for name, number in result.numbers.items()]
    return "\n".join([*lines, statement(result), str(arguments.out / RESULT), str(arguments.out / PAGE)])


def _measured(
    session: Session, arguments: Namespace, opened: dict[str, RecordIndex], classes: ClassList | None
) -> Outcome:
    if arguments.protocol == "probe":
        train, test = (Chosen.of(opened[name], None, DRAWN_BY) for name in ("train", "test"))
        return run_probe(session, train, test, classes, _probe_settings(arguments))
    count = arguments.records
    if arguments.protocol == "zero-shot" and arguments.way == "trie":
        count = count or TRIE_RECORDS
    chosen = Chosen.of(opened["test"], count, DRAWN_BY)
    if arguments.protocol == "reconstruct":
        return run_reconstruct(session, chosen, arguments.gallery)
    if arguments.protocol == "classify":
        return run_classify(session, chosen, classes, arguments.label, arguments.gallery)
    text = open_text(session.subject, session.model.shape, arguments.tokenizer)
    if arguments.protocol == "caption":
        told = CaptionSettings(arguments.decode, arguments.beams, arguments.p, arguments.seed, arguments.gallery)
        return run_caption(session, chosen, told, text)
    templates = tuple(arguments.template or (usual_template(text),))
    settings = ZeroShotSettings(arguments.way, arguments.label, templates, arguments.names)
    return run_zero_shot(session, chosen, classes, settings, text)


def _probe_settings(arguments: Namespace) -> ProbeSettings:
    lars = LarsSettings(arguments.epochs, arguments.warmup, arguments.batch, arguments.base_rate, arguments.seed)
    return ProbeSettings(arguments.way, arguments.label, arguments.views, lars, arguments.iterations)


def _refuse_own_records(asked: Asked, opened: list[RecordIndex]) -> None:
    subject = asked.subject
    protected = WarmStart.at(subject.weights if subject.kind != "run" else subject.path).protected
    for index in opened:
        refuse_training_records(index, protected)
