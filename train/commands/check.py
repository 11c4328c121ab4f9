"""`prepare.py check`: what the records of a config look like to the trainer, told to their owner."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from murmuration.accounting.durable import atomic
from murmuration.accounting.escaping import html_page, printable
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.draw.stream import StreamIndex
from murmuration.data.index.census import remarks
from murmuration.data.progress import Progress
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.labels import class_list
from murmuration.train.recipe.open_data import open_data, open_text, open_units, refuse_plain_http
from murmuration.train.recipe.read_options import REMOTE_IN_FLIGHT
from murmuration.train.recipe.ready_phase import ReadyPhase, resolve_shape
from murmuration.train.recipe.record_check import Findings, Shown, look_at, name_of, spread

PRIVATE = "private: what follows describes single records; it is for the owner of the data alone"
_LISTED = 20


@dataclass(frozen=True)
class Wanted:
    """`most`: records to look at per phase, None for all; `shown`: records on the page."""

    phase: str | None
    most: int | None
    shown: int
    workers: int | None
    out: Path


@dataclass(frozen=True)
class Section:
    """A phase on the page."""

    title: str
    rows: list[tuple[str, str]]
    tiles: list[Shown]


def check(config: Config, name: str, wanted: Wanted) -> None:
    """Prints a summary for each phase with records of its own, and writes the page, which calls the config `name`."""
    workers = wanted.workers if wanted.workers is not None else max(1, len(os.sched_getaffinity(0)) - 1)
    sections: list[Section] = []
    print(PRIVATE)
    for phase in _phases(config, wanted.phase):
        title = f"phase {phase.number} ({phase.name}, {phase.settings.objective})"
        if isinstance(phase.index, StreamIndex):
            print(f"\n{title}: a stream has no index, so its records cannot be looked at one by one")
            continue
        ids = spread(phase.index.records, wanted.most)
        remote = not isinstance(phase.index.locate(0)[0], Path)
        in_flight = REMOTE_IN_FLIGHT if remote else workers + 2
        reading = ReadOptions(workers, in_flight, phase.reading.timeout_seconds)
        found = look_at(phase, ids, wanted.shown, reading, Progress("looking at", "records"))
        sections.append(Section(title, list(rows_of(phase, found)), found.shown))
        print(f"\n{title}:")
        for what, text in sections[-1].rows:
            print(f"  {what:<14}{printable(text)}".rstrip())
    if wanted.shown and sections:
        _write(sections, name, wanted.out)
        print(f"\npage with the pictures (private): {wanted.out}")


def _phases(config: Config, name: str | None) -> Iterator[ReadyPhase]:
    """The phases with records, opened as training opens them, but without its refusals of what the records lack."""
    names = [phase.name for phase in config.phases if phase.trains]
    if name is not None and name not in names:
        raise RecipeError(f"--phase {name}: no phase with records has this name; there are {', '.join(names)}")
    shape = resolve_shape(config)
    classes = class_list(config, shape.head.classes)
    for number, phase in enumerate(config.phases):
        if phase.name not in ([name] if name is not None else names):
            continue
        where = f"phases.{number}"
        index = open_data(phase, shape, where, classes)
        if not phase.data.public:
            refuse_plain_http(index, f"{where}.data.path")
        units = open_units(index, phase.data, f"{where}.data")
        text = open_text(phase, shape, where)
        yield ReadyPhase(number, phase, shape, index, text, None, classes=classes, units=units)


def rows_of(phase: ReadyPhase, found: Findings) -> Iterator[tuple[str, str]]:
    """Name and text of each finding."""
    read = found.looked - found.left_out
    how = "" if found.looked == found.records else ", spread evenly (--all looks at all)"
    out = f"; {found.left_out:,} are left out" if found.left_out else ""
    yield "looked at", f"{found.looked:,} of {found.records:,} records{how}{out}"
    if phase.units is not None:
        sizes = Counter(phase.units.sizes.tolist())
        yield "units", f"{phase.n:,} by {phase.units.by!r}, of {_range(sizes)} records; drawn and protected as one"
    yield "usable", _share(found.usable, read)
    if phase.settings.objective != "text":
        yield "picture", _share(found.pictures, read)
    if found.sides and phase.settings.objective != "text":
        size = phase.shape.image_size
        small = _share(sum(count for side, count in found.sides.items() if side < size), found.sides.total())
        yield "shorter side", f"{_range(found.sides)} pixels; {small} are smaller than the model's {size}"
    yield "caption", _share(found.captions, read)
    if phase.text is not None and found.lengths:
        cut = f"{_share(found.cut, found.lengths.total())} are cut to model.text_length = {phase.text.length}"
        yield "tokens", f"{_range(found.lengths)} per caption, with start and end; {cut}"
        yield "unknown", f"{_share(found.unknown, found.words)} tokens"
    if phase.settings.label is not None:
        what = "a list of known classes" if phase.settings.multi_label else "a number"
        yield "label", f"{_share(found.labelled, read)} have {what} under {phase.settings.label!r}"
        yield from _histogram(phase, found)
    for number, remark in enumerate(remarks(found.census)):
        yield "" if number else "names", remark
    yield "bad", _share(found.bad.total(), read)
    for reason, count in found.bad.most_common(_LISTED):
        yield "", f"{count:,} x {reason}; such as {found.example[reason]}"


def _histogram(phase: ReadyPhase, found: Findings) -> Iterator[tuple[str, str]]:
    listed, outputs = phase.label_list, phase.data_spec(augment=False).classes
    without = 0
    for number, count in found.labels.items():
        output = number if listed is None else listed.output(number)
        without += count * (output is None or not 0 <= output < outputs)
    for number, count in sorted(found.labels.items())[:_LISTED]:
        yield "", f"{number}{name_of(phase, number)}: {count:,}"
    if len(found.labels) > _LISTED:
        yield "", f"and {len(found.labels) - _LISTED} more"
    if without:
        yield "", f"{_share(without, found.labels.total())} have a number without an output; the model has {outputs}"


def _share(count: int, of: int) -> str:
    return f"{count:,} of {of:,} ({count / max(1, of):.1%})"


def _range(counts: Counter[int]) -> str:
    """Least, median and most."""
    at, half = 0, (counts.total() + 1) // 2
    for value in sorted(counts):
        at += counts[value]
        if at >= half:
            return f"{min(counts):,} to {max(counts):,} (median {value:,})"
    return "none"


def _write(sections: list[Section], config: str, out: Path) -> None:
    template = Path(__file__).parent / "check.html.jinja"
    page = html_page(template, title=f"Records of {config}", private=PRIVATE, sections=sections)
    with atomic(out, 0o600) as file:
        file.write(page.encode(errors="backslashreplace"))
