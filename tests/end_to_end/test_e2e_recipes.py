"""Shipped recipes, each from its own file with `--set` alone, at 32 px with two processes."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.accounting.ledger.history import History
from murmuration.data.synthetic.index import shape_samples
from murmuration.train.storage.checkpoint import Checkpoints
from tests.end_to_end.toy_recipes import PRIVATE_STEPS, TINY, TINY_MAE, TINY_TEXT
from tests.support import forking
from tests.support.hostile_files import blank_a_picture
from tests.support.launching import (
    ROOT,
    TIMEOUT,
    Launch,
    environment,
    ledger_lines,
    opened_steps,
    run_worker,
    wait_for,
)
from tests.support.shipped_recipes import FILES
from tests.support.texts import write_texts

CONFIGS = ROOT / "ds_configs"


def synthetic_stage(steps: int = 6) -> dict[str, Any]:
    return {
        "phases.0.data.records": 200, "phases.0.data.size": 32, "phases.0.epochs": None, "phases.0.steps": steps,
        "phases.0.schedule.warmup_epochs": None, "phases.0.batch": 32,
    }  # fmt: skip


def private_records(data: Path, phase: int, records: int = 600, batch: int = 60, steps: int = 6) -> dict[str, Any]:
    at = f"phases.{phase}"
    return {
        f"{at}.data.path": str(data / "private"), f"{at}.data.expected_records": records,
        f"{at}.privacy.expected_batch": batch, f"{at}.steps": steps, f"{at}.schedule.warmup": 2,
        f"{at}.evaluation": {"path": str(data / "held_out"), "public": True, "records": 32},
    }  # fmt: skip


def prepared(*arguments: object) -> None:
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), *map(str, arguments)]
    forking.run(command, check=True, env=environment())


def by_colour(folder: Path, seed: int, count: int) -> set[str]:
    """Single images in folders by colour, whose names it gives, indexed by contents: a step is made again only on
    records that are known to be the same."""
    names: set[str] = set()
    for sample in shape_samples(seed, count, 32, labels=True):
        assert sample.labels is not None
        group = folder / f"{sample.labels['colour']:02d}"
        group.mkdir(parents=True, exist_ok=True)
        (group / f"{sample.key}.jpg").write_bytes(sample.jpg)
        names.add(group.name)
    prepared("index", folder, "--contents")
    return names


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's shards at toy size, and pictures with classes."""
    folder = tmp_path_factory.mktemp("recipes")
    prepared("demo", "--out", folder, "--private", 600, "--held-out", 64, "--textures", 40, "--workers", 1)
    names = by_colour(folder / "protected", 5, 300) | by_colour(folder / "held_classes", 9, 64)
    (folder / "classes.txt").write_text("\n".join(sorted(names)) + "\n")
    (folder / "excluded.txt").write_text(min(names) + "\n")
    return folder


@pytest.fixture(scope="module")
def more_data(data: Path) -> None:
    """And what only slow tests read."""
    by_colour(data / "open", 6, 300)
    by_colour(data / "divided", 7, 300)
    write_texts(data / "texts", [str(sample.caption) for sample in shape_samples(8, 600, 32)])


def launch(recipe: str, run_dir: Path, changes: dict[str, Any]) -> Launch:
    found = [f"{key}={json.dumps(value)}" for key, value in {"run.dir": str(run_dir), **changes}.items()]
    arguments = [part for each in found for part in ("--set", each)]
    return Launch(CONFIGS / recipe, run_dir.parent, arguments=arguments)


def curve(run_dir: Path, phase: str, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line[name] for line in lines if line["phase"] == phase and name in line}
    return [by_step[step] for step in sorted(by_step)]


def claim_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "certificate.json").read_text())["claim"]


