"""Checkpoints of our own: pieces through the shard map, whole or absent, readable at any world size.

Every rank writes its pieces into a temporary folder; after a barrier the main rank writes the manifest with the
pieces' hashes, renames the folder and swings the pointer. A kill at any moment leaves the previous one whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from train.engine import ShardedEngine
from train.ranks import Ranks

FORMAT = "murmuration-checkpoint/1"
WEIGHTS, FIXED = "weights", "fixed"


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or does not belong here; the message names the file."""


@dataclass(frozen=True)
class Position:
    """`step` steps of phase number `phase` are done."""

    phase: int
    step: int

    @property
    def folder(self) -> str:
        return f"phase{self.phase:02d}-step{self.step:08d}"


class Checkpoints:
    def __init__(self, folder: Path, ranks: Ranks, keep: int) -> None:
        self.folder, self.ranks, self.keep = folder, ranks, keep

    def save(self, position: Position, engine: ShardedEngine, replicated: bool, header: dict[str, Any]) -> str:
        """Returns the digest of the manifest; durable when it returns. A position is written once."""
        written = self.ranks.on_main(lambda: self._written(position))
        if written is not None:
            return written
        temporary = self.folder / f".{position.folder}.tmp"
        whole = engine.whole_weights()
        self.ranks.on_main(lambda: self._fresh(temporary))
        name = f"piece-{self.ranks.rank:05d}-of-{self.ranks.world:05d}.safetensors"
        if self.ranks.main or not replicated:
            tensors = _tensors_of(engine, whole if self.ranks.main else None)
            save_file(tensors, str(temporary / name))
            _sync(temporary / name)
        pieces = self.ranks.gather((name, _hash(temporary / name)) if (temporary / name).exists() else None)
        manifest = {
            "format": FORMAT,
            "phase": position.phase,
            "step": position.step,
            "optimizer_step": engine.optimizer_step(),
            "pieces": dict(piece for piece in pieces if piece),
            "shapes": {name: list(tensor.shape) for name, tensor in whole.items()},
            **header,
        }
        return self.ranks.on_main(lambda: self._publish(temporary, position, manifest))

    def _written(self, position: Position) -> str | None:
        pointer = self.folder / "latest"
        named = json.loads(pointer.read_text()) if pointer.exists() else {}
        return named["manifest_sha256"] if named.get("folder") == position.folder else None

    def _fresh(self, temporary: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for orphan in self.folder.glob(".*.tmp"):  # folders, and a pointer that was never swung
            shutil.rmtree(orphan) if orphan.is_dir() else orphan.unlink()
        temporary.mkdir()

    def _publish(self, temporary: Path, position: Position, manifest: dict[str, Any]) -> str:
        text = json.dumps(manifest, indent=2, sort_keys=True).encode()
        (temporary / "manifest.json").write_bytes(text)
        _sync(temporary / "manifest.json")
        _sync(temporary)
        final = self.folder / position.folder
        if final.exists():  # left by a kill between the two renames below; the pointer never named it
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(self.folder)
        digest = hashlib.sha256(text).hexdigest()
        pointer = self.folder / ".latest.tmp"
        pointer.write_text(json.dumps({"folder": position.folder, "manifest_sha256": digest}) + "\n")
        _sync(pointer)
        pointer.replace(self.folder / "latest")
        _sync(self.folder)
        self._retire(position.folder)
        return digest

    def _retire(self, newest: str) -> None:
        kept = sorted(path for path in self.folder.glob("phase*-step*") if path.name != newest)
        for old in kept[: max(0, len(kept) - (self.keep - 1))]:
            shutil.rmtree(old)

    def latest(self) -> Loaded | None:
        return self.newest(self.folder)

    @staticmethod
    def newest(folder: Path) -> Loaded | None:
        """What the pointer names, checked; None where nothing was ever saved."""
        pointer = folder / "latest"
        if not pointer.exists():
            return None
        try:
            named = json.loads(pointer.read_text())
            return Loaded.open(folder / named["folder"], named["manifest_sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{pointer} is damaged ({error}); restore it or start a new run directory") from None


@dataclass
class Loaded:
    """An opened checkpoint: any range of any tensor, whoever wrote it."""

    position: Position
    manifest: dict[str, Any]
    digest: str
    pieces: dict[tuple[str, str], list[tuple[int, int, Path]]]

    @staticmethod
    def open(folder: Path, digest: str) -> Loaded:
        try:
            text = (folder / "manifest.json").read_bytes()
        except OSError as error:
            raise CheckpointError(f"{folder}: {error.strerror}; the checkpoint is incomplete") from None
        if hashlib.sha256(text).hexdigest() != digest:
            raise CheckpointError(f"{folder / 'manifest.json'} is not the one that was written; it is damaged")
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {manifest['format']!r}, not {FORMAT!r}")
        pieces: dict[tuple[str, str], list[tuple[int, int, Path]]] = {}
        for name, expected in manifest["pieces"].items():
            path = folder / name
            if not path.exists() or _hash(path) != expected:
                raise CheckpointError(f"{path} is missing or damaged: its hash is not the one in the manifest")
            with safe_open(str(path), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (a safe_open is not iterable)
                    kind, parameter, start = key.split("|")
                    length = file.get_slice(key).get_shape()
                    size = length[0] if length else 1
                    pieces.setdefault((kind, parameter), []).append((int(start), size, path))
        return Loaded(Position(manifest["phase"], manifest["step"]), manifest, digest, pieces)

    def names(self, kind: str) -> list[str]:
        return [parameter for found, parameter in self.pieces if found == kind]

    def read(self, kind: str, parameter: str, start: int, length: int) -> Tensor:
        """Elements [start, start + length), put together from the pieces that hold them."""
        out = torch.empty(length)
        covered = 0
        for piece_start, size, path in self.pieces.get((kind, parameter), []):
            low, high = max(start, piece_start), min(start + length, piece_start + size)
            if low >= high:
                continue
            with safe_open(str(path), framework="pt") as file:
                stored = file.get_slice(f"{kind}|{parameter}|{piece_start}")
                out[low - start : high - start] = stored[low - piece_start : high - piece_start]
            covered += high - low
        if covered != length:
            raise CheckpointError(f"the checkpoint holds {covered} of {length} elements of {parameter} ({kind})")
        return out

    def state_dict(self, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """The whole model, shaped as `like`; refuses a model with other names."""
        stored = {*self.names(WEIGHTS), *self.names(FIXED)}
        if stored != set(like):
            odd = sorted(stored ^ set(like))[:3]
            raise CheckpointError(f"the checkpoint is of another model: {', '.join(odd)} … stand on one side only")
        kinds = {name: WEIGHTS for name in self.names(WEIGHTS)} | {name: FIXED for name in self.names(FIXED)}
        return {n: self.read(kinds[n], n, 0, t.numel()).view(t.shape).to(t.dtype) for n, t in like.items()}

    def weights(self) -> dict[str, Tensor]:
        """Every tensor with the shape that it was saved with; for handing weights to another model."""
        shapes = self.manifest["shapes"]
        kinds = {name: WEIGHTS for name in self.names(WEIGHTS)} | {name: FIXED for name in self.names(FIXED)}
        return {
            name: self.read(kinds[name], name, 0, torch.Size(shape).numel()).view(shape)
            for name, shape in shapes.items()
        }

    def restore_optimizer(self, engine: ShardedEngine) -> None:
        engine.set_optimizer_step(self.manifest["optimizer_step"])
        for shard in engine.shards():
            for kind, tensor in shard.state.items():
                for fragment in shard.fragments:
                    stored = self.read(kind, fragment.name, fragment.start, fragment.length)
                    fragment.of(tensor).copy_(stored)


def _tensors_of(engine: ShardedEngine, whole: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """This rank's shards, and of `whole` what no optimizer holds."""
    tensors: dict[str, Tensor] = {}
    for shard in engine.shards():
        for fragment in shard.fragments:
            for kind, tensor in {WEIGHTS: shard.weights.detach(), **shard.state}.items():
                piece = fragment.of(tensor).detach().cpu().clone()
                tensors[f"{kind}|{fragment.name}|{fragment.start}"] = piece
    for name, tensor in (whole or {}).items():
        if name not in engine.shapes:
            tensors[f"{FIXED}|{name}|0"] = tensor.detach().cpu().reshape(-1).float().clone()
    return tensors


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
