"""A small config that is in order, changes to it, and what it says when it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.config.load import ConfigError
from murmuration.train.config.phase import Phase
from murmuration.train.config.root import Config
from murmuration.train.recipe.ready_phase import plan_of_phase

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "model": {
        "family": "captioner", "image_size": 32, "patch_size": 8, "width": 16, "depth": 1, "heads": 2,
        "decoder_depth": 1, "text_length": 8, "vocabulary": 64,
    },
    "phases": [
        {
            "name": "warm", "data": {"path": "warm", "public": True}, "objective": "mae", "batch": 16,
            "schedule": {"peak": 1e-3}, "steps": 2,
        },
        {
            "name": "private",
            "data": {"path": "private", "tokenizer": "tokenizer.json", "expected_records": 400},
            "objective": "caption",
            "privacy": {"epsilon": 8.0, "expected_batch": 20, "noise_multiplier": 1.5, "clip": {"norm": 1.0}},
            "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}},
            "schedule": {"peak": 1e-3, "shape": "constant"},
            "steps": 5,
            "evaluation": {"path": "held", "public": True, "zero_shot": {"axes": {"colour": ["red", "blue"]}}},
        },
    ],
    "run": {"checkpoint_every": 2},
}  # fmt: skip

Change = Callable[[dict[str, Any]], None]


def put(dotted: str, value: Any) -> Change:
    def change(raw: dict[str, Any]) -> None:
        holder: Any = raw
        *way, last = dotted.split(".")
        for part in way:
            holder = holder[int(part)] if isinstance(holder, list) else holder.setdefault(part, {})
        holder[last] = value

    return change


def drop(dotted: str) -> Change:
    def change(raw: dict[str, Any]) -> None:
        holder: Any = raw
        *way, last = dotted.split(".")
        for part in way:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        del holder[last]

    return change


def private_phase(privacy: dict[str, Any] | None = None, **more: Any) -> Phase:
    """Of a captioner, with 20 steps of 50 records each; keys are replaced by those of `privacy` and `more`."""
    return Phase.model_validate(
        {
            "name": "private", "data": {"path": "x", "tokenizer": "t"}, "objective": "caption", "steps": 20,
            "schedule": {"peak": 1e-3}, "privacy": {"epsilon": 4.0, "expected_batch": 50.0, **(privacy or {})}, **more,
        }
    )  # fmt: skip


def plan_of(phase: Phase, records: int = 1000, known: PrivacyPlan | None = None, **more: Any) -> PrivacyPlan:
    return plan_of_phase(phase, records, "phases.0", known=known, **more)


def refusal(read: Callable[..., Config], *changes: Change, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        read(*changes, overrides=overrides)
    return str(refused.value)
