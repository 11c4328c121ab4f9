"""Two runs with the same keys whose data differ in one record: every public byte that differs, by its place."""

from __future__ import annotations

import io
import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from murmuration.train.audit.replay import public_sinks
from tests.support.launching import Launch
from tests.support.tars import indexed, png

RECORDS, STEPS, ODD = 40, 4, 7


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


BOMB = (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
    + chunk(b"IDAT", zlib.compress(bytes(1000)))
)
TEXT_BOMB = png()[:33] + chunk(b"zTXt", b"c\0\0" + zlib.compress(b"a" * 60_000_000, 9)) + png()[33:]
GOOD = (png(ODD), b'{"finding": 1}')
BLANK = (b"", GOOD[1])
"""No picture: the record keeps its place and adds nothing."""
POISON = {
    "no picture": (b"x" * 50, GOOD[1]),
    "decompression bomb": (BOMB, GOOD[1]),
    "text bomb": (TEXT_BOMB, GOOD[1]),
    "no such class": (GOOD[0], b'{"finding": 99}'),
    "cut label": (GOOD[0], b'{"finding": '),
    "deep label": (GOOD[0], b"[" * 100_000 + b"]" * 100_000),
    "long number": (GOOD[0], b'{"finding": ' + b"9" * 5000 + b"}"),
    "NaN": (GOOD[0], b'{"finding": NaN}'),
    "surrogate": (GOOD[0], b'{"finding": "\\ud800"}'),
    "no label": (GOOD[0], b'{"anna": 3}'),
}


def sinks(folder: Path, odd: tuple[bytes, bytes]) -> dict[str, bytes]:
    """What a run on these records shows to everybody."""
    data = folder / "data"
    records = [(png(number), b'{"finding": %d}' % (number % 3)) for number in range(RECORDS)]
    records[ODD] = odd
    indexed(data, ({"png": picture, "json": told} for picture, told in records))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "model": {
            "family": "classifier", "image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 1,
            "classes": 3, "classify_loss": "softmax",
        },
        "phases": [{
            "name": "private", "data": {"path": str(data), "label": "finding", "reading": {"workers": 0}},
            "objective": "classify",
            "privacy": {"epsilon": 8.0, "expected_batch": RECORDS // 2, "noise_multiplier": 0.6},
            "schedule": {"peak": 0.1}, "steps": STEPS,
        }],
        "run": {"engine": "local", "checkpoint_every": 2, "debug_seed": 5},
    }  # fmt: skip
    job, run_dir = Launch.written(config, folder, "neighbour", launcher="python")
    code, output = job.run()
    assert code == 0, output
    found = public_sinks(run_dir, io.StringIO(output))
    return {name: content.replace(str(folder).encode(), b"FOLDER") for name, content in found.items()}


DIGEST = re.compile(rb"[0-9a-f]{8,}")
RATE = re.compile(rb"[\d.,]+( samples/s| images/s| records/s|/s)")
NAMED = {
    # Which records these are, by digests under a salt that each index draws, and what hashes or signs those.
    "certificate.json: .hashes.config_sha256", "certificate.json: .hashes.data_manifests.private",
    "certificate.json: .segments.N.config_digest", "certificate.json: .segments.N.manifest_digest",
    "certificate.json: .hashes.checkpoint_manifest_sha256", "certificate.json: .weights.N.checkpoint_manifest_sha256",
    "certificate.json: .ledger.head", "certificate.json: .signature.value", "checkpoints/latest: ",
    "checkpoints/stepN/manifest.json: .ledger.head", "checkpoints/stepN/manifest.json: .manifest_digest",
    "ledger.jsonl: segment N.config_digest", "ledger.jsonl: segment N.manifest_digest",
    "ledger.jsonl: checkpoint N.digest",
    *(f"ledger.jsonl: {kind} N.previous" for kind in ("open", "commit", "checkpoint", "finish")),
    *(f"ledger.jsonl: {kind} N.hash" for kind in ("segment", "open", "commit", "checkpoint", "finish")),
}  # fmt: skip
"""All that differs where another record cannot be used."""
RELEASED = {
    "certificate.json: .weights.N.sha256", "checkpoints/stepN/manifest.json: .pieces.piece-N-of-N.safetensors",
    "checkpoints/stepN/piece-N-of-N.safetensors: ", "weights.json",
}  # fmt: skip
"""Weights and the optimizer's state, which the noise covers, and their digests."""
TIMED = {"logs/public.jsonl: None N.samples_per_second", "tb/public: "}
"""Measured before the first record is read, so that two runs on equal data differ in it, too."""


def leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(f"{place}.{key}", each)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from leaves(f"{place}.{number}", each)
    else:
        yield place, value


def parts(name: str, content: bytes) -> dict[str, Any]:
    """JSON by its leaves; of pages and the console, what is no digest; any other file as a whole."""
    if name.endswith(".jsonl"):
        lines = [json.loads(line) for line in content.splitlines()]
        return {f"{line.get('kind')} {at}": each for n, line in enumerate(lines) for at, each in leaves(str(n), line)}
    if name.endswith(".json"):
        return dict(leaves("", json.loads(content)))
    if name == "console" or name.endswith((".html", ".md")):
        return dict(enumerate(RATE.sub(b"RATE", DIGEST.sub(b"HEX", content)).splitlines()))
    return {"": content}


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> set[str]:
    """The places that differ, with numbers as N and all tensors in one."""
    assert one.keys() == other.keys()
    found = set()
    for name in one:
        ours, theirs = parts(name, one[name]), parts(name, other[name])
        places = [at for at in ours.keys() | theirs.keys() if ours.get(at) != theirs.get(at)]
        found |= {name if name == "weights.json" else f"{name}: {at}" for at in places}
    found = {re.sub(r"\b\d+\b", "N", re.sub(r"phase\d+-step\d+", "stepN", each)) for each in found}
    return found - TIMED


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return sinks(tmp_path_factory.mktemp("blank"), BLANK)


# Readers refuse these as "deep label" and the blank: tests/data/test_data_hostile_records.py has their kinds.
ALIKE = ("cut label", "long number", "NaN", "surrogate", "no picture", "no label")


@pytest.mark.parametrize(
    "kind", ["the same", *(pytest.param(kind, marks=pytest.mark.slow if kind in ALIKE else ()) for kind in POISON)]
)
def test_a_poisonous_record_shows_in_the_names_of_the_data_alone(
    blank: dict[str, bytes], tmp_path: Path, kind: str
) -> None:
    """As the same records do that were indexed a second time."""
    assert differing(blank, sinks(tmp_path, {"the same": BLANK, **POISON}[kind])) == NAMED


def test_a_usable_record_shows_in_what_noise_covers_besides(blank: dict[str, bytes], tmp_path: Path) -> None:
    assert differing(blank, sinks(tmp_path, GOOD)) == NAMED | RELEASED
