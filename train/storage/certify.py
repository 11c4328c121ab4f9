"""The end of a run: the digests of weights that a certificate names, and its signature, while the key still exists."""

from __future__ import annotations

from typing import Any

from murmuration.accounting.certificate.signature import fault_of, signed
from murmuration.accounting.certificate.statement import uncovered
from murmuration.accounting.certificate.weights import list_digest, write_lists
from murmuration.accounting.keys import load
from murmuration.accounting.ledger.chain import LedgerEntry, LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.strict_json import parse
from murmuration.train.storage.checkpoint_read import Loaded
from murmuration.train.storage.run_dir import RunDir


def earlier_certificate(run_dir: RunDir, history: History, entries: list[LedgerEntry]) -> dict[str, Any] | None:
    """The certificate of a finished run whose key is destroyed: nobody can sign another one. None where a new one can
    be written."""
    path = run_dir.root / "certificate.json"
    if run_dir.key.exists():
        return None
    try:
        document: dict[str, Any] = parse(path.read_bytes())
        fault = fault_of(document, history.run["signer"])
    except (OSError, ValueError, KeyError, TypeError):
        document, fault = {}, "cannot be read"
    if fault is not None:
        raise LedgerError(f"{path} {fault}, and the key that could sign another one is destroyed; restore the file")
    if uncovered(entries, document):
        raise LedgerError(
            f"{path} no longer covers the run, since how the run or a checkpoint was chosen was declared after it was "
            "signed, and the key that could sign another one is destroyed; declare that before a run ends, or set "
            "run.keep_key"
        )
    return document


def completed(run_dir: RunDir, history: History, document: dict[str, Any], kept: list[Loaded]) -> dict[str, Any]:
    """The certificate with the digests of the weights that may be exported, signed."""
    lists = {loaded.position.folder: loaded.tensor_digests() for loaded in kept}
    write_lists(lists, run_dir.root)
    document["weights"] = [
        {
            "phase": loaded.position.phase,
            "step": loaded.position.step,
            "checkpoint_manifest_sha256": loaded.digest,
            "tensors": len(lists[loaded.position.folder]),
            "sha256": list_digest(lists[loaded.position.folder]),
        }
        for loaded in kept
    ]
    return signed(document, load(run_dir.key))
