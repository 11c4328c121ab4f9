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
    assert "launch/setup.sh" in rule[2] and any("make setup" in rest for name, rest in PARSED if name == "RUN")


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


def engine() -> str | None:
    """The first that answers: `docker` is often there without its daemon."""
    found = filter(None, map(shutil.which, ("docker", "podman")))
    return next((each for each in found if not subprocess.run([each, "info"], capture_output=True).returncode), None)


@pytest.mark.slow
@pytest.mark.by_hand  # loads an image and packages over the network, for minutes that no processor seconds show
def test_it_is_built_and_answers(tmp_path: Path) -> None:
    program = engine()
    if program is None:
        pytest.skip("neither docker nor podman answers here")
    checkout, data = tmp_path / "checkout", tmp_path / "data"
    first, image = "murmuration-test:first", "murmuration-test:changed"
    left = shutil.ignore_patterns(*(line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()), ".git")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left)
    for private in ("scans/1.png", "out/secret/key", "train/secret/key", "data/1.png", ".git/config", "keys.json"):
        (checkout / private).parent.mkdir(parents=True, exist_ok=True)
        (checkout / private).write_text("private")
    (checkout / "train" / "step.py").chmod(0o600)

    def run(*words: str) -> str:
        done = subprocess.run([program, *words], cwd=checkout, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def built(name: str) -> list[str]:
        run("build", "-f", "Containerfile", "-t", name, ".")
        return json.loads(run("image", "inspect", "--format", "{{json .RootFS.Layers}}", name))

    def inside(*words: str, entry: str = "python") -> str:
        """As a user without a name there, who can write to the mounted folder alone, and without a network."""
        safe = ("--read-only", "--tmpfs", "/tmp", "--network", "none", "--user", "1234:1234", "--shm-size=2g")
        start = ("-m", "murmuration") if entry == "python" else ()
        return run(
            "run", "--rm", *safe, "-v", f"{data}:/data", "-w", "/data", "--entrypoint", entry, image, *start, *words
        )

    try:
        layers = built(first)
        (checkout / "train" / "step.py").write_text((ROOT / "train" / "step.py").read_text() + "\n")
        again = built(image)
        assert again[:-2] == layers[:-2] and again != layers, "a change of a source installed the packages again"

        asked = ("--epsilon", "3", "--delta", "1e-5", "--n", "10000", "--batch", "100", "--steps", "100")
        assert "σ = " in run("run", "--rm", image, "account", "calibrate", *asked)
        assert "epsilon" in run("run", "--rm", image, "train", "--dry-run", "--config", "ds_configs/dpcap_large.json")
        assert "FAIL" not in run("run", "--rm", "--user", "1234:1234", image, "doctor")
        found = ("run", "--rm", "--entrypoint", "find", image)
        assert not run(*found, "/", "-xdev", "-name", ".cache")
        sources = ("/opt/murmuration", "-type", "f", "-not", "-path", "*/.venv/*", "-not", "-name", "*.pyc")
        listed = run(*found, *sources)
        files = {path.removeprefix("/opt/murmuration/") for path in listed.splitlines()}
        assert "train/step.py" in files and not [name for name in files if not (ROOT / name).is_file()]
        assert not [name for name in files if name.startswith(("tests/", "docs/"))]

        data.mkdir()
        data.chmod(0o777)
        (data / "tokenizers.py").write_text("raise SystemExit('a file among the data was imported')")
        inside("prepare", "demo", "--out", "demo_data", "--private", "200", "--held-out", "20", "--textures", "80")
        config = json.loads((ROOT / "ds_configs" / "demo.json").read_text())
        config["model"] |= {"depth": 1, "width": 32, "decoder_depth": 1, "decoder_width": 32}
        for phase in config["phases"]:
            phase |= {"steps": 2, "batch": 40} if phase["objective"] == "mae" else {"steps": 2, "evaluation": None}
            phase["schedule"]["warmup"] = 1
        config["phases"][1]["data"]["expected_records"] = 200
        config["phases"][1]["privacy"]["expected_batch"] = 20
        (data / "ds_configs").mkdir()
        (data / "ds_configs" / "my.json").write_text(json.dumps(config))
        trained = ("train", "--config", "ds_configs/my.json", "--set")
        inside(*trained, "run.dir=runs/one", "--set", "run.engine=local")
        module = ("--num_gpus", "2", "--module", "murmuration")
        inside(*module, *trained, "run.dir=runs/deepspeed", entry="deepspeed")
        module = ("--standalone", "--nproc_per_node", "2", "-m", "murmuration")
        inside(*module, *trained, "run.dir=runs/torchrun", entry="torchrun")
        for name in ("one", "deepspeed", "torchrun"):
            inside("account", "verify", f"runs/{name}")
    finally:
        subprocess.run([program, "rmi", "-f", first, image], capture_output=True)


def test_no_run_no_key_and_no_data_get_into_an_image() -> None:
    first, *lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*" and {"**/__pycache__", "**/secret"} <= set(lines)
    taken = {line[1:].partition("/")[0] for line in lines if line.startswith("!")}
    # Not all of data/, where people put theirs; by name, since builders look for `**` in no folder that is left out.
    modules = {path.relative_to(ROOT).parts[1] for path in (ROOT / "data").rglob("*/*.py")}
    assert {line for line in lines if line.startswith("!data/")} == {
        "!data/*.py",
        *(f"!data/{name}" for name in modules),
    }
    package = {path.name for path in (ROOT / "murmuration").iterdir() if path.is_symlink()}
    assert taken == {"Makefile", "LICENSE", "pyproject.toml", "constraints*.txt", "murmuration"} | package
