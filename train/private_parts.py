"""What a private phase has and others have not: self-test, Poisson sampler, noise, released metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accounting.keys import Purpose
from accounting.plan import PrivacyPlan
from data.loader import Loader
from data.sampler import PoissonSampler
from train.clip import ClipEngine
from train.clip_adaptive import AdaptiveNorm
from train.engine import ShardedEngine
from train.engines import replicated
from train.metrics import MetricRelease
from train.noise import Noise, NoiseMechanism
from train.noise_ahead import NoiseAhead
from train.noise_philox import PhiloxNoise
from train.reading import until_unreadable
from train.recipe import ReadyPhase
from train.run_context import RunContext
from train.self_test import self_test
from train.step import PrivateStep


class PrivateParts:
    """Made around an engine that passed its self-test; `step` is then what the loop runs."""

    def __init__(
        self, run: RunContext, phase: ReadyPhase, plan: PrivacyPlan, clip: ClipEngine, engine: ShardedEngine,
        derive: Callable[[Purpose], bytes], load: Callable[[PoissonSampler], Loader[Any]],
    ) -> None:  # fmt: skip
        self._run, self._phase, self._plan, self._clip, self._engine = run, phase, plan, clip, engine
        self._derive = derive
        self.records_per_second = self._prove()
        self._ahead: NoiseAhead | None = None
        self.loader = load(PoissonSampler(derive("sampling"), derive("sampling-digest"), plan.records, plan.threshold))

    def _prove(self) -> float:
        run, plan = self._run, self._plan
        config = run.config
        report = self_test(
            self._engine, self._clip, self._noise("self-test"), replicated(config), self._phase.shape,
            self._phase.settings.objective, config.train_micro_batch_size_per_gpu, run.ranks,
        )  # fmt: skip
        run.board.say(
            f"{self._phase.name}  self-test passed: σ measured {report.measured_sigma:.3f} (planned "
            f"{plan.noise_multiplier:.3f}), hostile records move the sum by at most {report.largest_hostile:.3f}·C"
        )
        return report.records_per_second

    def _noise(self, purpose: Purpose) -> Noise:
        kind = PhiloxNoise if self._run.config.run.noise == "philox" else NoiseMechanism
        return kind.of(self._derive(purpose), self._plan)

    def step(self, stepping: ShardedEngine, done: int, resumed_from: str | None) -> PrivateStep:
        """After `done` steps; `resumed_from` is the checkpoint of this phase that they lie in.

        `stepping` is the engine, with what may be mixed into its updates.
        """
        run, plan, clip = self._run, self._plan, self._clip
        noise = self._noise("noise")
        if isinstance(noise, NoiseMechanism):
            fragments = [fragment for shard in self._engine.shards() for fragment in shard.fragments]
            noise = self._ahead = NoiseAhead(noise, fragments)
        metrics = None
        if plan.metrics:
            metrics = MetricRelease(self._derive("metric-noise"), plan, clip.rule.bound, run.ranks)
        norm = None
        if plan.adaptive is not None and metrics is not None:
            first = run.ranks.on_main(lambda: run.writer.clip_norm_after(self._phase.number, done, resumed_from))
            norm = AdaptiveNorm(plan, first, clip, noise, metrics)
        return PrivateStep(
            self._phase.number, run.journal, self.loader, clip, noise, stepping, run.ranks, run.stop,
            until_unreadable(self.loader.micro_batches, run.stop), metrics, norm,
        )  # fmt: skip

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
