"""The run's secret file, and the keys that last as long as the run (HKDF-SHA256).

The file is in RUN_DIR/secret/, outside every checkpoint folder. It contains two secrets that reveal nothing about each
other: a lasting one, from which the signature, the self-test and the order of public records are derived, and one link
of the chain from which the keys of private steps are derived (`key_chain`). The link is replaced at every durable
checkpoint, and at every step of a run whose weights may be seen after any. Anyone who has it can redraw the noise of
the steps that follow, so the file is destroyed with the final certificate.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, overload

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from murmuration.accounting.durable import flush, remedy, sync
from murmuration.accounting.errors import REFUSED, RunError, written_before
from murmuration.accounting.strict_json import parse

StepPurpose = Literal["sampling", "sampling-digest", "noise", "augmentation", "masks", "dropout", "metric-noise"]
"""Purposes whose keys could be used to undo or to link the releases of private steps."""
LastingPurpose = Literal["self-test", "public-order", "public-masks", "key-check", "signature"]
Purpose = Literal[StepPurpose, LastingPurpose]
Key = bytes | Callable[[int], bytes]
"""One key for all steps, or a function of the step."""
KEY_BYTES = 32
FORMAT = "murmuration-key/1"
BEFORE = "murmuration-key/2"  # counted on before forms began anew


class Derive(Protocol):
    """The keys of one phase by their purpose; keys that only private steps use may be a function of the step."""

    @overload
    def __call__(self, purpose: StepPurpose, /) -> Key: ...

    @overload
    def __call__(self, purpose: LastingPurpose, /) -> bytes: ...


class KeyFileError(RunError, ValueError):
    """The run key is missing, foreign or readable by others, or a forgotten key is asked for."""

    exit_code = REFUSED


class KeyNotWritten(RunError, OSError):
    """The new state of the secret file could not be written; the old one is intact."""


@dataclass(frozen=True)
class Link:
    """The chain of a segment's keys at one step: it gives the keys of this step and all later ones, but of none before.

    The state of step s + 1 is HKDF(state of step s, "next step"); the key of a purpose at step s is HKDF(state of step
    s, "key", purpose).

    With `slots` above 1, records are allocated to the steps of epochs of so many. All steps of an epoch then sample by
    the same key, which is made from the epoch's first link in the segment and moves along behind the state: it goes
    when the epoch ends, and the other keys of the epoch's steps go as all others do.
    """

    segment: str
    step: int
    state: bytes = field(repr=False)
    slots: int = 1

    @staticmethod
    def first(segment: str, step: int, secret: bytes, slots: int = 1) -> Link:
        return Link(segment, step, secret + _epoch_key(secret) if slots > 1 else secret, slots)

    def key(self, purpose: StepPurpose) -> bytes:
        if purpose not in get_args(StepPurpose):
            raise KeyFileError(f"steps have no key for the purpose {purpose!r}")
        of_epoch = self.slots > 1 and purpose == "sampling"
        return hkdf(self.state[KEY_BYTES:] if of_epoch else self.state[:KEY_BYTES], f"murmuration/2|key|{purpose}")

    def at(self, step: int) -> Link:
        """The same chain at this step or a later one; there is no way back."""
        state, epoch = self.state[:KEY_BYTES], self.state[KEY_BYTES:]
        for before in range(self.step, step):
            state = hkdf(state, "murmuration/2|next step")
            if self.slots > 1 and before % self.slots == 0:
                epoch = _epoch_key(state)
        return replace(self, step=max(step, self.step), state=state + epoch)


def _epoch_key(state: bytes) -> bytes:
    return hkdf(state, "murmuration/2|epoch")


@dataclass(frozen=True)
class RunKey:
    """The lasting secret; `debug` marks one made from a user's seed, which protects nothing. It gives the keys of
    phases without noise, so `derive` knows the purposes of steps, too."""

    secret: bytes = field(repr=False)
    debug: bool = False
    chain: Link | None = None
    """The chain of the segment that was begun last; None before the first."""
    head: dict[str, Any] | None = None
    """Of runs whose link moves at every step: the `Head` of the ledger when it moved last."""
    order: str | None = None
    """A digest of the order in which records were numbered when the run was last opened, if that matters."""

    @staticmethod
    def fresh() -> RunKey:
        return RunKey(secrets.token_bytes(KEY_BYTES))

    @staticmethod
    def from_debug_seed(seed: int) -> RunKey:
        return RunKey(hashlib.sha256(f"murmuration debug seed {seed}".encode()).digest(), debug=True)

    def derive(self, purpose: Purpose, phase: int, segment: str) -> bytes:
        if purpose not in get_args(Purpose):
            raise KeyFileError(f"there is no key purpose {purpose!r}")
        return hkdf(self.secret, f"murmuration/1|{purpose}|phase {phase}|segment {segment}")

    def check_value(self) -> str:
        """Lets a ledger recognise its key, and contains nothing that helps to guess it."""
        return hmac.new(self.derive("key-check", 0, "-"), b"murmuration key check", hashlib.sha256).hexdigest()

    def without_chain(self) -> RunKey:
        """The key that ranks keep for the whole run."""
        return replace(self, chain=None)

    def first_link(self, segment: str, step: int, slots: int = 1) -> Link:
        """A chain for a new segment, random from the operating system: nothing that leaked earlier reveals it. A debug
        key derives it from its seed, so that runs can be repeated."""
        fresh = hkdf(self.secret, f"murmuration/2|chain|{segment}") if self.debug else secrets.token_bytes(KEY_BYTES)
        return Link.first(segment, step, fresh, slots)


def hkdf(secret: bytes, info: str) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info.encode()).derive(secret)


# The file.


def store(key: RunKey, path: Path) -> None:
    """Writes the key with mode 0600 in a 0700 folder; never overwrites one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.chmod(path.parent, 0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_text(key))
        file.flush()
        flush(file.fileno())


