"""Which checkpoints stay: the pointer lists them in the order of writing, and retention chooses from that list.

Names say nothing about order: after a rollback, an abandoned checkpoint may have a later step than the newest one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.checkpoint_read import CheckpointError, Position


class PointerError(CheckpointError):
    """The pointer is damaged: its bytes can be read, and are not what was written."""


@dataclass(frozen=True)
class Entry:
    """A durable checkpoint, and what was measured on public records with its weights."""

    phase: int
    step: int
    manifest_sha256: str
    public: dict[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return Position(self.phase, self.step).folder


@dataclass(frozen=True)
class Keep:
    last: int = 2
    every: int | None = None
    best: str | None = None

    def chosen(self, entries: Sequence[Entry]) -> list[Entry]:
        """Of all that there are, the newest first: the last so many, every so-manieth step, each phase's best."""
        stay = {entry.folder for entry in entries[: self.last]}
        if self.every is not None:
            stay |= {entry.folder for entry in entries if entry.step and entry.step % self.every == 0}
        stay |= {entry.folder for entry in self.best_of(entries).values()}
        return [entry for entry in entries if entry.folder in stay]

    def best_of(self, entries: Sequence[Entry]) -> dict[int, Entry]:
        """By phase. Of a loss the smallest is best, of everything else the largest; of equals the newest."""
        if self.best is None:
            return {}
        sign = 1 if "loss" in self.best else -1
        found: dict[int, Entry] = {}
        for entry in entries:
            if self.best not in entry.public:
                continue
            other = found.get(entry.phase)
            if other is None or sign * entry.public[self.best] < sign * other.public[self.best]:
                found[entry.phase] = entry
        return found


def read_pointer(path: Path) -> list[Entry]:
    """The newest first; empty where nothing was ever saved."""
    if not path.exists():
        return []
    try:
        named = json.loads(path.read_bytes())
        return [_entry(each) for each in [named, *named.get("before", [])]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); mend the disk or the permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise PointerError(
            f"{path} is damaged ({reason}); restore it, or start the training command again, which rebuilds it from "
            "the ledger"
        ) from None


def pointer_text(entries: Sequence[Entry]) -> bytes:
    newest, *before = (
        {"folder": entry.folder, "manifest_sha256": entry.manifest_sha256, "public": entry.public} for entry in entries
    )
    return (json.dumps({**newest, "before": before}, indent=1) + "\n").encode()


def _entry(named: dict[str, Any]) -> Entry:
    folder, digest, public = named["folder"], named["manifest_sha256"], named.get("public", {})
    place = re.fullmatch(r"phase(\d{2,4})-step(\d{8,15})", folder, re.ASCII)
    if place is None or not isinstance(digest, str):
        raise ValueError(f"it names no checkpoint but {str(folder)[:80]!r}")
    return Entry(int(place[1]), int(place[2]), digest, {str(name): float(value) for name, value in public.items()})
