"""A real run on a disk that fills up, with a damaged piece, with another run's key and with other records."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from murmuration.accounting.keys import RunKey, destroy, store
from tests.support.launching import Launch, environment, opened_steps
from tests.support.runs import nothing_lost_and_nothing_twice, state_of, toy

Make = Callable[..., tuple[Launch, Path]]


def halfway(job: Launch) -> None:
    """Killed between the first private checkpoint and the end."""
    ended = job.end(kill={"rank": 0, "kind": "write", "at": 22, "before": True})
    assert ended.codes[0] == -9, ended.output


def test_storage_that_fails_is_named_with_its_fix_and_costs_nothing_once_it_works(whole: Path, launch: Make) -> None:
    """Where the run directory is made, where its ledger begins, and behind a checkpoint."""
    job, run_dir = launch("failing", toy)
    for kind, at, number in (
        ("fsync", 1, errno.EIO), ("fsync", 9, errno.ESTALE), ("write", 3, errno.EREMOTEIO),
        ("fsync", 25, errno.ENOTCONN),
    ):  # fmt: skip
        ended = job.end(kill={"rank": 0, "kind": kind, "at": at, "errno": number})
        assert 2 in ended.codes and set(ended.codes) <= {2, 75}, (ended.codes, ended.output)
        told = [
            line for line in ended.output.splitlines() if f"] {os.strerror(number)}" in line or "could not be" in line
        ]
        assert told and all("see that the disk or network file system works" in line for line in told), ended.output
        assert all(str(run_dir.parent) in line for line in told), told
        assert "Traceback" not in ended.output
    ended = job.end()
    assert ended.codes == [0, 0], ended.output
    nothing_lost_and_nothing_twice(run_dir, whole)


@pytest.mark.slow
def test_a_full_disk_costs_nothing_once_there_is_room(whole: Path, launch: Make, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"file systems may not be mounted here: {made.stderr.strip()}")
    try:
        run_dir = disk / "run"
        job, _ = launch("disk", lambda config: (toy(config), config["run"].update(dir=str(run_dir)))[0])
        halfway(job)
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        ended = job.end()
        assert 2 in ended.codes and "No space left on device" in ended.output, (ended.codes, ended.output)
        filler.unlink()
        ended = job.end()
        assert ended.codes == [0, 0], ended.output
        nothing_lost_and_nothing_twice(run_dir, whole)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_another_key_and_other_records_are_refused(launch: Make, small_data: Path) -> None:
    job, run_dir = launch("foreign", toy)
    halfway(job)
    key = run_dir / "secret" / "run.key"
    right = key.read_bytes()
    destroy(key)
    store(RunKey.from_debug_seed(8), key)
    before = opened_steps(run_dir)
    ended = job.end()
    assert ended.codes == [5, 5] and "is not the key of this ledger; restore the right one" in ended.output, (
        ended.output
    )
    key.write_bytes(right)

    other = job.cwd / "other"
    shutil.copytree(small_data / "held_out", other)
    ended = job.end(arguments=["--set", f"phases.1.data.path={other}"])
    assert ended.codes == [2, 2] and "error: " in ended.output, (ended.codes, ended.output)
    assert opened_steps(run_dir) == before
    ended = job.end()
    assert ended.codes == [0, 0], ended.output


@pytest.mark.slow
def test_ranks_on_a_processor_need_no_shared_memory(launch: Make) -> None:
    job, run_dir = launch("shm", toy, launcher="deepspeed")
    small = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*small, "true"], capture_output=True).returncode:
        pytest.skip("this machine permits no mounts, so /dev/shm cannot be made small")
    found = subprocess.run([*small, *job.command()], cwd=job.cwd, env=environment(), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert opened_steps(run_dir)


@pytest.mark.slow
def test_a_certificate_that_cannot_be_written_is_written_by_the_next_start(whole: Path, launch: Make) -> None:
    job, run_dir = launch("uncertified", toy)
    (run_dir / "certificate.json").mkdir(parents=True)
    ended = job.end()
    assert ended.codes[0] == 2 and "certificate.json" in ended.output, (ended.codes, ended.output)
    assert state_of(run_dir) == "trained; its certificate is not written"
    (run_dir / "certificate.json").rmdir()
    ended = job.end()
    assert ended.codes == [0, 0] and state_of(run_dir) == "done", ended.output
    nothing_lost_and_nothing_twice(run_dir, whole)