@pytest.fixture(scope="module")
def vip(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("vip") / "run"
    changes = TINY | TINY_MAE | synthetic_stage(steps=40) | private_records(data, 1, batch=200)
    changes["train_micro_batch_size_per_gpu"] = 64  # of such pictures, 64 take as long as 16
    code, output = launch("vip/vip_nano.json", run_dir, changes).run()
    assert code == 0, output
    return run_dir, output


def test_vip_warms_up_on_textures_then_trains_within_its_budget(vip: tuple[Path, str]) -> None:
    run_dir, output = vip
    losses, public = curve(run_dir, "synthetic", "loss"), curve(run_dir, "private", "public_loss")
    # A batch is of 32 pictures: its loss is off by a tenth, that of ten batches by .03; what is learned is .15.
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) and public[-1] < public[0]
    claim = claim_of(run_dir)
    assert claim["private"] and 7.9 < claim["epsilon"] <= 8.0, "calibrated to its budget, and spent"
    assert len(opened_steps(run_dir)) == 6 and "verified" in output
    page = (run_dir / "report.html").read_text()
    assert "Hidden patches filled in on public held-out images" in page and page.count("data:image/png") == 12


def test_a_head_is_trained_by_one_step_over_all_records_on_features_computed_once(
    vip: tuple[Path, str], data: Path, tmp_path: Path
) -> None:
    changes = TINY | {
        "model.positions": "sincos", "model.classes": 8, "phases.0.data.path": str(vip[0]), "run.checkpoint_every": 1,
        "phases.1.data.path": str(data / "protected"), "phases.1.data.expected_records": 300,
        "phases.1.privacy.expected_batch": 300, "phases.1.schedule.peak": 0.05,
        "phases.1.evaluation": {"path": str(data / "held_classes"), "public": True, "records": 64},
        "phases.1.data.classes": str(data / "classes.txt"),
    }  # fmt: skip
    run_dir = tmp_path / "one"
    job = launch("transfer/transfer_vith_onestep.json", run_dir, changes)
    code, output = job.run()
    assert code == 0, output
    assert "18 taken" in output and "300 to be computed" in output and "private, like the records" in output
    losses = curve(run_dir, "private", "public_loss")
    assert losses[-1] < losses[0], losses
    earlier = History.read(vip[0] / "ledger.jsonl")[0].without_noise()
    assert earlier and earlier <= History.read(run_dir / "ledger.jsonl")[0].without_noise(), "who begins here must know"
    claim = claim_of(run_dir)
    assert claim["private"] and 3.9 < claim["epsilon"] <= 4.0
    (commit,) = [line["facts"] for line in ledger_lines(run_dir) if line["kind"] == "commit"]
    assert commit["sampling"]["rule"]["threshold"] == 2**32 and commit["noise"]["elements"] == 8 * 32 + 8
    kept = list((run_dir / "secret" / "features").glob("*/*"))
    assert len(kept) == 2 * 5 and {path.stat().st_mode & 0o777 for path in kept} == {0o600}, "and of the held-out ones"


def test_features_that_are_lost_are_not_made_of_other_records(vip: tuple[Path, str], tmp_path: Path) -> None:
    """Killed before a checkpoint was durable, so its steps are made again under the same keys: of other features they
    would lay the difference bare."""
    prepared("demo", "--out", tmp_path, "--private", 16, "--held-out", 300, "--textures", 16, "--workers", 1)
    records = tmp_path / "held_out"  # which has labels
    changes = TINY | {
        "model.positions": "sincos", "model.classes": 8, "phases.0.data.path": str(vip[0]), "run.engine": "local",
        "run.checkpoint_every": 10_000, "phases.1.steps": 10_000, "phases.1.data.path": str(records),
        "phases.1.data.expected_records": 300, "phases.1.data.label": "colour", "phases.1.data.classes": None,
        "phases.1.privacy.expected_batch": 300, "phases.1.evaluation": None,
    }  # fmt: skip
    run_dir = tmp_path / "lost"
    job = launch("transfer/transfer_vith_onestep.json", run_dir, changes)
    job.launcher = "python"
    job.killed(run_dir, 2)
    opened = opened_steps(run_dir)
    shutil.rmtree(run_dir / "secret" / "features")
    shard = sorted(records.rglob("*.tar"))[-1]
    blank_a_picture(shard)
    code, output = job.run()
    assert code == 2 and f"/{shard.name}: changed since it was indexed" in output, output
    assert opened_steps(run_dir) == opened, "no step was made with the other record"
    assert not (run_dir / "secret" / "features").exists(), "nor features of it"


