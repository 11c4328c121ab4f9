"""Golden values that no processor changes, as text by item."""

from __future__ import annotations

import io
import json
import multiprocessing
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

from tests.golden import commands
from tests.golden.commands import LAUNCH, ROOT
from tests.golden.texts import as_json, digest, normalised, of_file
from tests.support.shipped_recipes import FILES

RECIPES = sorted(FILES.values())
Items = dict[str, str]
ENTRIES = re.compile(r'^( *)"rows": \[\n(?:\1 +.*\n)*\1\]', re.MULTILINE)
"""Of a matrix of correlated noise. A search finds them, and how a processor adds decides their last digits. What noise
adds up by them is in tests of its own."""


def helps(folder: Path) -> Items:
    """The help of every command and its subcommands; how argparse words them depends on Python's version."""
    found: Items = {}
    scripts = sorted(path.name for path in LAUNCH.glob("*.py") if "__main__" in path.read_text())
    for script in scripts:
        waiting: list[tuple[str, ...]] = [()]
        for words in waiting:
            text = commands.here(script, *words, "--help").output
            found[" ".join([script, *words])] = normalised(text, folder)
            choices = re.search(r"^ {2}\{([\w,-]+)\}", text, flags=re.MULTILINE)
            waiting += [(*words, name) for name in choices.group(1).split(",")] if choices and not words else []
    return found


def configs(folder: Path) -> Items:
    from tests.golden import inner  # here, as below: torch counts its threads when it is imported, so after warm_up

    found = {str(path.relative_to(ROOT)): as_json(inner.config_digests(path)) for path in RECIPES}
    return found | {"defaults": as_json(inner.defaults())}


def twins(folder: Path) -> Items:
    """`--dry-run` of every recipe without its privacy: all but the accounting, so it takes no time."""
    found: Items = {}
    for path in _recipes_elsewhere(folder):
        private = [f"phases.{n}.privacy=null" for n, phase in enumerate(_phases(path)) if "privacy" in phase]
        found |= _dry_run(path, folder, *(part for each in private for part in ("--set", each)))
    return found


def dry_runs(folder: Path) -> Items:
    """`--dry-run` of every recipe. Noise is calibrated once for all that promise the same, by one process per core."""
    alike: dict[str, list[Path]] = {}
    for path in _recipes_elsewhere(folder):
        alike.setdefault(json.dumps([_what_sets_the_noise(phase) for phase in _phases(path)]), []).append(path)
    found: Items = {}
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for items in pool.imap_unordered(_dry_run_group, [(group, folder) for group in alike.values()]):
            found |= items
    return found


def _what_sets_the_noise(phase: dict[str, Any]) -> list[Any]:
    privacy = {name: value for name, value in phase.get("privacy", {}).items() if name != "clip"}
    data = phase["data"]
    return [privacy, data.get("expected_records"), data.get("public_fraction"), phase.get("steps"), phase.get("epochs")]


def _dry_run_group(job: tuple[list[Path], Path]) -> Items:
    found: Items = {}
    for path in job[0]:
        found |= _dry_run(path, job[1])
    return found


def _dry_run(path: Path, folder: Path, *options: str) -> Items:
    """What it says to people, then what it says to scripts; the noise is calibrated once for both."""
    said = ""
    for form in ((), ("--json",)):
        done = commands.here("train.py", "--config", str(path), "--dry-run", *form, *options)
        said += f"exit code {done.code}\n{done.output}"
    return {
        path.relative_to(folder).as_posix(): ENTRIES.sub(r'\1"rows": <found by a search>', normalised(said, folder))
    }


def _recipes_elsewhere(folder: Path) -> list[Path]:
    """Copies, beside which no data lie: what is at hand on this machine must not matter."""
    shutil.copytree(ROOT / "ds_configs", folder / "ds_configs", dirs_exist_ok=True)
    return [folder / path.relative_to(ROOT) for path in RECIPES]


def _phases(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["phases"]


def ids(folder: Path) -> Items:
    from tests.golden import inner

    found: Items = {}
    for records, threshold, step in (
        (1, 1 << 31, 1), (1000, 1 << 28, 1), (1000, 1 << 28, 2), (1000, 1 << 32, 7), (1000, 1, 3),
        (2_500_001, 4_294_967, 1), (2_500_001, 4_294_967, 1 << 40),
    ):  # fmt: skip
        drawn, keyed = inner.drawn_ids(records, threshold, step)
        found[f"poisson n={records} K={threshold} step={step}"] = _ids(drawn) + f"keyed digest {keyed}\n"
    for records, batch, step in ((1, 3, 0), (1000, 32, 0), (1000, 32, 31), (2_500_001, 4096, 123)):
        found[f"public n={records} batch={batch} step={step}"] = _ids(inner.public_ids(records, batch, step))
    return found | {"keys": as_json(inner.derived_keys(7)), "chained keys": as_json(inner.chained_keys(7))}


def _ids(drawn: Any) -> str:
    return f"{len(drawn)} ids, {drawn.dtype}, sha256 {digest(drawn.tobytes())}\n{drawn[:20].tolist()}\n"


def noise(folder: Path) -> Items:
    """Made of sums, products, quotients and square roots alone, which IEEE rounds in one way on every processor."""
    from tests.golden import inner

    found: Items = {}
    for generator, farthest in (("aes", ((1 << 40) - 1, (1 << 24) - 1)), ("chacha20", ((1 << 32) - 1, (1 << 32) - 1))):
        for std, step, parameter, start, length in (
            (1.0, 1, 0, 0, 1), (1.0, 1, 0, 0, 1000), (1.0, 2, 0, 0, 1000), (1.0, 1, 1, 0, 1000), (0.7, 1, 0, 1, 999),
            (2.5, 5708, 211, 12345, 77777), (1.0, *farthest, 1 << 33, 64),
            (1.0, 3, 2, 0, (1 << 20) + 5),
        ):  # fmt: skip
            shape = f"{generator} std={std} step={step} parameter={parameter} elements={start}+{length}"
            for single in (False, True):
                drawn = inner.noise(generator, std, step, parameter, start, length, single)
                shown = [value.hex() for value in drawn[:8].astype("f8").tolist()]
                found[f"{shape} {drawn.dtype}"] = f"sha256 {digest(drawn.tobytes())}\n{as_json(shown)}"
    return found


def index(folder: Path) -> Items:
    """Bytes of indexes of shards and of single files, over contents that no library had a hand in."""
    shards, classes = folder / "fixed" / "shards", folder / "fixed" / "classes"
    shards.mkdir(parents=True)
    for number, count in enumerate((5, 3)):
        with tarfile.open(shards / f"{number:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for record in range(count):
                _add(tar, f"{number}{record:05d}.jpg", bytes([number, record]) * (100 + 300 * record))
                _add(tar, f"{number}{record:05d}.txt", f"caption {record}".encode())
    for record in range(6):
        place = classes / "ab"[record % 2] / f"{record}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes([record]) * (50 + record))
    found: Items = {}
    for source in (shards, classes):
        done = commands.run("prepare.py", "index", str(source), folder=folder)
        found[f"{source.name} output"] = normalised(done.output, folder)
    for path in sorted(p for p in (folder / "fixed").rglob("*") if p.is_file() and p.parent.name.endswith("index")):
        if "stamp" not in path.name and path.name != "salt.key":  # of this machine's clock, and of chance
            found[path.relative_to(folder / "fixed").as_posix()] = of_file(path, folder)
    return found


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
