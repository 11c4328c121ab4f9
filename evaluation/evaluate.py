"""From what was asked to a result: opens the model and the records, runs the protocol, writes what it found."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from shutil import rmtree

import torch

from murmuration.data.decode.class_list import ClassList
from murmuration.data.store.place import RecordIndex
from murmuration.evaluation.models.weights import Sizes, open_model
from murmuration.evaluation.protocols.protocol import Request
from murmuration.evaluation.protocols.shared_training import STATE
from murmuration.evaluation.session.answers import FOLDER
from murmuration.evaluation.session.features import Computing
from murmuration.evaluation.session.public_records import open_public, open_stand_in, refuse_training_records
from murmuration.evaluation.session.result import PAGE, RESULT, shown, statement, write
from murmuration.evaluation.session.session import Session, Work
from murmuration.evaluation.session.sharing import ENDING, PartDone, Sharing, started
from murmuration.train.recipe.warm_start import WarmStart

SCRATCH = "index"


def run(request: Request) -> str | None:
    """Evaluates, writes the result and gives its lines for the console; nothing on any but one of several processes."""
    sharing, device = started()
    try:
        return _run(request, sharing, device)
    except PartDone:
        return None
    except ENDING as error:
        sharing.fail(error)


def _run(request: Request, sharing: Sharing, device: torch.device) -> str:
    arguments, subject = request.arguments, request.subject
    workers = sharing.workers() if arguments.workers is None else arguments.workers
    classes = ClassList.read(arguments.classes) if getattr(arguments, "classes", None) else None
    records = sharing.main_first(lambda: _opened(request, classes, sharing.main))
    sizes = Sizes(arguments.heads, arguments.decoder_heads, arguments.image_size, getattr(arguments, "length", None))
    opened = partial(
        open_model, sizes=sizes, pixels=request.pixels, readers=request.readers(), texts=request.protocol.texts
    )
    model = opened(subject, headless=request.protocol.learns)
    model.model.to(device)
    computing = Computing(device, arguments.precision, arguments.micro_batch, workers)
    session = Session(subject, model, computing, request.view or model.view, arguments.out, sharing)
    outcome = import_module(request.protocol.module).run(session, Work(arguments, records, classes, opened))
    write(outcome, arguments.out)
    rmtree(arguments.out / FOLDER, ignore_errors=True)
    (arguments.out / STATE).unlink(missing_ok=True)
    result = outcome.result
    # The console is a public sink.
    told = [f"{name}: {shown(number)}" for name, number in result.numbers.items()] if not result.private else []
    notes = [f"note: {note}" for note in result.notes] if not result.private else []
    return "\n".join([*told, statement(result), *notes, str(arguments.out / RESULT), str(arguments.out / PAGE)])


def _opened(request: Request, classes: ClassList | None, first: bool) -> dict[str, RecordIndex]:
    """`first`: no other process did it, which would have indexed what needs it."""
    arguments, places, subject = request.arguments, dict(request.places), request.subject
    scratch = arguments.out / SCRATCH
    opened: dict[str, RecordIndex] = {}
    if getattr(arguments, "stand_in", False):
        opened["members"] = open_stand_in(places.pop("members"), scratch, first)
    protected = WarmStart.at(subject.weights if subject.kind != "run" else subject.path).protected
    for name, place in places.items():
        opened[name] = open_public(place, scratch, arguments.public_part, classes, first)
    for name in places:
        refuse_training_records(opened[name], protected)
    return opened