@pytest.mark.slow
def test_dpcap_is_stopped_resumed_and_shows_captions(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "cap"
    changes = TINY | TINY_MAE | TINY_TEXT | synthetic_stage() | private_records(data, 1, steps=12)
    changes |= {"phases.1.data.tokenizer": str(data / "tokenizer.json"), "phases.1.schedule.end": None}
    changes["phases.1.schedule.peak"] = 5e-3
    job = launch("dpcap/dpcap_nano.json", run_dir, changes)
    job.stopped(run_dir, 4)
    code, output = job.run()
    assert code == 0, output
    assert opened_steps(run_dir) == list(range(1, 13))
    claim = claim_of(run_dir)
    assert claim["private"] and 7.9 < claim["epsilon"] <= 8.0
    public = curve(run_dir, "private", "public_loss")
    assert public[-1] < public[0]
    assert "Captions on public held-out images" in (run_dir / "report.html").read_text()


def classes(data: Path, **more: Any) -> dict[str, Any]:
    return TINY | {"model.classes": 8, "model.positions": "sincos"} | more


def continual(data: Path) -> dict[str, Any]:
    held = {"path": str(data / "held_classes"), "public": True, "records": 64}
    return classes(data) | {
        "phases.0.data.path": str(data / "open"), "phases.0.data.expected_records": 300, "phases.0.batch": 30,
        "phases.0.epochs": None, "phases.0.steps": 90, "phases.0.schedule.warmup_epochs": None,
        "phases.0.evaluation": held, "phases.0.plateau": {"patience": 2, "min_delta": 0.3, "not_before": 6},
        "phases.0.data.classes": str(data / "classes.txt"), "phases.1.data.classes": str(data / "classes.txt"),
        "phases.1.data.path": str(data / "protected"), "phases.1.data.expected_records": 300,
        "phases.1.privacy.expected_batch": 60, "phases.1.epochs": None, "phases.1.steps": 6,
        "phases.1.schedule.warmup": 0, "phases.1.schedule.peak": 1e-3, "phases.1.evaluation": held,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("more_data")
def test_public_training_ends_at_its_plateau_and_hands_over_the_second_moment(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "bu"
    job = launch("continual/continual_base.json", run_dir, continual(data))
    process = job.held(run_dir, 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)
    code, output = job.run()
    assert code == 0, output
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    ended = max(line["step"] for line in lines if line["phase"] == "public")
    assert 6 <= ended < 90, "a plateau, and not the last step"
    last = Checkpoints.newest(run_dir / "checkpoints")
    assert last is not None and last.manifest["optimizer_step"] == ended + 6, "handed over, and gone on with"
    assert opened_steps(run_dir) == list(range(1, 7))
    claim = claim_of(run_dir)
    assert claim["private"] and 7.9 < claim["epsilon"] <= 8.0, "only the private phase is charged"


@pytest.mark.slow
@pytest.mark.usefixtures("more_data")
def test_one_set_is_cut_into_a_public_and_a_private_part(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "cut"
    # A set of its own: where other runs protect the whole of a set, no part of it can be made public any more.
    parts = dict.fromkeys(("phases.0.data.path", "phases.1.data.path"), str(data / "divided"))
    changes = continual(data) | parts | {"phases.0.steps": 6}
    code, output = launch("continual/continual_fraction.json", run_dir, changes).run()
    assert code == 0, output
    (plan,) = [line["plan"] for line in ledger_lines(run_dir) if line["kind"] == "plan"]
    assert plan["records"] == 270, "a tenth of 300 is public"
    assert claim_of(run_dir)["private"]


@pytest.mark.slow
@pytest.mark.usefixtures("more_data")
def test_public_gradients_are_mixed_in_and_every_step_is_charged(data: Path, tmp_path: Path) -> None:
    held = {"path": str(data / "held_classes"), "public": True, "records": 64}
    changes = classes(data) | {
        "phases.0.data.path": str(data / "protected"), "phases.0.data.expected_records": 300, "phases.0.epochs": None,
        "phases.0.steps": 6, "phases.0.privacy.expected_batch": 60, "phases.0.mixing.data.path": str(data / "open"),
        "phases.0.data.classes": str(data / "classes.txt"), "phases.0.mixing.data.classes": str(data / "classes.txt"),
        "phases.0.mixing.data.expected_records": 300, "phases.0.mixing.batch": 32, "phases.0.evaluation": held,
        "phases.0.schedule.warmup": 0, "phases.0.schedule.peak": 1e-3,
    }  # fmt: skip
    code, output = launch("continual/mixed_base.json", tmp_path / "mix", changes).run()
    assert code == 0, output
    losses = curve(tmp_path / "mix", "private", "public_loss")
    assert losses[-1] < losses[0] and len(opened_steps(tmp_path / "mix")) == 6
    assert 7.9 < claim_of(tmp_path / "mix")["epsilon"] <= 8.0
    code, output = launch("continual/mixed_base.json", tmp_path / "twin", changes | {"phases.0.privacy": None}).run()
    assert code == 0, output
    assert not claim_of(tmp_path / "twin")["private"] and "NOT PRIVATE" in output


@pytest.mark.slow
def test_a_phase_is_ended_by_hand_and_claims_what_was_planned(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "hand"
    changes = TINY | TINY_MAE | private_records(data, 0, steps=400)
    job = launch("vip/vip_init_random.json", run_dir, changes)
    process = job.start()
    wait_for(lambda: len(opened_steps(run_dir)) >= 3, process)
    (run_dir / "end_phase").write_text("private\n")
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    assert "end_phase names it" in output and len(opened_steps(run_dir)) < 400
    claim = claim_of(run_dir)
    assert claim["private"] and claim["epsilon"] < 7 and claim["epsilon_claimed"] == 8.0


@pytest.mark.slow
@pytest.mark.by_hand  # runs every recipe, and most of them twice
@pytest.mark.usefixtures("more_data")
def test_every_shipped_recipe_learns_stops_and_goes_on_within_its_budget(data: Path, tmp_path: Path) -> None:
    """Pre-training comes first: transfers start from its weights, as in the paper."""
    names = sorted(FILES, key=lambda name: (not name.startswith("pretrain"), name))
    begun = run_worker("recipes_worker.py", "begin", str(data), str(tmp_path), *names, seconds=20 * TIMEOUT)
    # Fine-tuning goes on first: once the runs that it starts from are finished, their weights are others.
    stopped = sorted((name for name in names if begun[name] == 75), key=lambda name: "finetune" not in name)
    resumed = run_worker("recipes_worker.py", "resume", str(data), str(tmp_path), *stopped, seconds=20 * TIMEOUT)
    for name in names:
        *_, last = json.loads(FILES[name].read_text())["phases"]
        run_dir, private, once = tmp_path / name, "privacy" in last, last.get("steps") == 1
        if private and not once:
            assert (begun[name], resumed[name]) == (75, 0), name
            assert opened_steps(run_dir) == list(range(1, PRIVATE_STEPS + 1)), name
        else:
            assert begun[name] == 0, name
        losses = curve(run_dir, last["name"], "public_loss" if private else "loss")
        assert losses[-1] < losses[0] and len(losses) > (1 if once else 3), (name, losses)
        claim = claim_of(run_dir)
        assert claim["private"] is private, name
        if private:
            budget = last["privacy"]["epsilon"]
            assert 0.98 * budget < claim["epsilon"] <= budget, (name, claim)
