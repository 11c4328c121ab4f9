"""Ways to hide what was spent: a copied run directory, a restored ledger, one more run on the same records."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.heads import NAME, read_heads
from murmuration.accounting.ledger.history import History
from murmuration.train.storage.sibling_runs import LOG
from tests.support import forking
from tests.support.evaluation_world import class_folders
from tests.support.hostile_files import blank_a_picture
from tests.support.launching import ROOT, Launch, environment, opened_steps
from tests.support.runs import account

Make = Callable[..., tuple[Launch, Path]]
LOCAL = ["--set", 'run.engine="local"']
# A run that is stopped twice still has some before it.
STEPS = 14


@pytest.fixture
def own_data(small_data: Path, tmp_path: Path) -> Callable[[dict[str, Any]], None]:
    """Other tests log runs on the shared records, and a copy of records takes their log along."""
    shutil.copytree(small_data / "private", tmp_path / "records")
    for log in (tmp_path / "records").rglob(f"*{LOG}"):
        log.unlink()

    def change(config: dict[str, Any]) -> None:
        config["run"] |= {"debug_seed": None, "checkpoint_every": 2}
        config["phases"] = config["phases"][1:]
        private = config["phases"][0]
        private["data"]["path"] = str(tmp_path / "records")
        private["data"]["reading"] = {"workers": 0}
        private["privacy"]["release"] = []
        private["steps"] = STEPS
        del private["evaluation"]

    return change


def test_a_copy_and_a_restored_ledger_hide_nothing(launch: Make, own_data: Any, tmp_path: Path) -> None:
    job, run_dir = launch("trunk", own_data, launcher="python", arguments=LOCAL)
    job.stopped(run_dir, 3)
    backup, branch = tmp_path / "backup", tmp_path / "branch"
    shutil.copytree(run_dir, backup)
    shutil.copytree(run_dir, branch)
    shared = len(opened_steps(run_dir))

    job.stopped(run_dir, shared + 3)
    known, before = (read_heads(folder / "secret" / NAME)[-1].charged[0].count for folder in (run_dir, backup))
    assert known >= shared + 3 and before <= shared
    saved = History.read(backup / "ledger.jsonl")[0].last_checkpoint()
    assert saved is not None
    again = STEPS - saved.step
    # Ledger and checkpoints from the backup, and nothing else: `cp` keeps the ledger's inode.
    (run_dir / "ledger.jsonl").write_bytes((backup / "ledger.jsonl").read_bytes())
    shutil.rmtree(run_dir / "checkpoints")
    shutil.copytree(backup / "checkpoints", run_dir / "checkpoints")
    refused = account("verify", str(run_dir))
    assert refused.returncode == 5 and "restored from a backup" in refused.stderr, refused.stdout + refused.stderr
    code, output = job.run()
    assert code == 5 and "restored from a backup" in output and "--new-segment" in output, output
    job.arguments = [*LOCAL, "--new-segment", "the disk failed"]
    code, output = job.run()
    assert code == 0, output
    history, _ = History.read(run_dir / "ledger.jsonl")
    [charged] = history.charged()
    assert charged.count == shared + (known - before) + again, "before the backup, lost, and made since"
    certificate = json.loads((run_dir / "certificate.json").read_text())
    assert certificate["claim"]["epsilon"] == epsilon([charged], history.delta())

    # The copy goes on by itself. Its certificate knows of the other, and what both cost.
    job.arguments = [*LOCAL, "--set", f"run.dir={json.dumps(str(branch))}"]
    code, output = job.run()
    assert code == 0 and "new keys from here on" in output, output
    certificate = json.loads((branch / "certificate.json").read_text())
    others = {sibling["id"] for sibling in certificate["siblings"]}
    assert others == {history.run_id} and str(tmp_path) not in json.dumps(certificate)
    both = Event(charged.rate, charged.sigma, charged.count + again)
    # Both went on in new segments, so both claim their budgets, which would have allowed more than what was opened.
    assert epsilon([both], history.delta()) < 8.0 < certificate["composition"]["epsilon_together"] < 2 * 8.0
    assert certificate["composition"]["epsilon_sum"] == 2 * 8.0
    assert account("verify", str(branch)).returncode == 0


def test_later_runs_are_held_to_the_budget_of_the_records(launch: Make, own_data: Any, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index", str(tmp_path / "records"), "--budget", "5"]
    done = forking.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "budget of ε = 5" in done.stdout, done.stdout + done.stderr
    job, run_dir = launch("greedy", own_data, launcher="python", arguments=LOCAL)
    code, output = job.run()
    assert code == 3 and "a budget of ε = 5 for all runs" in output, output
    assert opened_steps(run_dir) == []
    job.arguments = [*LOCAL, "--set", "phases.0.privacy=null", "--set", "phases.0.batch=48", "--set", 'run.dir="twin"']
    code, output = job.run()
    assert code == 3 and "a run without noise, or with a debug seed, exceeds" in output, output


def test_a_record_that_was_blanked_meets_no_old_noise(launch: Make, own_data: Any, tmp_path: Path) -> None:
    """Killed before a checkpoint was durable, so its steps are made again under the same keys. A shard of the same
    size that has other bytes would lay the difference bare."""

    def late(config: dict[str, Any]) -> None:
        own_data(config)
        config["run"]["checkpoint_every"] = 100

    job, run_dir = launch("blanked", late, launcher="python", arguments=LOCAL)
    job.killed(run_dir, 3)
    opened = opened_steps(run_dir)

    shard = sorted((tmp_path / "records").rglob("*.tar"))[0]
    whole = shard.read_bytes()
    blank_a_picture(shard)
    code, output = job.run()
    assert code == 2 and f"/{shard.name}: changed since it was indexed" in output, output
    assert opened_steps(run_dir) == opened, "no step was made with the other record"

    shard.write_bytes(whole)
    code, output = job.run()
    assert code == 0 and f"steps 1 to {max(opened)} are made again with the same noise" in output, output
    history, _ = History.read(run_dir / "ledger.jsonl")
    assert sum(event.count for event in history.charged()) == STEPS, "each step is charged once"


def test_steps_on_pictures_of_which_only_sizes_are_known_are_charged_twice(
    launch: Make, own_data: Any, tmp_path: Path
) -> None:
    """Nothing could tell that a picture was blanked before its steps are made again, so they get other keys."""
    pictures = class_folders(tmp_path / "pictures", 40)
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index", str(pictures)]
    done = forking.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    def late(config: dict[str, Any]) -> None:
        own_data(config)
        config["run"]["checkpoint_every"] = 100
        private = config["phases"][0]
        private["objective"] = "mae"
        private["data"] = {"path": str(pictures), "augment": "random_resized_crop", "reading": {"workers": 0}}

    job, run_dir = launch("sizes", late, launcher="python", arguments=LOCAL)
    job.killed(run_dir, 3)
    before, _ = History.read(run_dir / "ledger.jsonl")

    victim = sorted(pictures.rglob("*.png"))[0]
    victim.write_bytes(bytes(victim.stat().st_size))
    code, output = job.run()
    assert code in (0, 3) and "compares records by size alone" in output, output
    history, _ = History.read(run_dir / "ledger.jsonl")
    assert [segment.number for segment in history.segments] == [0, 1]
    assert "cannot tell whether their records changed" in history.segments[1].reason
    assert before.progress.items() <= history.progress.items(), "no old key was used again"
    assert sum(event.count for event in history.charged()) == history.steps()[0] > before.steps()[0]
    assert "the index cannot tell" in (history.why_budget_is_claimed() or "")
    assert account("verify", str(run_dir)).returncode == 0
