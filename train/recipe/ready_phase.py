"""From config sections to phases that can run: data opened and checked, plan frozen, model shape resolved.

Everything that can be refused is refused here, before any compute is spent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

from torch import nn

from murmuration.accounting.adaptive import AdaptiveError
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.errors import AccountingError, PlanError
from murmuration.accounting.keys import Derive
from murmuration.accounting.ledger.lines import PublicUse
from murmuration.accounting.make_plan import make_plan, steps_of, steps_of_passes
from murmuration.accounting.noise import NoiseKind
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.unit import Unit, unit_in_words
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.decode.class_list import ClassList
from murmuration.data.decode.resize import DECODER
from murmuration.data.draw.node_placement import Placement
from murmuration.data.draw.normalisation import Normalisation
from murmuration.data.draw.poisson import StepKey
from murmuration.data.draw.stream import StreamIndex
from murmuration.data.index.keyed_digest import every_ledger_digest, ledger_digest_of, ledger_digests
from murmuration.data.index.public_split import SplitIndex, apart, places_of
from murmuration.data.index.shard_index import shared_shard
from murmuration.data.index.unit_table import UnitTable
from murmuration.data.store.place import RecordIndex, Shard
from murmuration.data.text.encoder import TextEncoder
from murmuration.model.settings import SettingsError, Shape
from murmuration.model.trainable import TrainableError, select
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.config.data import CheckpointData, ReadingSettings, ShardData, StreamData, SyntheticData
from murmuration.train.config.phase import STATISTICS
from murmuration.train.config.privacy import Privacy
from murmuration.train.config.root import Config, Phase
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe import pixels
from murmuration.train.recipe.held_out import HeldOut, usable
from murmuration.train.recipe.labels import LabelSource, class_filter, class_list, require_numbers
from murmuration.train.recipe.open_data import (
    open_data,
    open_public,
    open_records,
    open_start,
    open_text,
    open_units,
    refuse_plain_http,
)
from murmuration.train.recipe.public_use import Use, hold_to_what_was_promised
from murmuration.train.recipe.record_names import Part, require_names
from murmuration.train.recipe.warm_start import WarmStart
from murmuration.train.storage.sibling_runs import RunLog

__all__ = [
    "ReadyPhase",
    "RecipeError",
    "clip_rule",
    "plan_of_phase",
    "planned",
    "planned_epsilon",
    "prepare",
    "resolve_shape",
    "with_steps",
]


READ = ShardData | SyntheticData | StreamData  # data sections that records are read from


@dataclass(frozen=True)
class ReadyPhase:
    """A phase with everything that it needs opened."""

    number: int
    settings: Phase
    shape: Shape
    index: RecordIndex
    text: TextEncoder | None
    held_out: RecordIndex | None
    monitored: RecordIndex | None = None
    mixed: RecordIndex | None = None
    """Public records whose gradients are mixed in."""
    start: WarmStart | None = None
    """Weights from outside that this phase, or one before it, began with."""
    classes: ClassList | None = None
    """Numbers of the classes, the same in every phase of the run."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Digests of the lists of classes that are left out."""
    units: UnitTable | None = None
    """The units of several records that the phase draws and protects; None: it draws records."""
    placement: Placement | None = None
    """Which ranks compute which records, where not every rank can read all of them."""
    captioned: bool = True
    """Whether the held-out records of a captioner have captions."""
    pixels: Normalisation = pixels.IMAGENET
    """The same in every phase of the run."""

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def where(self) -> str:
        """In the config."""
        return f"phases.{self.number}"

    @property
    def private(self) -> bool:
        return self.settings.privacy is not None

    @property
    def n(self) -> int:
        """How many units there are to draw: records, unless the phase protects others."""
        return self.index.records if self.units is None else self.units.count

    @property
    def unit(self) -> Unit | None:
        """What the phase protects; None: a record."""
        return unit_of(self.settings)

    def slot_rows(self, key: bytes | StepKey) -> SlotRows:
        """`key` decides which records of a unit take part where not all fit."""
        views = 1 if self.settings.privacy is None else self.settings.privacy.views
        if (unit := self.unit) is None:
            return SlotRows(views=views)
        return SlotRows(self.units, unit.rows, unit.reduce, views, key)

    def contents(self) -> dict[str, str]:
        """Digests of everything that a path in the config names and that shapes the training. Called on the main rank,
        which may have to make a salt."""
        found = _identity("data", self.index, self.settings.data.public)
        if self.units is not None:
            found["units"] = ledger_digest_of(self.index, self.units.digest, public=self.settings.data.public)
        if self.label_list is not None:
            found["classes"] = self.label_list.digest
        found |= self.left_out
        if self.text is not None:
            found["tokenizer"] = self.text.digest
        if self.mixed is not None:
            found |= _identity("mixed", self.mixed, True)
        if self.start is not None:
            found["start"] = self.start.digest
        if self.settings.plateau is not None and self.held_out is not None:
            found |= _identity("held_out", self.held_out, True)
        found["pixels"] = pixels.in_words(self.pixels)
        # A step that is made again must have the same bits: pixels are those of one decoder in one version.
        return found | {"decoder": DECODER} if isinstance(self.settings.data, READ) else found

    @property
    def measured(self) -> HeldOut | None:
        """What is measured on the held-out records."""
        if self.held_out is None:
            return None
        evaluation = self.settings.evaluation
        spec = self.data_spec(augment=False)
        if evaluation is not None:
            spec = replace(spec, augment=evaluation.view)
        return HeldOut(self.settings, self.shape, self.held_out, spec, self.text, self.captioned)

    @property
    def label_list(self) -> ClassList | None:
        """None where the phase has no labels."""
        return self.classes if self.settings.label is not None else None

    @property
    def public_records(self) -> list[tuple[PublicUse, str, RecordIndex]]:
        """What it uses as public besides its own records: what for, and where the config names them."""
        found: list[tuple[PublicUse, str, RecordIndex | None]] = [
            ("evaluation", "evaluation", self.held_out), ("monitor", "monitor", self.monitored),
            ("mixing", "mixing.data", self.mixed),
        ]  # fmt: skip
        return [(use, f"{self.where}.{key}", index) for use, key, index in found if index is not None]

    def index_of(self, part: Part) -> RecordIndex | None:
        if part.name == "data":
            return self.index
        return next((index for use, _, index in self.public_records if use == part.name), None)

    @property
    def reading(self) -> ReadingSettings:
        data = self.settings.data
        return data.reading if isinstance(data, READ) else ReadingSettings()

    def reader(
        self, derive: Derive, slots: SlotRows | None, reading: ReadOptions | None = None, pin_memory: bool = False
    ) -> BatchReader:
        """Of the records of the phase, as it trains on them."""
        return BatchReader(
            self.index, self.data_spec(augment=True), self.text, derive("augmentation"), derive("masks"),
            derive("dropout"), slots=slots, reading=reading, pin_memory=pin_memory,
        )  # fmt: skip

    def data_spec(self, augment: bool) -> DataSpec:
        """With `augment`, how training reads records; without, how measurements do: no dropout, no weights."""
        masks = self.shape.patches if self.settings.objective == "mae" else 0
        data = self.settings.data
        kind = data.augment if augment and isinstance(data, READ) else "center"
        label = self.settings.label
        outputs = self.shape.head.classes if self.label_list is None else len(self.label_list.names)
        one, several = (None, label) if self.settings.multi_label else (label, None)
        return DataSpec(
            self.shape.image_size, augment=kind, mask_patches=masks, drop_keys=augment and self.shape.drops,
            labels=() if one is None else (one,), target=one, listed=several,
            weight=self.settings.weight if augment else None,
            classes=outputs if label is not None else 0, class_list=self.label_list,
            mean=self.pixels.mean, std=self.pixels.std, pictures=self.settings.objective != "text",
        )  # fmt: skip


