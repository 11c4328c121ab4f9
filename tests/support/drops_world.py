"""Phases over toy records whose models drop, and modules that note in which mode they ran."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from murmuration.accounting.plan import PrivacyPlan
from murmuration.model.inputs import DROP_KEY
from murmuration.train.clip.engine import ClipEngine
from murmuration.train.config.phase import Evaluation, Monitor
from murmuration.train.config.root import Config
from murmuration.train.noise.adaptive_norm import AdaptiveNorm
from murmuration.train.private_phase import PrivatePhase
from murmuration.train.recipe.ready_phase import ReadyPhase, prepare


def config(dropout: float = 0.2, drop_path: float = 0.5, **phase: Any) -> Config:
    whole = {
        "name": "public", "objective": "mae", "data": {"source": "synthetic", "kind": "shapes", "records": 64},
        "batch": 16, "schedule": {"peak": 1e-3, "shape": "constant"}, "steps": 2,
    }  # fmt: skip
    model = {
        "family": "mae", "image_size": 16, "patch_size": 8, "width": 16, "depth": 3, "heads": 2,
        "mae_decoder_width": 16, "mae_decoder_depth": 1, "mae_decoder_heads": 2, "vocabulary": 32, "text_length": 8,
        "classes": 5, "head_scale": 1.0, "dropout": dropout, "drop_path": drop_path,
    }  # fmt: skip
    return Config.model_validate({"train_micro_batch_size_per_gpu": 8, "model": model, "phases": [whole | phase]})


def ready(**changes: Any) -> ReadyPhase:
    return prepare(config(**changes))[0]


def private_of(clip: ClipEngine, plan: PrivacyPlan, norm: AdaptiveNorm | None = None) -> Any:
    """A private phase, as far as measurements of public records ask for one."""
    private: Any = PrivatePhase.__new__(PrivatePhase)
    private.clip, private.plan, private.made = clip, plan, SimpleNamespace(norm=norm)
    return private


def measured(phase: ReadyPhase) -> ReadyPhase:
    """With its own records in the place of held-out ones."""
    parts = {
        "evaluation": Evaluation(path="-", public=True, records=16),
        "monitor": Monitor(path="-", public=True, records=8, probes=1),
    }
    return replace(phase, settings=phase.settings.model_copy(update=parts), held_out=phase.index, monitored=phase.index)


class Modes(nn.Module):
    """Notes the mode of every pass through the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[bool] = []

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        assert self.training == self.inner.training
        assert self.training == (DROP_KEY in inputs), "who trains is given keys, who measures is not"
        self.seen.append(self.training)
        return self.inner(inputs)


def noted(model: nn.Module) -> list[bool]:
    seen, model.seen = model.seen, []  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
    return seen  # pyright: ignore[reportReturnType]
