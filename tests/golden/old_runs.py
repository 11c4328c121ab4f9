"""A run directory of an earlier version, once when it had been stopped and once when it was finished, with its data.

`old_runs.tar.xz` holds what a user may come back to: later versions go on with the one and verify the other. It was
made by `python tests/golden/old_runs.py` at version 0.1.0, without a debug seed, and is not to be made again: a version
that cannot use it breaks the runs of its users. The stopped run keeps its secret key, which protects drawn shapes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parents[1]), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]

from tests.golden import commands, local  # noqa: E402

ARCHIVE = HERE / "old_runs.tar.xz"
CONFIG, STOPPED, FINISHED = "toy.json", "stopped", "finished"
STEPS = {1: 5, 2: 7}
"""How many steps the private phases of the config in the archive have, by number."""
STOP_AT = (2, 5)  # behind a checkpoint at step 3


def unpack(folder: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="tar")  # "data" would open the secret folder to others
    root = folder / "old"
    for name in (STOPPED, FINISHED):
        (root / name / "secret").chmod(0o700)
    return root


def at_home(run_dir: Path) -> None:
    """Makes an unpacked run directory the original: it remembers its files' numbers, and a copy gets new keys."""
    memory = run_dir / "secret" / "identity.json"
    places = {"ledger": run_dir / "ledger.jsonl", "folder": run_dir, "secret": memory.parent, "memory": memory}
    numbers = {n: [os.statvfs(p).f_fsid or p.stat().st_dev, p.stat().st_ino] for n, p in places.items()}
    memory.write_text(json.dumps(numbers))


def lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


def make() -> None:
    if ARCHIVE.exists():
        raise SystemExit(f"{ARCHIVE} is there, made by an earlier version; it stays as it is")
    commands.warm_up()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary).resolve() / "old"
        root.mkdir()
        local.demo_data(root)
        shutil.copy(HERE / local.TOY, root / CONFIG)
        running, stopped = root / FINISHED, root / STOPPED
        train = ("train.py", "--config", CONFIG, "--set", f"run.dir={FINISHED}")
        begun = commands.begin(*train, folder=root, ranks=2)
        while not (running / "ledger.jsonl").exists() or not any(
            (line["kind"], line.get("phase"), line.get("step")) == ("commit", *STOP_AT) for line in lines(running)
        ):
            time.sleep(0.005)
        (running / "stop").touch()
        done = begun.wait()
        print(done.output)
        if done.code != 75:
            raise SystemExit(f"the run ended with {done.code} and was not stopped")
        shutil.copytree(running, stopped)
        print(commands.run(*train, folder=root, ranks=2).output)
        (root / "console.log").unlink()
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            archive.add(root, "old", filter=_nobodys)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes")


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if Path(member.name).name in ("stop", ".prepare.lock", ".work") else member


if __name__ == "__main__":
    make()
