"""A one-run privacy audit on the live stack: the config's private phase, shortened, with canaries as extra records.

Everything that a run's epsilon rests on is the real thing: plan and calibration, keys, ledger, self-test, Poisson
sampler, `PrivateStep`, clip engine, DeepSpeed, noise, optimizer. Only the canaries are added, and the gradients handed
to the optimizer are watched. The audit uses a temporary directory and a key of its own, and never touches a run
directory.

The output of a gradient audit depends on coins and noise alone, because the real records' contributions are subtracted.
The output of an audit with input canaries depends on weights that saw real records: publishing it costs the audit's own
epsilon, on top of that of the training.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

from murmuration.accounting.certificate.signature import public_key
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.epsilon.audit_evidence import (
    ACCUSED,
    AuditBound,
    Claim,
    Evidence,
    collect,
    refuting_share,
)
from murmuration.accounting.escaping import printable
from murmuration.accounting.key_chain import KeyChain, PhaseKeys
from murmuration.accounting.keys import Link, RunKey, hkdf
from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.ledger.lines import KEYED
from murmuration.accounting.noise import IndependentNoise
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import RandomAllocation, make_sampling
from murmuration.data.draw.samplers import make_sampler
from murmuration.model.build import build
from murmuration.train.audit.canaries import CanaryBatches, CanaryClip, Coordinates, SilentBatches, WeakenedNoise, toss
from murmuration.train.audit.checks import Check, check_allocation, check_divisor, check_noise, check_sampling
from murmuration.train.audit.result import SIMULATED, AuditReport
from murmuration.train.audit.setup import AuditSetup
from murmuration.train.audit.turns import Group, SeenSegment, Turn, noise_in, pairs_in, turns_of
from murmuration.train.clip.losses import losses_of, of_slots
from murmuration.train.config.root import Config
from murmuration.train.core import Computation
from murmuration.train.distributed.ranks import Ranks, by_copy
from murmuration.train.distributed.shards import Fragment
from murmuration.train.distributed.stop import StopRequest
from murmuration.train.engines.around import EngineAround
from murmuration.train.engines.base import AppliedUpdate, Engine, evaluating
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.noise.choose import over_steps
from murmuration.train.noise.update import Noise, Update
from murmuration.train.optim.rates import learning_rate
from murmuration.train.private_phase import PrivatePhase
from murmuration.train.self_test.probes import SyntheticRecords, synthetic_batch
from murmuration.train.step import PrivateStep, Records
from murmuration.train.storage.sibling_runs import RunLog

SAMPLING_STEPS, SAMPLING_RECORDS = 64, 200_000
DIVISOR_STEPS, DIVISOR_RATE = 6, 0.5
INPUT_SEED = 9_001
FAULT, SMALL_FAULT = 0.3, 0.9  # shares of the planned noise; the report says how often an audit would find each
MOST_PATTERNS = 256
"""Turns are judged together up to so many patterns in all; beyond that each by itself, which finds no shared draws."""
ENOUGH = 20
"""Canaries for each number of a group of turns, from which its noise is measured and not taken from the plan."""
LEAST_NOISE = 1e-2
"""The least variance in any direction, as a share of the plan's: what so many canaries cannot tell from none."""


def audit(config: Config, planned: AuditSetup, ranks: Ranks) -> AuditReport:
    folder = Path(ranks.on_main(lambda: tempfile.mkdtemp(prefix="murmuration-audit-")))
    try:
        return _Audit(config, planned, ranks, folder).run()
    finally:
        ranks.on_main(lambda: shutil.rmtree(folder, ignore_errors=True))


