"""Hashes of released weights, tensor by tensor, so that they can be recognised in any file; without torch.

A certificate is signed before anything is exported, and an export may rename tensors or be split into files. So the
certificate states one hash: that of a list (`weights.json`) with the hash of each tensor.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from murmuration.accounting.durable import atomic
from murmuration.accounting.strict_json import parse

NAME = "weights.json"
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
    with atomic(folder / NAME, one_writer=True) as file:
        file.write(json.dumps(lists, indent=1, sort_keys=True).encode() + b"\n")


def read_lists(folder: Path) -> dict[str, dict[str, str]] | None:
    path = folder / NAME
    if not path.is_file():
        return None
    found = parse(path.read_bytes())
    if not isinstance(found, dict) or not all(_is_list(tensors) for tensors in found.values()):
        raise WeightsFileError(f"{path} is not a list of tensors; restore it")
    return found


def _is_list(tensors: Any) -> bool:
    return isinstance(tensors, dict) and all(isinstance(value, str) for value in tensors.values())


def digests_of_safetensors(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_HEADER:
                raise ValueError("its header is too long")
            header = parse(file.read(length))
            return {
                name: _stored_digest(file, 8 + length, entry)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
            raise WeightsFileError(f"{path} is not a safetensors file ({error}); export it again") from None


def _stored_digest(file: Any, base: int, entry: dict[str, Any]) -> str:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError("a tensor ends before it begins")
    file.seek(base + begin)
    return tensor_digest(entry["dtype"], entry["shape"], _read(file, end - begin))


def _read(file: Any, length: int) -> Iterable[bytes]:
    while length:
        chunk = file.read(min(length, _CHUNK))
        if not chunk:
            raise ValueError("a tensor is cut")
        length -= len(chunk)
        yield chunk
