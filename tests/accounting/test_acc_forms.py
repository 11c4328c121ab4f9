"""Forms began anew at 0.3.0: a file that an earlier version wrote is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.errors import RunError
from murmuration.accounting.keys import load, store
from murmuration.accounting.ledger.history import History
from murmuration.data.index.format import MANIFEST, read_manifest
from tests.support.acc_world import KEY, certified, rewritten, whole_run


def ledger_without(folder: Path, name: str) -> None:
    rewritten(folder, lambda line: line.pop(name) if line["kind"] == "run" else None)
    History.read(folder / "ledger.jsonl")


def certificate_of(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / "certificate.json").read_text())
    change(document)
    (folder / "certificate.json").write_text(json.dumps(document))
    verify(folder)


def key_file(folder: Path) -> None:
    store(KEY, folder / "run.key")
    path = folder / "run.key"
    path.write_bytes(path.read_bytes().replace(b"murmuration-key/1", b"murmuration-key/2"))
    load(path)


def index(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({"format": 2, "shards": []}))
    read_manifest(folder)


OLDER: dict[str, tuple[Callable[[Path], None], str]] = {
    "a ledger whose run did not sign": (lambda folder: ledger_without(folder, "signer"), "the ledger"),
    "a ledger of bare hashes": (lambda folder: ledger_without(folder, "record_digests"), "the ledger"),
    "a certificate without limits": (
        lambda folder: certificate_of(folder, lambda document: document.pop("limits")), "the certificate",
    ),
    "a certificate by its old number": (
        lambda folder: certificate_of(folder, lambda document: document.update(format="murmuration-certificate/2")),
        "the certificate",
    ),
    "a key file": (key_file, "the run key .*"),
    "an index": (index, ".*: the index"),
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_an_older_file_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    certified(whole_run(tmp_path))
    read, what = OLDER[name]
    with pytest.raises((RunError, ValueError, OSError), match=rf"^{what} was written by a version before 0\.3\.0; .+$"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"short", bytes(32), b"debug:" + bytes(32)])
def test_a_bare_secret_is_no_key_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.key").write_bytes(content)
    (tmp_path / "run.key").chmod(0o600)
    with pytest.raises(RunError, match="is damaged; restore it or start a new run directory"):
        load(tmp_path / "run.key")
