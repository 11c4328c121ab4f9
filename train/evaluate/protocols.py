"""From what was asked to a result: opens the model and the records, runs the protocol, writes what it found."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from shutil import rmtree

import torch

from murmuration.data.decode.class_list import ClassList
from murmuration.data.store.place import RecordIndex
from murmuration.evaluation.lars_probe import LarsSettings
from murmuration.model.captioner import Captioner
from murmuration.train.evaluate.answers import FOLDER
from murmuration.train.evaluate.aro import AroSettings, run_aro
from murmuration.train.evaluate.attack import AttackSettings, Shadow, log_stand_in, run_attack
from murmuration.train.evaluate.caption import CaptionSettings, run_caption
from murmuration.train.evaluate.classify import run_classify
from murmuration.train.evaluate.detect import run_detect
from murmuration.train.evaluate.detect import settings_of as detect_settings
from murmuration.train.evaluate.draws import FewRecords
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.features import Computing
from murmuration.train.evaluate.few_shot import FewShotSettings, run_few_shot
from murmuration.train.evaluate.fine_tune import run_fine_tune, settings_of
from murmuration.train.evaluate.multi_label import run_multi_label
from murmuration.train.evaluate.probe import ProbeSettings, run_probe
from murmuration.train.evaluate.public_records import open_public, open_stand_in, refuse_training_records
from murmuration.train.evaluate.reconstruct import run_reconstruct
from murmuration.train.evaluate.result import PAGE, RESULT, Outcome, shown, statement, write
from murmuration.train.evaluate.retrieval import RetrievalSettings, run_retrieval
from murmuration.train.evaluate.segment import run_segment
from murmuration.train.evaluate.segment import settings_of as segment_settings
from murmuration.train.evaluate.session import Chosen, Session
from murmuration.train.evaluate.sharing import ENDING, PartDone, Sharing, started
from murmuration.train.evaluate.subject import EvaluationRequest, Subject
from murmuration.train.evaluate.training_state import STATE
from murmuration.train.evaluate.weights import Sizes, open_model, open_text
from murmuration.train.evaluate.zero_shot import TRIE_RECORDS, ZeroShotSettings, run_zero_shot, usual_template
from murmuration.train.recipe.warm_start import WarmStart

DRAWN_BY = 0
"""The seed of every draw of records, so that all models are scored on the same ones."""
SCRATCH = "index"
MOST_RECORDS = 1 << 40
LEARNING = ("probe", "few-shot", "fine-tune", "detect", "segment")
"""Protocols that learn from records and score others."""


def run(asked: EvaluationRequest) -> str | None:
    """Evaluates, writes the result and gives its lines for the console; nothing on any but one of several processes."""
    sharing, device = started()
    try:
        return _run(asked, sharing, device)
    except PartDone:
        return None
    except ENDING as error:
        sharing.fail(error)


def _run(asked: EvaluationRequest, sharing: Sharing, device: torch.device) -> str:
    arguments = asked.arguments
    workers = sharing.workers() if arguments.workers is None else arguments.workers
    classes = ClassList.read(arguments.classes) if getattr(arguments, "classes", None) else None
    scratch = arguments.out / SCRATCH
    opened = sharing.main_first(lambda: _opened(asked, scratch, classes, sharing.main))
    sizes = Sizes(arguments.heads, arguments.decoder_heads, arguments.image_size)
    model = open_model(asked.subject, sizes, asked.pixels, headless=arguments.protocol in LEARNING)
    model.model.to(device)
    computing = Computing(device, arguments.precision, arguments.micro_batch, workers)
    session = Session(asked.subject, model, computing, asked.view, arguments.out, sharing)
    outcome = _measured(session, asked, opened, classes)
    write(outcome, arguments.out)
    rmtree(arguments.out / FOLDER, ignore_errors=True)
    (arguments.out / STATE).unlink(missing_ok=True)
    result = outcome.result
    # The console is a public sink.
    lines = [] if result.private else [f"{name}: {shown(number)}" for name, number in result.numbers.items()]
    return "\n".join([*lines, statement(result), str(arguments.out / RESULT), str(arguments.out / PAGE)])


def _opened(asked: EvaluationRequest, scratch: Path, classes: ClassList | None, first: bool) -> dict[str, RecordIndex]:
    """`first`: no other process did it, which would have indexed what needs it and logged an attack."""
    arguments, places = asked.arguments, dict(asked.places)
    opened: dict[str, RecordIndex] = {}
    if getattr(arguments, "stand_in", False):
        opened["members"] = open_stand_in(places.pop("members"), scratch, first)
    part = arguments.public_part
    public = {name: open_public(place, scratch, part, classes, first) for name, place in places.items()}
    _refuse_own_records(asked, list(public.values()))
    if "members" in opened and first:
        log_stand_in(opened["members"], asked.subject.path.resolve().name, arguments.out)
    return opened | public


def _measured(
    session: Session, asked: EvaluationRequest, opened: dict[str, RecordIndex], classes: ClassList | None
) -> Outcome:
    arguments = asked.arguments
    if arguments.protocol in LEARNING:
        return _learnt(session, arguments, opened, classes)
    count = getattr(arguments, "records", None)
    if arguments.protocol == "attack":
        count = min(count or MOST_RECORDS, *(index.records for index in opened.values()))
        members, others = (Chosen.of(opened[name], count, DRAWN_BY) for name in ("members", "others"))
        text = open_text(session.subject, session.model, arguments.tokenizer) if _writes(session) else None
        return run_attack(session, members, others, classes, _attack_settings(session, asked), text)
    if arguments.protocol == "zero-shot" and arguments.way == "trie":
        count = count or TRIE_RECORDS
    chosen = Chosen.of(opened["test"], count, DRAWN_BY)
    if arguments.protocol == "reconstruct":
        return run_reconstruct(session, chosen, arguments.gallery)
    if arguments.protocol == "classify" and arguments.multi_label:
        return run_multi_label(session, chosen, classes, arguments.label)
    if arguments.protocol == "classify":
        return run_classify(session, chosen, classes, arguments.label, arguments.gallery, arguments.real)
    text = open_text(session.subject, session.model, arguments.tokenizer)
    if arguments.protocol == "caption":
        drawn = arguments.decode, arguments.beams, arguments.p, arguments.seed
        told = CaptionSettings(*drawn, arguments.gallery, arguments.captions, arguments.split)
        return run_caption(session, chosen, told, text)
    if arguments.protocol == "retrieval":
        return run_retrieval(session, chosen, RetrievalSettings(arguments.captions, arguments.split), text)
    if arguments.protocol == "aro":
        made = arguments.captions, arguments.split, arguments.tags, arguments.seed
        return run_aro(session, chosen, AroSettings(arguments.cases, *made), text)
    templates = tuple(arguments.template or (usual_template(text),))
    settings = ZeroShotSettings(arguments.way, arguments.label, templates, arguments.names)
    return run_zero_shot(session, chosen, classes, settings, text)


def _probe_settings(arguments: Namespace) -> ProbeSettings:
    lars = LarsSettings(arguments.epochs, arguments.warmup, arguments.batch, arguments.base_rate, arguments.seed)
    return ProbeSettings(arguments.way, arguments.label, arguments.views, lars, arguments.iterations)


def _learnt(
    session: Session, arguments: Namespace, opened: dict[str, RecordIndex], classes: ClassList | None
) -> Outcome:
    train, test = (Chosen.of(opened[name], None, DRAWN_BY) for name in ("train", "test"))
    if arguments.protocol == "fine-tune":
        few, settings = _few_records(arguments), settings_of(arguments)
        return run_fine_tune(session, train, test, classes, arguments.label, settings, few)
    if arguments.protocol == "detect":
        return run_detect(session, train, test, detect_settings(arguments))
    if arguments.protocol == "segment":
        return run_segment(session, train, test, segment_settings(arguments))
    if arguments.protocol == "few-shot":
        settings = FewShotSettings(_probe_settings(arguments), _few_records(arguments))
        return run_few_shot(session, train, test, classes, settings)
    return run_probe(session, train, test, classes, _probe_settings(arguments))


def _few_records(arguments: Namespace) -> FewRecords:
    drawn = tuple(arguments.shots), tuple(arguments.percent), tuple(arguments.list)
    return FewRecords(*drawn, tuple(range(arguments.draws)))


def _writes(session: Session) -> bool:
    return isinstance(session.model.model, Captioner)


def _attack_settings(session: Session, asked: EvaluationRequest) -> AttackSettings:
    arguments = asked.arguments
    sizes = Sizes(arguments.heads, arguments.decoder_heads, arguments.image_size)
    shadows = []
    for what, *listed in arguments.shadow:
        model = open_model(Subject.at(what, arguments.config, arguments.set), sizes, asked.pixels)
        model.model.to(session.computing.device)
        try:
            lines = [line.strip() for path in listed for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(f"--shadow {what} {listed[0]}: {error}") from None
        shadows.append(Shadow(model, frozenset(filter(None, lines))))
    return AttackSettings(arguments.label, arguments.stand_in, tuple(shadows))


def _refuse_own_records(asked: EvaluationRequest, opened: list[RecordIndex]) -> None:
    subject = asked.subject
    protected = WarmStart.at(subject.weights if subject.kind != "run" else subject.path).protected
    for index in opened:
        refuse_training_records(index, protected)
