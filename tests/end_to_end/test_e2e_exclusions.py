"""A warm-up on pictures made while training; then records that are excluded after the run has begun with all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.data.index.exclusions import Exclusions
from murmuration.data.index.shard_index import ShardIndex
from tests.support.launching import Launch, ledger_lines, opened_steps

Make = Callable[..., tuple[Launch, Path]]


@pytest.mark.slow
def test_a_list_made_after_a_run_began_must_be_declared(launch: Make, small_data: Path, tmp_path: Path) -> None:
    """Synthetic source, CLIP's words. n stays what it was; who takes part is as much a part of the
    phase's identity as its config."""
    records = tmp_path / "records"
    shutil.copytree(small_data / "private", records)

    def change(config: dict[str, Any]) -> None:
        warm, private = config["phases"]
        warm["data"] = {"source": "synthetic", "kind": "mixed", "records": 64, "augment": "random_resized_crop"}
        config["model"]["vocabulary"] = 600
        private["data"] |= {"path": str(records), "tokenizer": "clip:600"}
        private.pop("evaluation")

    run, run_dir = launch("filtered", change)
    run.stopped(run_dir, 2)
    declared = next(line for line in ledger_lines(run_dir) if line["kind"] == "nonprivate")
    assert declared["public_data"] is True, declared
    opened = opened_steps(run_dir)

    whole = ShardIndex.open(records)
    Exclusions(whole.manifest_digest, np.array([3, 77], dtype=np.uint64), ("by hand",), 4, "test").write(whole.folder)
    code, output = run.run()
    assert code == 5 and "other records were excluded" in output and "--new-segment" in output, output
    assert opened_steps(run_dir) == opened, "no step was opened with another list"

    run.arguments = ["--new-segment", "two people asked to be left out"]
    code, output = run.run()
    assert code == 0, output
    assert {line["facts"]["sampling"]["records"] for line in ledger_lines(run_dir) if line["kind"] == "open"} == {
        whole.records
    }
    assert len([line for line in ledger_lines(run_dir) if line["kind"] == "plan"]) == 1
