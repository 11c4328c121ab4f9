"""The repository keeps its own rules: links, the map of pitfalls, and nothing that belongs to one machine."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.acc_world import certified, whole_run
from tests.support.launching import BIN

ROOT = Path(__file__).resolve().parents[1]
SLOW = "pytest.mark.slow"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def anchors(document: Path) -> set[str]:
    """What a link may name behind its #, as GitHub makes it of a heading."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_and_headings_that_the_documents_link_to_exist() -> None:
    for document in (path for path in tracked() if path.suffix == ".md"):
        for link in re.findall(r"\]\(([^):\s]+)\)", document.read_text()):
            file, _, anchor = link.partition("#")
            target = document.parent / file if file else document
            assert target.exists(), f"{document.relative_to(ROOT)} links to {link}"
            known = anchors(target) if anchor and target.suffix == ".md" else {anchor}
            assert anchor in known, f"{document.relative_to(ROOT)} links to {link}, which has no such heading"


def test_no_registry_address_or_machine_path_is_committed() -> None:
    words = ["pypi" + r"\.", "npm" + r"js\.", "find-" + "links", "index-" + "url", r"(?<![\w.])/(work|root|home)" + "/"]
    pattern = re.compile("|".join(words))
    for path in tracked():
        if path.suffix in {".png", ".jpg"}:
            continue
        found = pattern.search(path.read_text(errors="ignore"))
        assert not found, f"{path}: {found.group(0) if found else ''}"


def test_constraints_pin_versions_and_hashes_without_addresses() -> None:
    pinned = r"([A-Za-z0-9._-]+)==[A-Za-z0-9.+!_-]+(?: +--hash=sha256:[0-9a-f]{64})+"
    names: dict[str, list[str]] = {}
    for file in ("constraints.txt", "constraints-cu12.txt"):
        for line in (ROOT / file).read_text().replace("\\\n", "").splitlines():
            found = re.fullmatch(pinned, line)
            assert line.startswith("#") or found is not None, line
            names.setdefault(file, []).extend([] if found is None else [found[1]])
    merge = re.search(r"awk '(.*?)' constraints\.txt", (ROOT / "launch" / "setup.sh").read_text())
    assert merge is not None
    kept = subprocess.run(["awk", merge[1], ROOT / "constraints.txt"], capture_output=True, text=True).stdout
    left = re.findall(r"^([a-z][\w.-]+)==", kept, re.MULTILINE)
    assert len(left) > 100 and not {*left} & {*names["constraints-cu12.txt"]}, "each package has one version"
    assert {"torch", "torchvision", "triton"} <= {*names["constraints-cu12.txt"]}
    assert not [name for name in left if re.match("nvidia|cuda|torch", name)]


@pytest.mark.rest
def test_what_set_up_installs_is_compared_with_its_hash(tmp_path: Path) -> None:
    """A file of another content, under the name and the version that is asked for."""
    name, version, info = "braceexpand", "0.1.7", "braceexpand-0.1.7.dist-info"
    with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    command = [
        str(BIN / "uv"),
        "pip",
        "install",
        "--offline",
        "--no-cache",
        "--no-index",
        "--find" + "-links",
        str(tmp_path),
    ]
    command += ["--python", sys.executable, name]
    for more, refused in (([], False), (["-c", str(ROOT / "constraints.txt")], True)):
        target = ["--target", str(tmp_path / f"out{refused}")]
        done = subprocess.run([*command, *target, *more], capture_output=True, text=True)
        assert (done.returncode != 0) == refused, done.stderr
    assert "Hash mismatch" in done.stderr
    script = (ROOT / "launch" / "setup.sh").read_text()
    assert re.findall(r"pip install .*?(-c \S+|--require-hashes)", script.replace("\\\n", "")) == [
        "--require-hashes",
        '-c "$constraints"',
    ]


def slow_or_not(path: Path) -> dict[str, bool]:
    """The tests that a file defines, and whether each is marked slow, by itself, with its file or with its folder."""
    tree = ast.parse(path.read_text())
    all_slow = path.parent.name == "contrib" or any(
        isinstance(node, ast.Assign) and ast.unparse(node) == f"pytestmark = {SLOW}" for node in tree.body
    )
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {test.name: all_slow or SLOW in [ast.unparse(mark) for mark in test.decorator_list] for test in found}


def test_tests_that_the_map_names_exist_in_the_group_it_says() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    named = re.findall(r"(slow: )?`([^`]+)::([^`]+)`", text)
    assert len(named) > 100, "the map of pitfalls is not where it was"
    known = {path.name: slow_or_not(path) for path in (ROOT / "tests").rglob("test_*.py")}
    for said, file, test in named:
        assert test in known.get(file, {}), f"{file}::{test} does not exist"
        assert known[file][test] == bool(said), f"{file}::{test}: 'slow:' must stand before it if it is so marked"


def test_a_run_is_verified_with_the_packages_that_the_page_names(tmp_path: Path) -> None:
    """By a Python that sees those, what they require, and this checkout."""
    wanted = re.findall(r"^    pip install ([^#\n]+?)  +#", (ROOT / "docs" / "auditing.md").read_text(), re.MULTILINE)
    names, seen = wanted[0].split(), set[str]()
    (tmp_path / "site").mkdir()
    while names:
        distribution = metadata.distribution(names.pop())
        if distribution.name in seen:
            continue
        seen.add(distribution.name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."} - {"__pycache__"}:
            if not (tmp_path / "site" / top).exists():
                (tmp_path / "site" / top).symlink_to(distribution.locate_file(top))
        required = (Requirement(text) for text in distribution.requires or ())
        names += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert "torch" not in seen
    journal = whole_run(tmp_path / "run")
    (tmp_path / "run" / "certificate.json").write_text(json.dumps(certified(journal)))
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "launch" / "account.py"), "verify", str(tmp_path / "run")],
        env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 7 and "the certificate agrees" in done.stdout, done.stdout + done.stderr


def test_a_missing_compiler_is_named_with_its_package(tmp_path: Path) -> None:
    """Set-up on a machine that lacks g++: said first, before anything is installed."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "dirname", "make", "git"):
        source = subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True, text=True).stdout.strip()
        (tools / name).symlink_to(source)
    done = subprocess.run(
        ["sh", str(ROOT / "launch" / "setup.sh"), sys.executable],
        env={"PATH": str(tools)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "g++" in done.stderr and "apt-get install" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("given", "started"),
    [
        (["GPUS=4"], "deepspeed --num_gpus 4 launch/train.py --config"),
        (["GPUS=0", "ENGINE=deepspeed"], "deepspeed --num_gpus 2 launch/train.py --config"),
        (["GPUS=0", "ENGINE=local"], "python launch/train.py --set run.engine=local --config"),
    ],
)
def test_the_demo_starts_one_process_per_gpu_and_without_any_two_or_a_plain_one(given: list[str], started: str) -> None:
    done = subprocess.run(["make", "-n", "demo", *given], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"/{started} ds_configs/demo.json ||" in done.stdout
