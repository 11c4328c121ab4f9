"""Weights for release, with the certificate and the ledger that belong to them, and nothing else of the run directory.

Averaged weights, where the optimizer kept them, are exported beside the others: they are computed from released weights
only.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from murmuration.accounting.certificate.pages import write as write_certificate
from murmuration.accounting.certificate.provenance import Provenance
from murmuration.accounting.certificate.verify import CertificateError, Verdict, verify
from murmuration.accounting.certificate.weights import AVERAGED
from murmuration.accounting.certificate.weights import NAME as WEIGHTS_LIST
from murmuration.accounting.keys import secrets_in
from murmuration.accounting.ledger.history import History
from murmuration.accounting.strict_json import parse
from murmuration.train.export.card import LICENCE, UNKNOWN, write_card
from murmuration.train.export.finished import ExportError, Finished
from murmuration.train.export.forms import write_form
from murmuration.train.optim.base import AVERAGE
from murmuration.train.recipe.pixels import as_json, metadata, of_manifest
from murmuration.train.storage.checkpoint import CheckpointError, Checkpoints, Loaded, best_checkpoint
from murmuration.train.storage.deepspeed_format import read_deepspeed, write_deepspeed
from murmuration.train.storage.model_note import copy_named_files, note_of
from murmuration.train.storage.run_dir import RunDir

NOT_PRIVATE = "NOT_PRIVATE.txt"
PART = ".part"
"""Folder of an export that is not complete. One that was killed leaves it, and the next one removes it."""


def export(
    root: Path, out: Path, form: str = "safetensors", best: bool = False, averages: bool = False,
    licence: str = UNKNOWN,
) -> list[Path]:  # fmt: skip
    """Exports a durable checkpoint's weights and shapes with the certificate; refused if they do not belong together.

    The checkpoint is the last one, or the best one by the metric of run.keep_best, for which the planned budget is
    claimed. The forms of other packages hold one model, of the newest weights or of their averages.
    """
    run_dir = RunDir(root)
    if not LICENCE.fullmatch(licence):
        raise ExportError(
            f'--licence {licence!r:.80}: name one by its short form, such as apache-2.0, or write "other"'
        )
    if averages and form in FORMS:
        raise ExportError(
            f"--averaged chooses what timm, hf, peft, vip and dpcap hold; {form} has both, so leave it out"
        )
    _must_be_empty(out)
    if run_dir.root.resolve() in [out.resolve(), *out.resolve().parents]:
        raise ExportError(f"{out} lies inside the run directory, whose secret folder must never be published")
    verdict = _certified(root)
    loaded, document = _chosen(run_dir, best)
    with _whole(out) as part:
        told = Provenance.of(History.read(root / "ledger.jsonl")[0]).metadata()
        told |= metadata(of_manifest(loaded.manifest, loaded.position.folder))
        if form in FORMS:
            FORMS[form](loaded, part, told)
            _describe(loaded, root, part)
        else:  # a form of another package, and the page that says what the model is
            weights = averaged(loaded) if averages else loaded.weights()
            if weights is None:
                raise ExportError(f"{root} kept no averages (optimizer.params.ema_decay); leave --averaged out")
            finished = Finished.of(loaded, root, weights, told, AVERAGED if averages else "")
            loading = write_form(form, finished, part)
            listed = Checkpoints.listed(run_dir.checkpoints)
            kept = next(each for each in listed if each.manifest_sha256 == loaded.digest)
            write_card(part, finished, loading, document, {} if averages else kept.public, licence, best)
        shutil.copyfile(root / "ledger.jsonl", part / "ledger.jsonl")
        if (root / WEIGHTS_LIST).is_file():
            shutil.copyfile(root / WEIGHTS_LIST, part / WEIGHTS_LIST)
        # The pages are made anew from the document that was verified: a copy could have been edited.
        write_certificate(document, part)
        if verdict.objection:
            (part / NOT_PRIVATE).write_text(verdict.objection + "\n")
        _holds_no_key(run_dir.key, part)
        verify(part)  # what leaves is what was certified
        if not verdict.objection:
            # What is certified is for everyone, whatever the umask of the run.
            out.chmod(0o755)
            for path in out.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)
    return sorted(path for path in out.rglob("*") if path.is_file())


def _chosen(run_dir: RunDir, best: bool) -> tuple[Loaded, dict[str, Any]]:
    """The checkpoint that is exported, and the certificate, which must be that of the newest one."""
    loaded = Checkpoints.newest(run_dir.checkpoints)
    if loaded is None and not run_dir.checkpoints.is_dir():
        raise ExportError(f"{run_dir.root} is an export, which has no checkpoints; name the run directory it came from")
    if loaded is None:
        raise ExportError(f"{run_dir.root} has no checkpoint; let the run reach one")
    document = parse((run_dir.root / "certificate.json").read_bytes())
    hashes = document.get("hashes")
    if not isinstance(hashes, dict) or hashes.get("checkpoint_manifest_sha256") != loaded.digest:
        raise CheckpointError(
            "the certificate was written for another checkpoint; run the training command once more to renew it"
        )
    if best:
        loaded = best_checkpoint(run_dir)
    if "objective" not in loaded.manifest:
        raise CheckpointError(f"the manifest of {loaded.position.folder} names no objective; restore the checkpoint")
    return loaded, document


def from_deepspeed(folder: Path, out: Path) -> list[Path]:
    """Weights alone, for a phase that starts from them: no promise comes with them."""
    _must_be_empty(out)
    weights = read_deepspeed(folder)
    with _whole(out) as part:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(part / "model.safetensors"))
    return [out / "model.safetensors"]


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder inside `out`, whose content moves up if the block ends without an error."""
    new, part = not out.exists(), out / PART
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(out if new else part)
        raise
    for path in part.iterdir():
        path.replace(out / path.name)
    part.rmdir()


