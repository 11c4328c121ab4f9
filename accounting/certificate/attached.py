"""Checks what lies beside a ledger: is the certificate signed, and are the weights the ones that were certified?"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate.provenance import Provenance, ProvenanceError
from murmuration.accounting.certificate.signature import fault_of
from murmuration.accounting.certificate.weights import (
    AVERAGED,
    NAME,
    RENAMED,
    digests_of_renamed,
    digests_of_safetensors,
    list_digest,
    read_lists,
)
from murmuration.accounting.errors import RunError
from murmuration.accounting.ledger.heads import log_with_signer
from murmuration.accounting.ledger.history import History
from murmuration.accounting.strict_json import parse

_OTHER_WEIGHTS = (
    ".pt", ".bin", ".pth", ".ckpt", ".pkl", ".pickle", ".npz", ".npy", ".onnx", ".h5", ".gguf", ".msgpack",
    ".safetensors",
)  # fmt: skip


class CertificateError(RunError, ValueError):
    """The certificate and the ledger do not match; the message says where."""


@dataclass
class Attached:
    """What was checked beside the ledger, and what could not be, as sentences."""

    signed_by: str
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def check_attached(folder: Path, certificate: dict[str, Any], history: History, signer: str | None = None) -> Attached:
    """`signer` is the public key that the reader has from another source."""
    found = Attached(history.run["signer"])
    if signer is not None and signer != found.signed_by:
        raise CertificateError(f"the ledger names the signing key {found.signed_by}, not the expected {signer}")
    if (fault := fault_of(certificate, found.signed_by)) is not None:
        raise CertificateError(f"the certificate {fault}; restore the signed file")
    found.checked.append(f"the certificate is signed by {found.signed_by}")
    if signer is None and (log := log_with_signer(folder, history.run_id, found.signed_by)) is not None:
        found.checked.append(f"that is the run's key by the log of runs {log}")
    elif signer is None:
        found.unchecked.append(
            "whether that is the run's key: compare it with the data set's log of runs or a witness, and give it with "
            "--signer"
        )
    _check_weights(folder, certificate, found)
    _check_earlier(folder, certificate, history, found)
    made_from = Provenance.of(history)
    for path in sorted(folder.glob("*.safetensors")):
        # Later runs believe a file's own word about what it was made from, so it is checked here.
        try:
            told = Provenance.inside(path)
        except ProvenanceError as error:
            raise CertificateError(f"{path.name}: {error}") from None
        if told is None:
            found.unchecked.append(f"{path.name}: it does not say what it was made from")
        elif told != made_from:
            raise CertificateError(
                f"{path.name} says that it was made from other runs or records than the ledger says; export it again"
            )
        else:
            found.checked.append(f"{path.name} names the runs and records that the ledger names")
    return found


def _check_weights(folder: Path, certificate: dict[str, Any], found: Attached) -> None:
    certified = {_folder(entry): entry for entry in certificate.get("weights", [])}
    try:
        lists = read_lists(folder)
    except ValueError as error:
        raise CertificateError(f"{error}") from None
    if not certified:
        found.unchecked.append("weights: this certificate names none")
        return
    _check_checkpoints(folder, certified, found)
    files = sorted(folder.glob("*.safetensors"))
    found.unchecked += [f"{path.relative_to(folder)}: {why}" for path, why in _others(folder, files)]
    if lists is not None:
        _require_certified(certified, lists)
    if not files:
        if not any((folder / "checkpoints" / name / "manifest.json").is_file() for name in certified):
            found.unchecked.append("weights: none of those that the certificate names lie here")
        return
    if lists is None:
        raise CertificateError(f"{NAME} is missing, so {files[0].name} cannot be compared; restore it")
    for path in files:
        held, all_of_them, others = _check_file(path, {name: lists[name] for name in certified})
        part = "" if held == all_of_them else f", {held} of {all_of_them} tensors"
        found.checked.append(f"{path.name} holds certified weights{part}")
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            found.unchecked.append(
                f"{path.name}: {others[0]:.200}{more}, which no certified tensor is equal to: forms of other libraries "
                "need some that are computed from certified ones, or zeros; whether these are, nothing here can tell"
            )
        if (folder / RENAMED).is_file():
            found.unchecked.append(
                f"{path.name}: whether each tensor stands where it belongs: {RENAMED} says so, and neither it nor any "
                "other file beside the weights is certified; export again from the run, and compare"
            )


def _require_certified(certified: dict[str, dict[str, Any]], lists: dict[str, dict[str, str]]) -> None:
    """Whatever else lies there, or not: others compare tensors with these lists, too."""
    for name in sorted(certified.keys() | lists.keys()):
        if name not in certified or list_digest(lists.get(name, {})) != certified[name]["sha256"]:
            raise CertificateError(f"{NAME} is not the one that was certified for {name:.100}; restore it")


def lists_tensors_of(folder: Path, file: Path) -> bool:
    """Whether the signed certificate in a folder lists every tensor of a safetensors file, and the file has no other.
    RunError, OSError, ValueError, KeyError or TypeError where something of it cannot be read."""
    certificate = parse((folder / "certificate.json").read_bytes())
    history, _ = History.read(folder / "ledger.jsonl")
    lists = read_lists(folder)
    if lists is None or fault_of(certificate, history.run["signer"]) is not None:
        return False
    _require_certified({_folder(entry): entry for entry in certificate["weights"]}, lists)
    _, _, others = _check_file(file, lists)
    return not others


def _others(folder: Path, compared: list[Path]) -> list[tuple[Path, str]]:
    """Files outside `checkpoints` that look like weights and were not compared."""
    aside = folder / "checkpoints"
    paths = [path for path in folder.rglob("*") if path.suffix.lower() in _OTHER_WEIGHTS and aside not in path.parents]
    if (folder / "deepspeed").is_dir():
        paths = [folder / "deepspeed", *(path for path in paths if folder / "deepspeed" not in path.parents)]
    why = {True: "in another place than exports are written to", False: "not a safetensors file"}
    return [(path, why[path.suffix == ".safetensors"]) for path in sorted(paths) if path not in compared]


def _folder(entry: dict[str, Any]) -> str:
    return f"phase{entry['phase']:02d}-step{entry['step']:08d}"


def _check_file(path: Path, lists: dict[str, dict[str, str]]) -> tuple[int, int, list[str]]:
    """Requires that all tensors of a file come from one checkpoint; returns how many it has, how many there are, and
    the names of those that an export in another form had to compute."""
    try:
        renamed = digests_of_renamed(path)
        stored, others = (renamed.digests, renamed.others) if renamed else (digests_of_safetensors(path), [])
    except (OSError, ValueError) as error:
        raise CertificateError(f"{error}") from None
    prefix = AVERAGED if path.name.startswith("averaged") else ""
    strange: str | None = None  # rather than "", which is a possible name
    for tensors in lists.values():
        strange = next((name for name, digest in stored.items() if tensors.get(prefix + name) != digest), None)
        if stored and strange is None:
            return len(stored), sum(name.startswith(AVERAGED) == bool(prefix) for name in tensors), others
    raise CertificateError(
        f"{path.name}: the tensor {strange!r:.200} is not the one that was certified; export the weights again"
    )


def _check_checkpoints(folder: Path, certified: dict[str, dict[str, Any]], found: Attached) -> None:
    for name, entry in certified.items():
        manifest = folder / "checkpoints" / name / "manifest.json"
        if not manifest.is_file():
            continue
        if _hash(manifest) != entry["checkpoint_manifest_sha256"]:
            raise CertificateError(f"{manifest} is not the one that was certified; restore it")
        _require_pieces(manifest)
        found.checked.append(f"the checkpoint {name} holds the certified bytes")


def _check_earlier(folder: Path, certificate: dict[str, Any], history: History, found: Attached) -> None:
    """Checkpoints whose weights the certificate does not name: the ledger has the digest of each that the run wrote."""
    certified = {_folder(entry) for entry in certificate.get("weights", [])}
    written = {mark.digest for mark in history.checkpoints}
    for manifest in sorted(folder.glob("checkpoints/*/manifest.json")):
        name = manifest.parent.name
        if name in certified:
            continue
        if _hash(manifest) in written:
            _require_pieces(manifest)
            found.checked.append(f"the checkpoint {name} holds the bytes that the ledger names")
        else:
            found.unchecked.append(f"the checkpoint {name:.100}: the ledger names no such one")


def _require_pieces(manifest: Path) -> None:
    try:
        pieces = dict(parse(manifest.read_bytes())["pieces"])
    except (ValueError, KeyError, TypeError) as error:
        raise CertificateError(f"{manifest} is damaged ({error!r:.200}); restore it") from None
    for piece, expected in sorted(pieces.items()):
        path = manifest.parent / Path(str(piece)).name
        if _hash(path) != expected:
            raise CertificateError(f"{path} is not the one that was certified; restore it")


def _hash(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
