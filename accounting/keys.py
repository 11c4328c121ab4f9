"""One secret run key, and every other key derived from it by purpose, phase and segment (HKDF-SHA256).

The run key comes from the operating system and lives in RUN_DIR/secret/, outside every checkpoint folder.
Whoever holds it can redraw the noise, so it is destroyed when the final certificate is written.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from murmuration.accounting.errors import REFUSED, RunError

Purpose = Literal[
    "sampling", "sampling-digest", "noise", "augmentation", "masks", "dropout", "metric-noise", "self-test",
    "public-order", "key-check", "signature",
]  # fmt: skip
KEY_BYTES = 32


class KeyFileError(RunError, ValueError):
    """The run key is missing, foreign or readable by others."""

    exit_code = REFUSED


@dataclass(frozen=True)
class RunKey:
    """The run key; `debug` marks one made from a user's seed, which protects nothing."""

    secret: bytes = field(repr=False)
    debug: bool = False

    @staticmethod
    def fresh() -> RunKey:
        return RunKey(secrets.token_bytes(KEY_BYTES))

    @staticmethod
    def from_debug_seed(seed: int) -> RunKey:
        return RunKey(hashlib.sha256(f"murmuration debug seed {seed}".encode()).digest(), debug=True)

    def derive(self, purpose: Purpose, phase: int, segment: str) -> bytes:
        if purpose not in get_args(Purpose):
            raise KeyFileError(f"there is no key purpose {purpose!r}")
        info = f"murmuration/1|{purpose}|phase {phase}|segment {segment}".encode()
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(self.secret)

    def check_value(self) -> str:
        """Lets a ledger recognise its key without containing anything that helps to guess it."""
        return hmac.new(self.derive("key-check", 0, "-"), b"murmuration key check", hashlib.sha256).hexdigest()


def store(key: RunKey, path: Path) -> None:
    """Writes the key with mode 0600 in a 0700 folder; never overwrites one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.chmod(path.parent, 0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write((b"debug:" if key.debug else b"") + key.secret)
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> RunKey:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise KeyFileError(
            f"the run key {path} is missing, so this run cannot be continued; start a new run directory"
        ) from None
    if path.stat().st_mode & 0o077:
        raise KeyFileError(f"the run key {path} can be read by others; restore it with mode 0600 or start a new run")
    debug = content.startswith(b"debug:")
    secret = content.removeprefix(b"debug:")
    if len(secret) != KEY_BYTES:
        raise KeyFileError(f"the run key {path} has {len(secret)} bytes in the place of {KEY_BYTES}")
    return RunKey(secret, debug)


def destroy(path: Path) -> bool:
    """Overwrites and removes the key; True if there was one. (Copies in backups or snapshots are out of reach.)"""
    if not path.exists():
        return False
    with path.open("r+b") as file:
        file.write(secrets.token_bytes(path.stat().st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    return True
