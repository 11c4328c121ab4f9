"""What the lines of a ledger hold, by kind. `History` reads every line as one of these, and refuses any other."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from murmuration.accounting.epsilon.tuning import Declared
from murmuration.accounting.ledger.facts import CheckpointMark, Segment, StepFacts, StepId
from murmuration.accounting.ledger.warm_start_origin import Origin
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.typed import CLOSED

RecordDigests = Literal["sha256", "hmac-sha256", "name"]
UNKEYED: RecordDigests = "sha256"
KEYED: RecordDigests = "hmac-sha256"
NAMED: RecordDigests = "name"
"""By what a ledger knows records: a bare hash of their files, one keyed by a secret, or what a program calls them."""


@dataclass(frozen=True)
class RunLine:
    __pydantic_config__ = CLOSED
    format: str
    name: str
    key_check: str
    debug: bool
    versions: dict[str, Any]
    record_digests: RecordDigests = UNKEYED


@dataclass(frozen=True)
class PlanLine:
    __pydantic_config__ = CLOSED
    phase: int
    name: str
    plan: PrivacyPlan
    method: dict[str, Any]


@dataclass(frozen=True)
class NonprivateLine:
    __pydantic_config__ = CLOSED
    phase: int
    name: str
    public_data: bool
    manifest_digest: str


@dataclass(frozen=True)
class StepLine:
    """A step that was opened or committed; `share` is judged by the phase's `NormTrail`."""

    __pydantic_config__ = CLOSED
    phase: int
    segment: int
    step: int
    facts: StepFacts
    share: Any = None

    @property
    def step_id(self) -> StepId:
        return StepId(self.phase, self.segment, self.step)


@dataclass(frozen=True)
class _Runs:
    __pydantic_config__ = CLOSED
    mean: float
    shape: float | Literal["poisson"] = 1.0
    fixed: bool = False


@dataclass(frozen=True)
class TuningLine:
    __pydantic_config__ = CLOSED
    statement: str
    runs: _Runs | None

    def declared(self) -> Declared:
        return Declared.from_dict(asdict(self))


@dataclass(frozen=True)
class ReasonLine:
    __pydantic_config__ = CLOSED
    reason: str


@dataclass(frozen=True)
class ResumeLine:
    __pydantic_config__ = CLOSED
    phase: int
    step: int


@dataclass(frozen=True)
class RecoveredLine:
    __pydantic_config__ = CLOSED
    torn_bytes: int


@dataclass(frozen=True)
class ChoiceLine:
    __pydantic_config__ = CLOSED
    by: str


@dataclass(frozen=True)
class FinishLine:
    __pydantic_config__ = CLOSED


LINES: dict[str, type[Any]] = {
    "run": RunLine, "plan": PlanLine, "nonprivate": NonprivateLine, "tuning": TuningLine, "segment": Segment,
    "open": StepLine, "commit": StepLine, "checkpoint": CheckpointMark, "copied": ReasonLine, "resume": ResumeLine,
    "recovered": RecoveredLine, "choice": ChoiceLine, "origin": Origin, "finish": FinishLine,
}  # fmt: skip