def _identity(name: str, index: RecordIndex, public: bool) -> dict[str, str]:
    """Digests of the records and of the list of excluded ones: which records take part shapes what is released."""
    records, excluded = ledger_digests(index, public=public)
    return {name: records, **({f"{name}_excluded": excluded} if excluded else {})}


def prepare(config: Config) -> list[ReadyPhase]:
    shape = resolve_shape(config)
    classes = class_list(config, shape.head.classes)
    phases: list[ReadyPhase] = []
    start: WarmStart | None = None
    starts: dict[str, Path] = {}
    for number, phase in enumerate(config.phases):
        if isinstance(phase.data, CheckpointData):
            start = open_start(phase.data, f"phases.{number}.data")
            starts[f"phases.{number}.data.path"] = start.path
        phases.append(_open(number, phase, shape, start, classes))
    # No proof says what the promises of private phases that protect different units come to together.
    private = [phase for phase in phases if phase.private]
    for phase in private[1:]:
        first, other = (unit_in_words(each.unit) for each in (private[0], phase))
        if first != other:
            raise RecipeError(
                f"{phase.where}.data.unit: phase {phase.name!r} protects {other}, but phase "
                f"{private[0].name!r} protects {first}, and a run makes one promise; name the same unit in both, or "
                "train them in two runs"
            )
    _keep_apart(phases, config.run.registry)
    require_numbers(_label_sources(phases), classes, shape.head.classes)
    hold_to_what_was_promised(_uses(phases), config.run.registry)
    for phase in phases:
        require_names(phase.number, phase.settings, phase.index_of)
    statistics = pixels.of_run(config.model, starts)
    phases = [replace(phase, pixels=statistics) for phase in phases]
    for at, phase in enumerate(phases):
        if phase.measured is not None:  # read only now that they may be
            found = usable(phase.measured, f"{phase.where}.evaluation")
            phases[at] = replace(phase, captioned=found.captioned)
    # Nothing that is never measured may choose: no checkpoint would be the best.
    known = {name: None for phase in phases if phase.measured is not None for name in phase.measured.metrics()}
    if config.run.keep_best is not None and config.run.keep_best not in known:
        fix = f"name one of {', '.join(known)}" if known else "give a phase `evaluation`"
        raise RecipeError(f"run.keep_best = {config.run.keep_best!r}: no phase measures that; {fix}, or leave it out")
    return phases


