"""The config's sections on optimizers and learning rates. Settings that a type does not use are refused, not
ignored."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from murmuration.train.config.section import Section

Carry = Literal["none", "second-moment", "all"]
OptimizerType = Literal["AdamW", "LAMB", "LARS", "SGD"]
FOR_ALL = {"weight_decay", "ema_decay", "gradient_norm", "rules"}
ADAPTIVE = {"betas", "eps"}
TAKES: dict[OptimizerType, set[str]] = {
    "AdamW": FOR_ALL | ADAPTIVE,
    "LAMB": FOR_ALL | ADAPTIVE,
    "SGD": FOR_ALL | {"momentum"},
    "LARS": FOR_ALL | {"momentum", "eps"},
}


class ParameterRule(Section):
    """Exceptions for some parameters. All rules that match apply; factors multiply."""

    parameters: str = Field(default="*", description="Parameter names: `encoder.*`, `*.bias`, `*norm*`.")
    learning_rate: float = Field(default=1.0, gt=0, description="Factor on the rate.")
    weight_decay: bool = Field(default=True, description="false: no decay.")
    trust_ratio: bool = Field(default=True, description="false: ratio 1 in LAMB and LARS.")


class OptimizerParams(Section):
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW, LAMB.")
    eps: float = Field(
        default=1e-8, gt=0, description="In the denominator of AdamW and LAMB, and of LARS's trust ratio."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Decoupled in AdamW, in LAMB's direction, in SGD's and LARS's gradient.",
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD, LARS.")
    ema_decay: float | None = Field(default=None, gt=0, lt=1, description="Also saves a moving average of the weights.")
    gradient_norm: float | None = Field(
        default=None,
        gt=0,
        description="Scales down larger mean gradients, after the noise; no bound on a record.",
    )
    rules: list[ParameterRule] = Field(default=[], description="Exceptions for some parameters.")

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both betas must lie in [0, 1)")
        return betas


class Optimizer(Section):
    type: OptimizerType = Field(default="AdamW", description="The update rule.")
    params: OptimizerParams = Field(default=OptimizerParams(), description="Its settings.")
    carry: Carry = Field(
        default="none",
        description="State to take over; second-moment zeroes the first and keeps the step count.",
    )

    @model_validator(mode="after")
    def _of_this_type(self) -> Optimizer:
        if self.carry == "second-moment" and "betas" not in TAKES[self.type]:
            raise ValueError(f"{self.type} has no second moment to carry over; carry 'all' or 'none'")
        foreign = sorted(self.params.model_fields_set - TAKES[self.type])
        if foreign:
            raise ValueError(f"{self.type} has no {', '.join(foreign)}; it takes {', '.join(sorted(TAKES[self.type]))}")
        return self


class Schedule(Section):
    """Learning rate of step t = 1, 2, …: the smaller of a warm-up from `start` and a shape that falls to `floor`."""

    peak: float = Field(gt=0, description="Rate after the warm-up.")
    warmup: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    warmup_epochs: float | None = Field(default=None, ge=0, description="The same in epochs.")
    shape: Literal["constant", "linear", "cosine", "inverse-sqrt"] = Field(
        default="cosine", description="After the warm-up."
    )
    end: int | None = Field(
        default=None,
        gt=0,
        description="Last step of the shape; null: the phase's.",
    )
    start: float = Field(default=0.0, ge=0, description="Rate at which the warm-up begins.")
    floor: float = Field(default=0.0, ge=0, description="Rate to which linear and cosine fall.")
    shape_from: Literal["warmup", "first-step"] = Field(
        default="warmup",
        description="Where the shape begins; first-step: ViP's.",
    )
    first_step: Literal[0, 1] = Field(
        default=1,
        description="Number of the first step; 0 gives it the rate `start` (DP-Cap).",
    )

    @model_validator(mode="after")
    def _goes_up_and_down(self) -> Schedule:
        if self.warmup_epochs is not None and self.warmup:
            raise ValueError("the schedule has both warmup and warmup_epochs; give one of them")
        if max(self.start, self.floor) > self.peak:
            raise ValueError("start and floor must not exceed the peak")
        if self.shape_from == "warmup" and self.end is not None and self.end <= self.warmup:
            raise ValueError(f"the shape would end at step {self.end}, inside the warm-up of {self.warmup} steps")
        return self


class Offload(Section):
    """All optimizer state in host memory: DeepSpeed would update the rest with its own optimizer."""

    device: Literal["cpu"] = Field(default="cpu", description="Where it is kept.")
    pin_memory: bool = Field(default=False, description="Page-locked, for faster copies.")
    adam: Literal["torch", "deepspeed"] = Field(
        default="torch",
        description="deepspeed: DeepSpeedCPUAdam's kernel for AdamW, compiled once.",
    )


class ZeroOptimization(Section):
    """DeepSpeed's section of that name, without the settings that hide or change gradients."""

    stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="Shards 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."
    )
    reduce_bucket_size: int = Field(default=50_000_000, gt=0, description="Most elements per reduction.")
    allgather_bucket_size: int = Field(default=50_000_000, gt=0, description="Most elements per gather.")
    contiguous_gradients: bool = Field(default=True, description="Copies gradients into one buffer.")
    overlap_comm: Literal[False] = Field(
        default=False, description="Fixed: it would reduce while micro-batches still arrive."
    )
    round_robin_gradients: Literal[False] = Field(
        default=False, description="Fixed: noise and weights would not match."
    )
    offload_optimizer: Offload | None = Field(default=None, description="Optimizer state in host memory.")
    stage3_param_persistence_threshold: int | None = Field(default=None, ge=0, description="DeepSpeed's, for stage 3.")
