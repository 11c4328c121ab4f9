"""The one JSON that describes a run, and nothing that it does not say.

DeepSpeed's own keys stay at top level (those that cannot weaken the promise); ours are `about`, `model`, `phases`
and `run`. Unknown keys are refused here, keys that would break privacy in `refusals.py`, both before any compute.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from model.settings import ModelSettings
from train.config_data import Data
from train.config_privacy import Privacy, Tuning
from train.config_run import Keeping
from train.optim_settings import Optimizer, Schedule
from train.section import Section


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


class Run(Keeping):
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
