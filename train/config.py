"""The one JSON that describes a run, and nothing that it does not say.

DeepSpeed's own keys stay at top level (those that cannot weaken the promise); ours are `about`, `model`, `phases`
and `run`. Unknown keys are refused here, keys that would break privacy in `refusals.py`, both before any compute.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from accounting import tuning as accounted_tuning
from data.kinds import Kind
from model.settings import ModelSettings
from train.optim_settings import Optimizer, Schedule
from train.section import Section

_TOKENIZER = "'clip', 'clip:16384', or a local tokenizer.json or vocab.txt that saw no private caption."


class About(Section):
    """For people: what the recipe is, what it costs, what to expect. Not part of the run's identity."""

    command: str = ""
    cost: str = ""
    expect: str = ""
    source: str = ""


class Offload(Section):
    """Optimizer state in the main memory of the host; all of it, since DeepSpeed steps a part by its own optimizer."""

    device: Literal["cpu"] = "cpu"
    pin_memory: bool = False


class ZeroOptimization(Section):
    """DeepSpeed's section of that name, without the settings that hide or change gradients."""

    stage: Literal[0, 1, 2, 3] = 1
    reduce_bucket_size: int = Field(default=50_000_000, gt=0)
    allgather_bucket_size: int = Field(default=50_000_000, gt=0)
    contiguous_gradients: bool = True
    overlap_comm: Literal[False] = False
    round_robin_gradients: Literal[False] = False
    offload_optimizer: Offload | None = None
    stage3_param_persistence_threshold: int | None = Field(default=None, ge=0, description="Stage 3; DeepSpeed's own.")
    stage3_max_live_parameters: int | None = Field(default=None, gt=0, description="Stage 3; DeepSpeed's own.")
    stage3_prefetch_bucket_size: int | None = Field(default=None, gt=0, description="Stage 3; DeepSpeed's own.")


class ReadingSettings(Section):
    """How records are fetched and decoded. Nothing here changes a pixel, so a resumed run may change it."""

    workers: int | None = Field(
        default=None,
        ge=0,
        description="Decoding processes per rank; null: the free cores; 0: inside the trainer, not isolated.",
    )
    in_flight: int | None = Field(default=None, gt=0, description="Records read at a time; null: 64 from a URL.")
    timeout_seconds: float = Field(default=30.0, gt=0, description="Of one request to a remote store.")
    cache_dir: str | None = Field(default=None, description="Local folder that keeps remote records, in the clear.")
    cache_gib: float = Field(default=100.0, gt=0, description="At most this much is kept, by all ranks of a node.")
    cache_keep: Literal["records", "shards"] = "records"


class ShardData(Section):
    """Records in indexed tar shards: a folder, one tar, or a brace pattern."""

    source: Literal["shards"] = "shards"
    path: str
    public: bool = Field(default=False, description="Your word that nobody's privacy depends on these records.")
    expected_records: int | None = Field(
        default=None, gt=0, description="Serves --dry-run where the data are not at hand."
    )
    augment: Literal["none", "center", "random_resized_crop", "inception_crop"] = "none"
    tokenizer: str | None = Field(default=None, description=_TOKENIZER)
    reading: ReadingSettings = ReadingSettings()


class SyntheticData(Section):
    """Pictures made by rule while training: nobody's, so for phases that are not private."""

    source: Literal["synthetic"]
    kind: Kind = "mixed"
    records: int = Field(default=100_000, gt=0, description="Different pictures; an epoch shows each of them once.")
    seed: int = Field(default=1, ge=0, description="Another seed, other pictures.")
    size: int | None = Field(default=None, ge=8, description="Side in pixels before augmenting; null: as the model's.")
    augment: Literal["none", "center", "random_resized_crop", "inception_crop"] = "none"
    tokenizer: str | None = Field(default=None, description=_TOKENIZER + " Only `shapes` have captions.")
    reading: ReadingSettings = ReadingSettings()

    @property
    def public(self) -> bool:
        return True

    @model_validator(mode="after")
    def _has_captions(self) -> SyntheticData:
        if self.tokenizer is not None and self.kind != "shapes":
            raise ValueError(f"{self.kind} have no captions; `shapes` do, or leave the tokenizer away")
        return self


