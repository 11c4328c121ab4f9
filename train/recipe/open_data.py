"""Opens what a phase's data section names: indexes of records, parts of them, text encoders. Errors name the key.

What brings PyTorch along is imported where it is used, so that the first look at a config goes without.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from murmuration.data.decode.class_list import ClassList
from murmuration.data.decode.fields import ClassFilter
from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.format import Handling
from murmuration.data.index.open import open_index
from murmuration.data.index.open import open_units as open_table
from murmuration.data.index.public_split import SplitIndex, places_of, public_share
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.index.unit_table import UnitTable
from murmuration.data.store.place import RecordIndex, ShardError, is_url
from murmuration.data.store.remote import read_on_the_way
from murmuration.data.text.encoder import TextEncoder
from murmuration.data.text.vocabulary import TokenizerError
from murmuration.model.settings import ModelSettings, Shape
from murmuration.train.config.data import CheckpointData, Data, HeldOutData, ShardData, StreamData, SyntheticData
from murmuration.train.config.phase import TEXTUAL
from murmuration.train.config.root import Phase
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.labels import class_filter, leave_out

if TYPE_CHECKING:
    from murmuration.train.recipe.warm_start import WarmStart

MOST_RECORD_DRIFT = 0.01
DEMO = " (the demo's shards: python launch/prepare.py demo)"


def open_data(phase: Phase, shape: Shape, where: str, classes: ClassList | None) -> RecordIndex:
    from murmuration.train.recipe.warm_start import NoRecords

    data = phase.data
    if isinstance(data, CheckpointData):
        return NoRecords(open_start(data, f"{where}.data").digest)
    if isinstance(data, HeldOutData):
        return NoRecords("none")
    return open_records(data, phase, shape, f"{where}.data", classes)


def open_start(data: CheckpointData, where: str) -> WarmStart:
    from murmuration.train.recipe.warm_start import WarmStart, WarmStartError

    try:
        start = WarmStart.at(Path(data.path), data.take_head)
    except (WarmStartError, OSError) as error:
        raise RecipeError(f"{where}.path: {error}") from None
    if data.public and start.undeclared is not None:
        raise RecipeError(
            f"{where}.path: these weights come from a run that says {start.undeclared!r}; set {where}.public to false, "
            "which marks this run the same way, or start from other weights"
        )
    return start


def open_records(
    data: Data, phase: Phase, shape: Shape, where: str, classes: ClassList | None = None
) -> RecordIndex:  # fmt: skip
    """`data`: those of the phase, or those that it mixes in."""
    left_out = class_filter(data, phase.label, classes, where)
    if isinstance(data, SyntheticData):
        from murmuration.data.synthetic.index import SyntheticIndex

        return SyntheticIndex(data.kind, data.records, data.seed, data.size or shape.image_size)
    if isinstance(data, StreamData):
        from murmuration.data.draw.stream import StreamIndex

        try:
            stream = StreamIndex(data.path, data.lanes, data.buffer, data.reading.timeout_seconds)
        except ShardError as problem:
            raise RecipeError(f"{where}: {problem}") from None
        return leave_out(stream, left_out, where)
    assert isinstance(data, ShardData)
    # A set that is cut in two keeps the numbers of excluded records, so that the cut does not depend on them.
    dense = data.public and data.public_fraction is None
    handling: Handling = "skipped" if dense else "absent"
    index = _open_index(data.path, f"{where}.path", handling, classes, data.reading.node_shards, left_out)
    # In a list of excluded records, one record must not have decided about others that the phase protects singly.
    by = index.excluded_by if isinstance(index, ShardIndex | FolderIndex) else ""
    if by and by != data.by and not data.public:
        raise RecipeError(
            f"{where}.path: its exclusions leave out whole units by {by!r}, so one record decides about others; set "
            f"{where}.unit to {by!r}, or run murmuration.contrib.overlap again without --by-unit"
        )
    units = open_units(index, data, where)
    _check_expected(index, units, data, where)
    if phase.objective == "text" and isinstance(index, FolderIndex):
        raise RecipeError(
            f"{where}.path has single images, and objective 'text' reads texts; put these into tar shards, as .txt"
        )
    if phase.objective == "caption" and isinstance(index, FolderIndex):
        raise RecipeError(
            f"{where}.path has single images, which have no captions; train with objective 'mae', or put images "
            "and captions into tar shards"
        )
    if data.weight is not None and isinstance(index, FolderIndex):
        raise RecipeError(f"{where}.weight is a number in a record's .json, which single images lack; leave it out")
    if data.public_fraction is None:
        return index
    try:
        return SplitIndex(index, data.public_fraction, data.public, units)
    except ShardError as error:
        raise RecipeError(f"{where}: {error}") from None


def open_units(index: RecordIndex, data: Data, where: str) -> UnitTable | None:
    """The units that a section of data protects, as its index knows them; None where it protects records."""
    if not isinstance(data, ShardData) or data.by is None:
        return None
    if isinstance(index, SplitIndex):
        return index.units
    try:
        return open_table(index, data.by)
    except ShardError as error:
        raise RecipeError(f"{where}.unit: {error}") from None


def open_public(
    path: str, where: str, classes: ClassList | None = None, left_out: ClassFilter | None = None
) -> RecordIndex:  # fmt: skip
    return _open_index(path, where, "skipped", classes, None, left_out, needed=False)


def _open_index(
    path: str, where: str, excluded: Handling, classes: ClassList | None, node_shards: str | None = None,
    left_out: ClassFilter | None = None, needed: bool = True,
) -> RecordIndex:  # fmt: skip
    try:
        index = leave_out(open_index(path, excluded=excluded), left_out, where, needed)
        if node_shards is not None:
            from murmuration.data.draw.node_placement import on_this_node

            return on_this_node(index, node_shards)
        index.check_unchanged()
        return index.numbered_by(classes) if classes is not None and isinstance(index, FolderIndex) else index
    except (ShardError, OSError) as error:
        raise RecipeError(f"{where}: {error}{DEMO if 'demo_data' in path else ''}") from None


def hosts_of(index: RecordIndex) -> list[str]:
    """The stores that records are fetched from, and that see which ones are drawn."""
    from murmuration.data.draw.stream import StreamIndex

    places = map(str, index.places) if isinstance(index, StreamIndex) else places_of(index)
    urls = [urlsplit(place) for place in places if is_url(place)]
    # Without the name and password that may precede the host.
    return sorted({f"{url.scheme}://{url.netloc.rpartition('@')[2]}" for url in urls})


def refuse_plain_http(index: RecordIndex, where: str) -> None:
    """For records that are not public: others on the network would see their bytes, and which of them a step draws."""
    for host in hosts_of(index):
        if (seen := read_on_the_way(host)) is not None:
            raise RecipeError(
                f"{where}: private records would be read over plain http ({seen}), where anyone on the network path "
                "sees them and which of them each step draws; use https, or copy the shards to a disk of this machine"
            )


def open_text(phase: Phase, shape: Shape | ModelSettings, where: str) -> TextEncoder | None:
    tokenizer = phase.tokenizer
    if phase.objective not in TEXTUAL or tokenizer is None:
        return None
    try:
        text = TextEncoder(tokenizer, shape.text_length, shape.words_of_library)
    except TokenizerError as error:
        raise RecipeError(f"{where}.data.tokenizer: {error}") from None
    if text.vocabulary > shape.vocabulary:
        raise RecipeError(
            f"{where}.data.tokenizer has {text.vocabulary} tokens, more than model.vocabulary = "
            f"{shape.vocabulary}; set model.vocabulary to at least {text.vocabulary}"
        )
    return text


def _check_expected(index: RecordIndex, units: UnitTable | None, data: ShardData, where: str) -> None:
    if units is not None:
        if (given := data.expected_units) is not None and abs(units.count - given) > MOST_RECORD_DRIFT * given:
            raise RecipeError(
                f"{where}.expected_units is {given}, but the index has {units.count} units, more than 1 % off; index "
                "the right shards or correct the number"
            )
        return
    expected = data.expected_records
    if data.exclude_classes is not None and not isinstance(index, FolderIndex):
        return  # how many are left is known once all have been read
    if expected is not None and abs(index.records - expected) > MOST_RECORD_DRIFT * expected:
        raise RecipeError(
            f"{where}.expected_records is {expected}, but the index has {index.records} records, more than 1 % off; "
            "index the right shards or correct the number"
        )


def known_records(phase: Phase, where: str) -> tuple[int, str]:
    """n, the number of records or of units, even if the data are not at hand, and how it is known."""
    if isinstance(phase.data, SyntheticData):
        return phase.data.records, "made by rule"
    assert isinstance(phase.data, ShardData)
    try:
        dense = phase.data.public and phase.data.public_fraction is None
        index = open_index(phase.data.path, excluded="skipped" if dense else "absent")
        if phase.data.exclude_classes is not None and isinstance(index, FolderIndex):
            index = leave_out(index, class_filter(phase.data, phase.label, None, f"{where}.data"), f"{where}.data")
        whole, source = index.records, "from the index"
        if phase.data.by is not None:
            units = open_table(index, phase.data.by)
            whole, source = units.count, f"units by {units.by!r}, of {units.records:,} records, from the index"
    except (ShardError, OSError) as error:
        name = "expected_records" if phase.data.by is None else "expected_units"
        if (expected := getattr(phase.data, name)) is None:
            raise RecipeError(f"{where}.data: {error}; or give {name} for a dry run") from None
        whole, source = expected, f"{name}; the data are not at hand"
    if phase.data.public_fraction is None:
        return whole, source
    public = public_share(whole, phase.data.public_fraction)
    part = public if phase.data.public else whole - public
    return part, f"of {whole:,}, {source}"
