"""The launch scripts as they are, with their two places edited: torchrun, deepspeed with hosts, Slurm by a stub."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from murmuration.train.storage.run_dir import RunDir
from tests.support.launching import BIN, ROOT, Launch, ended, environment, free_port, opened_steps, wait_for
from tests.support.runs import TOY_STEPS, state_of, toy

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


def of_slurm(folder: Path, job: Launch, run_dir: Path) -> dict[str, str]:
    """What stands for its commands, and the variables of a job."""
    place("srun", SRUN, folder)
    place("scontrol", SCONTROL, folder)
    return {
        "PATH": f"{folder / 'bin'}:{environment()['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node-[1-2]", "CONFIG": str(job.config), "RUN_DIR": str(run_dir),
    }  # fmt: skip


@pytest.mark.slow
def test_slurm_queues_the_job_again_when_its_time_is_over_and_not_when_it_is_done(tmp_path: Path, launch: Make) -> None:
    job, run_dir = launch("slurm", toy)
    variables = of_slurm(tmp_path, job, run_dir)
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
def test_slurm_examines_its_nodes_and_trains_nothing(tmp_path: Path, launch: Make) -> None:
    job, run_dir = launch("examined", toy)
    variables = of_slurm(tmp_path, job, run_dir) | {
        "CHECK": "1", "PYTHON": f"env OF_A_CONTAINER=1 {sys.executable}", "SRUN": "--container-image=murmuration.sqsh",
    }  # fmt: skip
    code, output = ended(started("slurm.sh", tmp_path, **variables))
    assert code == 0 and "2 on 1 host" in output and "as large as the gradient" in output, output
    assert not run_dir.exists() and not (tmp_path / "scontrol").exists()


@pytest.mark.slow
def test_deepspeed_starts_the_command_of_the_package(tmp_path: Path, launch: Make) -> None:
    """It puts --local_rank before the command."""
    job, run_dir = launch("module", toy)
    where = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port()), "--module", "murmuration"]
    env = environment() | {"PYTHONPATH": str(ROOT)}
    for command in ("doctor", "train"):
        done = subprocess.run(
            [*where, command, "--config", str(job.config)], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert command == "train" or "2 on 1 host" in done.stdout
    assert whole(run_dir)


ENDING = """#!/bin/sh
# Stands for a launcher: the run that it starts writes its state or none, and ends.
[ ! -f {folder}/state ] || cp {folder}/state {folder}/run/run_state.json
[ ! -f {folder}/acts ] || echo step >> {folder}/run/ledger.jsonl
exit $(cat {folder}/code)
"""
STOPPED, FAILED = {"status": "stopped, resume me", "step": 4}, {"status": "failed", "error": "LedgerError"}
TRAINING = {"status": "training; resume me if killed", "step": 4}
TRAINED, DONE = {"status": "trained; its certificate is not written"}, {"status": "done", "run": "x"}


def end(
    script: str, folder: Path, code: int, state: dict[str, Any] | None, acts: bool = True, arguments: Sequence[str] = ()
) -> tuple[int, str]:  # fmt: skip
    """How a script (or the demo) ends whose earlier start was stopped: this start writes `state` and acts, its launcher
    ends."""
    shutil.copytree(ROOT / "launch", folder / "launch", dirs_exist_ok=True)
    for launcher in ("torchrun", "deepspeed", "srun"):
        place(launcher, ENDING, folder)
    place("scontrol", SCONTROL, folder)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(folder / "bin")
    (folder / ".venv" / ".ready").touch()
    (folder / "hostfile").write_text("localhost slots=2\n")
    run_dir = RunDir(folder / "run")
    run_dir.root.mkdir()
    if state is not None:
        run_dir.write_state(**state)
        (run_dir.root / "run_state.json").rename(folder / "state")
    if acts:
        (folder / "acts").touch()
    (folder / "code").write_text(str(code))
    run_dir.write_state(**STOPPED)
    run_dir.ledger.write_text("run\n")
    variables = {
        "PATH": f"{folder / 'bin'}:{environment()['PATH']}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node-1", "CONFIG": "any.json", "RUN_DIR": str(run_dir.root),
    }  # fmt: skip
    command = ["sh", str(folder / "launch" / script), *arguments] if script else ["make", "demo", "GPUS=2"]
    done = subprocess.run(command, cwd=folder, env=environment() | variables, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("script", ["torchrun.sh", "deepspeed.sh", "slurm.sh"])
@pytest.mark.parametrize(
    ("code", "state", "expected"),
    [
        (1, None, 1),  # refused before the run could write a state, and torchrun makes 1 of every code
        (2, None, 2), (5, None, 5), (137, None, 137), (1, FAILED, 1),
        (1, STOPPED, 75), (137, STOPPED, 75), (75, STOPPED, 75),
        (5, STOPPED, 5),  # one rank was refused and the others were stopped
        (0, STOPPED, 75), (0, TRAINING, 75), (0, TRAINED, 75),  # a process of the launcher was killed
        (0, None, 1), (0, FAILED, 1), (0, DONE, 0), (1, DONE, 1), (1, TRAINED, 1),
        (137, TRAINING, 75), (1, TRAINING, 75), (5, TRAINING, 5),  # killed before it could write another
    ],
)  # fmt: skip
def test_a_script_says_resume_me_only_if_this_very_start_was_stopped(
    tmp_path: Path, script: str, code: int, state: dict[str, Any] | None, expected: int
) -> None:
    found, output = end(script, tmp_path, code, state)
    assert found == expected, output
    if script == "slurm.sh":
        assert (tmp_path / "scontrol").exists() == (expected == 75), output


def test_slurm_does_not_queue_again_what_gets_nowhere(tmp_path: Path) -> None:
    for launched, expected in ((137, 137), (0, 75)):
        folder = tmp_path / str(launched)
        folder.mkdir()
        code, output = end("slurm.sh", folder, launched, STOPPED, acts=False)
        assert code == expected and "it is not queued again" in output, output
        assert not (folder / "scontrol").exists()


def test_a_dry_run_by_a_script_is_no_stopped_run(tmp_path: Path) -> None:
    code, output = end("deepspeed.sh", tmp_path, 0, None, arguments=("--dry-run",))
    assert code == 0, output


@pytest.mark.parametrize(("code", "state", "goes_on"), [(0, STOPPED, False), (0, DONE, True), (4, FAILED, False)])
def test_the_demo_ends_where_its_run_was_stopped(
    tmp_path: Path, code: int, state: dict[str, Any], goes_on: bool
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(tmp_path / "run")
    place("python", '#!/bin/sh\necho "$@" >> {folder}/started\n', tmp_path)
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text().replace("$(READY): ", "never: "))
    found, output = end("", tmp_path, code, state)
    assert (found == 0) == goes_on, output
    said = (tmp_path / "started").read_text()
    assert said.startswith("launch/prepare.py demo\n") and ("account.py verify" in said) == goes_on


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
    assert subprocess.run(["sh", "-n", str(ROOT / "launch" / "resume_me.sh")]).returncode == 0
    assert (BIN / "torchrun").exists()