def _source(data: Any) -> Any:
    return data.get("source", "shards") if isinstance(data, dict) else getattr(data, "source", None)


DATA_SECTIONS = {"shards": ShardData, "synthetic": SyntheticData}
Data = Annotated[
    Annotated[ShardData, Tag("shards")] | Annotated[SyntheticData, Tag("synthetic")], Discriminator(_source)
]


class Clip(Section):
    kind: Literal["flat", "automatic"] = "flat"
    norm: float = Field(default=1.0, gt=0, description="C: the most that one record moves the sum.")
    gamma: float = Field(default=0.01, ge=0, description="Automatic clipping scales by C / (norm + gamma).")
    groups: Literal["all", "block", "layer"] = Field(
        default="all", description="What is clipped together; groups have equal shares, whose squares sum to C²."
    )


class ReleasedMetric(Section):
    """Published with noise at every step, and charged as one event with the gradient."""

    name: Literal["loss", "clipped"]
    bound: float = Field(default=1.0, gt=0, description="Each record adds a number in [0, bound].")
    noise_multiplier: float = Field(gt=0, description="Noise on the sum, in units of the bound.")


class Privacy(Section):
    epsilon: float = Field(gt=0, description="Budget of the phase; training stops before it is passed.")
    delta: float | str | None = Field(default=None, description="A number, '1/n' or '1/(2n)'; null means 1/(2n).")
    expected_batch: float = Field(gt=0, description="q·n: the constant by which every noised sum is divided.")
    clip: Clip = Clip()
    noise_multiplier: float | None = Field(default=None, ge=0.1, description="null: calibrated from epsilon.")
    release: list[ReleasedMetric] = Field(default=[], description="Metrics of private records to publish with noise.")

    @model_validator(mode="after")
    def _one_of_each(self) -> Privacy:
        names = [metric.name for metric in self.release]
        if len(set(names)) != len(names):
            raise ValueError("privacy.release names a metric twice; each can be released once")
        if any(metric.name == "clipped" and metric.bound != 1.0 for metric in self.release):
            raise ValueError("a record is clipped or not, so the bound of the metric 'clipped' is 1")
        return self


class ZeroShot(Section):
    """Labels scored as the next words of a caption; the records' .json holds the true number under the axis's name."""

    prompt: str = "a photo of a"
    axes: dict[str, list[str]] = Field(min_length=1, description="Asked in order, each after the words found so far.")


class Evaluation(Section):
    """Public held-out records, measured at checkpoints only: nothing leaves before the weights are durable."""

    path: str
    records: int = Field(default=512, gt=0)
    zero_shot: ZeroShot | None = None


