"""The config's section on one phase of a run: what is trained, on which data, how, and for how long."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from murmuration.accounting.errors import PlanError
from murmuration.accounting.plan import require_together
from murmuration.data.decode.augment import AREAS, ResizeCrop, SteadyView, require_known
from murmuration.train.config.data import CheckpointData, Data, HeldOutData, ShardData, StreamData, SyntheticData
from murmuration.train.config.optimizer import Optimizer, OptimizerParams, Schedule
from murmuration.train.config.privacy import ALL, Clip, Privacy
from murmuration.train.config.section import Section, word_given

# The config section of the loss-improvement monitor.


class Monitor(Section):
    """Public records on which the loss's slope and curvature are measured at checkpoints."""

    path: str = Field(description="Indexed shards or images, with no protected record.")
    public: Literal[True] = Field(description="Your word, certified, that these records are public.")
    records: int = Field(
        default=256, ge=2, description="Records measured, at about 13 + 23·probes forward passes each."
    )
    every: int = Field(default=1, gt=0, description="Checkpoints between measurements.")
    probes: int = Field(default=4, gt=0, description="Random vectors per trace.")
    micro_batch: int | None = Field(
        default=None, gt=0, description="Records at a time; null: a quarter of the training's."
    )

    @model_validator(mode="before")
    @classmethod
    def _word_given(cls, given: Any) -> Any:
        return word_given(given, "the monitor's records")


MOST_STEPS = 10**9


class ZeroShot(Section):
    """Labels scored as the next words of a caption."""

    prompt: str = Field(default="a photo of a", description="Start of the caption.")
    axes: Annotated[dict[str, Annotated[list[str], Field(min_length=1)]], Field(min_length=1)] | None = Field(
        default=None,
        description="Labels by the field of the true one's number, in order; null: the class folders.",
    )
    class_names: str | None = Field(
        default=None,
        description="Without axes: a public JSON file {class: [name, …]}; null: folder names.",
    )

    @model_validator(mode="after")
    def _axes_or_classes(self) -> ZeroShot:
        if self.axes is not None and self.class_names is not None:
            raise ValueError("zero_shot.class_names are for class folders, and axes list their own labels; drop one")
        if "{}" in self.prompt:
            raise ValueError("zero_shot.prompt contains {}, but labels always follow it; leave {} out")
        return self


class Evaluation(Section):
    """Public held-out records, measured at checkpoints and published once the weights are durable."""

    path: str = Field(description="Indexed shards or images.")
    public: Literal[True] = Field(description="Your word, certified, that these records are public.")
    records: int = Field(default=512, gt=0, description="Records measured.")
    resize: int | None = Field(
        default=None,
        gt=0,
        description="Shorter side before `crop`; null: 256 with `crop`, else the middle square.",
    )
    crop: int | None = Field(
        default=None,
        gt=0,
        description="Side of the middle; null: 224 with `resize`. Other image sizes scale both.",
    )
    zero_shot: ZeroShot | None = Field(
        default=None,
        description="caption: scores labels as the next words; null: class folders by name.",
    )
    real: str | None = Field(
        default=None,
        description="ReaL: a public JSON file {picture: [class, …]}, or ImageNet's real.json.",
    )

    @model_validator(mode="before")
    @classmethod
    def _word_given(cls, given: Any) -> Any:
        return word_given(given, "records to evaluate on")

    @model_validator(mode="after")
    def _cuts_something_out(self) -> Evaluation:
        require_known(self.view)
        return self

    @property
    def view(self) -> SteadyView:
        """What is shown of a picture: the published view where one of its two numbers is given."""
        if self.resize is None and self.crop is None:
            return "center"
        usual = ResizeCrop()
        return ResizeCrop(self.resize or usual.resize, self.crop or usual.crop)


class Plateau(Section):
    """Ends the phase once the public held-out loss stops falling; a private one then claims its planned budget."""

    patience: int = Field(default=3, gt=0, description="Checkpoints in a row without improvement.")
    min_delta: float = Field(default=0.0, ge=0, description="Least improvement.")
    not_before: int = Field(default=0, ge=0, description="Fewest steps.")


