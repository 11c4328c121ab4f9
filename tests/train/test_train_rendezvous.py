"""Ranks on one machine meet where nobody on the network can read counters of private steps or pose as a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from murmuration.train.distributed.rendezvous import RendezvousError, init_method, open_to_others
from tests.support import forking

# Prints where this rank listens, and how many ranks there are by their own sum.
RANK = """
import json, os, sys, tempfile
from pathlib import Path
import torch
import torch.distributed as dist
from murmuration.train.engines.choose import start_ranks

def listening():
    own = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in own:
                yield cells[1].partition(":")[0]

tempfile.tempdir = os.environ["TMPDIR"]
if "AGENT_PORT" in os.environ:
    os.environ["MASTER_PORT"] = os.environ["AGENT_PORT"]
start_ranks(sys.argv[1])
one = torch.ones(1)
dist.all_reduce(one)
os.write(1, json.dumps([int(one), sorted(listening())]).encode() + b"\\n")
dist.barrier()
os._exit(0)
"""
LOOPBACK = "0100007F"  # as /proc writes 127.0.0.1


@pytest.fixture
def agent() -> TCPStore:
    """torchrun's store."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60))


def meet(folder: Path, engine: str, agent: TCPStore | None) -> list[Any]:
    script = folder / "rank.py"
    script.write_text(RANK)
    env = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | {"TMPDIR": str(folder)}
    if agent is not None:
        env |= {"AGENT_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, str(script), engine]
    with forking.start(command, ranks=2, env=env, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=300)
    return [json.loads(line) for line in said.splitlines() if line[:1] == "[" and line[1:2].isdigit()]


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("by_torchrun", [False, True])
def test_ranks_of_one_machine_listen_on_loopback_alone(
    tmp_path: Path, engine: str, by_torchrun: bool, agent: TCPStore
) -> None:
    """With a launcher that has a store of its own, and without."""
    found = meet(tmp_path, engine, agent if by_torchrun else None)
    assert len(found) == 2
    for count, places in found:
        assert count == 2 and places and set(places) == {LOOPBACK}, found
    assert not list(tmp_path.glob("murmuration-*")), "where the port was told is gone"


@pytest.mark.parametrize("mode", [0o755, 0o700, 0])
def test_what_a_stranger_writes_into_torchruns_store_is_not_followed(
    tmp_path: Path, agent: TCPStore, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    if mode:
        theirs.mkdir(mode=mode)
        (theirs / "port").write_text("1")
    if mode == 0o700:
        monkeypatch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
    agent.set("murmuration/0", str(theirs))
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RendezvousError, match="somebody else than this job wrote into torchrun's store; close its port"
    ):
        dist.init_process_group("gloo", init_method())


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, None),
        ({"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "1"}, None),
        ({"MASTER_ADDR": "node-1", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"MASTER_ADDR": "node-1", "LOCAL_SIZE": "2"}, None),
        ({"MASTER_ADDR": "node-1"}, "node-1:29500"),
        ({"MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "1"}, "10.0.0.1:29500"),
    ],
)
def test_several_machines_meet_where_others_can_listen(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str | None
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in ({"WORLD_SIZE": "2", "MASTER_PORT": "29500"} | variables).items():
        monkeypatch.setenv(name, value)
    assert open_to_others() == place
