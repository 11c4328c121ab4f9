"""Hashes of released weights, tensor by tensor, so that they can be recognised in any file; without torch.

A certificate is signed before anything is exported, and an export may rename tensors or be split into files. So the
certificate states one hash: that of a list (`weights.json`) with the hash of each tensor. Where an export renames or
cuts tensors, `renamed.json` says which ones of the file are which certified one; it is a map to follow, and proves
nothing by itself.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from murmuration.accounting.durable import atomic
from murmuration.accounting.strict_json import parse

NAME = "weights.json"
RENAMED = "renamed.json"
AVERAGED = "averaged/"
"""Prefix of the names of averaged weights, which are exported beside the others."""
_MOST_HEADER = 100 << 20
_CHUNK = 1 << 24


class WeightsFileError(ValueError):
    """A file that should hold tensors cannot be read; the message says why."""


def tensor_digest(dtype: str, shape: Sequence[int], chunks: Iterable[bytes | memoryview]) -> str:
    """`dtype` as in safetensors; the bytes are the elements in order, little-endian."""
    hashed = hashlib.sha256(f"{dtype} {list(shape)}\n".encode())
    for chunk in chunks:
        hashed.update(chunk)
    return hashed.hexdigest()


def list_digest(tensors: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(tensors, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_lists(lists: dict[str, dict[str, str]], folder: Path) -> None:
    """Writes one list for each checkpoint that may be exported, by the name of its folder."""
    with atomic(folder / NAME) as file:
        file.write(json.dumps(lists, indent=1, sort_keys=True).encode() + b"\n")


def read_lists(folder: Path) -> dict[str, dict[str, str]] | None:
    path = folder / NAME
    if not path.is_file():
        return None
    found = parse(path.read_bytes())
    if not isinstance(found, dict) or not all(_of_texts(tensors) for tensors in found.values()):
        raise WeightsFileError(f"{path} is not a list of tensors; restore it")
    return found


def _of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def digests_of_safetensors(path: Path) -> dict[str, str]:
    with _opened(path) as (file, base, header, _):
        return {
            name: tensor_digest(entry["dtype"], entry["shape"], _stored(file, base, entry))
            for name, entry in header.items()
        }


def metadata_of(path: Path) -> dict[str, str]:
    with _opened(path) as (_, _, _, metadata):
        return metadata


@dataclass(frozen=True)
class Renamed:
    """Digests of a file's tensors under certified names, and the names in the file that no certified tensor has."""

    digests: dict[str, str]
    others: list[str]


def digests_of_renamed(path: Path) -> Renamed | None:
    """By the `renamed.json` beside the file; None where it says nothing of this file."""
    beside = path.parent / RENAMED
    listed = _parts(beside, path.name) if beside.is_file() else {}
    if not listed:
        return None
    with _opened(path) as (file, base, header, _):
        found: dict[str, str] = {}
        for name, (shape, parts) in listed.items():
            if strange := [part for part in parts if part not in header]:
                raise WeightsFileError(f"{beside} names {strange[0]!r:.200}, which {path.name} lacks; export it again")
            dtypes = sorted({header[part]["dtype"] for part in parts})
            chunks = (chunk for part in parts for chunk in _stored(file, base, header[part]))
            found[name] = tensor_digest(" ".join(dtypes), shape, chunks)
        mapped = {part for _, parts in listed.values() for part in parts}
        return Renamed(found, [name for name in header if name not in mapped])


def _parts(path: Path, name: str) -> dict[str, tuple[list[int], list[str]]]:
    """By certified name, its shape and the tensors of the file that are its rows, in order."""
    try:
        told = parse(path.read_bytes()).get(name, {})
        return {ours: (list(where["shape"]), [str(part) for part in where["parts"]]) for ours, where in told.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsFileError(f"{path} cannot be read ({error}); export the weights again") from None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], int, dict[str, Any], dict[str, str]]]:
    """The file, where its data begin, its entries by name, and its metadata."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_HEADER:
                raise ValueError("its header is too long")
            header = parse(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            _require_nothing_between([entry["data_offsets"] for entry in entries.values()], path, 8 + length)
            metadata = header.get("__metadata__", {})
            if not _of_texts(metadata):
                raise ValueError("its metadata are no texts")
            yield file, 8 + length, entries, metadata
        except WeightsFileError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
            raise WeightsFileError(f"{path} is not a safetensors file ({error}); export it again") from None


def _require_nothing_between(offsets: list[list[int]], path: Path, base: int) -> None:
    """Bytes of no tensor would be in the file, and in no digest."""
    at = 0
    for begin, end in sorted(offsets):
        if begin != at or end < begin:
            raise ValueError("its tensors overlap, or there are bytes between them")
        at = end
    if path.stat().st_size != base + at:
        raise ValueError("bytes follow its last tensor, or it ends within it")


def _stored(file: IO[bytes], base: int, entry: dict[str, Any]) -> Iterator[bytes]:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError("a tensor ends before it begins")
    file.seek(base + begin)
    yield from _read(file, end - begin)


def _read(file: Any, length: int) -> Iterable[bytes]:
    while length:
        chunk = file.read(min(length, _CHUNK))
        if not chunk:
            raise ValueError("a tensor is cut")
        length -= len(chunk)
        yield chunk
