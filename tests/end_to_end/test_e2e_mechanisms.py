"""Kill -9 in runs of every mechanism, on every engine, and on from there: as if nothing had happened."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.ledger.history import History
from tests.support import forking
from tests.support.launching import ROOT, Launch, environment
from tests.support.runs import ZERO_3, different, final_weights, state_of, toy
from tests.support.whole_history import steps_of

Make = Callable[..., tuple[Launch, Path]]
LOCAL, FSDP2 = 'run.engine="local"', 'run.engine="fsdp2"'
PRIVATE = "phases.1.privacy"
BANDED = PRIVATE + '.noise={"kind": "banded", "bands": 4}'
PATIENT = r"key:0*(\d{1,2})"
ADAPTIVE = PRIVATE + '.clip={"kind": "flat", "norm": 1.0, "adaptive": {"quantile": 0.5, "learning_rate": 0.3}}'
PROBES = PRIVATE + '.loss_probes={"every": 3, "bound": 1.0}'


@dataclass(frozen=True)
class Row:
    """A mechanism: its settings, and those and the ranks of each start in turn."""

    settings: tuple[str, ...] = ()
    starts: tuple[tuple[int, tuple[str, ...]], ...] = ((1, (LOCAL,)),)

    @property
    def bitwise(self) -> bool:
        """Sums of other ranks, and by other engines, are rounded otherwise."""
        return len(set(self.starts)) == 1


def on(ranks: int, *settings: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    return ((ranks, settings),)


ROWS = {
    "banded": Row((BANDED,)),
    "allocated": Row((PRIVATE + '.sampling="allocation"', PRIVATE + ".expected_batch=75"), on(2)),
    "exact": Row(('run.noise="exact"',)),
    "units": Row((f"phases.1.data.unit={json.dumps(PATIENT)}", "phases.1.data.rows_per_unit=3"), on(2, *ZERO_3)),
    "views": Row((PRIVATE + ".views=2", PRIVATE + ".expected_batch=24")),
    "adaptive and probes": Row(
        (ADAPTIVE, PRIVATE + ".release=[]", PROBES, "phases.1.schedule.shape=constant", "phases.1.schedule.warmup=0"),
        on(2),
    ),
    "ZeRO-1": Row((), on(2, "zero_optimization.stage=1")),
    "ZeRO-3": Row((), on(2, *ZERO_3)),
    "FSDP2": Row((), on(2, FSDP2)),
    "banded, FSDP2": Row((BANDED,), on(2, FSDP2)),
    "exact, ZeRO-3": Row(('run.noise="exact"',), on(2, *ZERO_3)),
    "other worlds": Row((), on(1, LOCAL) + on(2) + on(2, FSDP2) + on(1, FSDP2) + on(2, *ZERO_3)),
    "banded, other worlds": Row((BANDED,), on(2) + on(1, LOCAL) + on(2, FSDP2)),
}
SHORT = ("adaptive and probes", "banded, other worlds")
# How far a life may get at most: a rest must be left to be killed in.
REACH = {"write": 6, "fsync": 20, "pread": 60, "replace": 3, "rename": 2, "mkdir": 3}
KILLS = ("fsync", "write", "rename", "write", "pread")


@pytest.fixture(scope="module")
def patients(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the private shards that knows their units."""
    folder = tmp_path_factory.mktemp("patients")
    index = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index", str(small_data / "private")]
    options = ["--out", str(folder), "--unit", PATIENT, "--unit-missing", "own"]
    made = forking.run([*index, *options], capture_output=True, text=True, env=environment())
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def start(job: Launch, row: Row, number: int, **options: Any) -> Any:
    ranks, settings = row.starts[number % len(row.starts)]
    arguments = [word for setting in (*row.settings, *settings) for word in ("--set", setting)]
    return job.end(arguments=arguments, ranks=ranks, **options)


@pytest.mark.parametrize(
    ("name", "kills"),
    [*((name, 2) for name in SHORT), *(pytest.param(name, 5, marks=pytest.mark.slow) for name in ROWS)],
)
def test_killed_again_and_again_it_ends_as_if_undisturbed(launch: Make, patients: Path, name: str, kills: int) -> None:
    """65 kills in all, where the slow ones run."""
    row, draw = ROWS[name], random.Random(name)

    def change(config: dict[str, Any]) -> None:
        toy(config)
        del config["run"]["keep_key"]  # which correlated noise refuses
        if name == "units":
            private = config["phases"][1]
            del private["data"]["expected_records"]
            private["data"]["path"] = str(patients)
            private["privacy"] |= {"expected_batch": 16, "epsilon": 30.0}

    whole, whole_dir = launch("whole", change)
    ended = start(whole, row, 0)
    assert set(ended.codes) == {0}, ended.output

    job, run_dir = launch("killed", change)
    for number, kind in enumerate(KILLS[:kills]):
        kill = {"rank": 0, "kind": kind, "at": draw.randint(1, REACH[kind]), "before": draw.random() < 0.5}
        ended = start(job, row, number, kill=kill)
        assert ended.codes[0] == -9 and set(ended.codes) <= {-9, 75}, (kill, ended.codes, ended.output)
    ended = start(job, row, kills)
    assert set(ended.codes) == {0}, ended.output

    assert steps_of(run_dir) == steps_of(whole_dir), "every step once, with the records and the noise it would have had"
    history, undisturbed = (History.read(folder / "ledger.jsonl")[0] for folder in (run_dir, whole_dir))
    assert len(history.segments) == 1 and not history.faults and state_of(run_dir) == "done"
    assert history.charged() == undisturbed.charged() and verify(run_dir).epsilon == verify(whole_dir).epsilon
    found, expected = final_weights(run_dir), final_weights(whole_dir)
    if row.bitwise:
        assert different(found, expected) == []
    else:
        assert all(torch.allclose(found[each], expected[each], rtol=1e-4, atol=1e-5) for each in expected)
    left = [path for path in run_dir.rglob("*") if path.name.startswith(".") or path.name.endswith(".tmp")]
    assert left == [], "temporary files were left"
    claim = [json.loads((folder / "certificate.json").read_text())["claim"] for folder in (run_dir, whole_dir)]
    assert claim[0] == claim[1]
