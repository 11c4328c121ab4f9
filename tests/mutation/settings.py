"""What is mutated, with which tests, and how much of it: cosmic-ray.toml beside this file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutation.tree import HERE

CONFIG = Path(__file__).with_name("cosmic-ray.toml")


@dataclass(frozen=True)
class Group:
    files: list[str]
    tests: list[str]
    sample: int
    """Mutants of each file, chosen at random; of the files in `whole` all, of those in `fewer` only a `few`."""
    whole: list[str]
    few: int
    fewer: list[str]
    seconds: float
    """How long the tests of one mutant may take in all, the fastest first. A single test may take half of that."""

    def most(self, file: str) -> int | None:
        return None if file in self.whole else self.few if file in self.fewer else self.sample


@cache
def raw() -> dict:
    return tomllib.loads(CONFIG.read_text())


def groups() -> dict[str, Group]:
    return {name: read(**group) for name, group in raw()["mutation"]["groups"].items()}


def read(
    files: list[str], tests: list[str], sample: int, whole: list[str], few: int = 0, fewer: tuple[str, ...] = (),
    seconds: float | None = None,
) -> Group:  # fmt: skip
    longest = float(seconds or raw()["mutation"]["seconds"])
    return Group(expand(files), expand(tests), sample, whole, few, expand(list(fewer)), longest)


def expand(patterns: list[str]) -> list[str]:
    """Files that hold anything."""
    found = [path for pattern in patterns for path in sorted(HERE.glob(pattern)) if path.stat().st_size > 2]
    return [path.relative_to(HERE).as_posix() for path in found]
