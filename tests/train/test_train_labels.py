"""Which class has which number: by one public list in every phase, in evaluation and in what is mixed in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.decode.augment import ResizeCrop
from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.folders import build_folder
from murmuration.data.index.shard_index import ShardIndex
from murmuration.launch.init import main as init
from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import trainable_shapes
from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.config.load import ConfigError, load
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.recipe.ready_phase import ReadyPhase, prepare
from murmuration.train.run.declare import public_uses
from murmuration.train.run.phase import StillEngine
from tests.support.config_base import drop, put
from tests.support.evaluation_world import evaluate, result, saved
from tests.support.train_helpers import on_ranks
from tests.train.test_train_record_names import checked, picture, shards

LISTED = ["dog", "cat", "bird", "fish"]


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """Folders of classes: private ones, public ones with others of the same list, and held-out ones."""
    folders = {"private": ["cat", "dog", "secret"], "open": ["bird", "dog"], "held": ["cat", "dog"], "odd": ["cow"]}
    for folder, names in folders.items():
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (20, 20), (number, len(name), 0)).save(
                    tmp_path / folder / name / f"{folder}-{number}.png"
                )
        build_folder(tmp_path / folder)
    (tmp_path / "classes.txt").write_text("\n".join(LISTED) + "\n")
    return tmp_path


def config_of(sets: Path, change: dict[str, Any] | None = None, **private: Any) -> Config:
    """A public phase on one folder, a private one on another, with evaluation; names are paths in `sets`."""
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "model": {
            "family": "classifier", "image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2,
            "classes": 4, "classify_loss": "softmax",
        },
        "phases": [
            {
                "name": "open", "data": {"path": "open", "public": True, "label": "cls", "classes": "classes.txt"},
                "objective": "classify", "batch": 2, "schedule": {"peak": 0.1}, "steps": 1,
            },
            {
                "name": "private", "data": {"path": "private", "label": "cls", "classes": "classes.txt"} | private,
                "objective": "classify", "privacy": {"epsilon": 8.0, "expected_batch": 4},
                "schedule": {"peak": 0.1}, "steps": 1, "evaluation": {"path": "held", "public": True, "records": 8},
            },
        ],
    }  # fmt: skip
    (sets / "config.json").write_text(json.dumps(raw))
    settings = [f"{key}={json.dumps(value)}" for key, value in (change or {}).items()]
    return load(sets / "config.json", settings)


def labels(phase: Any, index: Any) -> list[int | None]:
    batch = BatchReader(index, phase.data_spec(augment=False)).read(np.arange(index.records), 0)
    return [int(n) if there else None for n, there in zip(batch.inputs["labels"], batch.present, strict=True)][::4]


def test_every_phase_and_the_evaluation_have_the_numbers_of_the_list(sets: Path) -> None:
    public, private = prepare(config_of(sets))
    assert labels(public, public.index) == [2, 0]
    assert labels(private, private.index) == [1, 0, None], "a class that is not on the list makes bad records"
    assert private.held_out is not None and labels(private, private.held_out) == [1, 0]
    mixing = {"phases.1.mixing": {"data": {"path": str(sets / "open"), "public": True}, "batch": 2}}
    mixed = prepare(config_of(sets, mixing))[1]
    assert mixed.mixed is not None and labels(mixed, mixed.mixed) == [2, 0]


def test_a_list_that_one_phase_names_is_that_of_all(sets: Path) -> None:
    public, private = prepare(config_of(sets, {"phases.0.data.classes": None}))
    assert labels(public, public.index) == [2, 0] and labels(private, private.index) == [1, 0, None]


def test_another_order_is_another_phase_and_no_list_is_as_before(sets: Path) -> None:
    def digest(config: Config) -> str:
        return config.digest(0, prepare(config)[0].contents())

    config = config_of(sets)
    first = digest(config)
    (sets / "classes.txt").rename(sets / "list.txt")
    assert (
        digest(
            config_of(
                sets, {"phases.0.data.classes": str(sets / "list.txt"), "phases.1.data.classes": str(sets / "list.txt")}
            )
        )
        == first
    ), "not its place"
    (sets / "classes.txt").write_text("\n".join(reversed(LISTED)))
    assert digest(config) != first


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"phases.0.data.classes": None}, {"classes": None},
     r"phases.1.data.path: the class folders of private records must not decide.*public knowledge"),
    ({"phases.1.evaluation.path": "odd"}, {}, "phases.1.evaluation.path: the class folder cow is not on the list"),
    ({"phases.1.monitor": {"path": "odd", "public": True}}, {},
     "phases.1.monitor.path: the class folder cow is not on the list"),
    ({"phases.0.data.path": "odd"}, {}, "phases.0.data.path: the class folder cow is not on the list"),
    ({"phases.1.mixing": {"data": {"path": "odd", "public": True}, "batch": 2}}, {},
     "phases.1.mixing.data.path: the class folder cow is not on the list"),
    ({}, {"path": "odd"}, "phases.1.data.path: none of its class folders is on the list"),
    ({"model.classes": 3}, {}, "phases.0.data.classes: 4 classes, but the model has 3 outputs"),
    ({"phases.0.data.classes": "other.txt"}, {}, "phases.1.data.classes: not the list of the phases before it"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "private", "message"), REFUSED)
def test_what_would_number_classes_otherwise_is_refused_at_the_start_and_by_a_dry_run(
    sets: Path, change: dict[str, Any], private: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sets)
    (sets / "other.txt").write_text("cat\ndog\n")
    with pytest.raises(RecipeError, match=message):
        prepare(config_of(sets, _absolute(change, sets), **private))
    with pytest.raises(RecipeError, match=message):
        meaning(config_of(sets, _absolute(change, sets), **private))


def _absolute(value: Any, folder: Path) -> Any:
    """Sections given by --set hold paths as they are."""
    if isinstance(value, dict):
        return {
            key: str(folder / item) if key.rpartition(".")[2] == "path" else _absolute(item, folder)
            for key, item in value.items()
        }
    return value


def test_public_folders_of_other_classes_do_not_share_outputs_by_rank(sets: Path) -> None:
    public_alone = {"phases.1.privacy": None, "phases.1.data.public": True, "phases.1.data.path": str(sets / "held")}
    none = {"phases.0.data.classes": None, "phases.1.data.classes": None}
    with pytest.raises(RecipeError, match=r"phases.1.data.path: not the class folders of phases.0.data.path"):
        prepare(config_of(sets, public_alone | none))
    same = {"phases.0.data.path": str(sets / "held")}
    assert [labels(phase, phase.index) for phase in prepare(config_of(sets, public_alone | none | same))] == [
        [0, 1]
    ] * 2
    with pytest.raises(RecipeError, match="2 class folders, but the model has 1 outputs"):
        prepare(config_of(sets, public_alone | none | same | {"model.classes": 1}))


def test_a_dry_run_goes_without_what_is_not_at_hand(sets: Path) -> None:
    assert f"phases.1.data.classes: {sets / 'classes.txt'}\n" in as_text(
        meaning(config_of(sets, {}, expected_records=12))
    )
    (sets / "classes.txt").unlink()
    assert "classes.txt; not at hand, and needed to train" in as_text(meaning(config_of(sets, {}, expected_records=12)))
    with pytest.raises(RecipeError, match="the class list cannot be read"):
        prepare(config_of(sets))


# Records with any number of classes: what is read, their loss and its clipping, what is measured and refused.


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


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 4), (3, 5), (3, 64)])
def test_what_is_measured_is_scikit_learns_on_all_ranks(world: Path, ranks: int, micro_batch: int) -> None:
    phase = ready(world)
    torch.manual_seed(2)
    model = build(phase.shape, "classify").eval()

    def act(one: Any) -> dict[str, float]:
        engine: Any = StillEngine(copy.deepcopy(model), torch.device("cpu"))
        return PublicEvaluator(phase, engine, one, micro_batch, b"m" * 32).measure()

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
    area = result(world / "scored")["numbers"]["mean AUC"]["value"]
    assert area == pytest.approx(roc_auc_score(right, scores), abs=1e-6)
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
    digested = [text for text in kept if "contents" in text]
    assert ["multi_label" in text for text in digested] == [False, False, True]


# Weights of classes: public numbers, in the loss before it is clipped.


@pytest.mark.parametrize("weights", [None, (0.0, 1.0, 4.0, 0.5)])
@pytest.mark.parametrize(("loss", "several"), [("softmax", False), ("sigmoid", False), ("sigmoid", True)])
def test_losses_are_weighted_by_class_before_clipping(
    world: Path, loss: str, several: bool, weights: tuple[float, ...] | None
) -> None:
    bound = 0.05
    told = written(world).model
    weighty, plain = (
        told.model_copy(update={"class_weights": each, "classify_loss": loss}) for each in (weights, None)
    )
    model, unweighted = (build(each, "classify").double() for each in (weighty, plain))
    drawn = torch.Generator().manual_seed(3)
    images = torch.randn(8, 3, 16, 16, generator=drawn, dtype=torch.float64)
    labels = torch.randint(0, 2, (8, 4), generator=drawn).bool() if several else torch.arange(8) % 4
    inputs, present = {"images": images, "labels": labels}, torch.ones(8, dtype=torch.bool)
    logits, scale = unweighted.logits(images).detach(), torch.tensor(weights or [1.0] * 4, dtype=torch.float64)
    wanted = (labels if several else torch.nn.functional.one_hot(labels, 4)).double()
    entropies = (
        torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * scale
        if loss == "sigmoid"
        else -logits.log_softmax(1) * scale * wanted
    )
    torch.testing.assert_close(model(inputs).detach().double(), entropies.sum(1), rtol=1e-5, atol=1e-6)
    found, _ = clipped_totals(
        BookKeepingClip(ClipRule("flat", bound, 0.0)), model, inputs, present, trainable_shapes(model)
    )
    parameters = dict(model.named_parameters())
    expected = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    clipped = 0
    for row in range(8):  # by autograd on the formula, one record at a time
        each = unweighted.logits(images[row : row + 1])
        if loss == "sigmoid":
            losses = torch.nn.functional.softplus(each) - each * wanted[row]
            total = (losses * scale).sum()
        else:
            total = scale[labels[row]] * -each.log_softmax(1)[0, labels[row]]
        gradients = torch.autograd.grad(total, list(unweighted.parameters()), allow_unused=True)
        norm = torch.stack([each.square().sum() for each in gradients if each is not None]).sum().sqrt()
        clipped += bool(norm > bound)
        for name, gradient in zip(expected, gradients, strict=True):
            if gradient is not None and norm > 0:
                expected[name] += gradient * min(1.0, bound / float(norm))
    for name, total in found.items():
        torch.testing.assert_close(total.double(), expected[name], rtol=1e-4, atol=1e-7)
    assert clipped > 4


def test_class_weights_are_in_the_ledger_as_public_numbers(world: Path) -> None:
    phase = ready(world)
    assert "class-weights" not in public_uses(phase)
    head = replace(phase.shape.head, weights=(1.0, 1.0, 2.0, 1.0))
    uses = public_uses(replace(phase, shape=replace(phase.shape, head=head)))
    assert len(uses["class-weights"]) == 64


WEIGHTS_REFUSED: list[tuple[Any, str]] = [
    ("balanced", "is a list of public numbers, one for each class, not 'balanced': how many private records"),
    ([1.0, 2.0], r"class_weights has 2 numbers, and model.classes is 4"),
    ([0.0] * 4, "not all of them 0"),
    ([1.0, 1.0, 1.0, -1.0], "greater than or equal to 0"),
]


@pytest.mark.parametrize(("weights", "reason"), WEIGHTS_REFUSED)
def test_class_weights_that_are_none_are_refused(world: Path, weights: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelSettings.model_validate({"family": "classifier", "size": "small", "classes": 4, "class_weights": weights})


def test_class_weights_are_refused_where_they_weigh_nothing(world: Path) -> None:
    written(world)
    raw = json.loads((world / "config.json").read_text())
    raw["model"]["class_weights"] = [1.0] * 4
    del raw["phases"][0]["schedule"], raw["phases"][0]["steps"], raw["phases"][0]["privacy"]["expected_batch"]
    raw["phases"][0] |= {"objective": "head", "data": {"path": "private", "label": "cls", "classes": "classes.txt"}}
    (world / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"solves its head from sums.*leave it out"):
        load(world / "config.json", [])