def planned(phases: list[ReadyPhase], config: Config) -> list[tuple[ReadyPhase, PrivacyPlan]]:
    """The private phases of a run that begins now, with their plans: whatever a plan is refused for is said before any
    rank is joined."""
    found: list[tuple[ReadyPhase, PrivacyPlan]] = []
    for phase in phases:
        privacy = phase.settings.privacy
        if privacy is not None:
            plan = plan_of_phase(phase.settings, phase.n, phase.where, config.run.noise)
            clip_rule(privacy, plan, config.micro_batch)
            found.append((phase, plan))
    return found


def _uses(phases: list[ReadyPhase]) -> list[Use]:
    found: list[Use] = []
    for phase in phases:
        found.append(
            Use(f"{phase.where}.data", phase.index, phase.settings.data.public and not phase.private, phase.private)
        )
        found += [Use(where, index, public=True) for _, where, index in phase.public_records]
    return found


def _label_sources(phases: list[ReadyPhase]) -> list[LabelSource]:
    found: list[LabelSource] = []
    for phase in phases:
        label = phase.settings.label
        found += LabelSource.of(f"{phase.where}.data.path", phase.index, label, phase.private)
        for _, where, index in phase.public_records:
            found += LabelSource.of(f"{where}.path", index, label)
    return found


def _keep_apart(phases: list[ReadyPhase], registry: str | None) -> None:
    """Refuses data used as public, in any phase, that share a shard with records that are not public.

    Those are the records that a private phase protects, and those that its non-private twin trains on.
    """
    owners = [phase for phase in phases if phase.private or not phase.settings.data.public]
    for phase in phases:
        uses = [(f"{where}.path", index) for _, where, index in phase.public_records]
        if not phase.private and phase.settings.data.public:
            uses.append((f"{phase.where}.data.path", phase.index))
        for (where, index), owner in product(uses, owners):
            shared = _shared(owner.index, index)
            if shared is not None and not apart(owner.index, index):
                raise RecipeError(
                    f"{where}: {shared.name} belongs to the private records of phase {owner.name!r}; name public data"
                    if owner.private
                    else f"{where}: {shared.name} belongs to the records of phase {owner.name!r}, which are not "
                    "declared public; name public data"
                )
    for phase, owner in product(phases, owners):
        if phase.start is None or not owner.private:
            continue
        whole = every_ledger_digest(owner.index.whole) if isinstance(owner.index, SplitIndex) else frozenset[str]()
        known = every_ledger_digest(owner.index) | whole | RunLog.of(owner.index, registry).names()
        if known & phase.start.protected:
            raise RecipeError(
                f"{phase.start.path} was trained on the private records of phase {owner.name!r}, and what it spent "
                "would have to be added; continue that run, or start from other weights"
            )
        if known & phase.start.without_noise:
            raise RecipeError(
                f"{phase.start.path} used the records that phase {owner.name!r} protects without noise, or began from "
                "weights that did; start from other weights"
            )


def _shared(private: RecordIndex, public: RecordIndex) -> Shard | None:
    if isinstance(public, StreamIndex):
        return public.shared_with(private.shards, places_of(private))
    return shared_shard(private.shards, public.shards)


def resolve_shape(config: Config) -> Shape:
    try:
        config.model.require_whole_patches()
        return config.model.resolved()
    except SettingsError as error:
        raise RecipeError(f"model: {error}") from None


def select_trained(model: nn.Module, phase: Phase) -> list[str]:
    """Freezes what the phase does not train; the names of what it does."""
    try:
        return select(model, phase.trainable)
    except TrainableError as error:
        raise RecipeError(f"trainable: {str(error).rstrip('.')}") from None