def rewrite(key: RunKey, path: Path) -> None:
    """Replaces the stored key: the new one is durable under its name before the old one's bytes are overwritten.

    This holds as far as a file system overwrites at all: snapshots, backups and flash memory may keep the old bytes.
    """
    aside = _aside(path)
    _overwrite_and_remove(aside)  # left by a kill in the middle of this
    try:
        store(key, aside)
        with path.open("r+b") as old:
            aside.replace(path)
            sync(path.parent)
            _overwrite(old)
    except OSError as error:
        with contextlib.suppress(OSError):
            _overwrite_and_remove(aside)
        raise KeyNotWritten(
            f"{path} could not be rewritten ({error.strerror or error}); the last checkpoint is whole: "
            f"{remedy(error)}, then start the same command again"
        ) from None


def load(path: Path) -> RunKey:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise KeyFileError(
            f"the run key {path} is missing, so this run cannot be continued; start a new run directory"
        ) from None
    if path.stat().st_mode & 0o077:
        raise KeyFileError(f"the run key {path} can be read by others; restore it with mode 0600 or start a new run")
    return _of(content, path)


def secrets_in(path: Path) -> list[bytes]:
    """The secrets in the file, which must be found nowhere else."""
    key = _of(path.read_bytes(), path)
    state = key.chain.state if key.chain is not None else b""
    return [key.secret, *(state[at : at + KEY_BYTES] for at in range(0, len(state), KEY_BYTES))]


def _of(content: bytes, path: Path) -> RunKey:
    try:
        found: dict[str, Any] = parse(content)
        check = found.pop("check")
        if found["format"] == BEFORE:
            raise KeyFileError(written_before(f"the run key {path}", "start a new run directory"))
        if found["format"] != FORMAT:
            raise KeyFileError(f"the run key {path} has format {found['format']!r}; read it with a newer version")
        if check != _check(found):
            raise ValueError("its check does not match")
        chain = found["chain"] and Link(**{**found["chain"], "state": bytes.fromhex(found["chain"]["state"])})
        more = {name: found[name] for name in ("head", "order") if name in found}
        return RunKey(bytes.fromhex(found["lasting"]), found["debug"], chain, **more)
    except KeyFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise KeyFileError(f"the run key {path} is damaged; restore it or start a new run directory") from None


def destroy(path: Path) -> bool:
    """Overwrites and removes the key; True if there was one. (Copies in backups or snapshots are out of reach.)"""
    return any([_overwrite_and_remove(each) for each in (path, _aside(path))])


def _text(key: RunKey) -> bytes:
    chain: dict[str, Any] | None = None
    if key.chain is not None:
        chain = {"segment": key.chain.segment, "step": key.chain.step, "state": key.chain.state.hex()}
        chain |= {} if key.chain.slots == 1 else {"slots": key.chain.slots}
    content = {"format": FORMAT, "debug": key.debug, "lasting": key.secret.hex(), "chain": chain}
    content |= {name: value for name in ("head", "order") if (value := getattr(key, name)) is not None}
    return json.dumps({**content, "check": _check(content)}, indent=1).encode() + b"\n"


def _check(content: dict[str, Any]) -> str:
    """Distinguishes a damaged file from an intact one; anyone who can read it can read the secrets beside it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _overwrite_and_remove(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("r+b") as file:
        _overwrite(file)
    path.unlink()
    return True


def _overwrite(file: Any) -> None:
    file.write(secrets.token_bytes(os.fstat(file.fileno()).st_size))
    file.flush()
    flush(file.fileno())
