"""Features of a frozen body: the same steps as over pictures, computed once, by all ranks or by none; and LAMB's first
step on a zero head. The files have tests of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.data.draw.micro_batch import EMPTY, slots
from murmuration.data.store.place import UnreadableError
from murmuration.model.build import build
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import Optimizer, OptimizerParams, ParameterRule
from murmuration.train.distributed.stop import Stopped
from murmuration.train.optim.choose import make_optimizer
from murmuration.train.run.cached_features import apart, identity_of
from murmuration.train.storage.feature_store import ABSENT, BAD, PRESENT
from tests.support.features_world import (
    DAMAGED,
    OF,
    RECORDS,
    RESNET,
    Pictures,
    head_only,
    made,
)
from tests.support.train_helpers import alone, on_ranks


def test_a_clipped_sum_over_features_is_the_one_over_pictures(tmp_path: Path) -> None:
    reader, pictures, model = made(tmp_path / "features", alone(), Pictures())
    assert (reader.stored.state == PRESENT).sum() == RECORDS - 1 and reader.stored.state[DAMAGED] == BAD
    clip = ReferenceClip(ClipRule("flat", 0.5, 0.0))
    shuffled = np.array([[3, 1, 20, 9, 7]])  # begins and ends as five neighbours would
    for ids in (slots(np.arange(RECORDS), 0, 1, 8), slots(np.array([2, 3, 7, 20]), 0, 1, 8), shuffled):
        for row in ids:
            over_pictures, over_features = pictures.fetch(row, 1).batch, reader.fetch(row, 1).batch
            assert torch.equal(over_pictures.present, over_features.present)
            sums = [clipped_totals(clip, model, b.inputs, b.present)[0] for b in (over_pictures, over_features)]
            for name, expected in sums[0].items():
                assert torch.allclose(sums[1][name], expected, atol=1e-6), name


def test_padding_and_bad_records_are_absent_and_zero(tmp_path: Path) -> None:
    reader, pictures, _ = made(tmp_path / "features", alone(), Pictures())
    batch = reader.fetch(np.array([6, 7, 8, EMPTY]), 5).batch
    assert batch.present.tolist() == [True, False, True, False]
    assert not batch.inputs["features"][~batch.present].any() and batch.inputs["features"][0].any()
    assert batch.inputs["labels"].tolist() == [1, 0, 3, 0]
    assert pictures.closed and not reader.bad_reasons


@pytest.mark.parametrize("ids", [[3, 4, 5], [3, 9, 5]])
def test_a_row_that_was_never_made_is_an_error_and_no_record_without_a_gradient(tmp_path: Path, ids: list[int]) -> None:
    reader, _, _ = made(tmp_path, alone(), Pictures())
    with (reader.stored.path / "state.u8").open("rb+") as file:
        file.seek(5)
        file.write(bytes([ABSENT]))
    with pytest.raises(UnreadableError) as gone:
        reader.fetch(np.array(ids), 1)
    told = str(gone.value)
    assert told == f"features that were computed are gone from {reader.stored.path}; compute them again"
    assert "5" not in told.replace(str(reader.stored.path), ""), "which record a step drew is no one's to know"
    assert reader.fetch(np.array([3, 4, EMPTY]), 1).batch.present.tolist() == [True, True, False]


def test_a_stopped_run_goes_on_where_a_row_is_missing_and_another_body_begins_anew(tmp_path: Path) -> None:
    whole, _, _ = made(tmp_path / "whole", alone(), Pictures())
    first, told = Pictures(unreadable_after=8), list[Any]()
    with pytest.raises(Stopped, match="records that cannot be read"):
        made(tmp_path / "broken", alone(), first, bad=lambda *reasons: told.append(reasons))
    assert first.closed and told == [("head", 0, {DAMAGED: "damaged"})], "nobody reads that record again"
    reader, second, model = made(tmp_path / "broken", alone(), Pictures())
    assert len(first.asked) == 8 and sorted(first.asked + second.asked) == list(range(RECORDS))
    assert np.array_equal(reader.stored.features, whole.stored.features)
    assert np.array_equal(reader.stored.labels, whole.stored.labels)
    assert made(tmp_path / "broken", alone(), Pictures())[1].asked == [], "nothing is computed twice"
    with torch.no_grad():
        model.cls_token.add_(1.0)
    other, third, _ = made(tmp_path / "broken", alone(), Pictures(), model)
    assert len(third.asked) == RECORDS and not np.array_equal(other.stored.features, whole.stored.features)
    assert made(tmp_path / "broken", alone(), Pictures())[1].asked == [], "two bodies keep their features side by side"


def test_heads_and_seeds_share_the_features_of_one_body(tmp_path: Path) -> None:
    """A sweep over `features.folder`: what the body computes is all that counts."""
    made(tmp_path, alone(), Pictures())
    sweep = {
        "init_seed": 5, "head_scale": 1.0, "head_bias": -3.0, "classify_loss": "softmax", "classes": 7,
        "text_length": 12, "vocabulary": 99, "mask_ratio": 0.5, "decoder_bias": True, "mae_decoder_depth": 2,
    }  # fmt: skip
    body = {name: value for name, value in head_only().state_dict().items() if not name.startswith("head.")}
    for name, value in sweep.items():
        model = head_only(**{name: value})
        model.load_state_dict(body, strict=False)
        assert made(tmp_path, alone(), Pictures(), model)[1].asked == [], name


def test_the_identity_is_of_records_pixels_labels_body_and_precision() -> None:
    other = head_only(head_scale=1.0)
    assert identity_of(other, *OF) == identity_of(head_only(), *OF), "the head is no part"
    digest, spec, precision = OF
    changes: tuple[tuple[Any, ...], ...] = (
        ("others", spec, precision), (digest, replace(spec, augment="center"), precision), (digest, spec, "bf16"),
        (digest, replace(spec, labels=("shape",), target="shape"), precision),
        (digest, replace(spec, classes=3), precision),  # decides which records are bad
    )  # fmt: skip
    for changed in changes:
        assert identity_of(other, *changed) != identity_of(other, *OF)
    # The same weights, and yet other features.
    for change in ({"heads": 4}, {"pooling": "mean"}):
        same = head_only(**change)
        same.load_state_dict(other.state_dict())
        assert identity_of(same, *OF) != identity_of(other, *OF), change
    nets = [build(RESNET.model_copy(update=more), "classify") for more in ({}, {"head_scale": 1.0}, {"stages": (2,)})]
    first, head, deeper = (identity_of(net, *OF) for net in nets)
    assert first == head != deeper


def test_ranks_share_the_rows_and_their_files_are_the_owners_alone(tmp_path: Path) -> None:
    pictures = [Pictures() for _ in range(3)]
    readers = on_ranks(3, lambda ranks: made(tmp_path / "features", ranks, pictures[ranks.rank])[0])
    assert [row for each in pictures for row in each.asked] == list(range(RECORDS))
    whole = made(tmp_path / "alone", alone(), Pictures())[0].stored
    for reader in readers:
        assert np.allclose(reader.stored.features, whole.features, atol=1e-6)
        assert np.array_equal(reader.stored.state, whole.state)
    (kept,) = (tmp_path / "features").iterdir()
    assert (tmp_path / "features").stat().st_mode & 0o777 == kept.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in kept.iterdir()} == {0o600}


def test_files_of_an_older_version_stay_and_are_named(tmp_path: Path) -> None:
    for name in ("features.json", "features.npy", "labels.npy", "state.npy"):
        (tmp_path / name).write_text("older")
    said: list[str] = []
    made(tmp_path, alone(), Pictures(), said=said.append)
    assert all((tmp_path / name).read_text() == "older" for name in ("features.json", "features.npy", "state.npy"))
    assert "are of an older version and are not used; delete them if no older version needs them" in said[-1]
    said.clear()
    made(tmp_path / "fresh", alone(), Pictures(), said=said.append)
    assert len(said) == 1 and "23 to be computed" in said[0]


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


def test_a_record_that_is_not_finite_does_not_take_the_one_before_it_along() -> None:
    """As the matrix units of some processors do, which read beyond the end of a row and multiply that by 0."""

    def reads_too_far(images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1)
        return rows + 0.0 * torch.cat([rows[1:], rows[:1]])

    images = torch.randn(5, 3, 4, 4)
    images[2, 1] = torch.inf
    found = apart(reads_too_far, images)
    assert torch.equal(found[[0, 1, 3, 4]], images.flatten(1)[[0, 1, 3, 4]])
    assert not bool(reads_too_far(images)[1].isfinite().all()) and not bool(found[2].isfinite().all())
