"""Two hosts on one machine, as network namespaces with addresses of their own: one is cut off or killed in mid-step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from murmuration.accounting.ledger.history import History
from tests.support.launching import ROOT, Launch, ended, environment, free_port, opened_steps, wait_for
from tests.support.runs import TOY_STEPS, state_of, toy

Make = Callable[..., tuple[Launch, Path]]
STALL = 20


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    link: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def do(self, *words: str) -> None:
        subprocess.run(self.command(*words), check=True, capture_output=True)

    def rank(self, job: Launch, rank: int, world: int, port: int) -> subprocess.Popen[str]:
        """As srun would start it."""
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": self.link,
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        script = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(job.config)]
        return subprocess.Popen(
            self.command(*script, "--set", f"run.stall_seconds={STALL}"), cwd=job.cwd, env=environment() | variables,
            text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if shutil.which("ip") is None:
        pytest.skip("the command ip is not installed")
    own = f"mm{os.getpid() % 10000}"
    first, second = Host(f"{own}a", "10.77.0.1", f"{own}a0"), Host(f"{own}b", "10.77.0.2", f"{own}b0")
    made = subprocess.run(["ip", "netns", "add", first.name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        subprocess.run(["ip", "netns", "add", second.name], check=True)
        subprocess.run(
            ["ip", "link", "add", first.link, "netns", first.name, "type", "veth", "peer", "name", second.link,
             "netns", second.name], check=True,
        )  # fmt: skip
        for host in (first, second):
            host.do("ip", "addr", "add", f"{host.address}/24", "dev", host.link)
            host.do("ip", "link", "set", host.link, "up")
            host.do("ip", "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in (first, second):
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def on_both(hosts: tuple[Host, Host], job: Launch) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [host.rank(job, rank, 2, port) for rank, host in enumerate(hosts)]


def lose(host: Host, process: subprocess.Popen[str], how: str) -> None:
    if how == "cut off":
        host.do("ip", "link", "set", host.link, "down")
    else:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut off", "killed"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_job_and_it_goes_on_without_and_with_it(
    hosts: tuple[Host, Host], launch: Make, lost: int, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job, run_dir = launch("hosts", toy)
    both = on_both(hosts, job)
    wait_for(lambda: len(opened_steps(run_dir)) >= 3, both[0])
    lose(hosts[lost], both[lost], how)
    begin = time.monotonic()
    found = [ended(process) for process in both]
    seconds = time.monotonic() - begin
    with capsys.disabled():
        print(f"\nhost {lost} {how}: the job ended {seconds:.1f} s later (run.stall_seconds = {STALL})")
    codes, outputs = [code for code, _ in found], [output for _, output in found]
    assert "the ranks meet at 10.77.0.1:" in outputs[0], outputs[0]
    if how == "cut off":
        assert codes == [75, 75], outputs
        assert "no progress for 20 s (run.stall_seconds)" in outputs[0], outputs
        assert "rank 1 gave no sign of life" in outputs[0], outputs[0]
        # Cut off from the store, it cannot know whether it is the one to speak; libraries may have told something.
        assert "the rendezvous store does not answer" in outputs[1] or "error" not in outputs[1], outputs[1]
        hosts[lost].do("ip", "link", "set", hosts[lost].link, "up")
    else:
        assert (codes[1 - lost] == 75 and "another rank ended" in outputs[0] + outputs[1]) or lost == 0, outputs
    if lost == 1 or how == "cut off":
        assert state_of(run_dir) == "stopped, resume me"

    alone = hosts[0].rank(job, 0, 1, free_port())
    before = len(opened_steps(run_dir))
    wait_for(lambda: len(opened_steps(run_dir)) >= before + 2, alone)
    (run_dir / "stop").touch()
    assert ended(alone)[0] == 75
    assert len(opened_steps(run_dir)) < TOY_STEPS, "nothing was left for both"

    found = [ended(process) for process in on_both(hosts, job)]
    assert [code for code, _ in found] == [0, 0], found
    history = History.read(run_dir / "ledger.jsonl")[0]
    assert opened_steps(run_dir) == list(range(1, TOY_STEPS + 1)) and history.steps()[1] == TOY_STEPS
    assert len(history.segments) == 1 and not history.faults