class Mixing(Section):
    """Mixes public gradients with the noised ones: alpha · public + (1 - alpha) · private, after the noise."""

    data: ShardData | SyntheticData = Field(description="Public records.")
    batch: int = Field(gt=0, description="Public records per step.")
    shape: Literal["constant", "cosine", "linear", "switch", "sample-ratio"] = Field(
        default="constant",
        description="How alpha moves. cosine: a quarter wave; sample-ratio: batch / (batch + expected_batch).",
    )
    start: float | None = Field(default=0.5, ge=0, le=1, description="Alpha at the first step; null for sample-ratio.")
    end: float | None = Field(
        default=None, ge=0, le=1, description="Alpha after `steps`; null for constant and sample-ratio."
    )
    steps: int | None = Field(default=None, gt=0, description="Steps until alpha is `end`; null: the whole phase.")

    @model_validator(mode="after")
    def _means_something(self) -> Mixing:
        if not self.data.public:
            raise ValueError("the data to mix in are not declared public; their gradients get no noise")
        if self.data.reading.node_shards is not None:
            raise ValueError("every rank reads all of the data to mix in; leave reading.node_shards out")
        if isinstance(self.data, ShardData) and (self.data.rows_per_unit or self.data.unit_reduce):
            raise ValueError("single records are mixed in; of units, `unit` alone, which says how the set is cut")
        if self.shape in ("cosine", "linear", "switch") and self.end is None:
            raise ValueError(f"shape {self.shape!r} needs `end`, the final alpha")
        if self.shape == "switch" and self.steps is None:
            raise ValueError("shape 'switch' needs `steps`, after which alpha is `end`")
        given = sorted(
            name for name in self.model_fields_set & {"start", "end", "steps"} if getattr(self, name) is not None
        )
        if self.shape == "sample-ratio" and given:
            raise ValueError(
                f"shape 'sample-ratio' has one alpha, from the two batches; set {', '.join(given)} to null"
            )
        if self.shape == "constant" and set(given) - {"start"}:
            raise ValueError("shape 'constant' has one alpha, `start`; set end and steps to null")
        if self.shape != "sample-ratio" and self.start is None:
            raise ValueError(f"shape {self.shape!r} needs `start`, the alpha of the first step")
        return self

    @property
    def weight(self) -> str | None:
        return self.data.weight if isinstance(self.data, ShardData) else None


class Features(Section):
    """Outputs of the frozen body for every record, computed once, to train only a head."""

    folder: str | None = Field(
        default=None,
        description="Shared folder, as private as the records; null: that of an earlier phase on the same "
        "records, or RUN_DIR/secret.",
    )


class SolvedHead(Section):
    """Least squares on clipped and noised sums (trainable statistics)."""

    ridge: float | None = Field(
        default=None,
        gt=0,
        description="Added to the eigenvalues of the mean of z·zᵀ; null: a quarter of the largest by noise alone.",
    )


STATISTICS, WHITENED = "statistics", "whitened"
ONE_STEP = Schedule(peak=1.0, shape="constant")
PLAIN_DESCENT = Optimizer(type="SGD", params=OptimizerParams(momentum=0.0))
TEXTUAL = ("caption", "text")
"""Objectives that read a record's text."""


def _not_all(given: object) -> object:
    """`--set phases.N.privacy=null` passes a private phase's "all" on to the twin without privacy."""
    if given == ALL:
        raise ValueError(
            "a phase without privacy is trained on so many records per step; set this to their number, as 'all' is for "
            "privacy.expected_batch"
        )
    return given


