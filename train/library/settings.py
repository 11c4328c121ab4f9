"""What a library training is to be: its plan, its run, and how it is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from murmuration.accounting.errors import PlanError
from murmuration.accounting.ledger.lines import RECORDS_AS_PUBLIC, PublicUse
from murmuration.accounting.plan import require_together
from murmuration.train.config.optimizer import ZeroOptimization
from murmuration.train.config.privacy import Privacy
from murmuration.train.core import Computation
from murmuration.train.engines.choose import EngineSettings

EngineName = Literal["local", "deepspeed", "fsdp2"]


@dataclass(frozen=True)
class Settings:
    """What is trained for, and how and where it runs. `privacy` has the same keys as in a config.

    >>> four = Privacy(epsilon=4, expected_batch=200)
    >>> Settings(four, dataset="faces, version 1", run_dir="runs/faces", epochs=3).engine
    'local'
    >>> Settings(four, dataset="faces, version 1", run_dir="runs/faces")
    Traceback (most recent call last):
    murmuration.accounting.errors.PlanError: give either steps or epochs
    """

    privacy: Privacy
    dataset: str
    """A name and version of the records, which alone identifies them: a run continues, and weights that were trained on
    the same records are refused, by this name."""
    run_dir: str | Path
    steps: int | None = None
    epochs: float | None = None
    """Give one of steps and epochs."""
    micro_batch: int | Literal["auto"] = "auto"
    """Records that a rank computes at a time."""
    workers: int = 0
    """Processes of each rank that read records, forked as a DataLoader's are; 0: a thread reads them. What a record
    draws depends on its number and step alone, so that a resumed run may change this."""
    engine: EngineName = "local"
    zero: ZeroOptimization = field(default_factory=ZeroOptimization)
    shard_over: int | None = None
    """With FSDP2: the ranks of one copy of the weights; None: all."""
    computation: Computation = field(default_factory=Computation)
    checkpoint_every: int = 100
    """Steps from one checkpoint to the next, in `for step in training`."""
    keep_checkpoints: int = 2
    log_every: int = 10
    order: str | None = None
    """With allocation or correlated noise, any text that changes when the order of the records does, such as a digest
    of their names in order. An epoch continues only if it is the same at every opening; otherwise every opening begins
    a new one under new keys, and the interrupted one stays charged."""
    registry: str | Path | None = None
    """A folder for the log of all runs on these records, the same one for all of them: it holds them to a common
    budget, and certificates list them."""
    public: Mapping[PublicUse, str] = field(default_factory=dict)
    """Names of the records that are used without noise: {"evaluation": "MNIST test, version 1"}. It is your word, which
    the certificate repeats, that nobody's privacy depends on them."""
    about_data: str | None = None
    about_owner: str | None = None
    keep_key: bool = False
    debug_seed: int | None = None
    new_segment: str | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise PlanError("give either steps or epochs")
        least = {"steps": self.steps, "checkpoint_every": self.checkpoint_every, "log_every": self.log_every}
        least |= {"keep_checkpoints": self.keep_checkpoints}
        least |= {} if self.micro_batch == "auto" else {"micro_batch": self.micro_batch}
        for name, value in least.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PlanError(f"{name} must be a whole number from 1 up, but is {value!r}")
        if not isinstance(self.workers, int) or self.workers < 0:
            raise PlanError(f"workers must be a whole number from 0 up, but is {self.workers!r}")
        if self.epochs is not None and not (math.isfinite(self.epochs) and self.epochs > 0):
            raise PlanError(f"epochs must be a finite number above 0, but is {self.epochs}")
        if not self.dataset.strip():
            raise PlanError("dataset must be a name and version of the records")
        if self.engine not in (engines := get_args(EngineName)):
            raise PlanError(f"engine {self.engine!r} is none of {', '.join(engines)}")
        if unknown := set(self.public) - set(RECORDS_AS_PUBLIC):
            raise PlanError(f"public: {', '.join(sorted(unknown))} is none of {', '.join(RECORDS_AS_PUBLIC)}")
        if self.dataset in self.public.values():
            raise PlanError(f"public: {self.dataset!r} is what this run protects; name other records")
        EngineSettings(self.engine, 1, self.zero, self.shard_over)  # refuses what does not fit
        if self.computation.compile == "blocks" and self.computation.clip_engine != "book-keeping":
            raise PlanError('compile="blocks" needs the book-keeping clip engine; leave one of the two out')
        if self.computation.gradient_checkpointing and (
            self.computation.compile != "off" or self.computation.clip_engine != "book-keeping"
        ):
            raise PlanError(
                "gradient_checkpointing needs blocks that the book-keeping clip engine sees and nobody compiles; leave "
                "it out, or clip_engine and compile at their defaults"
            )
        mechanisms = self.privacy.mechanisms | ({"exact"} if self.computation.noise == "exact" else set())
        require_together(mechanisms | ({"keep_key"} if self.keep_key else set()))
