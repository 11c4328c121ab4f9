"""The contents of ledger lines, by kind. `History` reads every line as one of these, and refuses any other."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from murmuration.accounting.epsilon.accountant import show_delta, show_epsilon
from murmuration.accounting.ledger.facts import Charge, CheckpointMark, Segment, StepFacts, StepId
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.strict_json import CLOSED
from murmuration.accounting.unit import RECORD

if TYPE_CHECKING:
    from murmuration.accounting.epsilon.tuning import Declared

RecordDigests = Literal["hmac-sha256", "name"]
KEYED: RecordDigests = "hmac-sha256"
NAMED: RecordDigests = "name"
"""How a ledger identifies records: by a hash of their files that is keyed by a secret, or a name from a program."""
Word = Literal["private_curves", "keep_key", "witness"]
PublicUse = Literal["evaluation", "monitor", "mixing", "weights", "unknown-weights", "classes", "class-weights"]
RECORDS_AS_PUBLIC = ("evaluation", "monitor", "mixing")
"""Those of these uses that are of records; their digests are the records'."""
PUBLIC_USES = {
    "evaluation": "The records that were evaluated in", "monitor": "The records that were monitored in",
    "mixing": "The records whose gradients were mixed in without noise in",
    "weights": "The weights, without a ledger of ours, that began",
    "classes": "The names of the classes, which were taken from records, of",
    "class-weights": "The numbers by which losses of classes were multiplied in",
}  # fmt: skip
PUBLIC_WORD = "are public by the word of the run's owner, which nothing here can check."


@dataclass(frozen=True)
class Origin:
    """A run whose weights this one began from, known by its ledger: its promise is about its own records, and adds up
    for records in both. `protected` has the digests of its records, and of those of runs before it."""

    __pydantic_config__ = CLOSED
    run: str
    id: str
    """The hash of the ledger's first line."""
    epsilon: float
    """The most that it may claim."""
    delta: float
    protected: tuple[str, ...]
    unit: str | None = None
    """What its promise is about, in words; None: a record."""

    def __post_init__(self) -> None:
        if not (self.epsilon >= 0 and 0 <= self.delta < 1):
            raise ValueError(f"epsilon = {self.epsilon} with delta = {self.delta} is no promise of an earlier run")

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self) | {"protected": list(self.protected)}
        if self.unit is None:
            del fields["unit"]
        return fields

    def deviation(self, unit: str = RECORD) -> str:
        """The sentences that a certificate must contain about it; `unit`: what the certificate is about, in words."""
        theirs = "" if self.unit is None else f" for {self.unit}"
        together = (
            "is promised no more than the sum of both"
            if unit == (self.unit or RECORD)
            else f"is promised nothing by both together, since this run protects {unit}"
        )
        delta = show_delta(self.delta) if self.delta else "0"
        return (
            f"The weights began from those of run {self.run!r}, which promised (epsilon = "
            f"{show_epsilon(self.epsilon)}, delta = {delta}){theirs} on records of its own. Whoever has records there, "
            f"too, in whichever set of them, {together}."
        )


@dataclass(frozen=True)
class RunLine:
    __pydantic_config__ = CLOSED
    format: str
    name: str
    key_check: str
    debug: bool
    versions: dict[str, Any]
    signer: str
    """Public half of the key that signs the certificate."""
    record_digests: RecordDigests
    started: str | None = None
    """The day on which the run began, in UTC; debug runs do not record it."""


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
    shape: float | Literal["poisson"]
    fixed: bool


@dataclass(frozen=True)
class TuningLine:
    __pydantic_config__ = CLOSED
    statement: str
    runs: _Runs | None

    def declared(self) -> Declared:
        from murmuration.accounting.epsilon.tuning import Declared  # few runs were chosen by outputs

        return Declared.from_dict(asdict(self))


@dataclass(frozen=True)
class CopiedLine:
    """`id` is the id of the copy from here on."""

    __pydantic_config__ = CLOSED
    reason: str
    id: str


@dataclass(frozen=True)
class LostLine:
    """This ledger lacks lines that it is known to have had; what they had charged is charged here."""

    __pydantic_config__ = CLOSED
    length: int
    head: str
    charged: tuple[Charge, ...]


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
class PublicLine:
    """Records, or what was made of them, that a phase used without noise, because the run's owner said that they are
    public."""

    __pydantic_config__ = CLOSED
    phase: int
    use: PublicUse
    digest: str

    def deviation(self, name: str) -> str:
        """The sentence that a certificate must contain about it."""
        if self.use == "unknown-weights":
            return (
                f"FOREIGN WEIGHTS: phase {name!r} began with weights (digest {self.digest[:16]}) of which neither a "
                "ledger nor anybody's word says what they were made from."
            )
        return f"{PUBLIC_USES[self.use]} phase {name!r} (digest {self.digest[:16]}) {PUBLIC_WORD}"


@dataclass(frozen=True)
class EarlierLine:
    """Records that runs before this one used without noise, for what this one began with."""

    __pydantic_config__ = CLOSED
    digest: str

    def deviation(self) -> str:
        """The sentence that a certificate must contain about it."""
        return (
            f"Earlier runs used records (digest {self.digest[:16]}) without noise for the weights that this run "
            "began with; whether those are public, only these runs' certificates say."
        )


@dataclass(frozen=True)
class StoreLine:
    """A store that private records are fetched from, one range of bytes for each drawn record."""

    __pydantic_config__ = CLOSED
    phase: int
    host: str

    def deviation(self, name: str) -> str:
        """The sentence that a certificate must contain about it."""
        return (
            f"The records of phase {name!r} were fetched from {self.host} as they were drawn. Whoever runs that store, "
            "or sees its access log, knows which records took part in which step; the claim rests on that being a "
            "secret and does not hold against them."
        )


@dataclass(frozen=True)
class WordLine:
    """Something that the config asked for and every certificate of the run must say; it is never taken back."""

    __pydantic_config__ = CLOSED
    what: Word


@dataclass(frozen=True)
class FinishLine:
    __pydantic_config__ = CLOSED


LINES: dict[str, type[Any]] = {
    "run": RunLine, "plan": PlanLine, "nonprivate": NonprivateLine, "tuning": TuningLine, "segment": Segment,
    "open": StepLine, "commit": StepLine, "checkpoint": CheckpointMark, "copied": CopiedLine, "lost": LostLine,
    "resume": ResumeLine, "recovered": RecoveredLine, "choice": ChoiceLine, "public": PublicLine, "store": StoreLine,
    "word": WordLine, "origin": Origin, "earlier": EarlierLine, "finish": FinishLine,
}  # fmt: skip
