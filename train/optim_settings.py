"""The config's sections on optimizers and learning rates. What a type does not use is refused, not ignored."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from train.section import Section

Carry = Literal["none", "second-moment", "all"]
OptimizerType = Literal["AdamW", "LAMB", "LARS", "SGD"]
FOR_ALL = {"weight_decay", "ema_decay", "gradient_norm", "rules"}
ADAPTIVE = {"betas", "eps", "bias_correction", "noise_floor"}
TAKES: dict[OptimizerType, set[str]] = {
    "AdamW": FOR_ALL | ADAPTIVE,
    "LAMB": FOR_ALL | ADAPTIVE | {"weight_norm_bounds", "trust_bounds"},
    "SGD": FOR_ALL | {"momentum", "nesterov"},
    "LARS": FOR_ALL | {"momentum", "nesterov", "eps", "trust_coefficient", "trust_bounds"},
}


class ParameterRule(Section):
    """What is different for some parameters. Every rule that fits a parameter acts, and factors multiply."""

    parameters: str = Field(default="*", description="A pattern of names, as in a shell: encoder.*, *.bias, *norm*.")
    at_most_dimensions: int | None = Field(
        default=None, ge=0, description="Only tensors of so few dimensions: 1 for biases and norms, however named."
    )
    learning_rate: float = Field(default=1.0, gt=0, description="Factor on the learning rate (Mehta et al.'s alpha).")
    weight_decay: bool = Field(default=True, description="false: these weights do not decay.")
    trust_ratio: bool = Field(default=True, description="false: LAMB and LARS take these with ratio 1.")


class OptimizerParams(Section):
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(
        default=0.0, ge=0, description="AdamW: decoupled; LAMB: added to the direction; SGD, LARS: to the gradient."
    )
    bias_correction: bool = Field(default=True, description="false: moments as they are, small in the first steps.")
    noise_floor: float | None = Field(
        default=None,
        gt=0,
        description="DP-AdamBC: the noise's known variance leaves the second moment, which stays above this number; "
        "its root is the denominator, without eps.",
    )
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False
    trust_coefficient: float = Field(default=0.001, gt=0, description="LARS's eta.")
    weight_norm_bounds: tuple[float, float] | None = Field(
        default=None, description="LAMB's phi: the norm of the weights is taken as at least and at most these."
    )
    trust_bounds: tuple[float, float] | None = Field(default=None, description="Least and greatest trust ratio.")
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="Keeps a moving average of the weights, saved with the checkpoint."
    )
    gradient_norm: float | None = Field(
        default=None,
        gt=0,
        description="A longer mean gradient is scaled down to it, as pre-training does; in a private phase after the "
        "noise, so it bounds no record's part: that is privacy.clip.",
    )
    rules: list[ParameterRule] = Field(default=[], description="What is different for some parameters.")

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both betas must lie in [0, 1)")
        return betas

    @field_validator("weight_norm_bounds", "trust_bounds")
    @classmethod
    def _ordered(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None and not 0 <= bounds[0] < bounds[1]:
            raise ValueError("bounds are two numbers, the lower one first and not negative")
        return bounds

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> OptimizerParams:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov looks ahead along the momentum, so momentum must be above 0")
        return self


class Optimizer(Section):
    type: OptimizerType = "AdamW"
    params: OptimizerParams = OptimizerParams()
    carry: Carry = Field(
        default="none",
        description="State taken over from the phase before. second-moment: as Bu et al. hand AdamW over, with its "
        "first moment zeroed and its step count kept.",
    )

    @model_validator(mode="after")
    def _of_this_type(self) -> Optimizer:
        if self.carry == "second-moment" and "betas" not in TAKES[self.type]:
            raise ValueError(f"{self.type} has no second moment to carry over; carry 'all' or 'none'")
        if self.params.gradient_norm is not None and self.params.noise_floor is not None:
            raise ValueError("noise_floor subtracts the noise as it was drawn, and gradient_norm scales it; drop one")
        if self.carry != "none" and self.params.noise_floor is not None:
            raise ValueError("noise_floor subtracts the noise of every step, and carried moments have none of it")
        foreign = sorted(self.params.model_fields_set - TAKES[self.type])
        if foreign:
            raise ValueError(f"{self.type} has no {', '.join(foreign)}; it takes {', '.join(sorted(TAKES[self.type]))}")
        return self


class Schedule(Section):
    """Learning rate of step t = 1, 2, …: the lesser of a warm-up from `start` and a shape down to `floor`."""

    peak: float = Field(gt=0, description="Learning rate after the warm-up.")
    warmup: int = Field(default=0, ge=0, description="Steps of linear warm-up; the first step already moves.")
    warmup_epochs: float | None = Field(default=None, ge=0, description="In the place of `warmup`: in passes.")
    shape: Literal["constant", "linear", "cosine", "inverse-sqrt"] = "cosine"
    end: int | None = Field(
        default=None,
        gt=0,
        description="Last step of the shape, at its floor after it; null: the last of the phase.",
    )
    start: float = Field(default=0.0, ge=0, description="Learning rate from which the warm-up rises.")
    floor: float = Field(default=0.0, ge=0, description="Learning rate to which linear and cosine fall.")
    shape_from: Literal["warmup", "first-step"] = Field(
        default="warmup",
        description="Where the shape begins; ViP's cosine runs under the warm-up, from the first step.",
    )
    first_step: Literal[0, 1] = Field(
        default=1, description="Its number in the warm-up; 0 as in DP-Cap's code: the first step has the rate `start`."
    )
    hold: int = Field(
        default=1, gt=0, description="Steps for which a rate is kept; those of an epoch: per-epoch rates."
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
