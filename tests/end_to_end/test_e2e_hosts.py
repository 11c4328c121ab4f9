"""Two hosts on one machine, as network namespaces with addresses of their own: one is cut off or killed in mid-step."""

from __future__ import annotations

import json
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
from tests.support.texts import write_texts

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
        script = [str(ROOT / "launch" / "train.py"), "--config", str(job.config)]
        return self.start(job.cwd, rank, world, port, *script, "--set", f"run.stall_seconds={STALL}")

    def start(
        self, cwd: Path, rank: int, world: int, port: int, *script: str, hidden: Path | None = None
    ) -> subprocess.Popen[str]:
        """As srun would, under the host's own name; `hidden`: a folder that this host does not see."""
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": self.link,
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        hide = "" if hidden is None else f"mount -t tmpfs none {hidden};"
        named = [
            "unshare", "--uts", "--mount", "sh", "-c", f'hostname {self.name}; {hide} exec "$@"', "sh",
            sys.executable, *script,
        ]  # fmt: skip
        return subprocess.Popen(
            self.command(*named), cwd=cwd, env=environment() | variables, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
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


def test_doctor_examines_two_hosts_together(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The second one sees other records, and does not share the folder of the first."""
    model = {"family": "gpt2", "width": 64, "depth": 2, "heads": 2, "text_length": 9, "vocabulary": 4096}
    config = {
        "train_micro_batch_size_per_gpu": 4, "model": model,
        "phases": [{"name": "dp", "objective": "text", "data": {"path": "texts", "tokenizer": "clip"}, "steps": 1,
                    "privacy": {"epsilon": 8.0, "expected_batch": 4}, "schedule": {"peak": 0.1, "shape": "constant"}}],
    }  # fmt: skip
    folders = [tmp_path / host.name for host in hosts]
    for number, folder in enumerate(folders):
        write_texts(folder / "texts", ["a text"] * (12 - 2 * number))
        (folder / "my.json").write_text(json.dumps(config))

    def examined(places: list[Path]) -> tuple[list[int], list[str]]:
        port, script = free_port(), [str(ROOT / "launch" / "doctor.py"), "--config", "my.json"]
        hidden = folders[0] if places[1] == folders[1] else None
        both = [
            host.start(place, rank, 2, port, *script, hidden=hidden if rank else None)
            for rank, (host, place) in enumerate(zip(hosts, places, strict=True))
        ]
        found = [ended(process) for process in both]
        assert not [line for line in found[1][1].splitlines() if line.startswith(("ok ", "FAIL"))], found[1][1]
        return [code for code, _ in found], found[0][1].splitlines()

    first, second = (host.name for host in hosts)
    codes, lines = examined(folders)
    assert codes == [2, 2], lines
    assert f"ok    ranks          2 on 2 hosts: {first}, {second}" in lines
    (told,) = [line for line in lines if "all-reduce" in line]
    assert "as large as the gradient" in told and "by gloo" in told
    ranks = f"10 records for rank 1 on {second}, 12 records for rank 0 on {first}"
    assert f"FAIL  same           phases.0.data.path: {ranks}; give all hosts the same files" in lines
    assert [line for line in lines if line.startswith(f"FAIL  shared folder  rank 1 on {second} does not see")], lines
