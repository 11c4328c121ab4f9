"""A head from one pass over private features: two processes, a certificate, an export that answers, and its twin."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.epsilon.gaussian import gaussian_epsilon
from murmuration.accounting.ledger.history import History
from murmuration.data.index.open import open_index, open_units
from murmuration.data.synthetic.index import shape_samples
from murmuration.model.build import build
from murmuration.model.classifier import Classifier
from murmuration.model.settings import ModelSettings
from murmuration.model.statistics_head import StatisticsHead
from murmuration.model.trainable import merged, select
from tests.support import forking
from tests.support.launching import ROOT, Launch, environment, ledger_lines
from tests.support.runs import different, final_weights
from tests.support.whole_history import steps_of

RECORDS, EPSILON, CLASSES = 300, 8.0, 8
MODEL: dict[str, Any] = {
    "family": "classifier", "size": "custom", "image_size": 32, "patch_size": 8, "width": 32, "depth": 1, "heads": 2,
    "classes": CLASSES, "positions": "sincos",
}  # fmt: skip


def folders(root: Path, name: str, seed: int, count: int) -> Path:
    for sample in shape_samples(seed, count, 32, labels=True):
        assert sample.labels is not None
        group = root / name / f"{sample.labels['colour']:02d}"
        group.mkdir(parents=True, exist_ok=True)
        (group / f"{sample.key}.jpg").write_bytes(sample.jpg)
    index = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index", str(root / name), "--contents"]
    forking.run(index, check=True, env=environment(), capture_output=True)
    return root / name


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launch, Path]:
    root = tmp_path_factory.mktemp("head")
    private, held = folders(root, "private", 5, RECORDS), folders(root, "held", 9, 160)
    (root / "classes.txt").write_text("\n".join(f"{number:02d}" for number in range(CLASSES)) + "\n")
    data = {"source": "shards", "path": str(private), "label": "cls", "classes": str(root / "classes.txt")}
    phase = {
        "name": "head", "data": data, "objective": "head", "privacy": {"epsilon": EPSILON, "delta": 1e-4},
        "evaluation": {"path": str(held), "public": True, "records": 160},
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 16, "model": MODEL, "phases": [phase], "run": {"keep_key": False},
    }  # fmt: skip
    return Launch.written(config, root, "head")


@pytest.fixture(scope="module")
def finished(job: tuple[Launch, Path]) -> Path:
    launch, run_dir = job
    code, output = launch.run()
    assert code == 0, output
    assert "300 to be computed" in output and "self-test passed" in output and "verified" in output
    return run_dir


def top_1(run_dir: Path) -> float:
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    return [line["top_1"] for line in lines if "top_1" in line][-1]


def test_one_step_over_all_records_at_the_epsilon_of_one_gaussian(finished: Path) -> None:
    (commit,) = [line["facts"] for line in ledger_lines(finished) if line["kind"] == "commit"]
    assert commit["sampling"]["rule"]["threshold"] == 2**32, "every record, for sure"
    assert commit["noise"]["elements"] == 32 * 32 + CLASSES * 32, "both sums and nothing else"
    claim = verify(finished).epsilon
    (plan,) = [line["plan"] for line in ledger_lines(finished) if line["kind"] == "plan"]
    exact = gaussian_epsilon(plan["noise_multiplier"], 1e-4)
    assert exact <= claim <= EPSILON and claim == pytest.approx(exact, abs=1e-3) and claim > EPSILON - 0.01
    weights = sum(each.numel() for each in build(ModelSettings.model_validate(MODEL), "classify").state_dict().values())
    said = json.loads((finished / "certificate.json").read_text())["model"]
    assert said.endswith(f" {weights:,} parameters"), "the sums are none"


def test_the_sums_are_those_of_the_records_with_the_planned_noise(finished: Path) -> None:
    state, head, features, labels = summed(finished)
    head(features, labels).sum().backward()
    (plan,) = [line["plan"] for line in ledger_lines(finished) if line["kind"] == "plan"]
    require_planned_noise(state, head, RECORDS, plan["noise_multiplier"])


def summed(run_dir: Path) -> tuple[dict[str, Tensor], StatisticsHead, Tensor, Tensor]:
    """What a run ended with; a head to add up anew, and what it was given: features and labels."""
    state = final_weights(run_dir)
    model = build(ModelSettings(**MODEL), "classify")
    assert isinstance(model, Classifier)
    select(model, "statistics")
    head = model.head
    assert isinstance(head, StatisticsHead)
    (kept,) = (path.parent for path in (run_dir / "secret").glob("features/*/state.u8")
               if path.stat().st_size == RECORDS)  # fmt: skip
    features = torch.from_numpy(np.fromfile(kept / "features.f32", np.float32).reshape(RECORDS, 32).copy())
    labels = torch.from_numpy(np.fromfile(kept / "labels.i64", np.int64).copy())
    head.solving.copy_(state["head.solving"])
    return state, head, features, labels


def require_planned_noise(state: dict[str, Tensor], head: StatisticsHead, divisor: int, sigma: float) -> None:
    for name, sums in (("head.gram", head.gram.grad), ("head.cross", head.cross.grad)):
        assert sums is not None
        noise = -state[name] * divisor - sums
        spread = float(noise.std()) / sigma
        # The standard error of a deviation of n numbers is 1/√(2n); a third of the noise is far outside.
        assert abs(spread - 1) < 5 / (2 * noise.numel()) ** 0.5 + 0.01, name
        assert abs(float(noise.mean())) < 5 * sigma / noise.numel() ** 0.5, name


def test_a_patient_adds_the_mean_of_its_records_and_counts_once(job: tuple[Launch, Path], tmp_path: Path) -> None:
    """Of 100 patients with one record or eleven, by two processes: the sums are those of patients, the noise is there,
    and ε is that of one Gaussian over patients."""
    config = json.loads(job[0].config.read_text())
    data, unit = config["phases"][0]["data"], r"key:.*/0*(\d{1,2})"
    index = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index", data["path"], "--unit", unit]
    forking.run([*index, "--out", str(tmp_path / "index")], check=True, env=environment(), capture_output=True)
    data |= {"path": str(tmp_path / "index"), "unit": unit, "rows_per_unit": 11}
    launch, run_dir = Launch.written(config, tmp_path, "patients")
    code, output = launch.run()
    assert code == 0 and "300 to be computed" in output and "self-test passed" in output, output
    units = open_units(open_index(tmp_path / "index"), unit)
    (plan,) = [line["plan"] for line in ledger_lines(run_dir) if line["kind"] == "plan"]
    assert plan["records"] == units.count == 100 and plan["units"]["rows"] == 11
    claim, sigma = verify(run_dir).epsilon, plan["noise_multiplier"]
    assert gaussian_epsilon(sigma, 1e-4) <= claim <= EPSILON
    state, head, features, labels = summed(run_dir)
    records = [units.chosen(patient, bytes(32), 1, RECORDS) for patient in range(units.count)]
    assert {len(each) for each in records} == {1, 11} and sum(map(len, records)) == RECORDS
    for each in records:
        head(features[each], labels[each]).mean().backward()
    require_planned_noise(state, head, units.count, sigma)


def test_it_has_learned_and_its_export_is_an_ordinary_classifier(finished: Path, tmp_path: Path) -> None:
    assert top_1(finished) > 3 / CLASSES, "colours are told apart by their features, three times as often as by chance"
    export = [sys.executable, str(ROOT / "launch" / "export.py"), str(finished), str(tmp_path / "out")]
    done = forking.run([*export, "--form", "timm"], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    plain = build(ModelSettings(**MODEL), "classify")
    plain.load_state_dict(merged(final_weights(finished)))
    assert isinstance(plain, Classifier) and plain.head.weight.any()


def test_without_privacy_it_is_told_so_and_learns_as_much(job: tuple[Launch, Path], finished: Path) -> None:
    launch, run_dir = job
    twin = run_dir.parent / "twin"
    plain = Launch(
        launch.config, launch.cwd, launcher="python",
        arguments=["--set", "phases.0.privacy=null", "--set", f'run.dir="{twin}"', "--set", 'run.engine="local"'],
    )  # fmt: skip
    code, output = plain.run()
    assert code == 0, output
    # The noise is another in every run, and moves this share by about 0.024; now and then it helps.
    assert "NOT PRIVATE" in output and top_1(twin) > top_1(finished) - 0.15


@pytest.fixture(scope="module")
def whitened(job: tuple[Launch, Path]) -> tuple[Launch, Path, dict[str, Any]]:
    """The sums, then a head by descent on the features that they whiten."""
    config = json.loads(job[0].config.read_text())
    phase = config["phases"][0] | {
        "name": "whitened", "objective": "classify", "trainable": "whitened", "features": {}, "steps": 6,
        "privacy": {"epsilon": EPSILON, "delta": 1e-4, "expected_batch": "all", "clip": {"norm": 1.0}},
        "optimizer": {"type": "SGD", "params": {"momentum": 0.5}}, "schedule": {"peak": 1.0, "shape": "constant"},
    }  # fmt: skip
    config["phases"][0]["features"] = {"folder": str(job[0].cwd / "features")}
    config["phases"].append(phase)
    config["run"] |= {"checkpoint_every": 2, "debug_seed": 5}
    return *Launch.written(config, job[0].cwd, "whitened"), config


def test_a_head_on_whitened_features_learns_and_is_exported_as_an_ordinary_one(
    whitened: tuple[Launch, Path, dict[str, Any]], tmp_path: Path
) -> None:
    launch, run_dir, config = whitened
    code, output = launch.run()
    assert code == 0 and output.count("self-test passed") == 2, output
    assert output.count(f"in {launch.cwd}/features/") == 4 and output.count("; 0 to be computed") == 2, output
    assert top_1(run_dir) > 3 / CLASSES
    first, second = [line["plan"] for line in ledger_lines(run_dir) if line["kind"] == "plan"]
    both = gaussian_epsilon((first["noise_multiplier"] ** -2 + 6 * second["noise_multiplier"] ** -2) ** -0.5, 1e-4)
    assert both <= verify(run_dir).epsilon == pytest.approx(both, abs=0.02), (
        "the sums and the steps on one set of records"
    )
    state = final_weights(run_dir)
    assert (torch.linalg.eigvalsh(state["head.whitening"]) < 0.9).any() and state["head.weight"].any()

    out = tmp_path / "out"
    export = [sys.executable, str(ROOT / "launch" / "export.py"), str(run_dir), str(out), "--form", "timm"]
    done = forking.run(export, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    head = load_file(out / "model.safetensors")
    features = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    as_trained = features @ state["head.whitening"] @ state["head.weight"].T + state["head.bias"]
    torch.testing.assert_close(features @ head["head.weight"].T + head["head.bias"], as_trained, rtol=1e-4, atol=1e-4)

    killed, killed_dir = Launch.written(config, tmp_path, "killed")
    for kind, at in (("rename", 5), ("fsync", 9)):
        ended = killed.end(kill={"rank": 0, "kind": kind, "at": at, "before": True})
        assert ended.codes[0] == -9, (kind, ended.codes, ended.output)
    ended = killed.end()
    assert set(ended.codes) == {0}, ended.output
    assert different(final_weights(killed_dir), state) == []


@pytest.mark.slow
def test_killed_again_and_again_it_is_the_head_of_an_undisturbed_pass(job: tuple[Launch, Path], tmp_path: Path) -> None:
    config = json.loads(job[0].config.read_text())
    config["run"]["debug_seed"] = 5
    whole, whole_dir = Launch.written(config, tmp_path, "whole")
    ended = whole.end()
    assert set(ended.codes) == {0}, ended.output
    killed, killed_dir = Launch.written(config, tmp_path, "killed")
    for kind, at in (("pread", 9), ("write", 2), ("fsync", 4), ("rename", 1), ("fsync", 6)):
        ended = killed.end(kill={"rank": 0, "kind": kind, "at": at, "before": at % 2 == 0})
        assert ended.codes[0] == -9 and set(ended.codes) <= {-9, 75}, (kind, ended.codes, ended.output)
    ended = killed.end()
    assert set(ended.codes) == {0}, ended.output
    assert steps_of(killed_dir) == steps_of(whole_dir)
    assert len(History.read(killed_dir / "ledger.jsonl")[0].segments) == 1
    assert verify(killed_dir).epsilon == verify(whole_dir).epsilon
    assert different(final_weights(killed_dir), final_weights(whole_dir)) == []
    assert not [path for path in killed_dir.rglob("*") if path.name.startswith(".") or path.name.endswith(".tmp")]
