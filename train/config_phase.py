"""The section of the config that describes one phase of a run: what is trained on what, how, and until when."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from train.config_data import CheckpointData, Data, HeldOutData, ShardData, StreamData, SyntheticData
from train.config_privacy import Privacy
from train.monitor_settings import Monitor
from train.optim_settings import Optimizer, Schedule
from train.section import Section

MOST_STEPS = 10**9


class ZeroShot(Section):
    """Labels scored as the next words of a caption; the records' .json holds the true number under the axis's name."""

    prompt: str = "a photo of a"
    axes: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(
        min_length=1, description="Asked in order, each after the words found so far."
    )


class Evaluation(Section):
    """Public held-out records, measured at checkpoints only: nothing leaves before the weights are durable."""

    path: str
    records: int = Field(default=512, gt=0)
    zero_shot: ZeroShot | None = None


class Plateau(Section):
    """Ends the phase once the loss on the public held-out records stops falling. A private phase that may end so
    claims its planned budget."""

    patience: int = Field(default=3, gt=0, description="Checkpoints in a row without improvement.")
    min_delta: float = Field(default=0.0, ge=0, description="A smaller fall of the loss is no improvement.")
    not_before: int = Field(default=0, ge=0, description="Steps that are made in any case.")


class Mixing(Section):
    """Public gradients beside the noised ones: alpha · public + (1 - alpha) · private, after the noise."""

    data: ShardData | SyntheticData
    batch: int = Field(gt=0, description="Public records per step, drawn by a sampler of their own.")
    shape: Literal["constant", "cosine", "linear", "switch", "sample-ratio"] = Field(
        default="constant",
        description="How alpha goes from `start` to `end`; cosine: a quarter wave, DPMD with 0 to 1; switch: at once; "
        "sample-ratio: batch / (batch + expected_batch), always.",
    )
    start: float | None = Field(default=0.5, ge=0, le=1, description="Alpha at the first step.")
    end: float | None = Field(default=None, ge=0, le=1, description="Alpha after `steps`; constant has none.")
    steps: int | None = Field(default=None, gt=0, description="Steps on the way to `end`, which follows; null: all.")

    @model_validator(mode="after")
    def _means_something(self) -> Mixing:
        if not self.data.public:
            raise ValueError("the data to mix in are not declared public; their gradients get no noise")
        if self.data.reading.node_shards is not None:
            raise ValueError("data to mix in are read by all ranks alike; leave reading.node_shards out")
        if self.shape in ("cosine", "linear", "switch") and self.end is None:
            raise ValueError(f"shape {self.shape!r} needs `end`, the alpha it goes to")
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
    """What the frozen part of the model makes of every record, computed once and kept: for training a head alone."""

    folder: str | None = Field(
        default=None, description="null: RUN_DIR/secret. Features of private records are private, like the records."
    )


class Phase(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    data: Data
    objective: Literal["mae", "caption", "classify"]
    trainable: Literal["all", "head", "bias", "lora"] = "all"
    features: Features | None = Field(default=None, description="Only with trainable = head, and without augmentation.")
    privacy: Privacy | None = None
    mixing: Mixing | None = None
    batch: int | None = Field(default=None, gt=0, description="Records per step of a non-private phase.")
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule(peak=1.0, shape="constant")
    steps: int = Field(default=0, ge=0, le=MOST_STEPS, description="Or `epochs`, or `until_budget`.")
    epochs: float | None = Field(
        default=None, gt=0, le=1e6, description="Steps are then epochs · n / batch, rounded up."
    )
    until_budget: bool = Field(default=False, description="As many steps as epsilon pays at the given noise.")
    plateau: Plateau | None = None
    evaluation: Evaluation | None = None
    monitor: Monitor | None = None

    @property
    def trains(self) -> bool:
        """Whether it has steps: a checkpoint to start from and a mere evaluation have none."""
        return not isinstance(self.data, CheckpointData | HeldOutData)

    @property
    def tokenizer(self) -> str | None:
        return None if isinstance(self.data, CheckpointData) else self.data.tokenizer

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        complaint = self._of_training() if self.trains else self._of_standing_still()
        complaint = complaint or self._of_objective()
        if complaint is not None:
            raise ValueError(f"phase {self.name!r} {complaint}")
        return self

    def _of_training(self) -> str | None:
        ends = [name for name in ("steps", "epochs", "until_budget") if getattr(self, name)]
        if len(ends) != 1:
            had = f"has {' and '.join(ends)}" if ends else "has no end"
            return f"{had}; give one of steps, epochs and until_budget"
        if "schedule" not in self.model_fields_set:
            return "needs `schedule`, its learning rates"
        if self.privacy is None and self.batch is None:
            return "is non-private and needs `batch`, its records per step"
        if self.privacy is not None and self.batch is not None:
            return "has both `batch` and `privacy.expected_batch`; a private phase takes the latter"
        if isinstance(self.data, StreamData):
            return self._of_streams()
        if self.privacy is not None and self.data.public:
            return "has `privacy`, but its data are declared public; drop one of them"
        if self.until_budget and (self.privacy is None or self.privacy.noise_multiplier is None):
            return "trains until_budget, for which it needs privacy.noise_multiplier: epsilon alone fixes no number"
        if self.until_budget and self.privacy is not None and self.privacy.tan is not None:
            return "simulates another run with privacy.tan, so it needs that run's number of `steps`"
        if self.mixing is not None and self.optimizer.params.noise_floor is not None:
            return "has `mixing`, which weakens the noise that noise_floor subtracts; drop one of them"
        if self.plateau is not None and self.evaluation is None:
            return "ends at a plateau of the public loss and needs `evaluation`, which measures it"
        return self._of_features()

    def _of_streams(self) -> str | None:
        if self.privacy is not None:
            return (
                "has `privacy`, but a stream is shuffled, and the accounting holds for Poisson samples alone; index "
                "the shards (launch/prepare.py index) and use source 'shards'"
            )
        if self.epochs is not None or self.schedule.warmup_epochs is not None:
            return "counts in epochs, but how many records a stream has is not known; give steps and warmup"
        if self.features is not None:
            return "keeps features, for which records need numbers that a stream has not; use source 'shards'"
        return None

    def _of_features(self) -> str | None:
        if self.features is None:
            return None
        if self.trainable != "head" or self.objective != "classify":
            return "keeps features, which stay the same only with objective 'classify' and trainable 'head'"
        if getattr(self.data, "augment", "none") not in ("none", "center"):
            return "keeps features and augments its pictures, which change from step to step; drop one of them"
        if isinstance(self.data, ShardData) and self.data.reading.node_shards is not None:
            return "keeps features, which every rank reads of every record; leave data.reading.node_shards out"
        if self.weight is not None:
            return "keeps features, beside which no weights of records are kept; drop one of them"
        if self.mixing is not None:
            return "keeps features and mixes in public pictures; drop one of them"
        if self.monitor is not None:
            return "keeps features and has `monitor`, which measures the whole model; drop one of them"
        return None

    def _of_standing_still(self) -> str | None:
        forbidden = {
            "steps", "epochs", "until_budget", "batch", "privacy", "mixing", "plateau", "features", "optimizer",
            "schedule", "trainable", "monitor",
        }  # fmt: skip
        odd = sorted(name for name in self.model_fields_set & forbidden if getattr(self, name))
        if odd:
            return f"trains nothing, so {', '.join(odd)} mean nothing there; leave them out"
        if isinstance(self.data, HeldOutData) and self.evaluation is None:
            return "only evaluates and needs `evaluation`"
        return None

    @property
    def label(self) -> str | None:
        """What a classifier is to say, by the name that the records have for it."""
        return (
            self.data.label if isinstance(self.data, ShardData | StreamData) and self.objective == "classify" else None
        )

    @property
    def weight(self) -> str | None:
        """The number in a record's .json that multiplies its loss."""
        return self.data.weight if isinstance(self.data, ShardData | StreamData) else None

    def _of_objective(self) -> str | None:
        if self.objective == "classify" and self.trains and self.label is None:
            return "trains on labels and needs data.label, the field of a record that holds them"
        if self.label is not None and self.mixing is not None and isinstance(self.mixing.data, SyntheticData):
            return "trains on labels, which pictures made by rule have not; mix in shards"
        if self.objective == "caption" and self.trains and self.tokenizer is None:
            return "trains on captions and needs data.tokenizer"
        if self.objective == "caption" and self.evaluation is not None and self.tokenizer is None:
            return "measures captions and needs data.tokenizer; source 'held-out' takes one"
        if self.objective != "caption" and self.evaluation is not None and self.evaluation.zero_shot is not None:
            return "writes no captions, so it cannot be asked for zero-shot labels"
        return None
