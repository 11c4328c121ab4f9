"""What a config says of a head from one pass, what is filled in, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from murmuration.train.config.load import ConfigError, load
from murmuration.train.config.root import Config
from murmuration.train.planner.micro_batch import _drawn
from murmuration.train.recipe.ready_phase import make_plan, with_steps

PHASE: dict[str, Any] = {
    "name": "head", "data": {"path": "records", "label": "cls", "classes": "classes.txt"}, "objective": "head",
    "privacy": {"epsilon": 1.0},
}  # fmt: skip
MODEL = {"family": "classifier", "image_size": 32, "patch_size": 8, "width": 32, "depth": 1, "heads": 2, "classes": 4}


def given(folder: Path, changes: dict[str, Any], *overrides: str) -> Config:
    config = {"train_micro_batch_size_per_gpu": 8, "model": MODEL, "phases": [PHASE | changes], "run": {}}
    (folder / "c.json").write_text(json.dumps(config))
    return load(folder / "c.json", list(overrides))


def test_it_is_one_step_over_all_records(tmp_path: Path) -> None:
    (phase,) = given(tmp_path, {}).phases
    assert (phase.objective, phase.trainable, phase.steps) == ("classify", "statistics", 1)
    assert phase.features is not None and phase.privacy is not None and math.isinf(phase.privacy.expected_batch)
    settled = with_steps(phase, 500, "phases.0")
    assert settled.privacy is not None
    plan = make_plan(settled, settled.privacy, 500, "phases.0")
    assert plan.threshold == 2**32 and plan.steps == 1 and plan.divisor == 500.0
    same = given(tmp_path, {"objective": "classify", "trainable": "statistics"})
    assert same.digest(0, {}) == given(tmp_path, {}).digest(0, {})
    assert given(tmp_path, {"head": {"ridge": 0.1}}).digest(0, {}) != same.digest(0, {})


def test_all_stands_for_n_in_any_phase_and_is_written_as_it_was(tmp_path: Path) -> None:
    changes = {
        "objective": "classify", "trainable": "head", "privacy": {"epsilon": 1.0, "expected_batch": "all"},
        "steps": 3, "schedule": {"peak": 0.1}, "features": {},
    }  # fmt: skip
    config = given(tmp_path, changes)
    assert json.loads(config.model_dump_json())["phases"][0]["privacy"]["expected_batch"] == "all"
    settled = with_steps(config.phases[0], 77, "phases.0")
    assert settled.privacy is not None and settled.privacy.expected_batch == 77.0


def test_its_twin_without_privacy_takes_all_records(tmp_path: Path) -> None:
    (phase,) = given(tmp_path, {}, "phases.0.privacy=null").phases
    assert phase.privacy is None and with_steps(phase, 500, "phases.0").batch == 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 2}, "one pass over all records; leave steps"),
        ({"optimizer": {"type": "AdamW"}}, "one pass over all records; leave steps"),
        ({"schedule": {"peak": 0.5}}, "one pass over all records; leave steps"),
        ({"privacy": {"epsilon": 1.0, "expected_batch": 20}}, "leave privacy.expected_batch out"),
        ({"privacy": {"epsilon": 1.0, "clip": {"norm": 2.0}}}, "leave privacy.clip out"),
        ({"privacy": {"epsilon": 1.0, "release": [{"name": "loss", "noise_multiplier": 5.0}]}}, "privacy.release"),
        ({"privacy": {"epsilon": 1.0, "noise": {"kind": "banded", "bands": 2}}}, "leave privacy.noise out"),
        ({"privacy": {"epsilon": 1.0, "sampling": "allocation"}}, "leave privacy.sampling out"),
        ({"head": {"balanced": True}}, "head.balanced needs head.feature_norm"),
        ({"head": {"ridge": 0.0}}, "head.ridge = 0.0 is not usable"),
        ({"head": {"rigde": 1.0}}, "unknown key"),
        ({"privacy": {"epsilon": 1.0, "expected_batch": "most"}}, "expected_batch = 'most' is not usable"),
        ({"objective": "mae", "trainable": "statistics"}, "needs objective 'classify'"),
        ({"data": {"path": "records", "label": "cls", "augment": "random_resized_crop"}}, "augments its pictures"),
        (
            {
                "objective": "classify", "trainable": "head", "head": {"ridge": 1.0}, "steps": 1,
                "schedule": {"peak": 1.0}, "privacy": {"epsilon": 1.0, "expected_batch": 20},
            },
            "use trainable 'statistics'",
        ),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given(tmp_path, changes)
    assert message in str(caught.value)


def test_a_micro_batch_is_settled_before_all_records_are_counted(tmp_path: Path) -> None:
    """The word "auto" asks for the batch before there is an index."""
    drawn = _drawn(given(tmp_path, {}).phases[0])
    assert math.isfinite(drawn.mean) and drawn.even(2, 8) == 8
