"""An opened checkpoint: any range of any tensor, whichever rank wrote it, once every byte has been verified."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from murmuration.accounting.certificate.weights import AVERAGED, tensor_digest
from murmuration.accounting.errors import REFUSED, RunError
from murmuration.accounting.strict_json import JsonError, parse
from murmuration.train.engines.base import Engine
from murmuration.train.optim.base import AVERAGE

FORMAT = "murmuration-checkpoint/1"
WEIGHTS, FIXED = "weights", "fixed"


class CheckpointError(RunError, RuntimeError):
    """A checkpoint is damaged or does not belong here; the message names the file."""

    exit_code = REFUSED


@dataclass(frozen=True)
class Position:
    """`step` steps of phase number `phase` are done."""

    phase: int
    step: int

    @property
    def folder(self) -> str:
        return f"phase{self.phase:02d}-step{self.step:08d}"


@dataclass
class Loaded:
    position: Position
    manifest: dict[str, Any]
    digest: str
    pieces: dict[tuple[str, str], list[tuple[int, int, Path]]]

    @staticmethod
    def open(folder: Path, digest: str, share: tuple[int, int] = (0, 1)) -> Loaded:
        """Opens and verifies a checkpoint. With `share` = (rank, world), it hashes only this rank's share of the
        pieces; the other ranks hash the rest."""
        try:
            text = (folder / "manifest.json").read_bytes()
        except OSError as error:
            raise CheckpointError(f"{folder}: {error.strerror}; the checkpoint is incomplete") from None
        if hashlib.sha256(text).hexdigest() != digest:
            raise CheckpointError(f"{folder / 'manifest.json'} is not the one that was written; it is damaged")
        manifest = _checked(text, folder)
        pieces: dict[tuple[str, str], list[tuple[int, int, Path]]] = {}
        for number, (name, expected) in enumerate(sorted(manifest["pieces"].items())):
            path = folder / name
            try:
                if number % share[1] == share[0] and hash_of(path) != expected:
                    raise CheckpointError(f"{path} is damaged: its hash is not the one in the manifest")
                _list(path, pieces, manifest["shapes"])
            except (OSError, SafetensorError, ValueError) as error:
                raise CheckpointError(f"{path} is missing or damaged ({error})") from None
        return Loaded(Position(manifest["phase"], manifest["step"]), manifest, digest, pieces)

    def names(self, kind: str) -> list[str]:
        return [parameter for found, parameter in self.pieces if found == kind]

    def read(self, kind: str, parameter: str, start: int, length: int) -> Tensor:
        """Elements [start, start + length), put together from the pieces that contain them."""
        parts = [
            (max(start, piece_start), min(start + length, piece_start + size), piece_start, path)
            for piece_start, size, path in self.pieces.get((kind, parameter), [])
        ]
        parts = [part for part in parts if part[0] < part[1]]
        covered = sum(high - low for low, high, _, _ in parts)
        if covered != length:
            raise CheckpointError(
                f"the checkpoint has {covered} of {length} elements of {parameter} ({kind}); restore it"
            )
        out = torch.empty(length)
        for low, high, piece_start, path in parts:
            with safe_open(str(path), framework="pt") as file:
                stored = file.get_slice(f"{kind}|{parameter}|{piece_start}")
                out[low - start : high - start] = stored[low - piece_start : high - piece_start]
        return out

    def state_dict(self, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """The whole model, shaped as `like`; refuses a model with other names."""
        stored = {*self.names(WEIGHTS), *self.names(FIXED)}
        if stored != set(like):
            odd = sorted(stored ^ set(like))[:3]
            raise CheckpointError(f"the checkpoint is of another model: {', '.join(odd)} … exist on one side only")
        kinds = {name: WEIGHTS for name in self.names(WEIGHTS)} | {name: FIXED for name in self.names(FIXED)}
        return {n: self.read(kinds[n], n, 0, t.numel()).view(t.shape).to(t.dtype) for n, t in like.items()}

    def weights(self) -> dict[str, Tensor]:
        """Every tensor in the shape it was saved with, for handing weights to another model."""
        trained = set(self.names(WEIGHTS))
        return {name: self.whole(WEIGHTS if name in trained else FIXED, name) for name in self.manifest["shapes"]}

    def whole(self, kind: str, name: str) -> Tensor:
        """A whole tensor in its shape: a weight, or what the optimizer keeps beside it."""
        shape = self.manifest["shapes"][name]
        return self.read(kind, name, 0, torch.Size(shape).numel()).view(shape)

    def tensor_digests(self) -> dict[str, str]:
        """Digests of all tensors that may be exported; averages, if the optimizer kept them, have their own names."""
        trained, averages = set(self.names(WEIGHTS)), set(self.names(AVERAGE))
        found = {}
        for name in self.manifest["shapes"]:
            found[name] = listed_digest(self.whole(WEIGHTS if name in trained else FIXED, name))
            if averages:
                mean = listed_digest(self.whole(AVERAGE, name)) if name in averages else found[name]
                found[AVERAGED + name] = mean
        return found

    def restore_optimizer(self, engine: Engine, but: Sequence[str] = ()) -> None:
        """`but`: state that is not read."""
        engine.set_optimizer_step(self.manifest["optimizer_step"])
        for shard in engine.shards():
            for kind, tensor in shard.state.items():
                for fragment in shard.fragments if kind not in but else ():
                    stored = self.read(kind, fragment.name, fragment.start, fragment.length)
                    fragment.of(tensor).copy_(stored)


def listed_digest(tensor: Tensor) -> str:
    """As the list of a certificate's tensors has it, which holds them in full precision."""
    return tensor_digest("F32", tensor.shape, [tensor.float().contiguous().numpy().reshape(-1).data.cast("B")])


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ledger_of(manifest: object) -> tuple[int, str] | None:
    """Length and head of the ledger with which a checkpoint was written; None if the manifest does not say."""
    stored = manifest.get("ledger") if isinstance(manifest, dict) else None
    if not isinstance(stored, dict) or not _counts([stored.get("length")]) or not isinstance(stored.get("head"), str):
        return None
    return stored["length"], stored["head"]


