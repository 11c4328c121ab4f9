"""Which class has which number: by one public list in every phase, in evaluation and in what is mixed in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from murmuration.data.batch.reader import BatchReader
from murmuration.data.index.folders import build_folder
from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.ready_phase import prepare

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
