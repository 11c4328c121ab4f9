"""Which class has which number: one public list for all phases of a run, their evaluation and what they mix in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from murmuration.data.decode.class_list import ClassList, made_of_rows
from murmuration.data.decode.fields import ClassFilter
from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.open import open_index
from murmuration.data.index.public_split import whole_of
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.data.store.tar import shown
from murmuration.train.config.data import Data, ShardData, StreamData
from murmuration.train.config.root import Config, Phase
from murmuration.train.config.section import RecipeError

FOLDERS = "cls"  # the label that class folders provide


@dataclass(frozen=True)
class LabelSource:
    """Class folders whose names become labels; `private` where a phase protects them."""

    where: str
    index: FolderIndex
    private: bool

    @staticmethod
    def of(where: str, index: RecordIndex, label: str | None, private: bool = False) -> Iterator[LabelSource]:
        whole = whole_of(index)
        if label == FOLDERS and isinstance(whole, FolderIndex) and whole.labelled:
            yield LabelSource(where, whole, private)


def _labelled_data(config: Config) -> Iterator[tuple[str, Phase, ShardData | StreamData]]:
    """The data sections that may name classes, with their phases."""
    for number, phase in enumerate(config.phases):
        mixed = phase.mixing.data if phase.mixing is not None else None
        for where, data in ((f"phases.{number}.data", phase.data), (f"phases.{number}.mixing.data", mixed)):
            if isinstance(data, ShardData | StreamData):
                yield where, phase, data


def named_lists(config: Config) -> Iterator[tuple[str, Path, ShardData | StreamData]]:
    """The config keys that name class lists, with their paths and the sections that they are in."""
    for where, _, data in _labelled_data(config):
        if data.classes is not None:
            yield f"{where}.classes", Path(data.classes), data


def require_public_names(classes: ClassList, path: Path, data: str, where: str, word: str) -> None:
    """Refuses a list that was made of the rows of packed records: of these `data`, or of those beside which it lies.
    `word`: how to say that its names are public."""
    folders = [path.parent]
    with suppress(ShardError, OSError):
        index = open_index(data, excluded="ignored")
        folders += [index.root] if isinstance(index, ShardIndex) and isinstance(index.root, Path) else []
    if classes.digest in {made_of_rows(folder) for folder in folders}:
        raise RecipeError(
            f"{where}: {path} was made of the rows of packed records, and a class that one private record alone has "
            f"would tell of it; name a public list, or say {word} if these names are public all the same"
        )


def read_list(path: Path, where: str) -> ClassList:
    try:
        return ClassList.read(path)
    except ShardError as error:
        raise RecipeError(f"{where}: {error}") from None


def class_filter(data: Data, label: str | None, classes: ClassList | None, where: str) -> ClassFilter | None:
    """What `data.exclude_classes` leaves out."""
    if not isinstance(data, ShardData | StreamData) or data.exclude_classes is None:
        return None
    excluded = read_list(Path(data.exclude_classes), f"{where}.exclude_classes")
    if classes is not None and excluded.numbers.keys().isdisjoint(classes.in_files):
        raise RecipeError(
            f"{where}: none of the names of exclude_classes is on the list of classes; name the classes as that does"
        )
    return ClassFilter(excluded, label, classes)


def leave_out(index: RecordIndex, classes: ClassFilter | None, where: str, needed: bool = True) -> RecordIndex:
    """Class folders that are left out are not counted; a shard's records are known by their class once they are read,
    so their slots stay and are empty. `needed`: refuse records that none of the classes can be told of."""
    if classes is None:
        return index
    if isinstance(index, FolderIndex):
        there = not classes.excluded.numbers.keys().isdisjoint(index.classes)
        return index.without(classes.excluded.names) if there or needed else index
    if classes.label is None and not needed:
        return index
    if classes.label is None or classes.classes is None:
        raise RecipeError(
            f"{where}: exclude_classes needs data.label and data.classes, which say what class a record of a shard "
            "has; name both, or leave classes out of a folder of images"
        )
    from murmuration.data.draw.stream import StreamIndex  # only here: it brings PyTorch along

    assert isinstance(index, ShardIndex | StreamIndex), "the config refused any other"
    return index.without(classes)


def _left_out_everywhere(config: Config) -> set[str]:
    """The classes that all data with labels leave out, so that no output is needed for them."""
    found: list[set[str]] = []
    for where, phase, data in _labelled_data(config):
        if phase.label is not None:
            excluded = class_filter(data, None, None, where)
            found.append(set(excluded.excluded.names) if excluded else set())
    return set.intersection(*found) if found else set()


def class_list(config: Config, outputs: int) -> ClassList | None:
    """The one list of the run, if it has one, without the classes that all of its data leave out; refused where it has
    two, or more classes than the model has outputs."""
    found: ClassList | None = None
    excluded = _left_out_everywhere(config)
    for where, path, data in named_lists(config):
        classes = read_list(path, where)
        if isinstance(data, ShardData) and not (data.public or data.classes_public):
            require_public_names(classes, path, data.path, where, f"{where}_public, true,")
        if found is not None and classes != found:
            raise RecipeError(f"{where}: not the list of the phases before it; name the same one everywhere")
        found = classes
        if excluded and excluded.isdisjoint(classes.names):
            raise RecipeError(
                f"{where}: none of the names of exclude_classes is on this list; name the classes as it does"
            )
        outputs_needed = len(classes.without(excluded).names)
        if outputs_needed > outputs:
            raise RecipeError(
                f"{where}: {outputs_needed} classes, but the model has {outputs} outputs; set model.classes to "
                f"{outputs_needed}"
            )
    return found.without(excluded) if found is not None else None


def require_numbers(sources: Sequence[LabelSource], classes: ClassList | None, outputs: int) -> None:
    """Refuses folders whose classes would get numbers that mean something else, or that private records decide."""
    for source in sources:
        if classes is not None:
            # In private data, records of a folder that the list lacks are bad instead, because one record must not
            # decide whether a run starts; only a list that contains none of the folders is refused.
            unknown = [name for name in source.index.classes if name not in classes.numbers]
            if unknown and (not source.private or len(unknown) == len(source.index.classes)):
                said = (
                    "none of its class folders is" if source.private else f"the class folder {shown(unknown[0])} is not"
                )
                raise RecipeError(f"{source.where}: {said} on the list of data.classes; name the list that fits")
        elif source.private:
            raise RecipeError(
                f"{source.where}: the class folders of private records must not decide which class has which number; "
                "name data.classes, a file with one class per line that is public knowledge and was not made of them"
            )
        elif len(source.index.classes) > outputs:
            raise RecipeError(
                f"{source.where}: {len(source.index.classes)} class folders, but the model has {outputs} outputs; set "
                "model.classes, or name data.classes"
            )
    if classes is None and sources:
        first = sources[0]
        other = next((source for source in sources if source.index.classes != first.index.classes), None)
        if other is not None:
            raise RecipeError(
                f"{other.where}: not the class folders of {first.where}, so different classes would share an output; "
                "name data.classes, a list of all of them"
            )


def check_at_hand(config: Config, outputs: int) -> None:
    """Checks as much as possible without the data or the lists that are not at hand."""
    named = [(where, path) for where, path, _ in named_lists(config)]
    for where, _, data in _labelled_data(config):
        if data.exclude_classes is not None:
            named.append((f"{where}.exclude_classes", Path(data.exclude_classes)))
    if any(not path.exists() for _, path in named):
        return
    classes = class_list(config, outputs)
    sources: list[LabelSource] = []
    for number, phase in enumerate(config.phases):
        measured = [("evaluation", phase.evaluation), ("monitor", phase.monitor)]
        own = class_filter(phase.data, phase.label, classes, f"phases.{number}.data")
        named = [(f"phases.{number}.{name}.path", part.path, False, own) for name, part in measured if part is not None]
        if isinstance(phase.data, ShardData):
            named.append((f"phases.{number}.data.path", phase.data.path, phase.privacy is not None, own))
        if phase.mixing is not None and isinstance(phase.mixing.data, ShardData):
            mixed = class_filter(phase.mixing.data, phase.label, classes, f"phases.{number}.mixing.data")
            named.append((f"phases.{number}.mixing.data.path", phase.mixing.data.path, False, mixed))
        for where, path, private, left_out in named:
            with suppress(ShardError, OSError):
                index = leave_out(open_index(path), left_out, where, where.endswith(".data.path"))
                sources += LabelSource.of(where, index, phase.label, private)
    require_numbers(sources, classes, outputs)
