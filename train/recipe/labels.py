"""Which class has which number: one public list for all phases of a run, their evaluation and what they mix in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.open import open_index
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.data.store.tar import shown
from murmuration.train.config.data import ShardData, StreamData
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError

FOLDERS = "cls"  # the label that class folders provide


@dataclass(frozen=True)
class LabelSource:
    """Class folders whose names become labels; `private` where a phase protects them."""

    where: str
    index: FolderIndex
    private: bool

    @staticmethod
    def of(where: str, index: RecordIndex | None, label: str | None, private: bool = False) -> Iterator[LabelSource]:
        whole = index.whole if isinstance(index, SplitIndex) else index
        if label == FOLDERS and isinstance(whole, FolderIndex) and whole.labelled:
            yield LabelSource(where, whole, private)


def named_lists(config: Config) -> Iterator[tuple[str, Path]]:
    """The config keys that name class lists, with their paths."""
    for number, phase in enumerate(config.phases):
        sources = [(f"phases.{number}.data.classes", phase.data)]
        if phase.mixing is not None:
            sources.append((f"phases.{number}.mixing.data.classes", phase.mixing.data))
        for where, data in sources:
            if isinstance(data, ShardData | StreamData) and data.classes is not None:
                yield where, Path(data.classes)


def class_list(config: Config, outputs: int) -> ClassList | None:
    """The one list of the run, if it has one; refused where it has two, or more classes than the model has outputs."""
    found: ClassList | None = None
    for where, path in named_lists(config):
        try:
            classes = ClassList.read(path)
        except ShardError as error:
            raise RecipeError(f"{where}: {error}") from None
        if found is not None and classes != found:
            raise RecipeError(f"{where}: not the list of the phases before it; name the same one everywhere")
        if len(classes.names) > outputs:
            raise RecipeError(
                f"{where}: {len(classes.names)} classes, but the model has {outputs} outputs; set model.classes to "
                f"{len(classes.names)}"
            )
        found = classes
    return found


def require_numbers(sources: Sequence[LabelSource], classes: ClassList | None, outputs: int) -> None:
    """Refuses folders whose classes would get numbers that mean something else, or that private records decide."""
    for source in sources:
        if classes is not None:
            _require_names(source, classes)
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


def _require_names(source: LabelSource, classes: ClassList) -> None:
    """Refuses class folders that the list does not contain. In private data, the records of such a folder are bad
    instead, because one record must not decide whether a run starts; only a list that contains none of the folders is
    refused."""
    unknown = [name for name in source.index.classes if name not in classes.numbers]
    if unknown and (not source.private or len(unknown) == len(source.index.classes)):
        said = "none of its class folders is" if source.private else f"the class folder {shown(unknown[0])} is not"
        raise RecipeError(f"{source.where}: {said} on the list of data.classes; name the list that fits")


def check_at_hand(config: Config, outputs: int) -> None:
    """Checks as much as possible without the data or the lists that are not at hand."""
    missing = any(not path.exists() for _, path in named_lists(config))
    classes = None if missing else class_list(config, outputs)
    sources: list[LabelSource] = []
    for number, phase in enumerate(config.phases):
        places = [("evaluation", phase.evaluation), ("monitor", phase.monitor)]
        named = [(f"phases.{number}.{name}.path", part.path, False) for name, part in places if part is not None]
        if isinstance(phase.data, ShardData):
            named.append((f"phases.{number}.data.path", phase.data.path, phase.privacy is not None))
        if phase.mixing is not None and isinstance(phase.mixing.data, ShardData):
            named.append((f"phases.{number}.mixing.data.path", phase.mixing.data.path, False))
        for where, path, private in named:
            with suppress(ShardError, OSError):
                sources += LabelSource.of(where, open_index(path), phase.label, private)
    if not missing:
        require_numbers(sources, classes, outputs)
