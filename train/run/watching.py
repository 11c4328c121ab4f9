"""What a recipe's phase measures on public records with the weights of its checkpoints."""

from __future__ import annotations

from murmuration.accounting.keys import Derive
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.clip.engine import ClipEngine
from murmuration.train.config.phase import Phase
from murmuration.train.engines.base import Engine
from murmuration.train.noise.adaptive_norm import AdaptiveNorm
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.public.monitor import LossMonitor, MonitorReading
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.board import Board
from murmuration.train.run.cached_features import HeldOutFeatures
from murmuration.train.run.context import RunContext


class PublicRecords:
    def __init__(
        self, phase: Phase, board: Board, evaluator: PublicEvaluator | None, monitor: LossMonitor | None = None
    ) -> None:  # fmt: skip
        self._phase, self._board, self._evaluator, self._monitor = phase, board, evaluator, monitor
        self._values: dict[str, float] = {}
        self._unusable: str | None = None
        self._monitored: MonitorReading | None = None

    @staticmethod
    def of(
        run: RunContext, phase: ReadyPhase, engine: Engine, derive: Derive, clip: ClipEngine | None = None,
        plan: PrivacyPlan | None = None, norm: AdaptiveNorm | None = None, stored: HeldOutFeatures | None = None,
    ) -> PublicRecords:  # fmt: skip
        parts = phase, engine, run.ranks, run.config.micro_batch, derive("public-masks"), clip, plan, norm
        return PublicRecords(
            phase.settings, run.board,
            PublicEvaluator(*parts, run.config.run.precision, stored) if phase.held_out is not None else None,
            LossMonitor(*parts) if phase.monitored is not None else None,
        )  # fmt: skip

    def measure(self) -> dict[str, float]:
        if self._evaluator is not None:
            self._values, self._unusable = self._evaluator.measure(), self._evaluator.news_of_unusable()
        if self._monitor is not None:
            self._monitored = self._monitor.measure()
        return self._values

    def publish(self, step: int) -> None:
        """Shows what was measured since it was called last; the checkpoint of `step` is durable."""
        values, self._values = self._values, {}
        if values and self._evaluator is not None:
            self._board.measured(self._phase, step, values, self._unusable)
            self._board.signals(self._phase.name, step, self._evaluator.signals)
        monitored, self._monitored = self._monitored, None
        if monitored is not None:
            self._board.public(self._phase.name, step, monitored.values)
            for text in monitored.lines:
                self._board.say(f"{self._phase.name}  {text}")
