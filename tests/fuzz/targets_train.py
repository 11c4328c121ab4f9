"""Configs as `train.py --dry-run` reads them; checkpoints as export, verify and a resumed run do. Loads torch."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.statement import compose
from murmuration.accounting.cli.main import main as account
from murmuration.accounting.errors import DONE
from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.journal import Journal
from murmuration.train.commands.exit_codes import complain, guarded
from murmuration.train.commands.export import main as export
from murmuration.train.commands.train import main as train
from murmuration.train.config.load import ConfigError, load
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.open_data import open_start
from murmuration.train.run.context import RunContext
from murmuration.train.storage.checkpoint import Checkpoints, Keep, KeptCheckpoint, pointer_text
from murmuration.train.storage.checkpoint_read import FORMAT, Position
from murmuration.train.storage.run_dir import RunDir
from tests.fuzz.engine import ROOT, Broken, Target
from tests.fuzz.mutate_bytes import mutate_bytes
from tests.fuzz.mutate_json import dumps, mutate_text, odd_value
from tests.fuzz.targets_accounting import chained
from tests.support.acc_world import KEY, whole_run
from tests.support.config_base import BASE
from tests.support.train_helpers import alone

SHIPPED = ("demo.json", "transfer/transfer_vitb_last.json", "continual/mixed_base.json")


def small(recipe: dict[str, Any]) -> dict[str, Any]:
    """Noise given and few steps, so that a dry run need not search for either."""
    for phase in recipe["phases"]:
        if phase.get("privacy"):
            phase["privacy"]["noise_multiplier"] = 1.5
            phase["steps"] = 5
            phase.pop("epochs", None)
    return recipe


class Configs(Target):
    cpu_seconds = 120  # a noise multiplier that was taken out is calibrated

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "config.json"

    def seeds(self) -> list[bytes]:
        recipes = [json.loads((ROOT / "ds_configs" / name).read_text()) for name in SHIPPED]
        found = [json.dumps(small(copy.deepcopy(recipe))).encode() for recipe in (BASE, *recipes)]
        return [*found, found[0].replace(b", ", b", // one\n").replace(b"}", b', /* "two */ # three\n}')]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        return mutate_text(chance, data, other)

    def act(self, data: bytes) -> int:
        self.path.write_bytes(data)
        return train(["--config", str(self.path), "--dry-run"])


class Overrides(Target):
    """One `--set` a line, over a config that is in order."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "config.json"
        self.path.write_text(json.dumps(BASE))

    def seeds(self) -> list[bytes]:
        return [
            b"phases.1.steps=10",
            b"phases.1.privacy=null",
            b"model.width=32\nmodel.heads=4",
            b"run.dir=x",
            b"phases.0.schedule.peak=.5",
        ]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        if chance.random() < 0.3:
            return mutate_bytes(chance, data, other)
        keys = [".".join(map(str, way)) for way in ways(BASE)]
        key = chance.choice(keys)
        at = chance.randrange(len(key) + 1)
        key = chance.choice((
            key, key, key[:at], key + ".0", key + ".x.y", key[:at] + "." + key[at:], key.replace("0", "-1"),
            key.replace("1", "9" * 5000), "." * 5000, "$schema", "phases", "",
        ))  # fmt: skip
        line = f"{key}={dumps(odd_value(chance))}".encode("utf-8", "surrogateescape")
        return data + b"\n" + line if chance.random() < 0.2 else line

    def act(self, data: bytes) -> int:
        given = [line.replace(b"\0", b"").decode("utf-8", "surrogateescape") for line in data.split(b"\n")]
        try:
            load(self.path, given)
        except ConfigError as error:
            return complain(error)
        return DONE


def ways(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way for key, part in inner for way in ((*before, key), *ways(part, (*before, key)))]


STEPS = (2, 3)


