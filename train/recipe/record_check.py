"""What a sample of a phase's records shows: how many have what the phase needs, and why the others are unusable.

Records go through the reader of training, with its crop. All that is found is private where the records are.
"""

from __future__ import annotations

import base64
import io
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from murmuration.data.batch.reader import TARGET, BatchReader
from murmuration.data.batch.shard_reader import ReadOptions, RecordReader, ShardReader, open_source
from murmuration.data.decode.class_list import ClassList
from murmuration.data.decode.decode import FORMATS, BadRecord, parsing, picture_in
from murmuration.data.decode.fields import captions_of, class_in_file, classes_listed
from murmuration.data.draw.micro_batch import Fetched
from murmuration.data.index.census import Census
from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.public_split import whole_of
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import RecordIndex
from murmuration.data.text.encoder import TextEncoder
from murmuration.train.recipe.ready_phase import ReadyPhase

AT_ONCE = 64  # records in memory
_LARGEST_JSON = 1 << 20
_MOST_KINDS = 1000  # of labels, sizes and reasons that are told apart
_DETAIL = re.compile(r" \(|: ")


@dataclass(frozen=True)
class Shown:
    """One record as the model sees it: PNG in base64, or the reason why there is none."""

    record: str
    png: str | None
    text: str


@dataclass
class Findings:
    """Counts over the records that were looked at; `left_out` of them have an empty slot and were not read."""

    records: int
    looked: int = 0
    left_out: int = 0
    usable: int = 0
    pictures: int = 0
    captions: int = 0
    labelled: int = 0
    """Records with a label, or with a list of classes."""
    labels: Counter[int] = field(default_factory=Counter)
    """By the number in the file, usable or not; of a list every class that is on it."""
    sides: Counter[int] = field(default_factory=Counter)
    """Records by their picture's shorter side."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Captions by their tokens, with START and END, before they are cut."""
    cut: int = 0
    words: int = 0
    unknown: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)
    """A record for each reason why one is bad."""
    census: Census = field(default_factory=Census)
    shown: list[Shown] = field(default_factory=list)


def spread(records: int, most: int | None) -> np.ndarray:
    """The ids to look at: all, or so many at equal distances."""
    count = records if most is None else min(most, records)
    return np.arange(count) * records // max(1, count)


def look_at(
    phase: ReadyPhase, ids: np.ndarray, shown: int, reading: ReadOptions, progress: Callable[[int, int], None]
) -> Findings:
    found = Findings(phase.index.records, len(ids))
    spec = replace(phase.data_spec(augment=True), mask_patches=0, drop_keys=False)
    held = _Held(phase.index)
    key = secrets.token_bytes(32)  # another crop than any run's
    to_show = set(ids[spread(len(ids), shown)].tolist()) if shown else set[int]()
    index = phase.index
    whole = whole_of(index)
    source = index if isinstance(index, RecordReader) else ShardReader(index, open_source(index, reading))
    with (
        ThreadPoolExecutor(reading.in_flight) as pool,
        closing(BatchReader(cast(Any, held), spec, phase.text, augment_key=key, reading=reading)) as reader,
    ):
        progress(0, len(ids))
        for first in range(0, len(ids), AT_ONCE):
            asked = [int(record) for record in ids[first : first + AT_ONCE]]
            some = [record for record in asked if not phase.index.left_out(record)]
            held.members = dict(zip(some, pool.map(source.read, some), strict=True))
            if isinstance(whole, ShardIndex):
                held.members = {each: members for each, members in held.members.items() if whole.takes(members)}
            some = list(held.members)
            found.left_out += len(asked) - len(some)
            fetched = reader.fetch(np.array(some, dtype=np.int64), 0)
            for row, record in enumerate(some):
                _count(found, phase, held.members[record])
                _note(found, phase, record, row, fetched, record in to_show)
            progress(min(first + AT_ONCE, len(ids)), len(ids))
    return found


