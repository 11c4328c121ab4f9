"""Weights for release, with the certificate and the ledger that belong to them, and nothing else of the run directory.

Averaged weights, where the optimizer kept them, are exported beside the others: they are computed from released weights
only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from murmuration.accounting.certificate.certificate import CertificateError, Verdict, verify
from murmuration.accounting.certificate.certificate import write as write_certificate
from murmuration.accounting.certificate.weights import NAME as WEIGHTS_LIST
from murmuration.accounting.errors import RunError
from murmuration.accounting.keys import secrets_in
from murmuration.accounting.ledger.history import History
from murmuration.accounting.strict_json import parse
from murmuration.train.optim.base import AVERAGE
from murmuration.train.recipe.pixels import as_json, metadata, of_manifest
from murmuration.train.storage.best_checkpoint import best_checkpoint
from murmuration.train.storage.checkpoint import CheckpointError, Checkpoints, Loaded
from murmuration.train.storage.deepspeed_format import read_deepspeed, write_deepspeed
from murmuration.train.storage.model_note import copy_tokenizer, note_of
from murmuration.train.storage.provenance import Provenance
from murmuration.train.storage.run_dir import RunDir

NOT_PRIVATE = "NOT_PRIVATE.txt"


class ExportError(RunError, ValueError):
    """Nothing was exported; the message says why."""


def export(root: Path, out: Path, form: str = "safetensors", best: bool = False) -> list[Path]:
    """Exports a durable checkpoint's weights and shapes with the certificate; refused if they do not belong together.

    The checkpoint is the last one, or the best one by the metric of run.keep_best, for which the planned budget is
    claimed.
    """
    run_dir = RunDir(root)
    _must_be_empty(out)
    if run_dir.root.resolve() in [out.resolve(), *out.resolve().parents]:
        raise ExportError(f"{out} lies inside the run directory, whose secret folder must never be published")
    verdict = _certified(root)
    loaded = Checkpoints.newest(run_dir.checkpoints)
    if loaded is None:
        raise ExportError(f"{root} has no checkpoint")
    document = parse((root / "certificate.json").read_bytes())
    _belongs(loaded, document)
    if best:
        loaded = best_checkpoint(run_dir)
    if "objective" not in loaded.manifest:
        raise CheckpointError(f"the manifest of {loaded.position.folder} names no objective; restore the checkpoint")
    out.mkdir(parents=True, exist_ok=True)
    try:
        FORMS[form](loaded, out, Provenance.of(*History.read(root / "ledger.jsonl")))
        _describe(loaded, root, out)
        shutil.copyfile(root / "ledger.jsonl", out / "ledger.jsonl")
        if (root / WEIGHTS_LIST).is_file():
            shutil.copyfile(root / WEIGHTS_LIST, out / WEIGHTS_LIST)
        # The pages are made anew from the document that was verified: a copy could have been edited.
        write_certificate(document, out)
        if verdict.objection:
            (out / NOT_PRIVATE).write_text(verdict.objection + "\n")
        _holds_no_key(run_dir.key, out)
        verify(out)  # what leaves is what was certified
    except BaseException:
        shutil.rmtree(out)
        raise
    return sorted(path for path in out.rglob("*") if path.is_file())


def from_deepspeed(folder: Path, out: Path) -> list[Path]:
    """Weights alone, for a phase that starts from them: no promise comes with them."""
    _must_be_empty(out)
    weights = read_deepspeed(folder)
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(out / "model.safetensors"))
    return [out / "model.safetensors"]


def averaged(loaded: Loaded) -> dict[str, Tensor] | None:
    """The weights with averages in place of the trained tensors; None where no averages were kept."""
    kept = loaded.names(AVERAGE)
    return loaded.weights() | {name: loaded.whole(AVERAGE, name) for name in kept} if kept else None


def _must_be_empty(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out} is not empty; name a new folder")


def _certified(root: Path) -> Verdict:
    try:
        verdict = verify(root)
    except CertificateError as error:
        raise ExportError(f"the certificate does not hold: {error}") from None
    if not (root / "certificate.json").is_file():
        raise ExportError(f"{root} has no certificate yet; let the run finish first")
    return verdict


def _describe(loaded: Loaded, root: Path, out: Path) -> None:
    description = {
        "phase": loaded.position.phase,
        "step": loaded.position.step,
        "checkpoint_manifest_sha256": loaded.digest,
        "objective": loaded.manifest["objective"],
        "shapes": loaded.manifest["shapes"],
        **note_of(loaded.manifest),
        **as_json(of_manifest(loaded.manifest, loaded.position.folder)),
    }
    copy_tokenizer(loaded.manifest, root, out)
    (out / "export.json").write_text(json.dumps(description, indent=2) + "\n")


Write = Callable[[dict[str, Tensor], Path, dict[str, str]], Any]
Form = Callable[[Loaded, Path, Provenance], Any]


def _by(write: Write, suffix: str) -> Form:
    def act(loaded: Loaded, out: Path, made_from: Provenance) -> None:
        told = made_from.metadata() | metadata(of_manifest(loaded.manifest, loaded.position.folder))
        write(loaded.weights(), out / f"model.{suffix}", told)
        average = averaged(loaded)
        if average is not None:
            write(average, out / f"averaged.{suffix}", told)

    return act


FORMS: dict[str, Form] = {
    # Of these formats, only safetensors has a place for what the weights were trained on.
    "safetensors": _by(lambda tensors, path, told: save_file(tensors, str(path), told), "safetensors"),
    "pytorch": _by(lambda tensors, path, told: torch.save(tensors, path), "pt"),
    "deepspeed": lambda loaded, out, made_from: write_deepspeed(loaded, out / "deepspeed"),
}


def _belongs(loaded: Loaded, certificate: dict[str, object]) -> None:
    hashes = certificate.get("hashes")
    if not isinstance(hashes, dict) or hashes.get("checkpoint_manifest_sha256") != loaded.digest:
        raise CheckpointError(
            "the certificate was written for another checkpoint; run the training command once more to renew it"
        )


def _holds_no_key(key: Path, out: Path) -> None:
    """The last line of defence: the key's bytes, raw or as hex, occur in no exported file."""
    if not key.exists():
        return
    secrets = secrets_in(key)
    for path in (each for each in out.rglob("*") if each.is_file()):
        content = path.read_bytes()
        if any(secret in content or secret.hex().encode() in content for secret in secrets):
            raise ExportError(f"{path.name} contains the run key; nothing was exported")
