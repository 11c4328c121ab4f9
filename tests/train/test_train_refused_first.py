"""What can be refused without ranks is refused before the ranks are joined, and by one of them."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from murmuration.data.index.shard_index import build
from murmuration.data.synthetic.index import shape_samples, write_shards
from tests.support.config_base import BASE
from tests.support.launching import ROOT

# Each command line by two ranks in turn, in one process, as a launcher describes them to a script.
BOTH_RANKS = """
import contextlib, io, json, os, sys
from murmuration.train.commands.train import main
found = []
for arguments in json.loads(sys.argv[1]):
    for rank in "01":
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = main(arguments)
        found.append([code, said.getvalue()])
import torch
print(json.dumps([found, "deepspeed" in sys.modules, torch.distributed.is_initialized()]))
"""

REFUSED = {
    "phases.0.privacy.expected_batch=41": "expected_batch must lie in (0, 40]",
    "phases.0.privacy.delta=0.5": "delta must lie in (0, 1/n]",
    "phases.0.privacy.delta=1e-300": "delta = 1e-300 is too small",
    "phases.0.privacy.epsilon=1e6": "epsilon = 1e+06 promises nothing",
    "phases.0.data.path=elsewhere": "elsewhere",
    "phases.0.evaluation.path=private": "belongs to the private records",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    raw: dict[str, Any] = copy.deepcopy(BASE)
    raw["model"] = {"family": "mae", "image_size": 32, "patch_size": 8, "width": 16, "depth": 1, "heads": 2}
    raw["model"] |= {"mae_decoder_width": 16, "mae_decoder_depth": 1, "mae_decoder_heads": 2}
    private = raw["phases"][1] | {"objective": "mae", "data": {"path": "private"}}
    private["evaluation"] = {"path": "held", "public": True}
    private["privacy"] |= {"noise_multiplier": None}
    raw["phases"] = [private]
    for name, seed, count in (("private", 2, 40), ("held", 3, 8)):
        write_shards(tmp_path / name, shape_samples(seed, count, 32), 20)
        build(tmp_path / name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    return path


def test_no_rank_is_joined_for_a_refusal_and_one_rank_says_it(config: Path) -> None:
    lines = [["--config", str(config), "--set", change] for change in REFUSED]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BOTH_RANKS, json.dumps(lines)], cwd=config.parent, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, deepspeed, joined = json.loads(done.stdout)
    assert not deepspeed and not joined
    for (change, message), (code, said), (other_code, other) in zip(
        REFUSED.items(), found[::2], found[1::2], strict=True
    ):
        assert (code, other_code, other) == (2, 2, ""), (change, said, other)
        assert message in said and said.startswith("error: ") and said.count("\n") == 1, (change, said)
    assert sorted(path.name for path in config.parent.iterdir()) == ["config.json", "held", "private"]
