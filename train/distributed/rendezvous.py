"""Where ranks find each other. PyTorch's store takes anybody's connection, on all interfaces and without a password. It
holds counters of private steps, so that of ranks on one machine listens on loopback alone."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import (
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    register_rendezvous_handler,  # pyright: ignore[reportPrivateImportUsage]
)

from murmuration.accounting.errors import RunError
from murmuration.data.store.place import is_loopback

LOOPBACK = "127.0.0.1"
_SCHEME = "murmuration-loopback"
_WAIT = timedelta(minutes=5)


class RendezvousError(RunError, RuntimeError):
    """The ranks cannot meet."""


def init_method() -> str:
    """For `init_process_group`, once the launcher's variables are set."""
    if open_to_others() is not None:
        return "env://"
    # gloo's own connections have no password either, and their interface is otherwise that of the host's name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return f"{_SCHEME}://"


def open_to_others() -> str | None:
    """The address at which ranks on several machines meet, or None if all are on this one."""
    place = os.environ.get("MASTER_ADDR", LOOPBACK)
    # The second is DeepSpeed's name for it.
    here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE"))
    if here == os.environ.get("WORLD_SIZE", "1") or is_loopback(place):
        return None
    return f"{place}:{os.environ.get('MASTER_PORT')}"


def _meet(url: str, timeout: timedelta = _WAIT, **_: object) -> Iterator[tuple[Store, int, int]]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        yield _store(port, rank, world, timeout), rank, world
        return
    # The port is taken by torchrun's own store, which is open to all. It only says in which folder of this user's the
    # port of ours is written, and anybody may say so: what somebody else could have made is not followed.
    agent = TCPStore(os.environ["MASTER_ADDR"], port, None, False, timeout)
    key = f"murmuration/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank:
        yield _store(_read_port(Path(agent.get(key).decode())), rank, world, timeout), rank, world
        return
    with tempfile.TemporaryDirectory(prefix="murmuration-") as folder:
        own = _listening(0)
        (Path(folder) / "port").write_text(str(own.getsockname()[1]))
        agent.set(key, folder)
        store = _served(own, world, timeout)  # returns once all have met
    yield store, rank, world


def _read_port(folder: Path) -> int:
    try:
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077:
            return int((folder / "port").read_text())
    except (OSError, ValueError):
        pass
    raise RendezvousError(
        f"{folder}: somebody else than this job wrote into torchrun's store; close its port to others"
    )


def _store(port: int, rank: int, world: int, timeout: timedelta) -> TCPStore:
    return TCPStore(LOOPBACK, port, world, False, timeout) if rank else _served(_listening(port), world, timeout)


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise RendezvousError(
            f"{LOOPBACK}:{port}, where ranks are to meet, cannot be used ({error.strerror}); give the launcher another "
            "--master_port"
        ) from None


def _served(own: socket.socket, world: int, timeout: timedelta) -> TCPStore:
    port = own.getsockname()[1]
    return TCPStore(LOOPBACK, port, world, True, timeout, multi_tenant=True, master_listen_fd=own.detach())


register_rendezvous_handler(_SCHEME, _meet)