class _Audit:
    def __init__(self, config: Config, planned: AuditSetup, ranks: Ranks, folder: Path) -> None:
        self.config, self.planned, self.ranks, self.folder = config, planned, ranks, folder
        self.options, self.phase, self.settings, self.plan = (
            planned.options, planned.phase, planned.settings, planned.plan,
        )  # fmt: skip
        self.micro_batch = config.micro_batch
        self.engine_settings = EngineSettings.of(config)
        self.stop = StopRequest(folder / "stop")
        self.key: RunKey = ranks.on_main(RunKey.fresh)
        self._synthetic = SyntheticRecords.of(
            self.phase.shape, self.settings.objective, self.settings.rows_of_a_slot
        )  # fmt: skip
        self._journals: dict[str, Journal] = {}  # on the main rank alone

    def _register(self) -> None:
        """Logs an audit with input canaries: its output depends on real records, which costs epsilon like any run."""
        log = RunLog.of(self.phase.index, self.config.run.registry)
        own = secrets.token_hex(16)
        with log.alone() as held:
            budget, unit = self.plan.epsilon_budget, self.plan.unit
            held.require_budget({own}, budget, unit)
            warning = held.register(own, self.phase.name, "an audit", budget, self.plan.delta, unit)
        if warning:
            print(printable(warning), flush=True)

    def run(self) -> AuditReport:
        options, ranks, plan, phase = self.options, self.ranks, self.plan, self.phase
        if options.kind == "input":
            ranks.on_main(self._register)
        included: np.ndarray = ranks.on_main(lambda: toss(options.canaries))
        model = build(phase.shape, self.settings.objective)
        coordinates = Coordinates.choose(model, options.canaries)
        with PrivatePhase(
            plan, model, self.planned.rule, self.settings.optimizer, self._keys(Segment("audit")), ranks,
            self.engine_settings, Computation.of(self.config.run), number=phase.number,
            around_clip=lambda clip: CanaryClip(clip, coordinates), around_engine=WatchedEngine,
        ) as private:  # fmt: skip
            assert isinstance(private.clip, CanaryClip) and isinstance(private.engine, WatchedEngine)
            self.private, self.clip, self.engine = private, private.clip, private.engine
            tested = private.prove(self._synthetic)
            divisor = self._divisor()
            shown, claim = self._train(included)

        def judged() -> tuple[AuditBound, float, dict[float, float]]:
            bound = shown.evidence.bound(claim, options.confidence)
            return bound, shown.evidence.p_value(claim), self._power(shown, claim)

        bound, p_value, power = ranks.on_main(judged)
        return AuditReport(
            phase=phase.name, kind=options.kind, claim=claim.epsilon, bound=bound, p_value=p_value, plan=plan,
            engine=str(self.engine_settings), ranks=ranks.world,
            planted_noise_scale=None if options.noise_scale == 1 else options.noise_scale,
            measured_sigma=tested.measured_sigma, sampling=self._sampling(), divisor=divisor, noise=shown.noise,
            power=power,
        )  # fmt: skip

    def _train(self, included: np.ndarray) -> tuple[Shown, Claim]:
        """Makes the audited run; returns what its canaries show and what its ledger charges."""
        plan, gradient = self.plan, self.options.kind == "gradient"
        crafted = None
        if not gradient:
            crafted = self._synthetic.batch(self.options.canaries, INPUT_SEED).inputs
        self.ranks.on_main(lambda: self._begin("audit", plan))
        before = self._losses(crafted)
        segments = [self._segment(Segment("audit"), included, crafted)]
        if self.options.again:
            second = Segment("audit again", self.planned.resumed_after)
            self.ranks.on_main(lambda: self._begin_segment(self._journals["audit"], second))
            segments.append(self._segment(second, included, crafted))
        claim = self.ranks.on_main(lambda: charged_claim(self._journals["audit"]))
        if not gradient:
            return Shown(collect(before - self._losses(crafted), included)), claim
        numbers = self.planned.real + np.arange(self.options.canaries)
        return Shown.by(segments, plan, numbers, included, self.clip.rule.bound), claim

    def _segment(
        self, segment: Segment, included: np.ndarray, crafted: Mapping[str, Tensor] | None
    ) -> SeenSegment:  # fmt: skip
        plan, derive, engine, clip = self.plan, self._keys(segment), self.engine, self.clip
        reader = self.phase.reader(derive, self.phase.slot_rows(derive("augmentation")))
        planted: Noise | None = None
        if self.options.noise_scale != 1:
            weak = WeakenedNoise(derive("noise"), plan.noise_std, plan.divisor, self.options.noise_scale)
            first = segment.begun_after + 1
            planted = over_steps(weak, plan, first)
        batches = CanaryBatches(reader, self.ranks, self.micro_batch, self.planned.real, included, crafted)
        step = self._step(segment, self._journals.get("audit"), plan, planted, batches)
        engine.set_optimizer_step(segment.begun_after)
        engine.watcher = seen = Sightings(clip.coordinates)
        clip.take_known()
        known, took_part = [], []
        for t in range(segment.begun_after + 1, plan.steps + 1):
            step.run(t, learning_rate(self.settings.schedule, plan.steps, t))
            known.append(clip.take_known())
            took_part.append(batches.took_part(step.records.draw(t).ids))
        engine.watcher = None
        values = seen.values(known, plan.divisor, self.ranks, self.engine_settings.ranks_per_copy)
        return SeenSegment(segment.begun_after + 1, values, np.array(took_part))

    def _divisor(self) -> Check:
        """Checks the divisor with a `PrivateStep` whose records are present but contribute zero, at learning rate 0 and
        in another ledger; with Poisson draws, and with noise that no two steps share."""
        plan = replace(
            self.plan, sampling=make_sampling("poisson", self.plan.records, DIVISOR_RATE * self.plan.records, 1),
            steps=DIVISOR_STEPS, epsilon_budget=1e3,
            noise=self.plan.noise if self.plan.noise.bands == 1 else IndependentNoise(),
        )  # fmt: skip
        example = synthetic_batch(self.phase.shape, self.settings.objective, self.micro_batch, INPUT_SEED)
        self.ranks.on_main(lambda: self._begin("divisor", plan))
        silent = SilentBatches(example, self.ranks)
        step = self._step(Segment("divisor"), self._journals.get("divisor"), plan, None, silent)
        self.engine.watcher = seen = Sightings(self.clip.coordinates)
        for t in range(1, DIVISOR_STEPS + 1):
            step.run(t, 0.0)
        self.engine.watcher = None
        self.engine.set_optimizer_step(0)
        squares, elements = seen.sizes_of_noise(self.ranks, self.engine_settings.ranks_per_copy)
        sizes = np.array([len(step.records.draw(t).ids) for t in range(1, DIVISOR_STEPS + 1)])
        return check_divisor(squares, elements, plan.noise_std, plan.divisor, sizes)

    def _step(
        self, segment: Segment, journal: Journal | None, plan: PrivacyPlan, planted: Noise | None,
        batches: CanaryBatches | SilentBatches,
    ) -> PrivateStep:  # fmt: skip
        private = self.private.again(plan, self._keys(segment, plan.sampling.steps_of_a_key), segment.begun_after)
        # Drawn where it is needed: the audit compares what the optimizer sees with what it drew itself.
        noise = planted or private.core.noise("noise")
        records = Records(private.core.sampler().draw, batches)
        return private.begin(journal, self.stop, records, noise=noise)

    def _begin(self, purpose: str, plan: PrivacyPlan) -> None:
        """On the main rank: begins a separate ledger, as every run has one."""
        journal = Journal(Ledger.open(self.folder / f"{purpose}.jsonl"))
        key, name = self.key, f"{purpose} of phase {self.phase.name}"
        journal.start_run(name, key.check_value(), key.debug, {}, KEYED, public_key(key))
        journal.declare_plan(self.phase.number, self.phase.name, plan, describe("pld"))
        self._begin_segment(journal, Segment(purpose))
        self._journals[purpose] = journal

    def _begin_segment(self, journal: Journal, segment: Segment) -> None:
        number, contents = self.phase.number, self.phase.contents()
        digest = self.config.digest(number, contents)
        reason = "made again" if segment.begun_after else "first"
        journal.begin_segment(number, digest, contents["data"], segment.begun_after, reason, segment.name)

    def _keys(self, segment: Segment, steps_of_a_key: int = 1) -> PhaseKeys:
        """Keys like a run's, but repeatable: every call, on any rank, returns the same chain from its start."""
        secret = hkdf(self.key.secret, f"audit|{segment.name}")
        link = Link.first(segment.name, segment.begun_after + 1, secret, steps_of_a_key)
        return PhaseKeys(partial(self.key.derive, phase=self.phase.number, segment=segment.name), KeyChain(link))

    def _losses(self, crafted: Mapping[str, Tensor] | None) -> np.ndarray:
        """The loss of every input canary under the current weights. All ranks hold the same weights, so each computes
        all losses."""
        if crafted is None:
            return np.zeros(0)
        found, engine = [], self.engine
        with torch.no_grad(), evaluating(engine.model):
            for start in range(0, self.options.canaries, self.micro_batch):
                some = torch.arange(start, min(start + self.micro_batch, self.options.canaries))
                part = of_slots(crafted, some, self.options.canaries)
                part = {name: tensor.to(engine.device) for name, tensor in part.items()}
                found.append(losses_of(engine.model, part, len(some)).double().cpu())
        return torch.cat(found).numpy()

    def _sampling(self) -> Check:
        """Checks the real sampler at the config's own sampling rate."""
        records, trained = min(self.phase.n, SAMPLING_RECORDS), self.planned.trained
        if isinstance(trained, RandomAllocation):
            trained = RandomAllocation(min(trained.slots, SAMPLING_STEPS))
        keys = self._keys(Segment("sampling"), trained.steps_of_a_key)
        sampler = make_sampler(trained, keys("sampling"), keys("sampling-digest"), records)
        steps = SAMPLING_STEPS if trained.period == 1 else trained.period * (SAMPLING_STEPS // trained.period + 1)
        draws = [sampler.draw(t).ids for t in range(1, steps + 1)]
        if isinstance(trained, RandomAllocation):
            return check_allocation(draws, records, trained.slots)
        return check_sampling(draws, records, trained.rate)

    def _power(self, shown: Shown, claim: Claim) -> dict[float, float]:
        """By scale: the share of such audits that would refute noise of that many times the planned deviation; {} where
        that is not known."""
        evidence, level = shown.evidence, ACCUSED / shown.evidence.looks
        if self.options.kind != "gradient":
            return {}

        def share(scale: float) -> float:
            scored = partial(shown.scored, scale=scale)
            guesses = refuting_share(self.options.canaries, scored, claim, level=level, audits=SIMULATED)
            if evidence.pairs is None:
                return guesses
            return max(guesses, evidence.pairs.power(1 / claim.sigma, shown.gain / (shown.deviation * scale), level))

        return {scale: share(scale) for scale in (FAULT, SMALL_FAULT)}


@dataclass(frozen=True)
class Segment:
    name: str
    begun_after: int = 0


def charged_claim(journal: Journal) -> Claim:
    history = journal.history
    return Claim(tuple(history.charged()), history.epsilon(), history.delta())


# What the auditor sees: the gradient as it goes to the optimizer, after noise and division, and nothing earlier.


class Sightings:
    """Per step, the released value at each canary's coordinate, and the sum of squares of all released values."""

    def __init__(self, coordinates: Coordinates) -> None:
        self.coordinates = coordinates
        self.at_canaries: list[np.ndarray] = []
        self.squares: list[float] = []
        self.elements: list[int] = []

    def begin_step(self) -> None:
        self.at_canaries.append(np.zeros(len(self.coordinates.flat)))
        self.squares.append(0.0)
        self.elements.append(0)

    def see(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            released = fragment.of(flat).detach()
            here, offsets = self.coordinates.within(fragment.parameter, fragment.elements)
            self.at_canaries[-1][here] += released[torch.from_numpy(offsets).to(released.device)].double().cpu().numpy()
            self.squares[-1] += float(released.double().square().sum())
            self.elements[-1] += fragment.length

    def values(self, known: Sequence[np.ndarray], divisor: float, ranks: Ranks, ranks_per_copy: int) -> np.ndarray:
        """The released values per step and canary, minus what the real records are `known` to have added on each rank
        in each step."""
        released = sum(by_copy(ranks.gather(np.array(self.at_canaries)), ranks_per_copy)[0])
        return np.asarray(released - sum(ranks.gather(np.array(known))) / divisor)

    def sizes_of_noise(self, ranks: Ranks, ranks_per_copy: int) -> tuple[np.ndarray, np.ndarray]:
        """Per step, the sum of squares of the released values and their number, over the whole model."""
        parts = by_copy(ranks.gather((np.array(self.squares), np.array(self.elements))), ranks_per_copy)[0]
        return np.sum([part[0] for part in parts], axis=0), np.sum([part[1] for part in parts], axis=0)


class WatchedEngine(EngineAround):
    """Shows each finished update to a watcher."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.watcher: Sightings | None = None

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        if self.watcher is None:
            return self.inner.update(update, learning_rate)
        self.watcher.begin_step()
        return self.inner.update(_Watched(update, self.watcher), learning_rate)


class _Watched:
    def __init__(self, inner: Update, sightings: Sightings) -> None:
        self.inner, self.sightings = inner, sightings

    @property
    def elements(self) -> int:
        return self.inner.elements

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        self.inner.finish(flat, fragments)
        self.sightings.see(flat, fragments)


# What a run with canaries shows, put together: the guesses, the pairs, and whether steps share draws of noise.
#
# Why the guesses bound epsilon, whatever the mechanism: the coin of a canary decides between a record and a blank in
# its place, which are the neighbours of the definition. All else that decides a score is what was released, without the
# real records' part, and public numbers. The real records, and which steps they took part in, may be fixed: under
# Poisson sampling they are drawn independently of the canary, and the proofs for blocks of correlated noise and for
# random allocation (docs/proof.md) hold for each way in which the others are drawn. So a run that keeps its claim
# makes many right guesses as rarely as `audit_bound` and `audit_curve` say, if no score looks at a coin or at who was
# drawn.


@dataclass(frozen=True)
class Shown:
    evidence: Evidence
    noise: Check | None = None
    groups: Sequence[Group] = ()
    gain: float = 0.0
    """What one participation adds to a released number."""
    deviation: float = 0.0
    """The planned one of a draw of noise, in the same unit."""

    def scored(self, included: np.ndarray, draw: np.random.Generator, scale: float = 1.0) -> np.ndarray:
        """The scores that another such run might have shown, whose draws are so many times the planned ones."""
        groups = [each.simulated(included, self.gain, scale * self.deviation, draw) for each in self.groups]
        return scores(groups, len(included), self.gain, self.deviation)

    @staticmethod
    def by(
        segments: Sequence[SeenSegment], plan: PrivacyPlan, numbers: np.ndarray, included: np.ndarray, bound: float
    ) -> Shown:
        """`numbers`: those of the canaries among all records; `bound`: what a canary adds to a sum."""
        gain, deviation = bound / plan.divisor, plan.noise_std / plan.divisor
        groups = turns_of(segments, plan, numbers)
        evidence = collect(scores(groups, len(included), gain, deviation), included, pairs_in(groups))
        return Shown(evidence, check_noise(noise_in(segments, plan, gain)), groups, gain, deviation)


# One score for each canary: how much likelier the numbers of all its turns are if it was in than if it was out.
#
# Any function of what was released makes valid guesses; this one is the best there is if the plan is true. Under the
# plan, a canary that is in moves its turns along one of several patterns, whose chances are public: the score is the
# logarithm of the mean likelihood ratio over these patterns. Nothing that only the key tells enters, and no coin.
#
# The size of the noise and how it hangs together between turns are not taken from the plan, but from the numbers: their
# second moments over all canaries, less what gains of fair coins add to them. Two segments that share a draw then have
# a direction without noise, in which a canary that was drawn in only one of them is seen with certainty.


def scores(groups: Sequence[Group], canaries: int, gain: float, noise: float) -> np.ndarray:
    """`gain`: what one participation adds; `noise`: the planned deviation of a draw."""
    found = np.zeros(canaries)
    for group in groups:
        for turns in _judged_together(group.turns):
            found[group.which] += _log_ratio(turns, gain, noise)
    return found


def _judged_together(turns: Sequence[Turn]) -> list[list[Turn]]:
    together = 1
    for turn in turns:
        together *= len(turn.chances)
        if together > MOST_PATTERNS:
            return [[turn] for turn in turns]
    return [list(turns)] if turns else []


def _log_ratio(turns: Sequence[Turn], gain: float, noise: float) -> np.ndarray:
    values = np.concatenate([turn.values for turn in turns])
    patterns = gain * np.array([np.concatenate(each) for each in product(*(turn.patterns for turn in turns))])
    chances = np.array([np.prod(each) for each in product(*(turn.chances for turn in turns))])
    weights = np.linalg.solve(_covariance(values, patterns, chances, noise), patterns.T)  # [numbers, patterns]
    exponents = weights.T @ values - 0.5 * np.sum(patterns.T * weights, axis=0)[:, None]
    return np.asarray(logsumexp(exponents, axis=0, b=chances[:, None]))


def _covariance(values: np.ndarray, patterns: np.ndarray, chances: np.ndarray, noise: float) -> np.ndarray:
    """Covariance of the noise in the turns' numbers."""
    numbers, canaries = values.shape
    planned = noise**2
    if canaries < ENOUGH * numbers:
        return planned * np.eye(numbers)
    gains = 0.5 * (patterns.T * chances) @ patterns  # of canaries, half of which are in
    sizes, directions = np.linalg.eigh(values @ values.T / canaries - gains)
    return (directions * np.maximum(sizes, LEAST_NOISE * planned)) @ directions.T
