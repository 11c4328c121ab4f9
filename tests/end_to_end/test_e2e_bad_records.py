"""The owner learns of unusable records while a run trains, not only at its end, and of each of them once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.support.launching import Launch, opened_steps, wait_for
from tests.support.tars import indexed, png

RECORDS, CLASSES, STEPS = 40, 3, 60


def _shards(folder: Path) -> Path:
    """Labels from 0 to 4, where the model has three classes: two fifths of the records are unusable."""
    indexed(folder, ({"png": png(number), "json": b'{"finding": %d}' % (number % 5)} for number in range(RECORDS)))
    return folder


def _config(data: Path) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "model": {
            "family": "classifier", "image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 1,
            "classes": CLASSES, "classify_loss": "softmax",
        },
        "phases": [{
            "name": "private", "data": {"path": str(data), "label": "finding", "reading": {"workers": 0}},
            "objective": "classify", "privacy": {"epsilon": 8.0, "expected_batch": RECORDS // 2},
            "schedule": {"peak": 0.1}, "steps": STEPS,
        }],
        "run": {"engine": "local", "checkpoint_every": 2},
    }  # fmt: skip


def test_unusable_records_are_listed_at_checkpoints_and_once(tmp_path: Path) -> None:
    job, run_dir = Launch.written(_config(_shards(tmp_path / "data")), tmp_path, "bad", launcher="python")
    listed = run_dir / "logs" / "private" / "bad-records-rank0.jsonl"
    process = job.start(hold_after_opened=6)
    wait_for(listed.exists, process)
    os.killpg(process.pid, signal.SIGKILL)
    output = process.communicate()[0]
    assert opened_steps(run_dir)[-1] < STEPS, "it was over before it could be killed"
    assert listed.stat().st_mode & 0o777 == 0o600 and "finding" not in output

    code, output = job.run()
    assert code == 0 and "finding" not in output, output
    found = [json.loads(line) for line in listed.read_text().splitlines()]
    assert sorted(each["record"] for each in found) == [each for each in range(RECORDS) if each % 5 >= CLASSES]
    assert {each["reason"] for each in found} == {"the record's finding is not the number of a class"}