class _Held:
    """An index whose records were read already, so that reader and counts see the same bytes."""

    def __init__(self, index: RecordIndex) -> None:
        self._index = index
        self.members: dict[int, dict[str, bytes]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def read(self, record: int) -> dict[str, bytes]:
        return self.members[record]


def _count(found: Findings, phase: ReadyPhase, members: Mapping[str, bytes]) -> None:
    """What the record has, whether or not it is usable."""
    found.census.count(members)
    if "json" in members and len(members["json"]) <= _LARGEST_JSON:
        found.census.look_into(members["json"])
    if (picture := picture_in(members)) is not None:
        found.pictures += 1
        _count_side(found, picture)
    try:
        captions = captions_of(members, "txt")
        found.captions += 1
    except BadRecord:
        captions = []
    if phase.text is not None:
        for caption in captions:
            _count_tokens(found, phase.text, caption)
    if (label := phase.settings.label) is not None:
        try:
            numbers = _classes(phase, label, members)
        except BadRecord:
            return
        found.labelled += 1
        for number in numbers:
            _add(found.labels, number)


def _classes(phase: ReadyPhase, label: str, members: Mapping[str, bytes]) -> list[int]:
    if phase.settings.multi_label:
        return classes_listed(members, label, phase.data_spec(augment=False).classes, phase.label_list)
    return [class_in_file(members, label, phase.label_list or ClassList(()))]


def _count_side(found: Findings, picture: bytes) -> None:
    try:
        with parsing("the picture has no size"), Image.open(io.BytesIO(picture), formats=FORMATS) as image:
            _add(found.sides, min(image.size))
    except BadRecord:
        return  # the reader says why


def _count_tokens(found: Findings, text: TextEncoder, caption: str) -> None:
    room = 64 * text.length
    try:
        with parsing("the caption cannot be read"):
            words = text.words(caption[:room])
    except BadRecord:
        return
    _add(found.lengths, len(words) + 2)
    found.cut += len(words) + 2 > text.length or len(caption) > room
    found.words += len(words)
    found.unknown += words.count(text.unk)


def _add(counts: Counter[int], value: int) -> None:
    if value in counts or len(counts) < _MOST_KINDS:
        counts[value] += 1


def _note(found: Findings, phase: ReadyPhase, record: int, row: int, fetched: Fetched, show: bool) -> None:
    """What the reader made of the record."""
    where = f"record {record} in {Path(phase.index.owner(record)).name}"
    if phase.units is not None:
        where += f", unit {phase.units.unit_of(record)}"
    reason = fetched.bad.get(record)
    if reason is None:
        found.usable += 1
    else:
        kind = _DETAIL.split(reason, maxsplit=1)[0]
        if kind in found.bad or len(found.bad) < _MOST_KINDS:
            found.bad[kind] += 1
            found.example.setdefault(kind, where + reason.removeprefix(kind))
    if show:
        found.shown.append(Shown(where, *_seen(phase, row, fetched) if reason is None else (None, f"bad: {reason}")))


def _seen(phase: ReadyPhase, row: int, fetched: Fetched) -> tuple[str, str]:
    assert fetched.batch.pixels is not None
    file = io.BytesIO()
    Image.fromarray(fetched.batch.pixels.values[row].numpy()).save(file, "PNG")
    inputs, said = fetched.batch.inputs, ""
    if phase.text is not None:
        said = phase.text.decode(inputs["tokens"][row].tolist())
    elif TARGET in inputs:
        label = inputs[TARGET][row]
        numbers = label.nonzero().flatten().tolist() if phase.settings.multi_label else [int(label)]
        said = ", ".join(f"class {number}{name_of(phase, number, outputs=True)}" for number in numbers) or "no class"
    return base64.b64encode(file.getvalue()).decode(), said


def name_of(phase: ReadyPhase, number: int, outputs: bool = False) -> str:
    """The name of a class in brackets, by its number in files or among the outputs; nothing where it has no name."""
    whole = whole_of(phase.index)
    if phase.label_list is not None:
        names = phase.label_list.names if outputs else phase.label_list.in_files
    else:
        names = whole.classes if isinstance(whole, FolderIndex) else ()
    return f" ({names[number]})" if 0 <= number < len(names) else ""
