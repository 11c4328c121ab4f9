"""A run that protects units of several records, by real processes: killed, resumed, verified and exported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.ledger.history import History
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.index.exclusions import FACTS, IDS, Exclusions
from murmuration.data.index.open import open_units
from murmuration.data.index.shard_index import ShardIndex
from murmuration.train.audit import replay as replaying
from murmuration.train.config.load import load
from murmuration.train.engines.local import start_ranks
from murmuration.train.private_phase import PrivatePhase
from tests.support import forking
from tests.support.launching import ROOT, Launch, environment, ledger_lines
from tests.support.runs import TOY_STEPS, toy
from tests.support.whole_history import steps_of
from tests.train.test_train_units import RowByRow

Make = Callable[..., tuple[Launch, Path]]
PATIENT = r"key:0*(\d{1,2})"
"""The first digits of a record's number: 100 patients, of whom half have one record and half have eleven."""


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / name), *arguments]
    return forking.run(command, capture_output=True, text=True, env=environment())


@pytest.fixture(scope="module")
def patients(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the demo's private shards, in a folder of its own, that knows their units."""
    folder = tmp_path_factory.mktemp("patients") / "index"
    made = script("prepare.py", "index", str(small_data / "private"), "--out", str(folder), "--unit", PATIENT,
                  "--unit-missing", "own")  # fmt: skip
    assert made.returncode == 0 and f"units by '{PATIENT.replace(chr(92), 2 * chr(92))}'" in made.stdout, made
    return folder


@pytest.fixture
def of_patients(patients: Path) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        toy(config)
        private = config["phases"][1]
        del private["data"]["expected_records"]
        private["data"] |= {"path": str(patients), "unit": PATIENT, "rows_per_unit": 3}
        private["privacy"]["expected_batch"] = 16
        private["privacy"]["epsilon"] = 30.0

    return change


BANDS = 2


def by_dp_accounting(run_dir: Path, bands: int) -> float:
    """ε from the numbers of the plan in the ledger, without any code of ours: gradient and released numbers are one
    Gaussian event, and with bands a patient has a turn once in so many steps."""
    (plan,) = [line["plan"] for line in ledger_lines(run_dir) if line["kind"] == "plan"]
    precision = plan["noise_multiplier"] ** -2 + sum((each["bound"] / each["std"]) ** 2 for each in plan["metrics"])
    turns = -(-plan["steps"] // bands)
    sampled = dp_accounting.PoissonSampledDpEvent(
        plan["sampling"]["threshold"] / 2**32, dp_accounting.GaussianDpEvent(precision**-0.5)
    )
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4)
    return accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, turns)).get_epsilon(plan["delta"])


@pytest.mark.parametrize("noise", ["independent", "banded"])
def test_epsilon_of_patients_is_dp_accountings_with_either_noise(
    launch: Make, of_patients: Callable[[dict[str, Any]], None], patients: Path, noise: str
) -> None:
    def change(config: dict[str, Any]) -> None:
        of_patients(config)
        config["phases"] = config["phases"][1:]
        config["run"] |= {"engine": "local", "keep_key": False}
        if noise == "banded":
            config["phases"][0]["privacy"]["noise"] = {"kind": "banded", "bands": BANDS}

    job, run_dir = launch(noise, change, launcher="python")
    code, output = job.run()
    assert code == 0, output
    bands, certified = BANDS if noise == "banded" else 1, verify(run_dir)
    assert certified.committed == TOY_STEPS
    assert certified.epsilon == pytest.approx(by_dp_accounting(run_dir, bands), rel=2e-3)
    history = History.read(run_dir / "ledger.jsonl")[0]
    (plan,) = history.plans.values()
    count = open_units(ShardIndex.open(patients), PATIENT).count
    assert plan.records == count and plan.units is not None and plan.units.rows == 3
    drawn = {(facts.sampling.rule.parts, facts.sampling.records) for facts in steps_of(run_dir).opened.values()}
    assert drawn == {(bands, count)}
    mechanism = json.loads((run_dir / "certificate.json").read_text())["mechanism"]
    assert ("take turns" in mechanism) == (noise == "banded")


# An audit and a replay as a user starts them, on patients of which a step takes up to three records.

ALONE = ("--set", 'run.engine="local"', "--json")


