"""A report on every tensor of a weight file, and on every tensor of the model to be filled.

A weight that is not loaded causes no error later, only worse results; so each key is reported, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Fate = Literal["taken", "transformed", "ignored", "missing"]


class WeightsError(ValueError):
    """The weights cannot be used; the message is one sentence with the cause and the fix."""


@dataclass(frozen=True)
class KeyReport:
    """`key` is the file's name of a tensor that is taken, transformed or ignored, and the model's if it is missing."""

    key: str
    fate: Fate
    shape: tuple[int, ...]
    why: str = ""


@dataclass
class LoadReport:
    """`notes` say what was inferred or assumed; `unused` keeps the ignored tensors, for a complete export."""

    source: str
    entries: list[KeyReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unused: dict[str, Tensor] = field(default_factory=dict)

    def add(self, key: str, fate: Fate, tensor: Tensor, why: str = "") -> None:
        self.entries.append(KeyReport(key, fate, tuple(tensor.shape), why))
        if fate == "ignored":
            self.unused[key] = tensor

    def keys(self, fate: Fate) -> list[str]:
        return [entry.key for entry in self.entries if entry.fate == fate]

    @property
    def left_as_initialised(self) -> list[str]:
        """The model's tensors for which the file had nothing, not even a reason to be zero."""
        return [entry.key for entry in self.entries if entry.fate == "missing" and not entry.why.startswith("zero")]

    def __str__(self) -> str:
        """One line for each key, except that layers that differ only in their number share one."""
        lines = [f"{self.source}:", *(f"  note: {note}" for note in self.notes)]
        groups: dict[tuple[str, Fate, tuple[int, ...], str], list[list[int]]] = {}
        for entry in self.entries:
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "#", entry.key)
            numbers = [int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", entry.key)]
            groups.setdefault((pattern, entry.fate, entry.shape, entry.why), []).append(numbers)
        for (pattern, fate, shape, why), found in groups.items():
            name = pattern
            for place in zip(*found, strict=True):
                name = name.replace("#", _numbers(place), 1)
            size = "x".join(map(str, shape)) or "scalar"
            lines.append(f"  {fate:<11} {name} [{size}]{f': {why}' if why else ''}")
        counts = ", ".join(f"{len(self.keys(fate))} {fate}" for fate in ("taken", "transformed", "ignored", "missing"))
        return "\n".join([*lines, f"  in all: {counts}"])


def _numbers(found: Iterable[int]) -> str:
    numbers = sorted(set(found))
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers)) + "}"