class Phase(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    data: Data
    objective: Literal["mae", "caption"]
    trainable: Literal["all"] = "all"
    privacy: Privacy | None = None
    batch: int | None = Field(default=None, gt=0, description="Records per step of a non-private phase.")
    optimizer: Optimizer = Optimizer()
    schedule: Schedule
    steps: int = Field(gt=0)
    evaluation: Evaluation | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        if self.privacy is None and self.batch is None:
            raise ValueError(f"phase {self.name!r} is non-private and needs `batch`, its records per step")
        if self.privacy is not None and self.batch is not None:
            raise ValueError(
                f"phase {self.name!r} has both `batch` and `privacy.expected_batch`; a private phase takes the latter"
            )
        if self.objective == "caption" and self.data.tokenizer is None:
            raise ValueError(f"phase {self.name!r} trains on captions and needs data.tokenizer")
        if self.objective != "caption" and self.evaluation is not None and self.evaluation.zero_shot is not None:
            raise ValueError(f"phase {self.name!r} writes no captions, so it cannot be asked for zero-shot labels")
        if self.privacy is not None and self.data.public:
            raise ValueError(f"phase {self.name!r} has `privacy`, but its data are declared public; drop one of them")
        return self


class Tuning(Section):
    """What was chosen by looking at outputs of private runs on these records; it is written into the certificate."""

    statement: str = Field(min_length=1, description="What was tried and what was chosen by.")
    mean: float | None = Field(
        default=None, ge=1, description="Average number of runs; null: not charged, so NOT PRIVATE."
    )
    shape: float | Literal["poisson"] = Field(default=1.0, description="Of their number: 0 logarithmic, 1 geometric.")
    fixed: bool = Field(default=False, description="Their number was fixed beforehand: all of them are charged.")

    @model_validator(mode="after")
    def _possible(self) -> Tuning:
        self.declared()  # raises a ValueError that says why
        return self

    def declared(self) -> accounted_tuning.Declared:
        runs = accounted_tuning.Tuning.from_dict(self.model_dump()) if self.mean is not None else None
        return accounted_tuning.Declared(self.statement, runs)


class Run(Section):
    engine: Literal["deepspeed"] = "deepspeed"
    clip_engine: Literal["book-keeping", "reference", "opacus"] = Field(
        default="book-keeping", description="The other two hold a gradient per record: for checking small models."
    )
    clip_memory: Literal["lean", "fast"] = Field(
        default="lean", description="fast: small models keep some gradients per record, at up to 1.5 times the memory."
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Of the products in layers; weights, norms and sums are always fp32."
    )
    noise: Literal["aes", "philox"] = Field(
        default="aes", description="philox: drawn on the device, and not cryptographic; the certificate says so."
    )
    dir: str | None = Field(default=None, description="null: runs/<config name> under the current folder.")
    checkpoint_every: int = Field(default=100, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)
    log_every: int = Field(default=10, gt=0)
    keep_key: bool = Field(default=False, description="Keep the run key after the final certificate.")
    tuned_on_private_data: Tuning | None = None
    debug_seed: int | None = Field(default=None, description="Keys from this seed: repeatable, and NOT PRIVATE.")

    @model_validator(mode="after")
    def _engine_fits(self) -> Run:
        if self.clip_engine != "book-keeping" and self.precision != "fp32":
            raise ValueError(f'run.clip_engine = "{self.clip_engine}" works in fp32 alone; set run.precision to "fp32"')
        return self


class Config(Section):
    """A whole run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, title="Murmuration run")

    schema_path: str | None = Field(default=None, alias="$schema")
    about: About = About()
    train_micro_batch_size_per_gpu: int = Field(gt=0)
    gradient_accumulation_steps: Literal[1] = 1
    gradient_clipping: float = Field(default=0.0, ge=0, le=0)
    steps_per_print: int = Field(default=1_000_000_000, gt=0)
    wall_clock_breakdown: bool = False
    zero_optimization: ZeroOptimization = ZeroOptimization()
    model: ModelSettings
    phases: list[Phase] = Field(min_length=1)
    run: Run = Run()

    @model_validator(mode="after")
    def _phases_fit(self) -> Config:
        names = [phase.name for phase in self.phases]
        if len(set(names)) != len(names):
            raise ValueError("two phases have the same name; names tell them apart in the ledger and the plots")
        if self.zero_optimization.stage == 3 and self.run.clip_engine != "book-keeping":
            raise ValueError(
                f"run.clip_engine = {self.run.clip_engine!r} needs whole weights on every rank, which ZeRO-3 has not; "
                "use 'book-keeping' or another stage"
            )
        return self

    def digest(self, phase: int, contents: dict[str, str]) -> str:
        """Identity of everything that shapes what a phase releases: replay is allowed only while it stands.

        `contents` holds digests in the place of paths. World size, ZeRO settings and book-keeping do not shape it.
        """
        own = self.phases[phase].model_dump(exclude={"data": {"path", "tokenizer", "reading"}, "evaluation": True})
        identity: dict[str, Any] = {
            "model": self.model.model_dump(),
            "phase": own,
            "clip_engine": self.run.clip_engine,
            "clip_memory": self.run.clip_memory,
            "precision": self.run.precision,
            "noise": self.run.noise,
            "micro_batch": self.train_micro_batch_size_per_gpu,
            "contents": contents,
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def json_schema() -> dict[str, Any]:
    """For editors; checked in as ds_configs/schema.json and kept equal by a test."""
    return Config.model_json_schema(by_alias=True)


def run_dir_of(config: Config, config_path: Path) -> Path:
    return Path(config.run.dir) if config.run.dir else Path.cwd() / "runs" / config_path.stem