def judged(command: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert command.returncode == 0, command.stdout + command.stderr
    return json.loads(command.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["gradient", pytest.param("input", marks=pytest.mark.slow)])
def test_canaries_beside_patients_do_not_refute_an_honest_run(
    launch: Make, of_patients: Callable[[dict[str, Any]], None], kind: str
) -> None:
    job, run_dir = launch("audited", of_patients)
    # At 95 %, an honest bound lies above the claim once in a hundred audits; with 60 canaries, a patient whose rows
    # count three times would not be seen at this confidence.
    some = ("--canaries", "240", "--records", "20", "--steps", "2", "--confidence", "0.999999")
    found = judged(script("audit.py", "--config", str(job.config), "--kind", kind, *some, *ALONE))
    assert found["kind"] == kind and found["canaries"] == 240 and found["refuted"] == []
    assert found["lower_bound_if_assumed"] <= found["claimed_epsilon"] <= 2.0
    assert not run_dir.exists(), "an audit leaves no run directory"


@pytest.fixture
def replayable(launch: Make, of_patients: Callable[[dict[str, Any]], None]) -> Path:
    """One micro-batch a step, and sums of losses: a patient's three rows could add up to three times the bound."""

    def change(config: dict[str, Any]) -> None:
        of_patients(config)
        config["phases"] = config["phases"][1:]
        config["train_micro_batch_size_per_gpu"] = 64

    return launch("replayed", change)[0].config


def a_large_patient(patients: Path) -> int:
    return int(np.argmax(open_units(ShardIndex.open(patients), PATIENT).sizes))


def test_the_replay_command_blanks_a_patient_and_no_more(replayable: Path, patients: Path) -> None:
    command = ("audit.py", "--replay", "--config", str(replayable), "--steps", "1", *ALONE)
    found = judged(script(*command))
    assert found["refuted"] == [] and found["noun"] == "unit" and found["drawn"] == 1
    assert 0 < found["largest_move"] <= found["bound"] * 1.001 <= 1.001
    count = open_units(ShardIndex.open(patients), PATIENT).count
    refused = script(*command, "--record", str(count))
    assert refused.returncode == 2 and f"--record {count} is not among the {count} units" in refused.stderr


@pytest.mark.parametrize("fault", ["none", "rows clipped one by one", "rows of half a patient stay"])
def test_a_replay_finds_rows_that_are_not_a_patient_s(
    replayable: Path, patients: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "rows clipped one by one":
        monkeypatch.setattr(replaying, "PrivatePhase", partial(PrivatePhase, around_clip=RowByRow))
    if fault == "rows of half a patient stay":
        monkeypatch.setattr(SlotRows, "records_of", also_in_the_next_slot(SlotRows.records_of))
    everyone = ["phases.0.privacy.expected_batch=100", "phases.0.privacy.epsilon=1e3", "phases.0.privacy.release=[]"]
    report = replaying.replay(load(replayable, everyone), start_ranks(), 1, a_large_patient(patients))
    assert report.drawn == 1
    if fault == "none":
        assert report.refuted == []
    elif fault == "rows clipped one by one":
        assert report.refuted == [f"one unit moved a sum by {max(report.moves):.6f}·C, but {report.bound:.6f}·C is "
                                  "promised"] and max(report.moves) > 1.2  # fmt: skip
    else:
        assert any(each.startswith("all other rows of all micro-batches") for each in report.refuted)


def also_in_the_next_slot(honest: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A slot holds a record of the unit before it, too: two units know of one record."""

    def records_of(self: SlotRows, ids_row: np.ndarray, step: int) -> np.ndarray:
        found = honest(self, ids_row, step)
        found[1:, -1] = found[:-1, 0]
        return found

    return records_of


def test_what_a_config_may_not_ask_of_units(
    launch: Make, of_patients: Callable[[dict[str, Any]], None], patients: Path, small_data: Path
) -> None:
    """One sentence each, before anything is computed."""

    def refused(change: Callable[[dict[str, Any]], None], *arguments: str) -> str:
        def both(config: dict[str, Any]) -> None:
            of_patients(config)
            change(config)

        job, run_dir = launch("refused", both)
        found = script("train.py", "--config", str(job.config), *arguments)
        assert found.returncode == 2, found.stdout + found.stderr
        assert not run_dir.exists() and "Traceback" not in found.stderr
        return found.stderr

    def data(config: dict[str, Any]) -> dict[str, Any]:
        return config["phases"][1]["data"]

    assert "named by" in refused(lambda config: data(config).update(unit="person"))
    assert "knows no units" in refused(lambda config: data(config).update(path=str(small_data / "private")))
    assert "give their number as expected_units" in refused(lambda config: data(config).update(expected_records=600))
    assert "more than 1 % off" in refused(lambda config: data(config).update(expected_units=600))
    assert "needs `unit`" in refused(lambda config: data(config).update(unit="record"))
    assert "leave it out" in refused(lambda config: config["phases"][0]["data"].update(unit=PATIENT))

    def twice(config: dict[str, Any]) -> None:
        other = json.loads(json.dumps(config["phases"][1])) | {"name": "records"}
        del other["data"]["rows_per_unit"]
        other["data"]["unit"] = "record"
        config["phases"].append(other)

    assert "a run makes one promise" in refused(twice)
    index = ShardIndex.open(patients)
    Exclusions(index.manifest_digest, np.array([3], dtype=np.uint64), unit="person").write(index.folder)
    try:
        assert "so one record decides about others" in refused(lambda config: None)
    finally:
        for name in (FACTS, IDS):
            (index.folder / name).unlink()


def test_a_dry_run_says_what_n_counts(
    launch: Make, of_patients: Callable[[dict[str, Any]], None], patients: Path
) -> None:
    job, _ = launch("dry", of_patients)
    count = open_units(ShardIndex.open(patients), PATIENT).count
    told = script("train.py", "--config", str(job.config), "--dry-run")
    assert told.returncode == 0, told.stderr
    assert f"n             {count} (units by {PATIENT!r}, of 600 records, from the index)" in told.stdout
    assert "the mean over at most 3 of its records" in told.stdout

    def elsewhere(config: dict[str, Any]) -> None:
        of_patients(config)
        config["phases"][1]["data"] |= {"path": "nowhere", "expected_units": 1234}

    job, _ = launch("elsewhere", elsewhere)
    told = script("train.py", "--config", str(job.config), "--dry-run")
    assert "n             1,234 (expected_units; the data are not at hand)" in told.stdout, told.stderr


def test_units_of_the_demo_are_uneven(patients: Path) -> None:
    sizes = open_units(ShardIndex.open(patients), PATIENT).sizes
    assert len(sizes) == 100 and np.unique(sizes, return_counts=True)[1].tolist() == [50, 50]
    assert sizes.min() == 1 and sizes.max() == 11