def _open(
    number: int, phase: Phase, shape: Shape, start: WarmStart | None, classes: ClassList | None
) -> ReadyPhase:  # fmt: skip
    where = f"phases.{number}"
    index = open_data(phase, shape, where, classes)
    if phase.privacy is not None or not phase.data.public:
        refuse_plain_http(index, f"{where}.data.path")
    text = open_text(phase, shape, where)
    out = class_filter(phase.data, phase.label, classes, f"{where}.data")
    measured = phase.evaluation, phase.monitor
    held_out, monitored = (
        open_public(part.path, f"{where}.{name}.path", classes, out) if part else None
        for name, part in zip(("evaluation", "monitor"), measured, strict=True)
    )
    mixed = None
    if phase.mixing is not None:
        mixed = open_records(phase.mixing.data, phase, shape, f"{where}.mixing.data", classes)
    units = open_units(index, phase.data, f"{where}.data")
    n = index.records if units is None else units.count
    if phase.privacy is None and phase.batch is not None and phase.batch > n:
        what = "records" if units is None else "units"
        raise RecipeError(f"{where}.batch = {phase.batch} exceeds the {n} {what} of its data")
    phase = with_steps(phase, n, where)
    return ReadyPhase(
        number, phase, shape, index, text, held_out, monitored, mixed, start, classes, _left_out(phase, where), units
    )


def _left_out(phase: Phase, where: str) -> dict[str, str]:
    sources = {"excluded_classes": (phase.data, f"{where}.data")}
    if phase.mixing is not None:
        sources["mixed_excluded_classes"] = (phase.mixing.data, f"{where}.mixing.data")
    filters = {name: class_filter(data, None, None, place) for name, (data, place) in sources.items()}
    return {name: found.excluded.digest for name, found in filters.items() if found is not None}


def with_steps(phase: Phase, records: int, where: str) -> Phase:
    """The phase with its batch, steps and warm-up as numbers, however the config gives them."""
    if phase.privacy is not None and math.isinf(phase.privacy.expected_batch):
        every = phase.privacy.model_copy(update={"expected_batch": float(records)})
        phase = phase.model_copy(update={"privacy": every})
    if phase.trainable == STATISTICS and phase.privacy is None:
        phase = phase.model_copy(update={"batch": records})
    steps, schedule = phase.steps, phase.schedule
    batch = phase.batch or (phase.privacy.expected_batch if phase.privacy else 1)
    sampling, asked = "poisson" if phase.privacy is None else phase.privacy.sampling, "epochs"
    try:
        if phase.epochs is not None:
            steps = steps_of(phase.epochs, records, batch, sampling)
        if schedule.warmup_epochs is not None:
            asked = "schedule.warmup_epochs"
            warmup = round(steps_of_passes(schedule.warmup_epochs, records, batch))
            schedule = schedule.model_copy(update={"warmup": warmup, "warmup_epochs": None})
    except PlanError as error:
        raise RecipeError(f"{where}.{asked}: {error}") from None
    return phase.model_copy(update={"steps": steps, "schedule": schedule})


def unit_of(phase: Phase) -> Unit | None:
    data = phase.data
    if not isinstance(data, ShardData) or data.by is None:
        return None
    return Unit(data.by, data.rows_per_unit or 1, data.unit_reduce or "mean")


def plan_of_phase(
    phase: Phase, records: int, where: str, noise: NoiseKind = "aes", known: PrivacyPlan | None = None, table: str = ""
) -> PrivacyPlan:
    """The plan of a private phase for n = `records`, or units. `known`: the ledger's plan, whose σ and matrix need not
    be computed again; `table`: the ledger's digest of the table of units."""
    assert phase.privacy is not None, "a plan is of a private phase"
    units = unit_of(phase)
    try:
        request = phase.privacy.request(records, phase.steps, exact=noise == "exact")
        return make_plan(request if units is None else replace(request, units=replace(units, table=table)), known)
    except (PlanError, AdaptiveError, AccountingError) as error:
        raise RecipeError(f"{where}.privacy: {error}") from None


@lru_cache(maxsize=256)
def planned_epsilon(plan: PrivacyPlan) -> float:
    return epsilon([plan.event()], plan.delta)


def clip_rule(privacy: Privacy, plan: PrivacyPlan, micro_batch: int) -> ClipRule:
    clip = privacy.clip
    try:
        return ClipRule.of(plan, clip.kind, clip.gamma, micro_batch, clip.grouping)
    except ClipError as error:
        raise RecipeError(str(error)) from None
