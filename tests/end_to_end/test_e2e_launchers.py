"""The launch scripts as they are, with their two places edited: torchrun, deepspeed with hosts, Slurm by a stub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.conftest import BIN, ROOT, Launch, environment, free_port, opened_steps, wait_for
from tests.end_to_end.runs import TOY_STEPS, ended, state_of, toy

Make = Callable[..., tuple[Launch, Path]]

SRUN = """#!{python}
# Stands for Slurm's srun: two tasks on this machine; gives the largest code of all.
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
tasks = [
    subprocess.Popen(command, env=dict(os.environ, SLURM_PROCID=str(i), SLURM_LOCALID=str(i), SLURM_NTASKS="2",
                                       SLURM_NTASKS_PER_NODE="2"))
    for i in range(2)
]
open("{folder}/tasks", "w").write(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!/bin/sh
# Stands for Slurm's scontrol.
case "$1" in
    show) echo 127.0.0.1 ;;
    *) echo "$@" >> "{folder}/scontrol" ;;
esac
"""


def started(script: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["sh", str(ROOT / "launch" / script)], cwd=folder, env=environment() | variables, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def whole(run_dir: Path) -> bool:
    state = state_of(run_dir)
    return state == "done" and opened_steps(run_dir) == list(range(1, TOY_STEPS + 1))


def place(name: str, text: str, folder: Path) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.format(folder=folder, python=sys.executable))
    path.chmod(0o755)


@pytest.mark.slow
def test_slurm_queues_the_job_again_when_its_time_is_over_and_not_when_it_is_done(tmp_path: Path, launch: Make) -> None:
    job, run_dir = launch("slurm", toy)
    place("srun", SRUN, tmp_path)
    place("scontrol", SCONTROL, tmp_path)
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{environment()['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node-[1-2]", "CONFIG": str(job.config), "RUN_DIR": str(run_dir),
    }  # fmt: skip
    process = started("slurm.sh", tmp_path, **variables)
    wait_for(lambda: len(opened_steps(run_dir)) >= 2, process)
    for task in (tmp_path / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)  # as --signal=USR1@180 does
    code, output = ended(process)
    assert code == 75 and "stopped by SIGUSR1" in output and "queued again" in output, output
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
    code, output = ended(started("slurm.sh", tmp_path, **variables))
    assert code == 0 and whole(run_dir), output
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n", "a job that is done was queued again"


@pytest.mark.slow
def test_slurm_does_not_queue_again_what_gets_nowhere_or_is_refused(tmp_path: Path, launch: Make) -> None:
    job, run_dir = launch("slurm", toy)
    place("srun", "#!/bin/sh\nexit 137\n", tmp_path)  # every task dies at its start
    place("scontrol", SCONTROL, tmp_path)
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{environment()['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node-1", "CONFIG": str(job.config), "RUN_DIR": str(run_dir),
    }  # fmt: skip
    code, output = ended(started("slurm.sh", tmp_path, **variables))
    assert code == 137, output
    run_dir.mkdir()
    (run_dir / "run_state.json").write_text('{"status": "stopped, resume me"}')
    code, output = ended(started("slurm.sh", tmp_path, **variables))
    assert code == 137 and "it is not queued again" in output, output
    assert not (tmp_path / "scontrol").exists()


@pytest.mark.slow
def test_torchrun_on_two_nodes_gives_75_when_stopped_and_goes_on(tmp_path: Path, launch: Make) -> None:
    """Both nodes are this machine, with one process each."""
    job, run_dir = launch("torchrun", toy)

    def nodes() -> list[subprocess.Popen[str]]:
        variables = {"NODES": "2", "PROCESSES": "1", "FIRST": f"localhost:{free_port()}"}
        return [
            started("torchrun.sh", tmp_path, **variables, CONFIG=str(job.config), RUN_DIR=str(run_dir))
            for _ in range(2)
        ]

    both = nodes()
    wait_for(lambda: len(opened_steps(run_dir)) >= 2, both[0])
    (run_dir / "stop").touch()
    found = [ended(process) for process in both]
    assert [code for code, _ in found] == [75, 75], found
    found = [ended(process) for process in nodes()]
    assert [code for code, _ in found] == [0, 0] and whole(run_dir), found


SSH = """#!/bin/sh
# Stands for ssh to a host that is this machine: leaves options and the host out, and runs the command.
while [ "${{1#-}}" != "$1" ]; do case "$1" in -o|-p) shift 2 ;; *) shift ;; esac; done
shift
exec sh -c "$*"
"""


@pytest.mark.slow
def test_deepspeed_with_a_hostfile(tmp_path: Path, launch: Make) -> None:
    """One host, this machine: others would need ssh."""
    job, run_dir = launch("hostfile", toy)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    place("ssh", SSH, tmp_path)
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{environment()['PATH']}",
        "CONFIG": str(job.config),
        "RUN_DIR": str(run_dir),
        "MASTER_PORT": str(free_port()),
    }
    code, output = ended(started("deepspeed.sh", tmp_path, **variables, HOSTFILE=str(tmp_path / "none")))
    assert code == 2 and "write one line for each node" in output
    process = started("deepspeed.sh", tmp_path, **variables, HOSTFILE=str(tmp_path / "hosts"))
    wait_for(lambda: len(opened_steps(run_dir)) >= 2, process)
    (run_dir / "stop").touch()
    code, output = ended(process)
    assert code == 75, output
    code, output = ended(started("deepspeed.sh", tmp_path, **variables, HOSTFILE=str(tmp_path / "hosts")))
    assert code == 0 and whole(run_dir), output


def test_every_script_is_a_valid_one_with_two_places_to_edit() -> None:
    for name in ("slurm.sh", "torchrun.sh", "deepspeed.sh"):
        script = ROOT / "launch" / name
        assert subprocess.run(["sh", "-n", str(script)]).returncode == 0
        assert script.read_text().count("# EDIT ") == 2
    assert (BIN / "torchrun").exists()
