"""Records with any number of classes: what is read, their loss and its clipping, what is measured and refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.decode.augment import ResizeCrop
from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.shard_index import ShardIndex
from murmuration.model.build import build
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import trainable_shapes
from murmuration.train.commands.init import main as init
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.recipe.ready_phase import ReadyPhase, prepare
from murmuration.train.run.evaluation_phase import StillEngine
from tests.support.brute_force import flat, records_of
from tests.support.config_base import drop, put
from tests.support.evaluation_world import evaluate, result, saved
from tests.support.train_helpers import on_ranks
from tests.train.test_train_record_names import checked, picture, shards

NAMES = ["mass", "effusion", "nodule", "oedema"]
LISTS: list[Any] = [
    ["mass"], [], ["effusion", "nodule"], ["oedema", "mass", "mass"], [2, "mass"], ["1"], ["nodule"], [" effusion "],
]  # fmt: skip
BAD: list[Any] = [["masses"], "mass", [4], [-1], [True], [None], [[0]], None, {"mass": 1}]


def members(lists: list[Any], first: int = 0) -> Iterator[dict[str, bytes]]:
    for number, listed in enumerate(lists, first):
        yield {"png": picture(29 * number), "json": json.dumps({"findings": listed}).encode()}


def written(folder: Path, **phase: Any) -> Config:
    (folder / "classes.txt").write_text("\n".join(NAMES) + "\n")
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "model": {"family": "classifier", "size": "custom", "image_size": 16, "patch_size": 8, "width": 16, "depth": 1,
                  "heads": 2, "classes": 4, "classify_loss": "sigmoid", "head_scale": 1.0, "head_bias": 0.0},
        "phases": [{
            "name": "dp", "objective": "classify",
            "data": {"path": "private", "label": "findings", "multi_label": True, "classes": "classes.txt"},
            "privacy": {"epsilon": 8.0, "expected_batch": 4}, "schedule": {"peak": 0.1}, "steps": 1, **phase,
        }],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return load(folder / "config.json", [])


@pytest.fixture
def world(tmp_path: Path) -> Path:
    shards(tmp_path / "private", members(LISTS), members(BAD, 100))
    shards(tmp_path / "held", members(LISTS * 5, 200), members(BAD, 300))
    shards(tmp_path / "none", members([[]] * 20, 400))
    return tmp_path


def ready(world: Path, held: str = "held") -> ReadyPhase:
    return prepare(written(world, evaluation={"path": held, "public": True}))[0]


def read(phase: ReadyPhase) -> tuple[dict[str, Tensor], Tensor]:
    reader = BatchReader(phase.index, phase.data_spec(augment=False))
    batch = reader.read(np.arange(phase.index.records), 0)
    assert sorted(reader.bad_records) == list(range(len(LISTS), phase.index.records))
    return batch.inputs, batch.present


def test_a_list_becomes_a_row_of_answers_and_what_is_no_list_of_known_classes_is_bad(world: Path) -> None:
    inputs, present = read(ready(world))
    expected = [[0], [], [1, 2], [0, 3], [0, 2], [1], [2], [1]]
    assert [row.nonzero().flatten().tolist() for row in inputs["labels"]] == expected + [[]] * len(BAD)
    assert present.tolist() == [True] * len(LISTS) + [False] * len(BAD)
    assert inputs["labels"].dtype == torch.bool and inputs["labels"].shape[1] == len(NAMES)


def test_each_records_loss_is_its_own_and_its_clipped_sum_is_brute_forces(world: Path) -> None:
    phase = ready(world)
    inputs, present = read(phase)
    torch.manual_seed(1)
    model = build(phase.shape, "classify").double()
    real = {name: tensor.double() if name == "images" else tensor for name, tensor in inputs.items()}
    bound = 0.05
    records = records_of(model, {name: tensor[present] for name, tensor in real.items()})
    assert min(record.norm() for record in records) > bound, "everything is clipped"
    logits = model.logits(real["images"]).detach().numpy()  # pyright: ignore
    for row, record in enumerate(records):
        share = 1 / (1 + np.exp(-logits[row]))
        right = inputs["labels"][row].numpy()
        assert record.loss == pytest.approx(float(-np.log(np.where(right, share, 1 - share)).sum()), rel=1e-5)
    clip = BookKeepingClip(ClipRule("flat", bound, 0.0))
    found, _ = clipped_totals(clip, model, real, present, trainable_shapes(model))
    for name, total in found.items():
        expected = sum(record.gradient[name] * flat(bound)(record.norm()) for record in records)
        assert torch.allclose(total.double(), expected, rtol=1e-5, atol=1e-8), name  # pyright: ignore


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 4), (3, 5), (3, 64)])
def test_what_is_measured_is_scikit_learns_on_all_ranks(world: Path, ranks: int, micro_batch: int) -> None:
    phase = ready(world)
    torch.manual_seed(2)
    model = build(phase.shape, "classify").eval()

    def act(one: Any) -> dict[str, float]:
        engine: Any = StillEngine(copy.deepcopy(model), torch.device("cpu"))
        return PublicEvaluator(phase, engine, one, micro_batch, b"m" * 32, None, None).measure()

    found = on_ranks(ranks, act)
    assert all(each == found[0] for each in found) and list(found[0]) == ["public_loss", "mean_average_precision"]
    assert phase.measured is not None and phase.measured.metrics()[:2] == list(found[0])
    reader = BatchReader(phase.measured.index, phase.measured.spec)
    batch = reader.read(phase.measured.ids, 0)
    right = batch.inputs["labels"][batch.present].numpy()
    with torch.no_grad():
        scores = model.logits(batch.inputs["images"])[batch.present].numpy()  # pyright: ignore
        losses = model(batch.inputs)[batch.present]
    assert len(right) == 5 * len(LISTS)
    assert found[0]["mean_average_precision"] == pytest.approx(average_precision_score(right, scores), abs=1e-9)
    assert found[0]["public_loss"] == pytest.approx(float(losses.mean()), rel=1e-6)


def test_a_finished_model_is_measured_by_the_command(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(world)
    torch.manual_seed(3)
    model = build(config.model.resolved(), "classify").eval()
    saved(world / "weights.pt", model.state_dict())
    asked = ["classify", world / "weights.pt", "--config", world / "config.json", "--public", "--data", world / "held",
             "--classes", world / "classes.txt", "--multi-label", "--pixels", "imagenet",
             "--out", world / "scored"]  # fmt: skip
    assert evaluate(*asked) == 2 and "--multi-label needs --label" in capsys.readouterr().err
    assert evaluate(*asked, "--label", "findings") == 0
    found = result(world / "scored")["numbers"]["mean average precision"]
    index = ShardIndex.open(world / "held")
    spec = DataSpec(16, augment=ResizeCrop(), listed="findings", classes=4, class_list=ClassList(tuple(NAMES)))
    batch = BatchReader(index, spec).read(np.arange(index.records), 0)
    with torch.no_grad():
        scores = model.logits(batch.inputs["images"])[batch.present].numpy()  # pyright: ignore
    right = batch.inputs["labels"][batch.present].numpy()
    assert found["n"] == len(NAMES) and found["value"] == pytest.approx(
        average_precision_score(right, scores), abs=1e-6
    )
    assert result(world / "scored")["data"]["test"]["unreadable"] == len(BAD)


def test_held_out_records_of_which_none_has_a_class_are_refused(world: Path) -> None:
    with pytest.raises(RecipeError, match=r"none of the 20 records can be measured \(the field findings has right"):
        ready(world, "none")


def test_the_owner_sees_how_often_each_class_is_listed(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(world)
    said = checked(capsys, world)
    for line in (
        "usable 8 of 17 (47.1%)", "label 8 of 17 (47.1%) have a list of known classes under 'findings'",
        "0 (mass): 3", "1 (effusion): 3", "2 (nodule): 3", "3 (oedema): 1",
        "1 x the record's findings is not a list of classes; such as record 9 in 000001.tar",
    ):  # fmt: skip
        assert line in said or line.replace("1 x", "3 x") in said, (line, said)
    page = (world / "page.html").read_text()
    assert "class 1 (effusion), class 2 (nodule)" in page and "no class" in page


def test_a_misspelt_list_is_refused_before_anything_is_spent(world: Path) -> None:
    written(world)
    shards(world / "more", members(LISTS * 8, 500))
    config = load(world / "config.json", ["phases.0.data.label=findngs", f"phases.0.data.path={world / 'more'}"])
    with pytest.raises(RecipeError, match=r'has a field "findngs" in its \.json; "findings" is the nearest name'):
        prepare(config)


def test_init_writes_a_config_that_reads_lists(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards(world / "more", members(LISTS * 8, 500))
    (world / "classes.txt").write_text("\n".join(NAMES))
    asked = ["classify", "--data", str(world / "more"), "--label", "findings", "--size", "nano", "--image-size", "32",
             "--classes", str(world / "classes.txt"), "--out", str(world / "my.json")]  # fmt: skip
    assert init([*asked, "--multi-label"]) == 0
    config = load(world / "my.json", [])
    assert config.phases[0].multi_label and config.model.classify_loss == "sigmoid" and config.model.classes == 4
    assert prepare(config)[0].data_spec(augment=True).listed == "findings"
    capsys.readouterr()
    assert init(["caption", "--data", str(world / "more"), "--multi-label", "--out", str(world / "other.json")]) == 2
    assert "--multi-label is for classify" in capsys.readouterr().err


CLASSIFIER = [
    put("model.family", "classifier"), put("model.classify_loss", "sigmoid"), put("phases.1.objective", "classify"),
    put("phases.1.data.label", "findings"), drop("phases.1.data.tokenizer"), drop("phases.1.evaluation.zero_shot"),
]  # fmt: skip
SEVERAL = [*CLASSIFIER, put("phases.1.data.multi_label", True)]


def test_lists_change_the_digest_and_runs_without_them_keep_theirs(
    loaded: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {"data": "d"}
    assert loaded(*SEVERAL).digest(1, contents) != loaded(*CLASSIFIER).digest(1, contents)
    mixing = put("phases.1.mixing", {"data": {"path": "p", "public": True}, "batch": 2})
    kept, real = list[str](), json.dumps
    monkeypatch.setattr(json, "dumps", lambda value, **options: kept.append(real(value, **options)) or kept[-1])
    for changes in (CLASSIFIER, [*CLASSIFIER, mixing], SEVERAL):
        loaded(*changes).digest(1, contents)
    digested = [text for text in kept if "clip_engine" in text and "contents" in text]
    assert ["multi_label" in text for text in digested] == [False, False, True]
