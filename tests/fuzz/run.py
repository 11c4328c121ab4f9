"""The loop: mutate, run, keep what was new, shorten what was wrong and write it into the corpus."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz.engine import ACCEPTED, Result, Target, Worker

CORPUS = Path(__file__).parent / "corpus"
TARGETS = {
    "ledger": "targets_accounting:Ledgers",
    "certificate": "targets_accounting:Certificates",
    "manifest": "targets_index:Manifests",
    "stats": "targets_index:Stats",
    "known": "targets_index:KnownShards",
    "offsets": "targets_index:Offsets",
    "exclusions": "targets_index:ExclusionFacts",
    "excluded": "targets_index:ExcludedIds",
    "units": "targets_units:UnitFacts",
    "unit-numbers": "targets_units:UnitNumbers",
    "tar": "targets_tar:Shards",
    "config": "targets_train:Configs",
    "override": "targets_train:Overrides",
    "checkpoint": "targets_train:CheckpointManifests",
    "pointer": "targets_train:Pointers",
}
POOL = 400  # of cases that were answered in a way of their own, and are mutated further
SHORTENINGS, SHORTENING_SECONDS = 150, 20.0
PLAIN_BYTES = 4096  # larger cases are compressed


@contextmanager
def opened(name: str) -> Iterator[tuple[Target, Worker]]:
    module, _, kind = TARGETS[name].partition(":")
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-", dir=memory if memory.is_dir() else None))
    try:
        target = getattr(importlib.import_module(f"tests.fuzz.{module}"), kind)(folder)
        worker = Worker(target)
        try:
            yield target, worker
        finally:
            worker.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kept(name: str) -> dict[Path, bytes]:
    """What was found before, smallest first."""
    paths = sorted(path for path in (CORPUS / name).glob("*") if path.is_file())
    return {path: gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in paths}


@dataclass
class Summary:
    target: str
    seed: int
    cases: int = 0
    seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    messages: set[str] = field(default_factory=set)
    findings: dict[tuple[str, str], tuple[Path, Result]] = field(default_factory=dict)

    def __str__(self) -> str:
        answers = ", ".join(f"{count:,} x {code}" for code, count in self.codes.most_common())
        lines = [f"{self.target}: {self.cases:,} cases in {self.seconds:.0f} s (seed {self.seed}); answers: {answers}; "
                 f"{len(self.messages)} different; {len(self.findings)} findings"]  # fmt: skip
        for path, result in self.findings.values():
            where = f" in {result.place}" if result.place else ""
            lines.append(f"  {result.fault}{where}: {path.name}: {result.said[:300]!r}")
        return "\n".join(lines)


def fuzz(name: str, seed: int, cases: int, keep: bool = True) -> Summary:
    """As many cases on any machine, under any load. Everything in the corpus comes first, so that what is known is not
    written again."""
    summary = Summary(name, seed)
    with opened(name) as (target, worker):
        honest = target.seeds()
        for data in honest:
            result = worker.run(data)
            assert result.code in ACCEPTED and not result.fault, f"{name}: a file as it should be is refused: {result}"
        pool = list(honest)
        for path, data in kept(name).items():
            result = worker.run(data)
            if result.fault:
                summary.findings[result.signature] = (path, result)
            pool.append(data)
        chance, begun = Random(f"{name} {seed}"), time.monotonic()
        while summary.cases < cases:
            base = chance.choice(honest if chance.random() < 0.5 else pool)
            data = target.mutate(chance, base, chance.choice(pool))
            result = worker.run(data)
            summary.cases += 1
            summary.codes[str(result.code) if not result.fault else "fault"] += 1
            if result.fault and result.signature not in summary.findings:
                data, result = _shorter(worker, data, result)
                summary.findings[result.signature] = (_store(name, data, result, keep), result)
            elif not result.fault and result.message not in summary.messages and len(pool) < POOL:
                pool.append(data)
            summary.messages.add(result.message)
        summary.seconds = time.monotonic() - begun
    return summary


def _shorter(worker: Worker, data: bytes, result: Result) -> tuple[bytes, Result]:
    """Pieces that are not needed for the same fault are left out, from halves down to single bytes."""
    if result.code is None and "time" in result.fault:
        return data, result  # each try would take as long
    begun, tries, size = time.monotonic(), 0, len(data) // 2
    while size >= 1:
        at = 0
        while at < len(data):
            if tries >= SHORTENINGS or time.monotonic() - begun > SHORTENING_SECONDS:
                return data, result
            tries += 1
            less = data[:at] + data[at + size :]
            again = worker.run(less)
            if again.signature == result.signature:
                data, result = less, again
            else:
                at += size
        size //= 2
    return data, result


def _store(name: str, data: bytes, result: Result, keep: bool) -> Path:
    words = re.sub(r"[^A-Za-z0-9]+", "-", f"{result.fault} {result.place}").strip("-").lower()[:60].strip("-")
    path = CORPUS / name / f"{words}-{hashlib.sha256(data).hexdigest()[:8]}"
    packed = len(data) > PLAIN_BYTES
    path = path.with_name(path.name + ".gz") if packed else path
    if keep:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data, 9, mtime=0) if packed else data)
    return path
