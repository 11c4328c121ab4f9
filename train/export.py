"""Weights for release, with the certificate that belongs to them, and with nothing else of the run directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from accounting.certificate import CertificateError, verify
from accounting.certificate import write as write_certificate
from train.checkpoint import CheckpointError, Checkpoints, Loaded
from train.run_dir import RunDir

NOT_PRIVATE = "NOT_PRIVATE.txt"


class ExportError(ValueError):
    """Nothing was exported; the message says why."""


def export(root: Path, out: Path) -> list[Path]:
    """The last durable checkpoint's weights, its shapes and the certificate; refused if they do not belong together."""
    run_dir = RunDir(root)
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out} is not empty; name a new folder")
    if run_dir.root.resolve() in [out.resolve(), *out.resolve().parents]:
        raise ExportError(f"{out} lies inside the run directory, whose secret folder must never be published")
    try:
        verdict = verify(root)
    except CertificateError as error:
        raise ExportError(f"the certificate does not hold: {error}") from None
    if not (root / "certificate.json").is_file():
        raise ExportError(f"{root} has no certificate yet; let the run finish first")
    loaded = Checkpoints.newest(run_dir.checkpoints)
    if loaded is None:
        raise ExportError(f"{root} has no checkpoint")
    document = json.loads((root / "certificate.json").read_text(encoding="utf-8"))
    _belongs(loaded, document)
    out.mkdir(parents=True, exist_ok=True)
    try:
        save_file(loaded.weights(), str(out / "model.safetensors"), metadata={"format": "pt"})
        shape = {
            "phase": loaded.position.phase,
            "step": loaded.position.step,
            "objective": loaded.manifest["objective"],
        }
        (out / "export.json").write_text(json.dumps({**shape, "shapes": loaded.manifest["shapes"]}, indent=2) + "\n")
        shutil.copyfile(root / "ledger.jsonl", out / "ledger.jsonl")
        # The pages are made anew from the document that was verified: a copy could have been edited.
        write_certificate(document, out)
        if verdict.objection:
            (out / NOT_PRIVATE).write_text(verdict.objection + "\n")
        _holds_no_key(run_dir.key, out)
    except BaseException:
        shutil.rmtree(out)
        raise
    return sorted(out.iterdir())


def _belongs(loaded: Loaded, certificate: dict[str, object]) -> None:
    hashes = certificate.get("hashes")
    if not isinstance(hashes, dict) or hashes.get("checkpoint_manifest_sha256") != loaded.digest:
        raise CheckpointError(
            "the certificate was written for another checkpoint; run the training command once more to renew it"
        )


def _holds_no_key(key: Path, out: Path) -> None:
    """The last line of defence: the key's bytes, raw or as hex, occur in nothing that is about to leave."""
    if not key.exists():
        return
    secret = key.read_bytes().removeprefix(b"debug:")
    for path in out.iterdir():
        content = path.read_bytes()
        if secret in content or secret.hex().encode() in content:
            raise ExportError(f"{path.name} contains the run key; nothing was exported")