def averaged(loaded: Loaded) -> dict[str, Tensor] | None:
    """The weights with averages in place of the trained tensors; None where no averages were kept."""
    kept = loaded.names(AVERAGE)
    return loaded.weights() | {name: loaded.whole(AVERAGE, name) for name in kept} if kept else None


def _must_be_empty(out: Path) -> None:
    if os.path.lexists(out) and not (out.is_dir() and all(path.name == PART for path in out.iterdir())):
        raise ExportError(f"{out} is not an empty folder; name a new one")


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
    copy_named_files(loaded.manifest, root, out)
    (out / "export.json").write_text(json.dumps(description, indent=2) + "\n")


Write = Callable[[dict[str, Tensor], Path, dict[str, str]], Any]
Form = Callable[[Loaded, Path, dict[str, str]], Any]


def _by(write: Write, suffix: str) -> Form:
    def act(loaded: Loaded, out: Path, told: dict[str, str]) -> None:
        write(loaded.weights(), out / f"model.{suffix}", told)
        average = averaged(loaded)
        if average is not None:
            write(average, out / f"averaged.{suffix}", told)

    return act


FORMS: dict[str, Form] = {
    # Of these formats, only safetensors has a place for what the weights were trained on.
    "safetensors": _by(lambda tensors, path, told: save_file(tensors, str(path), told), "safetensors"),
    "pytorch": _by(lambda tensors, path, told: torch.save(tensors, path), "pt"),
    "deepspeed": lambda loaded, out, told: write_deepspeed(loaded, out / "deepspeed"),
}


def _holds_no_key(key: Path, out: Path) -> None:
    """The last line of defence: the key's bytes, raw or as hex, occur in no exported file."""
    if not key.exists():
        return
    secrets = secrets_in(key)
    for path in (each for each in out.rglob("*") if each.is_file()):
        content = path.read_bytes()
        if any(secret in content or secret.hex().encode() in content for secret in secrets):
            raise ExportError(f"{path.name} contains the run key; nothing was exported")
