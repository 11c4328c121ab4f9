"""The config's digest: what shapes a release changes it, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.train.config.root import Config
from tests.support.config_base import put

CONTENTS = {"data": "d1", "tokenizer": "t1"}
SHAPES: list[tuple[str, Any]] = [
    ("phases.1.schedule.peak", 2e-3), ("phases.1.schedule.warmup", 3), ("phases.1.schedule.shape", "cosine"),
    ("phases.1.schedule.end", 50), ("phases.1.optimizer.params.betas", [0.9, 0.96]),
    ("phases.1.optimizer.params.weight_decay", 0.1), ("phases.1.optimizer.params.eps", 1e-6),
    ("phases.1.optimizer.params.gradient_norm", 1.0), ("phases.1.optimizer.width_transfer", {"width": 8}),
    ("phases.1.privacy.noise", {"kind": "banded", "bands": 2}), ("phases.1.privacy.sampling", "allocation"),
    ("phases.1.data.augment", "center"), ("phases.1.data.weight", "score"), ("phases.1.privacy.clip.norm", 2.0),
    ("phases.1.privacy.clip.kind", "automatic"), ("phases.1.privacy.clip.gamma", 0.5),
    ("phases.1.privacy.clip.groups", "block"), ("run.clip_engine", "reference"), ("run.clip_memory", "fast"),
    ("run.precision", "bf16"), ("phases.1.privacy.views", 2),
    ("phases.1.privacy.expected_batch", 21), ("phases.1.privacy.noise_multiplier", 1.6), ("phases.1.steps", 6),
    ("phases.1.privacy.epsilon", 4.0), ("phases.1.privacy.delta", 1e-5), ("model.width", 32), ("model.init_seed", 1),
    ("model.text_length", 9), ("model.mask_ratio", 0.5), ("model.dropout", 0.1), ("train_micro_batch_size_per_gpu", 16),
]  # fmt: skip
SHAPES_NOT: list[tuple[str, Any]] = [
    ("zero_optimization.stage", 2), ("zero_optimization.reduce_bucket_size", 1000), ("run.checkpoint_every", 3),
    ("run.log_every", 1), ("run.keep_checkpoints", 5), ("run.dir", "/elsewhere"), ("run.keep_key", True),
    ("about.cost", "more"), ("phases.1.data.path", "moved"), ("phases.1.data.tokenizer", "moved.json"),
    ("phases.1.evaluation.records", 5), ("steps_per_print", 5), ("run.engine", "fsdp2"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), SHAPES, ids=[key for key, _ in SHAPES])
def test_what_shapes_a_release_changes_the_digest(loaded: Callable[..., Config], key: str, value: Any) -> None:
    assert loaded(put(key, value)).digest(1, CONTENTS) != loaded().digest(1, CONTENTS)


@pytest.mark.parametrize(("key", "value"), SHAPES_NOT, ids=[key for key, _ in SHAPES_NOT])
def test_what_does_not_shape_a_release_leaves_the_digest(loaded: Callable[..., Config], key: str, value: Any) -> None:
    changed = loaded(put(key, value))
    assert changed != loaded() and changed.digest(1, CONTENTS) == loaded().digest(1, CONTENTS)


def test_the_digest_holds_contents_in_the_place_of_paths(loaded: Callable[..., Config], tmp_path: Path) -> None:
    config = loaded()
    digests = {config.digest(1, {"data": d, "tokenizer": t}) for d in ("d1", "d2") for t in ("t1", "t2")}
    assert len(digests) == 4 and config.digest(0, CONTENTS) not in digests


def test_a_run_from_before_there_were_drops_and_weights_goes_on(loaded: Callable[..., Config]) -> None:
    """Its digest knows of neither, and so must ours while there are none."""
    mixing, deep = {"data": {"path": "x", "public": True}, "batch": 4}, put("model.depth", 2)
    zero = loaded(put("model.dropout", 0.0), put("model.drop_path", 0))
    assert zero.digest(1, CONTENTS) == loaded().digest(1, CONTENTS)
    rates = [loaded(deep, put("model.drop_path", rate)).digest(1, CONTENTS) for rate in (0, 0.1, 0.2)]
    assert len(set(rates)) == 3 and rates[0] == loaded(deep).digest(1, CONTENTS)
    mixed, kept = loaded(put("phases.1.mixing", mixing)), list[str]()
    begun = []
    for more in ({}, {"take_head": False}):
        start = {"source": "checkpoint", "path": "x", "public": True} | more
        begun.append(
            loaded(
                lambda raw, start=start: raw["phases"].insert(
                    0, {"name": "start", "objective": "caption", "data": start}
                )
            )
        )
    assert begun[0].digest(0, CONTENTS) != begun[1].digest(0, CONTENTS)
    real = json.dumps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "dumps", lambda value, **options: kept.append(real(value, **options)) or kept[-1])
        zero.digest(1, CONTENTS)
        mixed.digest(1, CONTENTS)
        begun[0].digest(0, CONTENTS)
    new = ("drop", '"weight"', "take_head", "gradient_norm", "pixels", "resize", 'crop"', '"views"', "width_transfer")
    assert all("mask_ratio" in text and not any(name in text for name in new) for text in kept)
    assert '"batch": 4' in kept[1]
    weighted = put("phases.1.mixing", {**mixing, "data": {**mixing["data"], "weight": "score"}})
    assert loaded(weighted).digest(1, CONTENTS) != mixed.digest(1, CONTENTS)
