"""A study: arms, values and seeds, trained, evaluated and drawn by one command that can be killed; and refusals."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.certificate.verify import verify
from murmuration.data.index.folders import build_folder
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.study import plan_runs
from murmuration.evaluation.study.outcome import cost_of
from murmuration.evaluation.study.plan_runs import require_budgets, require_sound
from murmuration.evaluation.study.study_file import load_study, runs_of
from murmuration.evaluation.study.train_runs import Folder
from murmuration.launch.study import main
from murmuration.train.config.load import load
from murmuration.train.storage.run_dir import RunDir
from murmuration.train.storage.sibling_runs import DataBudgetError, RunLog
from tests.support import forking
from tests.support.evaluation_world import class_folders, class_list
from tests.support.launching import ROOT, TIMEOUT, wait_for
from tests.support.shipped_recipes import STUDIES

TRANSFERS = ROOT / "ds_configs" / "transfer"
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "model": {"family": "classifier", "image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2,
              "classes": 5},
    "phases": [
        {
            "name": "private", "objective": "classify",
            "data": {"path": "private", "label": "cls", "classes": "classes.txt"},
            "privacy": {"epsilon": 4.0, "delta": 1e-3, "expected_batch": 20, "clip": {"norm": 1.0}},
            "schedule": {"peak": 1e-2, "shape": "constant"}, "steps": 3,
            "evaluation": {"path": "public", "public": True},
        }
    ],
    "run": {"engine": "local", "log_every": 1},
}  # fmt: skip
STUDY: dict[str, Any] = {
    "title": "Toy <study>",
    "config": "config.json",
    "set": {"run.debug_seed": 7, "phases.0.data.reading": {"workers": 0}},
    "axis": {"key": "phases.0.privacy.epsilon", "label": "ε", "values": [2, 8], "scale": "log"},
    "arms": [
        {"name": "all"},
        {"name": "lost", "set": {"phases.0.evaluation.path": "nowhere"}, "values": [8]},
    ],
    "measures": [
        {"label": "top-1", "metric": "top_1"},
        {"label": "classify", "number": "top-1",
         "evaluate": ["classify", "--data", "public", "--public", "--workers", "0"]},
    ],
    "seeds": 2,
    "sizes": {"one": {"seeds": 1, "set": {"phases.0.steps": 2}}},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("study")
    for name, each, seed in (("private", 20, 0), ("public", 4, 100)):
        build_folder(class_folders(folder / name, each, seed=seed))
    class_list(folder)
    (folder / "config.json").write_text(json.dumps(BASE))
    (folder / "study.json").write_text(json.dumps(STUDY))
    yield folder
    forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue] # whose seconds count once it has ended


def asked(folder: Path, out: str, *more: str) -> list[str]:
    """At one value of the axis; that there may be several is seen where a study is priced."""
    options = ["--jobs", "2", "--set", "axis.values=[8]", *more]
    return [str(folder / "study.json"), "--out", str(folder / out), *options]


def ran(*arguments: str) -> tuple[int, str, str]:
    """The command's exit code and what it prints, in this process: what it forks its runs from is imported once."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        return main(list(arguments)), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    code, out, err = ran(*asked(folder, "whole"))
    assert code == 2 and "lost-8-1 failed: error" in err and "4 of 4" in out
    return json.loads((folder / "whole" / "study.json").read_text())


