"""Features of a frozen body: the same steps as over pictures, computed once; and LAMB's first step on a zero head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from train_helpers import alone, on_ranks

from data.batches import EMPTY, DataSpec, Fetched, MicroBatch, slots
from model.build import build
from model.settings import ModelSettings
from model.trainable import select
from train.clip import clipped_totals
from train.clip_reference import ReferenceClip
from train.clip_rule import ClipRule
from train.features import ABSENT, BAD, HEADER, PRESENT, FeatureReader, FeatureStore, fill, identity_of
from train.optim import make_optimizer
from train.optim_settings import Optimizer, OptimizerParams, ParameterRule
from train.recipe_error import RecipeError

SETTINGS = ModelSettings(
    family="classifier", image_size=16, patch_size=8, width=16, depth=1, heads=2, classes=5, classify_loss="sigmoid",
)  # fmt: skip
RECORDS, DAMAGED = 23, 7
OF: tuple[Any, ...] = ("records", DataSpec(16, labels=("cls",), target="cls"), "fp32")
IMAGES = torch.randn(RECORDS, 3, 16, 16, generator=torch.Generator().manual_seed(3))
LABELS = torch.arange(RECORDS) % 5


class Pictures:
    """A reader of pictures, one of which is bad; counts what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def read(self, ids: np.ndarray, step: int) -> MicroBatch:
        return self.fetch(ids, step).batch

    def fetch(self, ids: np.ndarray, step: int) -> Fetched:
        del step
        self.asked += [int(number) for number in ids]
        there = torch.from_numpy((ids != EMPTY) & (ids != DAMAGED))
        rows = torch.from_numpy(np.maximum(ids, 0))
        images = torch.where(there.view(-1, 1, 1, 1), IMAGES[rows], 0.0)
        return Fetched(MicroBatch({"images": images, "labels": torch.where(there, LABELS[rows], 0)}, there), {})


def head_only() -> Any:
    model = build(SETTINGS, "classify")
    select(model, "head")
    return model


def filled(folder: Path, stop_after: int | None = None) -> tuple[FeatureStore, Pictures, Any]:
    model, pictures = head_only(), Pictures()
    FeatureStore.create(folder, RECORDS, 16, identity_of(model, *OF))
    store = FeatureStore.open(folder)
    missing = store.missing(0, 1)[:stop_after]
    fill(store, model, pictures, missing, 4, alone(), "fp32")  # pyright: ignore[reportArgumentType]
    return store, pictures, model


def test_a_clipped_sum_over_features_is_the_one_over_pictures(tmp_path: Path) -> None:
    store, pictures, model = filled(tmp_path / "features")
    assert (store.state == PRESENT).sum() == RECORDS - 1 and store.state[DAMAGED] == BAD
    clip = ReferenceClip(ClipRule("flat", 0.5, 0.0))
    shuffled = np.array([[3, 1, 20, 9, 7]])  # begins and ends as five neighbours would
    for ids in (slots(np.arange(RECORDS), 0, 1, 8), slots(np.array([2, 3, 7, 20]), 0, 1, 8), shuffled):
        for row in ids:
            over_pictures, over_features = pictures.fetch(row, 1).batch, FeatureReader(store).fetch(row, 1).batch
            assert torch.equal(over_pictures.present, over_features.present)
            sums = [clipped_totals(clip, model, b.inputs, b.present)[0] for b in (over_pictures, over_features)]
            for name, expected in sums[0].items():
                assert torch.allclose(sums[1][name], expected, atol=1e-6), name


def test_padding_and_bad_records_are_absent_and_zero(tmp_path: Path) -> None:
    store, _, _ = filled(tmp_path / "features")
    batch = FeatureReader(store).fetch(np.array([6, 7, 8, EMPTY]), 5).batch
    assert batch.present.tolist() == [True, False, True, False]
    assert not batch.inputs["features"][~batch.present].any() and batch.inputs["features"][0].any()
    assert batch.inputs["labels"].tolist() == [1, 0, 3, 0]


