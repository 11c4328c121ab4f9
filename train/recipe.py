"""From config sections to phases that can run: data opened and checked, plan frozen, model shape resolved.

Everything that can be refused is refused here, before any compute is spent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from accounting.accountant import AccountingError, Event, epsilon
from accounting.calibrate import calibrate_sigma
from accounting.plan import PlanError, PlannedMetric, PrivacyPlan, parse_delta, threshold_for
from data.batches import DataSpec
from data.folders import FolderIndex
from data.index import RecordIndex, shared_shard
from data.index_open import open_index
from data.synthetic import SyntheticIndex
from data.tar import ShardError
from data.text import TextEncoder
from model.settings import SettingsError, Shape
from train.clip_rule import ClipError, ClipRule
from train.config import Config, Phase
from train.config_data import Data, ShardData, SyntheticData
from train.config_privacy import Privacy

MOST_RECORD_DRIFT = 0.01


class RecipeError(ValueError):
    """A phase cannot run as configured; the message names the key and the mend."""


@dataclass(frozen=True)
class ReadyPhase:
    """A phase with everything opened that it needs."""

    number: int
    settings: Phase
    shape: Shape
    index: RecordIndex
    text: TextEncoder | None
    held_out: RecordIndex | None

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def private(self) -> bool:
        return self.settings.privacy is not None

    def contents(self) -> dict[str, str]:
        """Digests of everything that a path in the config names and that shapes the training."""
        found = {"data": self.index.manifest_digest}
        if self.text is not None:
            found["tokenizer"] = self.text.digest
        return found

    def data_spec(self, augment: bool) -> DataSpec:
        masks = self.shape.patches if self.settings.objective == "mae" else 0
        kind = self.settings.data.augment if augment else "center"
        return DataSpec(image_size=self.shape.image_size, augment=kind, mask_patches=masks)


def prepare(config: Config) -> list[ReadyPhase]:
    shape = resolve_shape(config)
    phases = [_open(config, number, phase, shape) for number, phase in enumerate(config.phases)]
    _keep_apart(phases)
    return phases


def _keep_apart(phases: list[ReadyPhase]) -> None:
    """What is used as public, in whichever phase, holds no shard of records that a private phase protects."""
    owners = [phase for phase in phases if phase.private]
    for phase in phases:
        uses = [(f"phases.{phase.number}.evaluation.path", phase.held_out)]
        if not phase.private and phase.settings.data.public:
            uses.append((f"phases.{phase.number}.data.path", phase.index))
        for (where, index), owner in product(uses, owners):
            shared = shared_shard(owner.index.shards, index.shards) if index else None
            if shared is not None:
                raise RecipeError(
                    f"{where}: {shared.name} belongs to the private records of phase {owner.name!r}; "
                    "name data that are public"
                )


def resolve_shape(config: Config) -> Shape:
    try:
        return config.model.resolved()
    except SettingsError as error:
        raise RecipeError(f"model: {error}") from None


def _open(config: Config, number: int, phase: Phase, shape: Shape) -> ReadyPhase:
    where = f"phases.{number}"
    index = _open_data(phase.data, shape, f"{where}.data")
    if phase.objective == "caption" and isinstance(index, FolderIndex):
        raise RecipeError(
            f"{where}.data.path holds single images, which have no captions; train with objective 'mae', or put images "
            "and captions into tar shards"
        )
    text = None
    if phase.objective == "caption" and phase.data.tokenizer is not None:
        try:
            text = TextEncoder(phase.data.tokenizer, shape.text_length)
        except ValueError as error:
            raise RecipeError(f"{where}.data.tokenizer: {error}") from None
        if text.vocabulary > shape.vocabulary:
            raise RecipeError(
                f"{where}.data.tokenizer has {text.vocabulary} tokens, more than model.vocabulary = "
                f"{shape.vocabulary}; set model.vocabulary to at least {text.vocabulary}"
            )
    held_out = None
    if phase.evaluation is not None:
        held_out = _open_index(phase.evaluation.path, f"{where}.evaluation.path")
    if phase.privacy is None and phase.batch is not None and phase.batch > index.records:
        raise RecipeError(f"{where}.batch = {phase.batch} exceeds the {index.records} records of its data")
    return ReadyPhase(number, phase, shape, index, text, held_out)


def _open_data(data: Data, shape: Shape, where: str) -> RecordIndex:
    if isinstance(data, SyntheticData):
        return SyntheticIndex(data.kind, data.records, data.seed, data.size or shape.image_size)
    index = _open_index(data.path, f"{where}.path")
    _check_expected(index, data, where)
    return index


def _open_index(path: str, where: str) -> RecordIndex:
    try:
        index = open_index(path)
        index.check_unchanged()
        return index
    except (ShardError, OSError) as error:
        hint = " (the demo's shards: python launch/prepare.py demo)" if "demo_data" in path else ""
        raise RecipeError(f"{where}: {error}{hint}") from None


def _check_expected(index: RecordIndex, data: ShardData, where: str) -> None:
    expected = data.expected_records
    if expected is not None and abs(index.records - expected) > MOST_RECORD_DRIFT * expected:
        raise RecipeError(
            f"{where}.expected_records is {expected}, but the index holds {index.records} records, more than 1 % off; "
            "index the right shards or correct the number"
        )


def make_plan(
    phase: Phase, privacy: Privacy, records: int, where: str, known: PrivacyPlan | None = None
) -> PrivacyPlan:
    """Freezes n, q, C, sigma, T and delta; `known` is the ledger's plan, whose sigma need not be calibrated again."""
    try:
        threshold = threshold_for(records, privacy.expected_batch)
        delta = parse_delta(privacy.delta, records)
        metrics = tuple(PlannedMetric(m.name, m.bound, m.bound * m.noise_multiplier) for m in privacy.release)
        fixed = dict(
            records=records, threshold=threshold, clip_norm=privacy.clip.norm, steps=phase.steps, delta=delta,
            epsilon_budget=privacy.epsilon, metrics=metrics,
        )  # fmt: skip
        sigma = privacy.noise_multiplier
        if sigma is None and known is not None and all(getattr(known, k) == v for k, v in fixed.items()):
            sigma = known.noise_multiplier
        if sigma is None:
            together = calibrate_sigma(threshold / 2**32, phase.steps, privacy.epsilon, delta)
            sigma = _share_of_gradient(together, metrics)
        return PrivacyPlan(noise_multiplier=sigma, **fixed)  # pyright: ignore[reportArgumentType]
    except (PlanError, AccountingError) as error:
        raise RecipeError(f"{where}.privacy: {error}") from None


def _share_of_gradient(together: float, metrics: tuple[PlannedMetric, ...]) -> float:
    """The gradient's noise multiplier such that gradient and metrics, which are one event, have `together`."""
    if not metrics:
        return together
    left = together**-2 - sum((m.bound / m.std) ** 2 for m in metrics)
    if left <= 0:
        raise PlanError(f"the released metrics alone need more than the budget; their noise must exceed {together:g}")
    return math.ceil(left**-0.5 * 1e5) / 1e5


def planned_epsilon(plan: PrivacyPlan) -> float:
    return epsilon([Event(plan.sampling_rate, plan.effective_noise_multiplier, plan.steps)], plan.delta)


def clip_rule(privacy: Privacy, plan: PrivacyPlan, micro_batch: int) -> ClipRule:
    clip = privacy.clip
    try:
        return ClipRule.of(plan, clip.kind, clip.gamma, micro_batch, clip.groups)
    except ClipError as error:
        raise RecipeError(str(error)) from None


def expected_rows(records_per_step: float, micro_batch: int, world: int) -> int:
    """Micro-batches per rank of an expected logical batch."""
    return max(1, math.ceil(records_per_step / world / micro_batch))
