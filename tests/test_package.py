"""`pip install .`: one top-level name, commands on the PATH, and a program of one's own from another folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from murmuration.accounting.certificate.verify import verify
from tests.test_structure import OF_OPTIONS

ROOT = Path(__file__).parents[1]
PARTS = ("accounting", "contrib", "data", "evaluation", "launch", "model", "train")


def run(*command: object, cwd: Path, code: int = 0) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that holds the wheel, and sees the packages of this one."""
    folder = tmp_path_factory.mktemp("package")
    source, venv = folder / "source", folder / "venv"
    source.mkdir()
    for name in (*PARTS, "ds_configs", "murmuration"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run(*pip, "--python", venv / "bin" / "python", "install", "--no-deps", "-q", wheel, cwd=folder)
    return venv


def test_nothing_lands_beside_the_one_name(installed: Path) -> None:
    (packages,) = installed.glob("lib/python*/site-packages")
    ours = {path.name for path in packages.iterdir()} & {*PARTS, "murmuration"}
    assert ours == {"murmuration"}
    assert {path.name for path in (packages / "murmuration").iterdir() if path.is_dir()} >= set(PARTS)
    found = run(installed / "bin" / "python", "-c", "import murmuration; print(murmuration.__file__)", cwd=installed)
    assert Path(found.strip()).is_relative_to(packages)


def test_recipes_schema_and_scripts_come_along(installed: Path, tmp_path: Path) -> None:
    (package,) = installed.glob("lib/python*/site-packages/murmuration")
    for folder in ("ds_configs", "launch"):
        files = [*(ROOT / folder).rglob("*.json"), *(ROOT / folder).rglob("*.sh")]
        assert files and all((package / path.relative_to(ROOT)).read_bytes() == path.read_bytes() for path in files)
    asked = [installed / "bin" / "murmuration", "train", "--dry-run", "--config", "ds_configs/demo.json"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
    copy = re.search(r"there is no config file ds_configs/demo.json; copy (\S+)", done.stderr)
    assert done.returncode == 2 and copy is not None, done.stderr
    shutil.copytree(Path(copy[1]).parent, tmp_path / "ds_configs")
    assert "there is no config file" not in subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True).stderr


WITHOUT_DEEPSPEED = f"""
import runpy, sys
sys.argv = ["own_model.py", "run"]
runpy.run_path("own_model.py", run_name="__main__")
assert not any(name.split(".")[0] == "deepspeed" for name in sys.modules)
assert not {{f"murmuration.{{name}}" for name in {OF_OPTIONS!r}}} & sys.modules.keys()
import torch
assert not torch.distributed.is_initialized()
"""


def test_a_program_of_ones_own_trains_and_its_certificate_verifies(installed: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs" / "own_model.py", tmp_path)
    told = run(installed / "bin" / "python", "-c", WITHOUT_DEEPSPEED, cwd=tmp_path)
    verdict = verify(tmp_path / "run")
    assert verdict.opened == verdict.committed == 60 and 2.9 < verdict.epsilon <= 3 == verdict.claimed
    assert f"epsilon={verdict.epsilon!r}" in told
    said = run(installed / "bin" / "murmuration", "account", "verify", "run", cwd=tmp_path, code=7)
    assert "the certificate agrees" in said


IMPORTS = """
import sys, murmuration
murmuration.PrivateTraining
slow = {"dp_accounting", "scipy.stats", "sympy", "tensorboard", "torch._dynamo", "torch.distributed.tensor"}
assert not slow & sys.modules.keys(), slow & sys.modules.keys()
"""


def test_importing_the_library_waits_for_pytorch_alone() -> None:
    run(sys.executable, "-c", IMPORTS, cwd=ROOT)


def test_every_command_explains_itself(installed: Path, tmp_path: Path) -> None:
    murmuration = installed / "bin" / "murmuration"
    listed = [line.split()[0] for line in run(murmuration, cwd=tmp_path).splitlines() if line.startswith("  ")]
    assert listed == [
        "init",
        "train",
        "prepare",
        "account",
        "plan",
        "audit",
        "evaluate",
        "study",
        "use",
        "doctor",
        "retire",
        "export",
    ]
    for command in listed:
        assert "usage:" in run(murmuration, command, "--help", cwd=tmp_path), command
    wrong = subprocess.run([murmuration, "trian"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "the commands are init, train, prepare" in wrong.stderr
