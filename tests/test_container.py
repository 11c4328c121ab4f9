"""The container file: all that it copies and runs is there, and nothing of a run or of data gets into an image."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from murmuration.__main__ import COMMANDS
from tests.support.launching import environment

ROOT = Path(__file__).resolve().parents[1]


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and arguments of each, lines that end with a backslash joined."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


ENGINE = next((found for found in map(shutil.which, ("docker", "podman")) if found), None)
FILE = (ROOT / "Containerfile").read_text()
PARSED = instructions(FILE)


def only(name: str) -> str:
    (found,) = (rest for each, rest in PARSED if each == name)
    return found


def test_instructions_are_known_and_the_base_is_a_python_that_the_project_supports() -> None:
    assert {name for name, _ in PARSED} == {"FROM", "RUN", "ARG", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"}
    version = re.fullmatch(r"python:3\.(\d+)\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", only("FROM"))
    least = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert version is not None and least is not None and int(version[1]) >= int(least[1])


def test_what_it_copies_is_there_and_set_up_before_the_sources_by_the_files_that_this_takes() -> None:
    copied = [shlex.split(rest)[:-1] for name, rest in PARSED if name == "COPY"]
    assert all((ROOT / source).exists() for sources in copied for source in sources)
    assert copied[-1] == ["."]
    before = {source for sources in copied[:-1] for source in sources}
    rule = re.search(r"^\$\(READY\):(.*)\n\t@(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule is not None and {*rule[1].split(), "launch/setup.sh", "Makefile"} == before
    assert "launch/setup.sh" in rule[2] and any(rest.startswith("make setup") for _, rest in PARSED)


def test_it_installs_what_the_setup_asks_for() -> None:
    (installed,) = re.findall(r"apt-get install -y --no-install-recommends ([\w+ -]+?) +&&", FILE.replace("\\\n", " "))
    needed = re.findall(r"command -v (\S+)", (ROOT / "launch" / "setup.sh").read_text())
    assert set(installed.split()) == set(needed), "the image of Python has venv and headers"


def test_its_commands_exist() -> None:
    program, *arguments = json.loads(only("ENTRYPOINT"))
    assert program == "python"
    command = [sys.executable, *arguments, *json.loads(only("CMD"))]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "doctor" in done.stdout
    told = re.findall(r"murmuration(?: (?:doctor|train))", FILE)
    named = {text.split()[1] for text in told}
    assert named == {"doctor", "train"} <= COMMANDS.keys()
    assert (Path(sys.executable).parent / "deepspeed").exists()


@pytest.mark.slow
def test_it_is_built_and_answers() -> None:
    if ENGINE is None or subprocess.run([ENGINE, "info"], capture_output=True).returncode:
        pytest.skip("neither docker nor podman answers here")

    def run(*words: str) -> str:
        done = subprocess.run([str(ENGINE), *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    image = "murmuration-test"
    run("build", "-f", "Containerfile", "-t", image, ".")
    try:
        assert "FAIL" not in run("run", "--rm", "--shm-size=2g", image, "doctor")
        asked = ("--epsilon", "3", "--delta", "1e-5", "--n", "10000", "--batch", "100", "--steps", "100")
        assert "sigma" in run("run", "--rm", image, "account", "calibrate", *asked)
        dry = ("train", "--dry-run", "--config", "ds_configs/dpcap_large.json")
        assert "epsilon" in run("run", "--rm", image, *dry)
    finally:
        run("rmi", "-f", image)


def test_no_run_no_key_and_no_data_get_into_an_image() -> None:
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "runs", "demo_data", "**/secret"} <= set(left_out)
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert {"runs", "demo_data", ".venv", "build"} <= ignored & set(left_out)
