"""A warm-up on pictures made while training; then records that are left out after the run has used them all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.data.index.exclusions import FACTS, IDS, Exclusions
from murmuration.data.index.shard_index import ShardIndex
from tests.support.launching import Launch, ledger_lines, opened_steps, wait_for

Make = Callable[..., tuple[Launch, Path]]


@pytest.mark.slow
def test_a_list_made_after_a_run_began_stops_its_resume(launch: Make, small_data: Path, tmp_path: Path) -> None:
    """Synthetic source, CLIP's words, real launcher. The ledger speaks of n records; another n is another run."""
    records = tmp_path / "records"
    shutil.copytree(small_data / "private", records)

    def change(config: dict[str, Any]) -> None:
        warm, private = config["phases"]
        warm["data"] = {"source": "synthetic", "kind": "mixed", "records": 64, "augment": "random_resized_crop"}
        config["model"]["vocabulary"] = 600
        private["data"] |= {"path": str(records), "tokenizer": "clip:600"}
        private.pop("evaluation")

    run, run_dir = launch("filtered", change)
    process = run.start()
    wait_for(lambda: len(opened_steps(run_dir)) >= 2, process)
    (run_dir / "stop").touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    declared = next(line for line in ledger_lines(run_dir) if line["kind"] == "nonprivate")
    assert declared["public_data"] is True, declared
    opened = opened_steps(run_dir)

    whole = ShardIndex.open(records)
    Exclusions(whole.manifest_digest, np.array([3, 77], dtype=np.uint64), ("by hand",), 4, "test").write(whole.folder)
    assert ShardIndex.open(records).records == whole.records - 2
    code, output = run.run()
    assert code in (2, 5) and "records" in output, output
    assert opened_steps(run_dir) == opened, "no step was opened on the smaller set"

    for name in (IDS, FACTS):
        (whole.folder / name).unlink()
    code, output = run.run()
    assert code == 0 and len(opened_steps(run_dir)) == 12, output