def test_a_stopped_run_goes_on_where_a_row_is_missing_and_another_body_begins_anew(tmp_path: Path) -> None:
    whole, _, _ = filled(tmp_path / "whole")
    _, first, _ = filled(tmp_path / "broken", stop_after=9)
    store, second, model = filled(tmp_path / "broken")
    assert len(first.asked) == 9 and sorted(first.asked + second.asked) == list(range(RECORDS))
    assert np.array_equal(store.features, whole.features) and np.array_equal(store.labels, whole.labels)
    assert filled(tmp_path / "broken")[1].asked == [], "nothing is computed twice"
    with torch.no_grad():
        model.cls_token.add_(1.0)
    FeatureStore.create(tmp_path / "broken", RECORDS, 16, identity_of(model, *OF))
    assert len(FeatureStore.open(tmp_path / "broken").missing(0, 1)) == RECORDS
    other = head_only()
    with torch.no_grad():
        other.head.weight.add_(1.0)
    assert identity_of(other, *OF) == identity_of(head_only(), *OF), "the head is no part"
    digest, spec, precision = OF
    for changed in (
        ("others", spec, precision), (digest, replace(spec, augment="center"), precision), (digest, spec, "bf16"),
        (digest, replace(spec, labels=("shape",), target="shape"), precision),
    ):  # fmt: skip
        assert identity_of(other, *changed) != identity_of(other, *OF)


def test_only_files_of_its_own_are_replaced_and_a_torn_header_begins_anew(tmp_path: Path) -> None:
    store, _, _ = filled(tmp_path / "features")
    assert not len(store.missing(0, 1))
    (tmp_path / "features" / HEADER).write_text('{"identi')
    (tmp_path / "features" / f".{HEADER}.17.tmp").touch()
    FeatureStore.create(tmp_path / "features", RECORDS, 16, "another")
    assert len(FeatureStore.open(tmp_path / "features").missing(0, 1)) == RECORDS
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(RecipeError, match=r"holds other things \(thesis.txt\); name a folder of its own"):
        FeatureStore.create(tmp_path / "mine", RECORDS, 16, "x")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_ranks_share_the_rows_and_their_files_are_the_owners_alone(tmp_path: Path) -> None:
    FeatureStore.create(tmp_path / "features", RECORDS, 16, "x")
    store = FeatureStore.open(tmp_path / "features")
    parts = [store.missing(rank, 3).tolist() for rank in range(3)]
    assert [row for part in parts for row in part] == list(range(RECORDS))
    assert (tmp_path / "features").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "features").iterdir()} == {0o600}


def test_a_row_is_marked_as_there_after_its_content_lies_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    FeatureStore.create(tmp_path / "features", RECORDS, 16, "x")
    store = FeatureStore.open(tmp_path / "features")
    seen: list[tuple[bool, int]] = []
    monkeypatch.setattr(FeatureStore, "flush", lambda self: seen.append((bool(self.features[3].all()), self.state[3])))
    store.put(np.array([3]), np.ones((1, 16), np.float32), np.array([2]), np.array([True]))
    assert seen == [(True, ABSENT)] and store.state[3] == PRESENT


def test_ranks_with_fewer_rows_ask_about_a_stop_as_often_as_the_others(tmp_path: Path) -> None:
    """Asking is a collective act: a rank that is through would leave the others waiting."""
    FeatureStore.create(tmp_path / "features", RECORDS, 16, "x")

    def asked(ranks: Any) -> int:
        found: list[Any] = []
        store = FeatureStore.open(tmp_path / "features")
        run: Any = SimpleNamespace(stop=SimpleNamespace(check=found.append))
        pictures: Any = Pictures()
        fill(store, head_only(), pictures, store.missing(ranks.rank, ranks.world), 11, ranks, "fp32", run)
        return len(found)

    assert on_ranks(2, asked) == [2, 2], "11 rows are one round, 12 are two"


def stepped(kind: str, rules: list[ParameterRule], steps: int = 1) -> list[torch.Tensor]:
    model = head_only()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    params = OptimizerParams(rules=rules)
    optimizer = make_optimizer(Optimizer(type=kind, params=params), named, 0.0)  # pyright: ignore[reportArgumentType]
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    draw = torch.Generator().manual_seed(8)
    for _ in range(steps):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    return [parameter.detach().clone() for _, parameter in named]


def test_lamb_on_a_zero_head_is_adam_at_the_first_step_and_a_sign_update() -> None:
    """The trust ratio is 1 where the weights' norm is 0 (Mehta et al., 2205.02973); the bias of -10 needs the rule."""
    no_ratio = [ParameterRule(parameters="head.bias", trust_ratio=False)]
    lamb, adam = stepped("LAMB", no_ratio), stepped("AdamW", [])
    assert all(torch.equal(one, other) for one, other in zip(lamb, adam, strict=True))
    assert torch.allclose(lamb[0].abs(), torch.full_like(lamb[0], 0.01), atol=1e-7)
    assert not torch.equal(stepped("LAMB", [])[1], adam[1]), "without the rule the bias moves by its own ratio"
    assert not torch.equal(stepped("LAMB", no_ratio, 2)[0], stepped("AdamW", [], 2)[0]), "from then on they differ"