class RunDirectory(Target):
    """A finished run of three steps with two checkpoints, its ledger and its certificate, without its key."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        whole_run(folder / "made").ledger.close()
        self.root, self.out = folder / "run", folder / "out"
        self.lines = (folder / "made" / "ledger.jsonl").read_bytes()
        entries = [json.loads(line) for line in self.lines.splitlines()]
        self.pieces = folder / "pieces"
        self.pieces.mkdir()
        self.manifests = {step: self._manifest(step, entries) for step in STEPS}
        self.document: dict[str, Any] = {}
        self.lay(self.manifests[3])
        journal = Journal(Ledger.open(self.root / "ledger.jsonl"))
        self.document = compose(journal.history, journal.ledger.entries, {})
        journal.ledger.close()

    def _manifest(self, step: int, entries: list[dict[str, Any]]) -> bytes:
        name = "piece-00000-of-00001.safetensors"
        tensors = {
            "weights|layer.weight|0": np.arange(6, dtype=np.float32),
            "exp_avg|layer.weight|0": np.ones(6, np.float32), "weights|layer.bias|0": np.zeros(2, np.float32),
            "fixed|positions|0": np.zeros(4, np.float32),
        }  # fmt: skip
        path = self.pieces / f"{step}-{name}"
        save_file(tensors, path)
        before = next(n for n, entry in enumerate(entries) if (entry["kind"], entry.get("step")) == ("commit", step))
        manifest = {
            "format": FORMAT, "phase": 0, "step": step, "optimizer_step": step,
            "shapes": {"layer.weight": [2, 3], "layer.bias": [2], "positions": [1, 4]}, "run": "tiny",
            "ledger": {"length": before + 1, "head": entries[before]["hash"]}, "plan": entries[1]["plan"],
            "manifest_digest": "data-1", "objective": "mae",
            "pieces": {name: hashlib.sha256(path.read_bytes()).hexdigest()},
        }  # fmt: skip
        return json.dumps(manifest, indent=2).encode()

    def lay(self, newest: bytes, pointer: bytes | None = None) -> None:
        """All files fit together, whatever the newest manifest says; but for a pointer that is the case itself."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.out, ignore_errors=True)
        listed = []
        for step, manifest in ((3, newest), (2, self.manifests[2])):
            place = self.root / "checkpoints" / Position(0, step).folder
            place.mkdir(parents=True)
            (place / "manifest.json").write_bytes(manifest)
            for piece in self.pieces.glob(f"{step}-*"):
                shutil.copyfile(piece, place / piece.name.partition("-")[2])
            listed.append(KeptCheckpoint(0, step, hashlib.sha256(manifest).hexdigest(), {"public_loss": 1.0}))
        digest = listed[0].manifest_sha256
        (self.root / "checkpoints" / "latest").write_bytes(pointer_text(listed) if pointer is None else pointer)
        ledger = chained(self.lines.replace(b'"digest":"digest"', b'"digest":"%s"' % digest.encode()))
        (self.root / "ledger.jsonl").write_bytes(ledger)
        head = json.loads(ledger.splitlines()[-1])["hash"]
        document = self.document | {"hashes": {"checkpoint_manifest_sha256": digest}}
        document["ledger"] = {"length": len(ledger.splitlines()), "head": head}
        (self.root / "certificate.json").write_text(json.dumps(signed(document, KEY)))
        self.newest = digest

    def commands(self) -> int:
        code = account(["verify", str(self.root)])
        with mock.patch.object(sys, "argv", ["export.py", str(self.root), str(self.out)]):
            code = max(code, export())
        return max(code, self._started_from(), self.resumed(None), self.resumed("a damaged checkpoint"))

    def _started_from(self) -> int:
        try:
            open_start(SimpleNamespace(path=str(self.root), take_head=None, public=True), "phases.0.data")  # pyright: ignore
        except RecipeError as error:
            return complain(error)
        return DONE

    def resumed(self, segment: str | None) -> int:
        """Up to where a run that is started again has its weights, in the order of train/run/run.py."""

        def act() -> int:
            ledger = Ledger.open(self.root / "ledger.jsonl")
            try:
                run = RunContext(
                    "run", RunDir(self.root), alone(), Journal(ledger), None,
                    Checkpoints(self.root / "checkpoints", alone(), Keep()), segment,
                    config=SimpleNamespace(run=SimpleNamespace(keep_best="public_loss")),  # pyright: ignore
                    board=SimpleNamespace(say=print), stop=None,  # pyright: ignore
                )  # fmt: skip
                loaded = run.latest()
            finally:
                ledger.close()
            if segment is None and (loaded is None or loaded.digest != self.newest):
                raise Broken("a run goes on from another checkpoint than the ledger's newest without a word")
            return DONE

        return guarded(act, True)


class CheckpointManifests(RunDirectory):
    def seeds(self) -> list[bytes]:
        return [self.manifests[3]]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        return mutate_text(chance, data, other)

    def act(self, data: bytes) -> int:
        self.lay(data)
        return self.commands()


class Pointers(RunDirectory):
    """As `latest`, and as the next one that a kill left before it took that name."""

    def seeds(self) -> list[bytes]:
        return [(self.root / "checkpoints" / "latest").read_bytes()]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        return mutate_text(chance, data, other)

    def act(self, data: bytes) -> int:
        self.lay(self.manifests[3], data)
        code = self.commands()
        self.lay(self.manifests[3])
        (self.root / "checkpoints" / ".latest.tmp").write_bytes(data)
        return max(code, self.resumed(None))
