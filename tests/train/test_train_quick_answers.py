"""What a person waits for while typing is answered before anything that takes seconds is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from murmuration.__main__ import COMMANDS
from tests.support.launching import ROOT

SLOW = (
    "torch",
    "deepspeed",
    "timm",
    "transformers",
    "torchvision",
    "dp_accounting",
    "scipy",
    "matplotlib",
    "tokenizers",
)
ANSWER = """
import json, sys
from murmuration.__main__ import main
try:
    code = main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]), file=sys.stderr)
"""


def answered(*arguments: str) -> tuple[int, set[str], str]:
    """Exit code, the packages that were imported, and what was printed."""
    done = subprocess.run([sys.executable, "-c", ANSWER, *arguments], cwd=ROOT, capture_output=True, text=True)
    *said, last = done.stderr.splitlines()
    code, imported = json.loads(last)
    return code, set(imported), done.stdout + "\n".join(said)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_imports_nothing_that_takes_seconds(command: str) -> None:
    code, imported, text = answered(command, "--help")
    assert code == 0 and "usage:" in text
    assert imported.isdisjoint({*SLOW, "pydantic", "numpy"})


@pytest.mark.parametrize(
    "arguments",
    [
        ("train",),
        ("train", "--dry-run"),
        ("audit",),
        ("plan", "--gpus=1", "--memory=80", "--tflops=100"),
        ("four-way", "--phase=a", "--noise-multiplier=1", "--out=a"),
    ],
    ids=" ".join,
)
def test_a_misspelt_key_is_answered_before_anything_that_takes_seconds(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    raw = json.loads((ROOT / "ds_configs" / "demo.json").read_text())
    raw["phases"][1]["schedule"]["peek"] = raw["phases"][1]["schedule"].pop("peak")
    config = tmp_path / "typo.json"
    config.write_text(json.dumps(raw))
    code, imported, text = answered(arguments[0], "--config", str(config), *arguments[1:])
    assert code == 2 and "did you mean 'peak'?" in text, text
    assert imported.isdisjoint(SLOW)


@pytest.mark.parametrize("name", ["demo.json", "vip/vip_base.json"])
def test_a_dry_run_imports_pytorch_and_no_package_built_on_it(name: str) -> None:
    """timm brings torchvision, and that PyTorch's compiler with sympy: more than all that a dry run computes."""
    code, imported, text = answered("train", "--config", f"ds_configs/{name}", "--dry-run")
    assert code == 0 and "(calibrated)" in text and "torch" in imported, text
    assert imported.isdisjoint({*SLOW, "sympy", "triton"} - {"torch", "scipy", "tokenizers"})