def test_a_study_goes_on_past_a_lost_arm(folder: Path, found: dict[str, Any]) -> None:
    rows = {(row["arm"], row["place"]): row for row in found["rows"]}
    assert set(rows) == {("all", 8), ("lost", 8)}
    assert [each["run"] for each in found["failed"]] == ["lost-8-1", "lost-8-2"] and rows["lost", 8]["runs"] == 0
    for (arm, place), row in rows.items():
        for label in ("top-1", "classify") if arm != "lost" else ():
            summary = row["measures"][label]
            assert row["runs"] == summary["n"] == 2 and 0 <= summary["low"] <= summary["value"] <= summary["high"] <= 1
            assert summary["value"] == pytest.approx(sum(summary["values"]) / 2)
        if arm != "lost":
            assert verify(folder / "whole" / "runs" / f"{arm}-{place}-1").committed == 3
    assert found["cost"] == cost_of([folder / "whole" / "runs" / f"all-8-{seed}" for seed in (1, 2)])
    page = (folder / "whole" / "study.html").read_text()
    assert "Toy &lt;study&gt;" in page and "lost-8-2 failed" in page and "standard deviation over runs" in page
    assert (folder / "whole" / "study.png").read_bytes().startswith(b"\x89PNG")


def test_published_weights_are_evaluated_beside_the_runs(
    folder: Path, found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are trained by nobody here: a run of the other study stands in for them."""
    classify = STUDY["measures"][1]
    weights = {"weights": "whole/runs/all-8-1"}
    half = {**classify, "evaluate": [*classify["evaluate"], "--records", "3"]}
    arms = [{"name": "published", **weights}, {"name": "its own way", **weights, "measures": [half]}]
    study = {name: STUDY[name] for name in ("title", "config", "measures")} | {"arms": arms, "seeds": 2, "panels": 2}
    (folder / "published.json").write_text(json.dumps(study))
    call = [str(folder / "published.json"), "--out", str(folder / "published")]
    code, *said = ran(*call, "--jobs", "1")
    assert code == 0, said
    told = json.loads((folder / "published" / "study.json").read_text())
    first, own = [row["measures"] for row in told["rows"]]
    assert first["top-1"] is own["top-1"] is None and told["cost"] is None, "of a training that is not here"
    (trained,) = [row["measures"]["classify"]["values"][0] for row in found["rows"] if row["arm"] == "all"]
    assert first["classify"]["values"] == [trained] and own["classify"]["n"] == 1
    wide, narrow = [
        int.from_bytes((folder / each / "study.png").read_bytes()[16:20]) for each in ("published", "whole")
    ]
    assert wide == 2 * narrow, "two panels"
    assert sorted(scored(folder / "published")) == [("its_own_way", 3), ("published", 20)]
    changed = study | {"arms": arms[:1], "measures": [STUDY["measures"][0], half]}
    (folder / "published.json").write_text(json.dumps(changed))
    code, *said = ran(*call, "--jobs", "1")
    assert code == 0, said
    assert ("published", 3) in scored(folder / "published"), "a changed measure is another evaluation, beside the first"
    assert main([*call, "--dry-run"]) == 0 and "evaluated: " in capsys.readouterr().out
    assert main([*call, "--set", 'arms=[{"name": "published", "weights": "elsewhere"}]']) == 2
    assert "published-1 was evaluated with other settings" in capsys.readouterr().err


def scored(folder: Path) -> list[tuple[str, int]]:
    """Of each evaluation: the arm, and how many records it took."""
    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("evaluations/*/result.json")}
    return [(name.rpartition("-1.")[0], each["numbers"]["top-1"]["n"]) for name, each in results.items()]


def test_a_run_whose_budget_was_spent_before_its_last_step_is_not_taken_as_trained(
    folder: Path, found: dict[str, Any]
) -> None:
    study = load_study(folder / "study.json", ["axis.values=[8]"])
    run = next(each for each in runs_of(study, folder / "whole") if each.arm == "all")
    kept = Folder(folder / "whole")
    assert found["rows"] and kept.trained(run)
    state = RunDir(kept.of(run))
    before = state.state_file.read_bytes()
    state.write_state(status="budget spent")
    try:
        assert not kept.trained(run)
    finally:
        state.state_file.write_bytes(before)


def test_a_second_study_in_the_same_folder_is_refused_until_the_first_is_dead(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "shared"
    holder = (
        "import sys, time; from pathlib import Path; from murmuration.evaluation.study.train_runs import Folder\n"
        "with Folder(Path(sys.argv[1])).held(): print('held', flush=True); time.sleep(60)"
    )
    with forking.start([sys.executable, "-c", holder, str(out)], stdout=subprocess.PIPE, text=True, cwd=ROOT) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        assert main([str(folder / "study.json"), "--out", str(out)]) == 2
        assert f"another study is writing to {out}; let it end, or name another --out" in capsys.readouterr().err
        assert not (out / "runs").exists()
        first.kill()
    with Folder(out).held():
        pass


@pytest.mark.slow
def test_a_study_is_the_same_after_kills(folder: Path, found: dict[str, Any]) -> None:
    command = [sys.executable, str(ROOT / "launch" / "study.py"), *asked(folder, "stopped")]
    for number, signals in enumerate(([signal.SIGTERM], [signal.SIGKILL], [])):
        process = forking.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for each in signals:
            wait_for(lambda n=number: len(list((folder / "stopped" / "runs").glob("*/certificate.json"))) > n, process)
            os.kill(process.pid, each)
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == {0: 75, 1: -9, 2: 2}[number], output
    assert json.loads((folder / "stopped" / "study.json").read_text())["rows"] == found["rows"]
    code, _, err = ran(*asked(folder, "stopped", "--set", "phases.0.steps=4"))
    assert code == 2 and "was trained with other settings; name another --out" in err


REFUSED: list[tuple[list[str], str]] = [
    (["size=small"], "has no size 'small'; it has one"),
    (["seeds=0"], "seeds = 0 is not usable: input should be greater than or equal to 1"),
    (["phases.0.epoch=1"], "all-2-1: unknown key"),
    (["axis=null"], "an arm has values, and there is no axis"),
    (['arms=[{"name": "a"}, {"name": "a"}]'], "two arms have the same name; rename one"),
    (['measures=[{"label": "top-1"}]'], "give `metric`, or `evaluate` with `number`"),
    (['arms=[{"name": "a", "at": {"9": {}}}]'], "arm 'a' has `at` for '9', which is no value of its axis"),
    (["axis=null", 'arms=[{"name": "a", "weights": "w", "set": {"x": 1}}]'], "has weights, which nothing trains"),
    (["axis=null", 'arms=[{"name": "a", "weights": "w"}]', 'measures=[{"label": "b", "metric": "c"}]'],
     "has weights, and no measure evaluates them"),
    (['arms=[{"name": "a", "measures": [{"label": "b", "metric": "c"}]}]'], "measures 'b', which the study does not"),
    (["config=gone.json"], "there is no config file"),
    (["axis.values=[-1]"], "phases.0.privacy.epsilon = -1 is not usable"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_bad_input_is_one_sentence_before_anything_is_trained(
    folder: Path, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [part for each in overrides for part in ("--set", each)]
    assert main([str(folder / "study.json"), "--out", str(folder / "refused"), *given]) == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1 and not (folder / "refused").exists()


def test_a_size_changes_what_it_names_and_a_dry_run_says_what_would_be_spent(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder / "study.json"), "--dry-run", "--set", "size=one"]) == 0
    told = capsys.readouterr().out
    assert "Toy <study>: 3 runs (1 of each)" in told and "at most ε = 18, at the sum of their δ" in told
    runs = runs_of(load_study(folder / "study.json", ["size=one"]), folder / "out")
    assert [run.name for run in runs] == ["all-2-1", "lost-8-1", "all-8-1"]
    assert {config.phases[0].steps for config in require_sound(runs)} == {2}
    with pytest.raises(EvaluationError, match="cannot be read as a study"):
        load_study(folder / "nothing.json", [])


def test_an_arm_may_change_keys_at_one_value_of_the_axis(folder: Path) -> None:
    given = 'arms=[{"name": "a", "at": {"8": {"phases.0.steps": 5, "phases.0.privacy.epsilon": 7}}}, {"name": "b"}]'
    runs = runs_of(load_study(folder / "study.json", [given, "seeds=1"]), folder / "out")
    steps = {run.name: config.phases[0].steps for run, config in zip(runs, require_sound(runs), strict=True)}
    assert steps == {"a-2-1": 3, "a-8-1": 5, "b-2-1": 3, "b-8-1": 3}
    privacy = [config.phases[0].privacy for config in require_sound(runs)]
    budgets = {run.name: each and each.epsilon for run, each in zip(runs, privacy, strict=True)}
    assert budgets == {"a-2-1": 2, "a-8-1": 7, "b-2-1": 2, "b-8-1": 8}, "the axis's own key as well"


def test_paths_within_a_section_that_an_arm_changes_are_relative_to_the_study(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    arm = {"name": "a", "set": {"phases.0.data": BASE["phases"][0]["data"]}}
    (tmp_path / "study.json").write_text(json.dumps({**STUDY, "arms": [arm], "seeds": 1, "axis": None}))
    (config,) = require_sound(runs_of(load_study(tmp_path / "study.json", []), tmp_path / "out"))
    assert config.phases[0].model_dump()["data"]["path"] == str(tmp_path / "private")


def test_a_study_that_would_exceed_the_budget_of_its_records_is_refused_before_its_first_run(tmp_path: Path) -> None:
    build_folder(class_folders(tmp_path / "private", 20))
    build_folder(class_folders(tmp_path / "public", 4, seed=100))
    class_list(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "study.json").write_text(json.dumps({**STUDY, "arms": STUDY["arms"][:1], "seeds": 1}))
    configs = require_sound(runs_of(load_study(tmp_path / "study.json", []), tmp_path / "out"))
    from murmuration.data.index.folders import FolderIndex

    log = RunLog.of(FolderIndex.open(tmp_path / "private.index"))
    log.set_budget(10.0)
    require_budgets(configs)  # 2 and 8
    log.set_budget(9.9)
    with pytest.raises(DataBudgetError, match=r"so a run of ε = 10 is too much"):
        require_budgets(configs)
    log.set_budget(10.0)
    log.register("a" * 64, "private", "all-2-1", 2.0, 1e-3)
    require_budgets(configs, {"a" * 64})  # begun, and not charged twice when the study goes on
    with pytest.raises(DataBudgetError):
        require_budgets(configs)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_shipped_study_is_sound_at_every_size(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_runs, "planned_hours", lambda *_: None)  # seconds of each model
    raw = json.loads(path.read_text())
    if "arms" not in raw:  # a config that only studies name
        assert load(path, []).phases
        return
    for size in (None, *raw.get("sizes", {})):
        chosen = [] if size is None else ["--set", f"size={size}"]
        assert main([str(path), "--dry-run", *chosen]) == 0
        titled = raw if size is None else raw | raw["sizes"][size]
        assert titled["title"] in capsys.readouterr().out


def test_a_dry_run_plans_the_hours_that_a_recipe_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each run, whatever its budget, and of all; of runs without GPUs none."""
    study = ROOT / "ds_configs" / "studies" / "mehta_epsilon.json"
    said = {name: re.findall(r"([\d.]+) GPU-hours", load(TRANSFERS / f"transfer_vitb_{name}.json", []).about.hardware)
            for name in ("last", "full")}  # fmt: skip
    assert main([str(study), "--dry-run", "--set", "axis.values=[1, 8]", "--set", "seeds=2"]) == 0
    told = capsys.readouterr().out
    for name, part in (("last layer", "last"), ("all layers", "full")):
        assert told.count(f", {said[part][0]} GPU-hours") == 2, (name, told)
    whole = 4 * sum(float(hours) for (hours,) in said.values())
    (planned,) = re.findall(r"^([\d.]+) GPU-hours in all, planned on 8 GPUs", told, re.MULTILINE)
    assert float(planned) == pytest.approx(whole, rel=0.05)
    assert main([str(study), "--dry-run", "--set", "size=cifar"]) == 0 and "GPU-hours" not in capsys.readouterr().out
