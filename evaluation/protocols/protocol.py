"""What the command `evaluate` knows of a protocol, and what it asks it to do. Free of torch, so that bad input is
refused within a second."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from murmuration.evaluation.models.subject import Subject

if TYPE_CHECKING:
    from murmuration.data.decode.augment import Augment
    from murmuration.evaluation.models.weights import Reader
    from murmuration.evaluation.session.public_records import RecordsPlace
    from murmuration.model.settings import NamedPixels, PixelSettings

SCORED = {"test": "data"}
LEARNT_AND_SCORED = {"train": "data", "test": "test"}


@dataclass(frozen=True)
class Protocol:
    name: str
    help: str
    arguments: Callable[[ArgumentParser], object]
    """Declares the protocol's own options; those of all protocols come after them."""
    module: str
    """Where `run(session, work)` stands. Imported when everything was checked that needs no torch."""
    records: Mapping[str, str] = field(default_factory=lambda: SCORED)
    """Its sets of records, each with the argument that names it."""
    files: tuple[str, ...] = ()
    """Arguments that name files, which must exist."""
    check: Callable[[Namespace], object] = lambda arguments: None
    """Refuses options that do not go together."""
    texts: bool = False
    """It is for language models."""
    private: bool = False
    """Its results are for the owner alone."""

    @property
    def learns(self) -> bool:
        """It learns from one set, so that the model's own head is not used."""
        return "train" in self.records


@dataclass(frozen=True)
class Request:
    """A command whose arguments and files are in order."""

    protocol: Protocol
    arguments: Namespace
    subject: Subject
    places: dict[str, RecordsPlace]
    view: Augment | None
    """None: the model's own."""
    pixels: NamedPixels | PixelSettings | None
    """What --pixels says."""
    readers: Callable[[], tuple[Reader, ...]] = tuple
    """Readers of published files beside our own; asked when torch may be imported."""
