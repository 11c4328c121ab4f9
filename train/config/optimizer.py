"""The config's sections on optimizers and learning rates. Settings that a type does not use are refused, not
ignored."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from murmuration.train.config.section import Section

Carry = Literal["none", "second-moment", "all"]
OptimizerType = Literal["AdamW", "LAMB", "LARS", "SGD"]
FOR_ALL = {"weight_decay", "ema_decay", "gradient_norm", "rules"}
ADAPTIVE = {"betas", "eps", "noise_floor"}
TAKES: dict[OptimizerType, set[str]] = {
    "AdamW": FOR_ALL | ADAPTIVE,
    "LAMB": FOR_ALL | ADAPTIVE,
    "SGD": FOR_ALL | {"momentum"},
    "LARS": FOR_ALL | {"momentum", "eps", "trust_coefficient"},
}


class ParameterRule(Section):
    """Exceptions for some parameters. Every rule that matches a parameter applies, and factors multiply."""

    parameters: str = Field(
        default="*", description="Shell pattern of parameter names: `encoder.*`, `*.bias`, `*norm*`."
    )
    at_most_dimensions: int | None = Field(
        default=None,
        ge=0,
        description="Only tensors of at most so many dimensions: 1 for biases and norms.",
    )
    learning_rate: float = Field(default=1.0, gt=0, description="Factor on the learning rate.")
    weight_decay: bool = Field(default=True, description="false: these weights do not decay.")
    trust_ratio: bool = Field(default=True, description="false: LAMB and LARS use ratio 1 for these.")


class OptimizerParams(Section):
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW, LAMB: decay of both moments.")
    eps: float = Field(
        default=1e-8, gt=0, description="Added to the denominator of AdamW and LAMB, and of LARS's trust ratio."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Decoupled in AdamW, added to LAMB's direction, and to the gradient in SGD and LARS.",
    )
    noise_floor: float | None = Field(
        default=None,
        gt=0,
        description="DP-AdamBC: the noise's variance leaves the second moment, clamped to this; its root replaces the "
        "denominator.",
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD, LARS.")
    trust_coefficient: float = Field(default=0.001, gt=0, description="LARS: its eta.")
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="Keeps a moving average of the weights, saved with the checkpoint."
    )
    gradient_norm: float | None = Field(
        default=None,
        gt=0,
        description="Scales down a mean gradient of a larger norm; in private phases after the noise, and no bound on "
        "a record.",
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
    params: OptimizerParams = Field(
        default=OptimizerParams(), description="Its settings; what the type does not use is refused."
    )
    carry: Carry = Field(
        default="none",
        description="State taken from the previous phase; second-moment zeroes the first moment and keeps the step "
        "count.",
    )

    @model_validator(mode="after")
    def _of_this_type(self) -> Optimizer:
        if self.carry == "second-moment" and "betas" not in TAKES[self.type]:
            raise ValueError(f"{self.type} has no second moment to carry over; carry 'all' or 'none'")
        if self.params.gradient_norm is not None and self.params.noise_floor is not None:
            raise ValueError("noise_floor subtracts the noise as it was drawn, and gradient_norm scales it; drop one")
        if self.carry != "none" and self.params.noise_floor is not None:
            raise ValueError(
                "noise_floor subtracts the noise of every step, which carried moments do not contain; drop one"
            )
        foreign = sorted(self.params.model_fields_set - TAKES[self.type])
        if foreign:
            raise ValueError(f"{self.type} has no {', '.join(foreign)}; it takes {', '.join(sorted(TAKES[self.type]))}")
        return self


class Schedule(Section):
    """Learning rate of step t = 1, 2, …: the smaller of a warm-up from `start` and a shape that falls to `floor`."""

    peak: float = Field(gt=0, description="Learning rate after the warm-up.")
    warmup: int = Field(default=0, ge=0, description="Steps of linear warm-up; the first is already above `start`.")
    warmup_epochs: float | None = Field(
        default=None, ge=0, description="Warm-up in passes over the records, instead of `warmup`."
    )
    shape: Literal["constant", "linear", "cosine", "inverse-sqrt"] = Field(
        default="cosine", description="How the rate moves after the warm-up."
    )
    end: int | None = Field(
        default=None,
        gt=0,
        description="Last step of the shape, which then stays at its floor; null: the phase's last.",
    )
    start: float = Field(default=0.0, ge=0, description="Learning rate at which the warm-up begins.")
    floor: float = Field(default=0.0, ge=0, description="Learning rate to which linear and cosine fall.")
    shape_from: Literal["warmup", "first-step"] = Field(
        default="warmup",
        description="Where the shape begins; ViP's cosine begins under the warm-up.",
    )
    first_step: Literal[0, 1] = Field(
        default=1,
        description="Number of the first step in the warm-up; 0, as in DP-Cap's code, gives it the rate `start`.",
    )
    hold: int = Field(
        default=1, gt=0, description="Steps for which a rate is kept; an epoch's length gives one rate per epoch."
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
    """Optimizer state in host memory: all of it, since DeepSpeed would update the rest with an optimizer of its own."""

    device: Literal["cpu"] = Field(default="cpu", description="Where optimizer state is kept.")
    pin_memory: bool = Field(default=False, description="Page-locked memory, for faster copies.")
    adam: Literal["torch", "deepspeed"] = Field(
        default="torch",
        description="deepspeed: AdamW by the kernel of DeepSpeedCPUAdam, compiled at the first run.",
    )


class ZeroOptimization(Section):
    """DeepSpeed's section of that name, without the settings that hide or change gradients."""

    stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."
    )
    reduce_bucket_size: int = Field(default=50_000_000, gt=0, description="Most elements per reduction.")
    allgather_bucket_size: int = Field(default=50_000_000, gt=0, description="Most elements per gather.")
    contiguous_gradients: bool = Field(default=True, description="Copies gradients into one buffer.")
    overlap_comm: Literal[False] = Field(
        default=False, description="Refused otherwise: it would reduce while micro-batches still arrive."
    )
    round_robin_gradients: Literal[False] = Field(
        default=False, description="Refused otherwise: noise and weights would no longer match."
    )
    offload_optimizer: Offload | None = Field(default=None, description="Keeps optimizer state in host memory.")
    stage3_param_persistence_threshold: int | None = Field(default=None, ge=0, description="Stage 3; DeepSpeed's own.")
