"""Launches: small shards, a small config derived from the demo's, and commands as a user would type them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import forking
from tests.support.launching import ROOT, Launch, environment


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small_data")
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), "demo", "--out", str(folder)]
    forking.run(
        [*command, "--private", "600", "--held-out", "64", "--textures", "200", "--workers", "1"],
        check=True, env=environment(), capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def small_config(small_data: Path) -> dict[str, Any]:
    """The demo's config at toy size; a debug seed makes runs comparable bit by bit (and NOT PRIVATE)."""
    config = json.loads((ROOT / "ds_configs" / "demo.json").read_text())
    del config["$schema"]
    config["train_micro_batch_size_per_gpu"] = 16
    config["model"] |= {
        "width": 32, "depth": 1, "heads": 2, "decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2,
        "mae_decoder_width": 16, "mae_decoder_heads": 2,
    }  # fmt: skip
    warm, private = config["phases"]
    warm |= {"batch": 32, "steps": 2}
    warm["data"]["path"] = str(small_data / "textures")
    private["data"] |= {"path": str(small_data / "private"), "tokenizer": str(small_data / "tokenizer.json")}
    private["data"] |= {"expected_records": 600, "augment": "random_resized_crop"}
    private["privacy"] |= {"expected_batch": 48, "noise_multiplier": 2.0, "epsilon": 8.0}
    private["privacy"]["release"] = [
        {"name": "loss", "bound": 8.0, "noise_multiplier": 6.0}, {"name": "clipped", "noise_multiplier": 6.0},
    ]  # fmt: skip
    private["evaluation"] |= {"path": str(small_data / "held_out"), "records": 32}
    private["steps"] = 12
    config["run"] |= {"checkpoint_every": 3, "debug_seed": 7, "private_curves": True}
    return config


@pytest.fixture
def launch(tmp_path: Path, small_config: dict[str, Any]) -> Callable[..., tuple[Launch, Path]]:
    """Writes a config and gives the launch and its run directory; `change` edits the config first."""

    def make(name: str, change: Callable[[dict[str, Any]], None] | None = None, **options: Any) -> tuple[Launch, Path]:
        return Launch.written(small_config, tmp_path, name, change, **options)

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, small_config: dict[str, Any]) -> tuple[Path, str]:
    """An uninterrupted run, from a folder that is not the repository's; and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "whole.json").write_text(json.dumps(small_config))
    code, output = Launch(folder / "whole.json", folder).run()
    assert code == 0, output
    return folder / "runs" / "whole", output


@pytest.fixture(scope="session")
def whole(small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy run, never interrupted."""
    from tests.support.runs import toy

    folder = tmp_path_factory.mktemp("whole")
    job, run_dir = Launch.written(small_config, folder, "whole", toy)
    ended = job.end()
    assert ended.codes == [0, 0], ended.output
    return run_dir
