"""Accuracy while training: a captioner on class folders without captions, and a classifier, by two processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from murmuration.accounting.ledger.history import History
from murmuration.data.synthetic.index import shape_samples
from tests.support import forking
from tests.support.launching import ROOT, Launch, environment, opened_steps
from tests.support.runs import state_of

Make = Callable[..., tuple[Launch, Path]]
COLOURS = ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"]
EACH, BROKEN = 5, 3


def class_folders(root: Path, name: str, usable: bool, seed: int = 21) -> Path:
    """Pictures in folders by colour, of which some, or all, are no pictures; indexed."""
    folder = root / name
    count = dict.fromkeys(COLOURS, 0)
    for sample in shape_samples(seed, 200, 32, labels=True):
        assert sample.labels is not None
        colour = COLOURS[sample.labels["colour"]]
        if count[colour] == EACH:
            continue
        broken = not usable or (colour == "red" and count[colour] < BROKEN)
        (folder / colour).mkdir(parents=True, exist_ok=True)
        (folder / colour / f"{colour}-{count[colour]}.jpg").write_bytes(b"no picture" if broken else sample.jpg)
        count[colour] += 1
    assert set(count.values()) == {EACH}
    index = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index", str(folder)]
    forking.run(index, check=True, env=environment(), capture_output=True)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    class_folders(root, "held", usable=True)
    class_folders(root, "broken", usable=False)
    # The first picture of each colour shows no class that anybody found; the others show their own and the next one.
    right = {
        f"{colour}-{place}.jpg": [] if not place else [colour, COLOURS[(number + 1) % len(COLOURS)]]
        for number, colour in enumerate(COLOURS) for place in range(EACH)
    }  # fmt: skip
    (root / "right.json").write_text(json.dumps(right))
    return root


def board(run_dir: Path) -> dict[str, dict[int, float]]:
    """The curves as TensorBoard reads them."""
    events = EventAccumulator(str(run_dir / "tb" / "public")).Reload()
    names = [tag for tag in events.Tags()["scalars"] if tag.startswith("dp/")]
    return {tag.partition("/")[2]: {each.step: each.value for each in events.Scalars(tag)} for tag in names}


def test_a_captioner_measures_zero_shot_on_class_folders_and_ends_well(launch: Make, folders: Path) -> None:
    def on_folders(config: dict[str, Any]) -> None:
        config["phases"][1]["evaluation"] = {"path": str(folders / "held"), "public": True, "records": 1000}
        config["phases"][1]["steps"] = 4
        config["run"] |= {"keep_best": "accuracy"}

    job, run_dir = launch("folders", on_folders)
    code, output = job.run()
    assert code == 0, output
    assert f"{BROKEN} of {len(COLOURS) * EACH} public held-out records cannot be measured" in output
    assert output.count("cannot be measured") == 1, "once, not at every checkpoint"
    curves = board(run_dir)
    usable = len(COLOURS) * EACH - BROKEN
    for name in ("top_1", "top_5"):
        assert sorted(curves[name]) == [0, 3, 4]
        assert all(abs(value * usable - round(value * usable)) < 1e-4 for value in curves[name].values())
    assert all(curves["top_1"][step] <= curves["top_5"][step] for step in (0, 3, 4))
    assert "public_loss" not in curves and "update_snr" not in curves, "there are no captions to measure a loss on"
    state = json.loads((run_dir / "run_state.json").read_text())
    assert state["status"] == "done" and state["measured"]["step"] == 4
    assert state["measured"]["top_1"] == pytest.approx(curves["top_1"][4])
    assert f"checkpoint at step 4  zero-shot top-1 {curves['top_1'][4]:.3f}  zero-shot top-5" in output
    assert f"zero-shot top-1: {curves['top_1'][4]:.3f} (before private: {curves['top_1'][0]:.3f})" in output
    page = (run_dir / "report.html").read_text()
    assert "top-1</text>" in page and "top-5</text>" in page and "zero-shot top-1:" in page
    assert "Captions on public held-out images" in page, "pictures of several classes, with the classes' names"
    best = max(curves["top_1"], key=lambda step: (curves["top_1"][step], step))
    kept = {entry["folder"] for entry in entries(run_dir)}
    assert f"phase01-step{best:08d}" in kept
    history, _ = History.read(run_dir / "ledger.jsonl")
    assert "checkpoints are kept by their top_1" in (history.why_budget_is_claimed() or "")


def entries(run_dir: Path) -> list[dict[str, Any]]:
    pointer = json.loads((run_dir / "checkpoints" / "latest").read_text())
    return [pointer, *pointer["before"]]


def test_records_of_which_none_can_be_measured_are_refused_before_anything_is_written(
    launch: Make, folders: Path
) -> None:
    def broken(config: dict[str, Any]) -> None:
        config["phases"][1]["evaluation"] = {"path": str(folders / "broken"), "public": True}

    job, run_dir = launch("refused", broken)
    code, output = job.run()
    assert code == 2, output
    errors = [line for line in output.splitlines() if "error: " in line]
    assert len(errors) == 1 and "Traceback" not in output
    assert (
        "phases.1.evaluation.path: none of the 40 records can be measured" in errors[0] and "name others" in errors[0]
    )
    assert not run_dir.exists()
    # The same for captions that are asked for by a label of the captions' records.
    job.arguments = ["--set", f'phases.1.evaluation.path="{folders / "held"}"', "--set",
                     'phases.1.evaluation.zero_shot={"axes": {"colour": ["red", "blue"]}}']  # fmt: skip
    job.launcher = "python"
    code, output = job.run()
    assert code == 2 and 'has single images, which have no field "colour"' in output, output


def test_a_classifier_shows_top_1_top_5_and_real(launch: Make, folders: Path) -> None:
    def classifier(config: dict[str, Any]) -> None:
        (private,) = config["phases"][1:]
        config["phases"] = [private]
        config["zero_optimization"] = {"stage": 3}  # no rank has the whole model
        config["model"] |= {"family": "classifier", "classes": len(COLOURS), "head_scale": 1.0}
        (folders / "classes.txt").write_text("\n".join(COLOURS) + "\n")
        del private["data"]["tokenizer"]
        private["data"] |= {
            "path": str(folders / "protected"), "expected_records": len(COLOURS) * EACH, "label": "cls",
            "classes": str(folders / "classes.txt"),
        }  # fmt: skip
        private["objective"] = "classify"
        private["privacy"]["release"] = []
        private["privacy"]["expected_batch"] = 20
        private["evaluation"] = {
            "path": str(folders / "held"), "public": True, "real": str(folders / "right.json")
        }  # fmt: skip
        private["steps"] = 4

    class_folders(folders, "protected", usable=True, seed=22)
    job, run_dir = launch("classifier", classifier)
    ended = job.end()
    output = ended.output
    assert ended.codes == [0, 0], output
    curves = board(run_dir)
    # Of 40 pictures 3 are broken; the first of each colour has no right class, and of the other 32, 2 are broken.
    for name, records in (("top_1", 37), ("top_5", 37), ("real", 30)):
        assert sorted(curves[name]) == [0, 3, 4]
        assert all(abs(value * records - round(value * records)) < 1e-4 for value in curves[name].values()), name
    measured = json.loads((run_dir / "run_state.json").read_text())["measured"]
    assert {"public_loss", "top_1", "top_5", "real", "update_snr"} < set(measured)
    assert f"top-1 {measured['top_1']:.3f}  top-5 {measured['top_5']:.3f}  ReaL {measured['real']:.3f}" in output
    assert "ReaL</text>" in (run_dir / "report.html").read_text() and f"ReaL: {measured['real']:.3f}" in output
    assert state_of(run_dir) == "done" and opened_steps(run_dir) == [1, 2, 3, 4]
