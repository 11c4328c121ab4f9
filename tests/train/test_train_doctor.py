"""`doctor`: one line for each thing that a run would trip over, and exit code 2 if one of them is missing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.data.index.folders import build_folder
from murmuration.train.commands import doctor, doctor_ranks
from murmuration.train.commands.finding import Finding
from murmuration.train.config.load import load
from murmuration.train.distributed.ranks import Ranks
from tests.support import forking
from tests.support.evaluation_world import class_folders, class_list, shards
from tests.support.launching import ROOT, environment, printed
from tests.support.train_helpers import on_ranks


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A phase on class folders, measured on shards."""
    build_folder(class_folders(tmp_path / "pictures", 2))
    shards(tmp_path / "shards", 5)
    model = {
        "family": "classifier", "width": 16, "depth": 1, "heads": 2, "image_size": 32, "patch_size": 4, "classes": 5,
    }  # fmt: skip
    phase = {
        "name": "private", "objective": "classify",
        "data": {"path": "pictures", "label": "cls", "classes": str(class_list(tmp_path))},
        "privacy": {"epsilon": 8.0, "expected_batch": 2, "clip": {"norm": 1.0}}, "steps": 2,
        "schedule": {"peak": 1e-3, "shape": "constant"}, "evaluation": {"path": "shards", "public": True},
    }  # fmt: skip
    path = tmp_path / "my.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "model": model, "phases": [phase]}))
    return path


def examined(config: Path) -> tuple[int, list[list[str]]]:
    """The exit code, and verdict, subject and text of each line."""
    command = [sys.executable, str(ROOT / "launch" / "doctor.py"), "--config", str(config)]
    done = forking.run(command, capture_output=True, text=True, timeout=300)
    assert not done.stderr.strip(), done.stderr
    return done.returncode, [[line[:5].strip(), line[6:20].strip(), line[21:]] for line in done.stdout.splitlines()]


def test_a_machine_that_trains_is_well_and_a_missing_compiler_is_named(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines = examined(config)
    assert code == 0 and not [line for line in lines if line[0] == "FAIL"], lines
    told = [line[2] for line in lines if line[1] == "records"]
    assert told[0].startswith("phases.0.data.path: 10 in") and told[1].startswith("phases.0.evaluation.path: 5 in")
    assert ["ok", "ranks", "two processes met by gloo"] in lines or "met by nccl" in str(lines)

    monkeypatch.setenv("PATH", str(tmp_path))
    assert [each.verdict for each in doctor.compiler()] == ["FAIL" if torch.cuda.is_available() else "warn"]


def test_records_that_cannot_be_read_are_named(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shards" / "000000.tar").unlink()
    found = [(each.verdict, each.told) for each in doctor.records(load(config, []))]
    assert [verdict for verdict, _ in found] == ["ok", "FAIL"] and "000000.tar" in found[1][1], found
    config.write_text("{")
    assert doctor.main(["--config", str(config)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert str(config) in said


def test_a_folder_that_cannot_be_written_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without a folder of the user's own."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (disk,) = doctor.disk()
    assert disk.verdict == "warn" and f"{Path.cwd()} cannot be written to" in disk.told and not [*doctor.clock()]
    for told in on_ranks(2, lambda ranks: [*doctor_ranks._folder(ranks)]):
        assert not told


def test_ranks_of_a_launcher_are_examined_together(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch" / "doctor.py"), "--config", str(config)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    out, err = printed(process := forking.start(command, ranks=2, env=environment(), cwd=tmp_path, **streams))
    assert process.returncode == 0, err
    lines = {line[6:20].strip(): line for line in out.splitlines()}
    assert len(lines) >= len(out.splitlines()) - 1, "two phases' records; nothing else is told twice"
    assert f"2 on 1 host: {socket.gethostname()}" in lines["ranks"]
    assert "torch" in lines["same"] and "phases.0.data.path" in lines["same"] and lines["same"].startswith("ok")
    assert lines["shared folder"] == f"ok    shared folder  all ranks see {tmp_path}"
    assert "as large as the gradient" in lines["all-reduce"] and "GB/s" in lines["all-reduce"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".doctor")]


def test_ranks_with_other_clocks_and_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = threading.local()
    monkeypatch.setattr(time, "time", lambda: time.monotonic() + getattr(clock, "ahead", 0.0))

    def found(ranks: Ranks) -> list[Finding]:
        clock.ahead = 5.0 * ranks.rank
        facts = {"torch": (f"2.1{ranks.rank}", ""), "records": ("10 records", str(ranks.rank))}
        return [*doctor_ranks._clocks(ranks), *doctor_ranks._same(ranks, facts)]

    for told in on_ranks(2, found):
        assert [each.verdict for each in told] == ["warn", "FAIL", "FAIL"]
        clocks, torches, records = (each.told for each in told)
        assert clocks.startswith("rank 1 on") and "5.0 s ahead of rank 0 on" in clocks
        assert torches.startswith("torch: 2.11 for rank 1 on") and "2.10 for rank 0 on" in torches
        assert records.startswith("records: 10 records, but of other contents for rank 1")