class Phase(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="Unique name in ledger, logs and plots.")
    data: Data = Field(description="Records to read.")
    objective: Literal["mae", "caption", "classify", "text"] = Field(
        description="Loss; head: classify with trainable statistics. A phase that loads weights takes the next one's."
    )
    trainable: Literal["all", "head", "bias", "lora", "statistics", "whitened"] = Field(
        default="all",
        description="What is trained. statistics: a classifier's head, solved in one step; whitened: one on features "
        "that the sums of a phase with statistics, just before, have whitened.",
    )
    head: SolvedHead | None = Field(default=None, description="How to solve statistics.")
    features: Features | None = Field(
        default=None,
        description="Caches a frozen body's output; only for classify, trainable head, no augmentation.",
    )
    privacy: Privacy | None = Field(default=None, description="null: not private, as every output says.")
    mixing: Mixing | None = Field(default=None, description="Mixes in public gradients after the noise.")
    batch: Annotated[int | None, BeforeValidator(_not_all)] = Field(
        default=None, gt=0, description="Records per step without privacy."
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="Update rule.")
    schedule: Schedule = Field(
        default=Schedule(peak=1.0, shape="constant"),
        description="Learning rates; required to train.",
    )
    steps: int = Field(default=0, ge=0, le=MOST_STEPS, description="Length: give steps or epochs.")
    epochs: float | None = Field(
        default=None, gt=0, le=1e6, description="Length: epochs · n / batch steps, rounded up."
    )
    plateau: Plateau | None = Field(default=None, description="Ends the phase early; needs `evaluation`.")
    evaluation: Evaluation | None = Field(default=None, description="Public records to measure at checkpoints.")
    monitor: Monitor | None = Field(default=None, description="Measures what a step gains.")

    @property
    def trains(self) -> bool:
        """Whether the phase has steps: one that loads a checkpoint or only evaluates has none."""
        return not isinstance(self.data, CheckpointData | HeldOutData)

    @property
    def blind(self) -> str | None:
        """What to say of a private phase of which nobody will see whether it learns."""
        privacy = self.privacy
        if privacy is None or self.evaluation is not None or self.monitor is not None or privacy.release:
            return None
        return (
            "nothing is measured while it trains, so nobody will see whether it learns; name public records in "
            "`evaluation`, or release the loss with noise (`privacy.release`)"
        )

    @property
    def rows_of_a_slot(self) -> int:
        """How many rows a micro-batch computes for each of its records, or units."""
        records = (self.data.rows_per_unit or 1) if isinstance(self.data, ShardData) else 1
        return records if self.privacy is None else records * self.privacy.views

    @property
    def mechanisms(self) -> frozenset[str]:
        """What the phase asks for, as `accounting.plan.MECHANISMS` names it."""
        privacy = self.privacy
        chosen = {
            "statistics": self.trainable == STATISTICS,
            "features": self.features is not None,
            "mixing": self.mixing is not None,
            "monitor": self.monitor is not None,
            "units": isinstance(self.data, ShardData) and self.data.by is not None,
        }
        return frozenset(name for name, given in chosen.items() if given) | (privacy.mechanisms if privacy else set())

    @property
    def random_inputs(self) -> bool:
        """Whether what the model gets of a record is, or may be, another one each time that it is read."""
        augments = getattr(self.data, "augment", "none") in AREAS
        return augments or self.objective in ("mae", "caption")  # masks; one of several captions

    @property
    def tokenizer(self) -> str | None:
        return None if isinstance(self.data, CheckpointData) else self.data.tokenizer

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        if not self.trains:
            complaint = self._of_standing_still()
        elif (complaint := self._of_steps_and_batch()) is None:
            complaint = self._of_streams() if isinstance(self.data, StreamData) else self._of_numbered_records()
        complaint = complaint or self._of_objective()
        if complaint is not None:
            raise ValueError(f"phase {self.name!r} {complaint}")
        self.require_together()
        return self

    def require_together(self, more: Collection[str] = ()) -> None:
        """Refuses what does not go together, in the words of plan and library. `more`: what the run asks for."""
        try:
            require_together(self.mechanisms | set(more))
        except PlanError as error:
            raise ValueError(f"phase {self.name!r}: {error}") from None

    def _of_steps_and_batch(self) -> str | None:
        if bool(self.steps) == bool(self.epochs):
            return f"has {'steps and epochs' if self.steps else 'no end'}; give steps or epochs"
        if "schedule" not in self.model_fields_set:
            return "needs `schedule`, its learning rates"
        if self.privacy is None and self.batch is None and self.trainable != STATISTICS:
            return "is non-private and needs `batch`, its records per step"
        if self.privacy is not None and self.batch is not None:
            return "has both `batch` and `privacy.expected_batch`; a private phase takes the latter"
        return None

    def _of_numbered_records(self) -> str | None:
        if self.privacy is not None and self.data.public:
            return "has `privacy`, but its data are declared public; drop one of them"
        if self.privacy is not None and self.privacy.loss_probes is not None and self.schedule.shape != "constant":
            return (
                "has privacy.loss_probes, which find the learning rate while training, and a schedule that lowers it; "
                "set schedule.shape to 'constant', or leave loss_probes out"
            )
        if self.plateau is not None and self.evaluation is None:
            return "ends at a plateau of the public loss and needs `evaluation`, which measures it"
        return self._of_statistics() or self._of_features()

    def _of_statistics(self) -> str | None:
        if self.trainable != STATISTICS:
            return "has `head`, which says how sums are solved; use trainable 'statistics'" if self.head else None
        if self.objective != "classify":
            return "solves a classifier's head, and needs objective 'classify'"
        if self.steps != 1 or self.schedule != ONE_STEP or self.optimizer != PLAIN_DESCENT:
            return "solves its head from one pass over all records; leave steps, epochs, schedule and optimizer out"
        if self.batch is not None:
            return "takes all records in its one step; leave `batch` out"
        if self.plateau is not None:
            return "is one step, which cannot end at a plateau; leave `plateau` out"
        return None if self.privacy is None else self._of_private_statistics(self.privacy)

    def _of_private_statistics(self, privacy: Privacy) -> str | None:
        if not math.isinf(privacy.expected_batch):
            return "takes all records in its one step; leave privacy.expected_batch out, or set it to 'all'"
        if privacy.clip != Clip():
            return "has sums to which no record adds more than 1; leave privacy.clip out"
        return None

    @property
    def view(self) -> SteadyView | None:
        """By which its model is to see pictures later: as it is evaluated, or as it was trained where that was without
        crops. None: the published view, which suits training by random crops."""
        if self.objective == "text":
            return None
        if self.evaluation is not None and self.evaluation.view != "center":
            return self.evaluation.view
        return None if getattr(self.data, "augment", None) in AREAS else "center"

    def _of_streams(self) -> str | None:
        if self.privacy is not None:
            return (
                "has `privacy`, but a stream is shuffled, and the accounting holds only for Poisson samples; index "
                "the shards (launch/prepare.py index) and use source 'shards'"
            )
        if self.trainable == STATISTICS:
            return "solves its head from one pass over numbered records, and a stream has none; use source 'shards'"
        if self.epochs is not None or self.schedule.warmup_epochs is not None:
            return "counts in epochs, but the number of records in a stream is not known; give steps and warmup"
        if self.features is not None:
            return "keeps features, which need numbered records, and a stream has none; use source 'shards'"
        return None

    def _of_features(self) -> str | None:
        if self.features is None:
            return None
        if self.trainable not in ("head", STATISTICS, WHITENED) or self.objective != "classify":
            return "keeps features, which stay the same only with objective 'classify' and trainable 'head'"
        if getattr(self.data, "augment", "none") not in ("none", "center"):
            return "keeps features and augments its pictures, which change from step to step; drop one of them"
        if isinstance(self.data, ShardData) and self.data.reading.node_shards is not None:
            return "keeps features, for which every rank reads every record; leave data.reading.node_shards out"
        if self.weight is not None:
            return "keeps features and has data.weight, but no record weights are stored with features; drop one"
        return None

    def _of_standing_still(self) -> str | None:
        forbidden = {
            "steps", "epochs", "batch", "privacy", "mixing", "plateau", "features", "optimizer",
            "schedule", "trainable", "monitor", "head",
        }  # fmt: skip
        odd = sorted(name for name in self.model_fields_set & forbidden if getattr(self, name))
        if odd:
            return f"trains nothing, so {', '.join(odd)} would have no effect; leave them out"
        if isinstance(self.data, HeldOutData) and self.evaluation is None:
            return "only evaluates and needs `evaluation`"
        return None

    def _of_texts(self) -> str | None:
        if (self.trains and self.tokenizer is None) or (self.evaluation is not None and self.tokenizer is None):
            return "reads texts and needs data.tokenizer"
        if self.monitor is not None:
            return "trains a language model, whose curvature is not measured; leave monitor out"
        if self.privacy is not None and self.privacy.held_out is not None:
            return "does not predict labels, so it has no accuracy to release; use objective 'classify'"
        if self.evaluation is not None and (self.evaluation.zero_shot is not None or self.evaluation.real is not None):
            return "names no classes, so evaluation.zero_shot and evaluation.real have nothing to score; leave them out"
        if self.privacy is not None and self.privacy.views > 1:
            return "sees no picture that could be cropped in several ways; set privacy.views to 1"
        data = [self.data] + ([self.mixing.data] if self.mixing is not None else [])
        if any(isinstance(each, SyntheticData) for each in data):
            return "reads texts, and synthetic records are pictures; name tar shards"
        odd = ("label", "classes", "exclude_classes")
        if given := [name for each in data for name in odd if getattr(each, name, None) is not None]:
            return f"does not train on labels, so data.{given[0]} would have no effect; leave it out"
        if any(getattr(each, "augment", "none") != "none" for each in data):
            return "sees no picture that data.augment could change; leave it out"
        return None

    @property
    def label(self) -> str | None:
        """The field of a record that contains a classifier's label. A phase without records of its own measures class
        folders, or .cls files."""
        if self.objective != "classify":
            return None
        if isinstance(self.data, ShardData | StreamData):
            return self.data.label
        return "cls" if self.evaluation is not None else None

    @property
    def multi_label(self) -> bool:
        """Whether the field lists any number of classes."""
        return isinstance(self.data, ShardData | StreamData) and self.data.multi_label

    @property
    def weight(self) -> str | None:
        """The number in a record's .json that multiplies its loss."""
        return self.data.weight if isinstance(self.data, ShardData | StreamData) else None

    def _of_objective(self) -> str | None:
        if self.objective == "text":
            return self._of_texts()
        if self.objective == "classify" and self.trains and self.label is None:
            return "trains on labels and needs data.label, the field of a record that contains them"
        if self.label is None and getattr(self.data, "classes", None) is not None:
            return "does not train on labels, so data.classes would have no effect; leave it out"
        if self.label is not None and self.mixing is not None and isinstance(self.mixing.data, SyntheticData):
            return "trains on labels, which synthetic pictures do not have; mix in shards"
        if self.objective == "caption" and self.trains and self.tokenizer is None:
            return "trains on captions and needs data.tokenizer"
        if self.objective == "caption" and self.evaluation is not None and self.tokenizer is None:
            return "measures captions and needs data.tokenizer; source 'held-out' takes one"
        if self.objective != "classify" and self.privacy is not None and self.privacy.held_out is not None:
            return "does not predict labels, so it has no accuracy to release; use objective 'classify'"
        if self.objective != "caption" and self.evaluation is not None and self.evaluation.zero_shot is not None:
            return "writes no captions, so it has no zero-shot labels to score; leave evaluation.zero_shot out"
        if self.objective == "mae" and self.evaluation is not None and self.evaluation.real is not None:
            return "names no classes, so none can be right; leave evaluation.real out"
        return self._of_several_labels()

    def _of_several_labels(self) -> str | None:
        mixed = self.mixing.data if self.mixing is not None else None
        if isinstance(mixed, ShardData) and mixed.multi_label:
            return "reads mixed-in records as its own; set multi_label in data, and leave it out of mixing.data"
        if not self.multi_label:
            return None
        if self.label is None:
            return "does not train on labels, so data.multi_label would have no effect; leave it out"
        if self.label == "cls":
            return "has data.multi_label, and a .cls names one class; name a field of the .json that lists classes"
        if any(getattr(data, "exclude_classes", None) is not None for data in (self.data, mixed)):
            return "has data.multi_label, so a record has no one class to leave it out by; drop exclude_classes"
        if self.features is not None:
            return "keeps features, with which one class per record is stored; leave data.multi_label out, or features"
        if self.privacy is not None and self.privacy.held_out is not None:
            return "releases an accuracy, which needs one class per record; leave data.multi_label out, or the release"
        if self.evaluation is not None and self.evaluation.real is not None:
            return "has data.multi_label, by which every record lists all of its classes; leave evaluation.real out"
        return None