def _checked(text: bytes, folder: Path) -> dict[str, Any]:
    """The manifest, once its values have the types that all later code relies on."""
    try:
        manifest = parse(text)
    except JsonError:
        raise CheckpointError(f"{folder / 'manifest.json'} is not readable JSON; it is damaged") from None
    found = manifest if isinstance(manifest, dict) else {}
    if found.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {str(found.get('format'))[:80]!r}, not {FORMAT!r}")
    shapes, pieces = found.get("shapes"), found.get("pieces")
    wrong = {
        "phase, step or optimizer_step": not _counts([found.get(k) for k in ("phase", "step", "optimizer_step")]),
        "shapes": not isinstance(shapes, dict)
        or not all(isinstance(shape, list) and _counts(shape) for shape in shapes.values()),
        "pieces": not isinstance(pieces, dict)
        or not all(isinstance(digest, str) and name == Path(name).name for name, digest in pieces.items()),
        "ledger": "ledger" in found and ledger_of(found) is None,
        "objective": not isinstance(found.get("objective", ""), str),
    }
    if damaged := [name for name, bad in wrong.items() if bad]:
        raise CheckpointError(f"{folder / 'manifest.json'} has no usable {damaged[0]}; it is damaged")
    return found


def _counts(values: list[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 for value in values)


def _list(path: Path, pieces: dict[tuple[str, str], list[tuple[int, int, Path]]], shapes: dict[str, list[int]]) -> None:
    with safe_open(str(path), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (a safe_open is not iterable)
            kind, parameter, start = key.split("|")
            if parameter not in shapes:
                raise ValueError(f"the manifest does not list {parameter[:80]!r}")
            length = file.get_slice(key).get_shape()
            if len(length) > 1:
                raise ValueError(f"{key[:80]!r} is not flat")
            size = length[0] if length else 1
            pieces.setdefault((kind, parameter), []).append((int(start), size, path))
