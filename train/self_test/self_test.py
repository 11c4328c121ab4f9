"""A check at every start, on the live engine with synthetic records: clipped, noised once, bounded, all trained.

That no record meets another holds by construction (`clip/isolated.py`): a module that would let it is refused by the
first pass. What is tested here is tested on the records that it is given.

It runs before the first private step and leaves weights and optimizer unchanged, bit for bit. Its noise
comes from its own key. A run that fails the check does not start.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from murmuration.accounting.errors import SELF_TEST_FAILED, RunError
from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.check import check_gradients
from murmuration.train.clip.engine import ClipEngine, Clipped, clipped_totals
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.distributed.ranks import Ranks, by_copy
from murmuration.train.engines.base import Engine, digests_of, evaluating
from murmuration.train.noise.update import Noise, NoisyUpdate, PlainUpdate, UpdateError
from murmuration.train.self_test.held import Held
from murmuration.train.self_test.probes import Capture, Push, SyntheticRecords, arrived_evenly

SIGMA_TOLERANCE = 0.05
# Enough draws to make the tolerance more than six standard deviations wide, so that no correct run fails by chance.
SIGMA_DRAWS = 1 << 13
SUM_TOLERANCE = 1e-3
HOSTILE = {"1e3": 1e3, "1e19": 1e19, "NaN": math.nan, "infinite": math.inf, "1e-25": 1e-25}
PROOF_RATE = 0.1
HEAD = 16

T = TypeVar("T")


class SelfTestError(RunError, RuntimeError):
    """The training code does not do what the ledger would state; the run must not start."""

    exit_code = SELF_TEST_FAILED


@dataclass(frozen=True)
class SelfTestReport:
    measured_sigma: float
    largest_hostile: float
    records_per_second: float
    written_out: float
    """Share of the synthetic records whose norm took the slow path."""

    def in_words(self, planned_sigma: float) -> str:
        return (
            f"self-test passed: σ measured {self.measured_sigma:.3f} (planned {planned_sigma:.3f}), hostile records "
            f"move the sum by at most {self.largest_hostile:.3f}·C, {self.written_out:.0%} of the synthetic records "
            "needed their gradients written out"
        )


def self_test(
    engine: Engine, clip: ClipEngine, noise: Noise, ranks_per_copy: int, records: SyntheticRecords,
    micro_batch: int, ranks: Ranks,
) -> SelfTestReport:  # fmt: skip
    """`noise` has the planned standard deviation and divisor, but the self-test's key. `ranks_per_copy`: neighbours
    that hold a copy of the state together; 0: all."""
    batch = records.batch(micro_batch, seed=ranks.rank).to(engine.device)
    return _Test(engine, clip, noise, ranks_per_copy, records, batch, ranks).run()


@dataclass(frozen=True)
class _Test:
    """What is tested, and with what."""

    engine: Engine
    clip: ClipEngine
    noise: Noise
    ranks_per_copy: int
    records: SyntheticRecords
    batch: MicroBatch
    ranks: Ranks

    @property
    def absent(self) -> MicroBatch:
        """The micro-batch with a record in no slot."""
        return MicroBatch(self.batch.inputs, torch.zeros_like(self.batch.present))

    def _totals(
        self, inputs: Mapping[str, Tensor], present: Tensor, rule: ClipRule | None = None
    ) -> tuple[dict[str, Tensor], Clipped]:  # fmt: skip
        return clipped_totals(self.clip, self.engine.model, inputs, present, self.engine.shapes, rule)

    def run(self) -> SelfTestReport:
        if self.engine.optimizer_step():
            raise SelfTestError("the self-test must run before the optimizer's state is restored; it would be lost")
        weights = [shard.weights.detach().clone() for shard in self.engine.shards()]
        before = fingerprint(self.engine)
        try:
            fill_zeros(self.engine, self.absent, self.ranks)
            largest = self._records_are_bounded()
            sigma = self._noise_is_as_planned()
            seconds = self._sums_are_exact()
            doubtful = self.engine.observe().doubtful
            slow = 0 if doubtful is None else int(doubtful.sum())
            put_back(self.engine, weights)

            self.engine.accumulate(self.absent)
            left = Capture(PlainUpdate(batch=1))
            self.engine.update(left, learning_rate=0.0)
            self._agree(lambda: _nothing_left(left))

            self._weights_move(weights)
        except (UpdateError, ClipError) as error:
            raise SelfTestError(str(error)) from error
        self._agree(self._forget_moments)
        self._agree(lambda: self._unchanged(before))
        all_records = len(self.batch.present) * self.ranks.world
        return SelfTestReport(sigma, largest, 2 * all_records / seconds, self.ranks.sum(slow) / all_records)

    def _records_are_bounded(self) -> float:
        """Checks that no record moves the sum by more than C, nor anything of another record; returns how far the worst
        one moves it."""
        self._agree(self._clipping_binds)
        # After a first pass, and while weights stay as they are: what a module derives from these it may keep.
        kept = Held.by(self.engine.model, weights=False)
        largest = max(self.ranks.gather(self._agree(lambda: self._hostile(kept))))
        self._agree(lambda: self._keeps_nothing(kept))
        plain = self.engine.plain_model()
        self._agree(lambda: self._gradients_are_true(plain))
        return largest

    def _noise_is_as_planned(self) -> float:
        """Checks that noise is on every element once, independent, and of the planned sigma, which is returned as
        measured."""
        drawn = [self._empty_step(step) for step in range(1, self._steps() + 1)]
        self._every_element_once(drawn[0])
        sigma = self._measured_sigma(drawn)
        self._streams_differ(drawn)
        return sigma

    def _sums_are_exact(self) -> float:
        """Checks what three micro-batches bring to the optimizer; returns the seconds of two on the slowest rank."""
        # Before the update: Rprop moves weights by steps of its own, whatever the learning rate.
        expected = self._sum_of_clipped()
        with evaluating(self.engine.model):  # a path may be dropped for all records; here each weight gets its gradient
            self.engine.accumulate(self.batch)
        started = self._when_idle()
        self.engine.accumulate(self.batch)
        self.engine.accumulate(self.batch)
        seconds = max(self.ranks.gather(self._when_idle() - started))
        gradients = Capture(PlainUpdate(batch=1))
        self.engine.update(gradients, learning_rate=0.0)
        moved = {fragment.name for fragment, values in gradients.found if bool((values != 0).any())}
        reached = set().union(*self.ranks.gather(moved))
        # A weight that the loss uses may have a gradient of zero, as where only the last place of a bidirectional LSTM
        # is read. Book-keeping refuses one that the loss does not use; other engines cannot tell the two apart.
        told = isinstance(self.clip, BookKeepingClip)
        missing = sorted(name for name in self.engine.shapes.keys() - reached if not told or bool(expected[name].any()))
        if missing:
            raise SelfTestError(f"the trained set is not the declared one: {', '.join(missing[:3])} … get no gradient")
        self._sum_is_the_sum(gradients, expected)
        return seconds

    def _when_idle(self) -> float:
        """The time at which the device has done what it was given."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        return time.monotonic()

    def _agree(self, check: Callable[[], T]) -> T:
        """Runs a check of each rank's own state; an objection of one stops all, so that none waits in a collective."""
        found, objection = None, None
        try:
            found = check()
        except SelfTestError as error:
            objection = str(error)
        self._stop_all(objection)
        return found  # pyright: ignore[reportReturnType]

    def _stop_all(self, objection: str | None) -> None:
        for other in self.ranks.gather(objection):
            if other is not None:
                raise SelfTestError(other)

    def _keeps_nothing(self, kept: Held) -> None:
        if changed := kept.changed(Held.by(self.engine.model, weights=False)):
            raise SelfTestError(
                f"{changed} changed while the model ran; let forward() keep nothing from one pass to the next"
            )

    def _gradients_are_true(self, plain: nn.Module | None) -> None:
        try:
            check_gradients(
                self.clip, self.engine.model, self.batch.inputs, self.batch.present,
                plain=plain, shapes=self.engine.shapes,
            )  # fmt: skip
        except ClipError as error:
            raise SelfTestError(str(error)) from None

    def _clipping_binds(self) -> None:
        """Clips one record to a tenth of its own norm: whatever C is, the factor must take effect here."""
        rule, alone = self.clip.rule, torch.zeros_like(self.batch.present)
        alone[0] = True

        def clipped(rule: ClipRule) -> tuple[float, Clipped]:
            totals, seen = self._totals(self.batch.inputs, alone, rule)
            return _norm(totals.values()), seen

        whole, seen = clipped(replace(rule, kind="flat", bound=1e30))
        if not whole:
            loss = float(seen.losses[0])
            raise SelfTestError(
                "a test record alone has no gradient, as with a loss that compares records with one another; give each "
                "record a loss of its own"
                if math.isfinite(loss)
                else f"the loss of a test record is {loss}; let example= or synthetic= have the ranges of the items"
            )
        ratios = []
        for kind in ("flat", rule.kind):
            tight = replace(rule, kind=kind, bound=whole / 10)
            ratios.append(clipped(tight)[0] / tight.sensitivity)
        if not all(ratio <= 1.0 for ratio in ratios):
            raise SelfTestError(
                f"one record moved the sum by {max(ratios):.3f} times the bound; clipping does not hold"
            )

    def _hostile(self, kept: Held) -> float:
        """How far one hostile record moves the sum of its micro-batch, in units of C."""
        without = self.batch.present.clone()
        without[0] = False
        base, alone = self._totals(self.batch.inputs, without)
        moves, reached = {}, []
        for name, inputs, known in self._hostile_records():
            try:
                moved, seen = self._totals(inputs, self.batch.present)
            except (IndexError, RuntimeError):
                if known:
                    raise
                continue  # a number that the model does not take
            distance = _norm(moved[k].double() - base[k].double() for k in base) / self.clip.rule.sensitivity
            moves[name] = distance
            for what in ("losses", "norms", "factors"):
                one, other = getattr(alone, what)[1:], getattr(seen, what)[1:]
                if not torch.equal(one, other):
                    reached.append(f"a hostile record ({name}) changed the {what} of other records in its micro-batch")
        # Only now: until all ranks have tried all records, they may wait for this one's share of the weights.
        if reached:
            self._keeps_nothing(kept)  # spectral_norm's vectors move with each pass, whatever the records
            raise SelfTestError(reached[0])
        for name, distance in moves.items():
            if not distance <= 1.0:
                raise SelfTestError(
                    f"a hostile record ({name}) moved the sum by {distance:.3f}·C; clipping does not hold"
                )
        return max(moves.values())

    def _hostile_records(self) -> Iterator[tuple[str, dict[str, Tensor], bool]]:
        """Inputs whose first record is hostile, with words for how, and whether the model must take them."""
        for name, value in HOSTILE.items():
            for where, inputs in self.records.scaled(self.batch.inputs, value):
                yield name + where, inputs, True
        # A number that is out of range would stop a GPU, and leave the others waiting where weights are gathered
        # together.
        beyond = self.engine.device.type == "cpu" and not self.engine.partitioned
        for where, inputs in self.records.at_their_ends(self.batch.inputs, beyond):
            yield where, inputs, not beyond

    def _steps(self) -> int:
        """Empty steps to draw: at least two, so that they can be compared, and enough to measure sigma."""
        return max(2, math.ceil(SIGMA_DRAWS / self.engine.trainable_elements))

    def _empty_step(self, step: int) -> Capture:
        self.engine.accumulate(self.absent)
        captured = Capture(NoisyUpdate(self.noise, step))
        self.engine.update(captured, learning_rate=0.0)
        return captured

    def _every_element_once(self, captured: Capture) -> None:
        """Checks that the shards of all ranks tile every parameter: no element without noise, none with two draws."""
        parts = self.ranks.gather([(fragment.name, fragment.start, fragment.length) for fragment, _ in captured.found])
        for covering in ([piece for part in copy for piece in part] for copy in by_copy(parts, self.ranks_per_copy)):
            ends = dict.fromkeys(self.engine.shapes, 0)
            for name, start, length in sorted(covering):
                if ends.get(name) != start:
                    raise SelfTestError(f"elements of {name} around {start} get noise twice, or never")
                ends[name] = start + length
            for name, end in ends.items():
                if end != self.engine.shapes[name].numel():
                    raise SelfTestError(f"elements of {name} from {end} on get no noise and no update")

    def _measured_sigma(self, drawn: list[Capture]) -> float:
        """Measured in empty steps, in which only noise reaches the optimizer."""
        values = [values.double() for captured in drawn for _, values in captured.found]
        parts = self.ranks.gather((sum(v.numel() for v in values), sum(float(v.square().sum()) for v in values)))
        count, squares = sum(part[0] for part in parts), sum(part[1] for part in parts)
        measured = math.sqrt(squares / max(1, count)) * self.noise.divisor / self.clip.rule.sensitivity
        # The planned deviation of what the empty steps add: that of single draws, unless draws are combined.
        steps = len(drawn)
        facts = [self.noise.correlation(step) for step in range(1, steps + 1)]
        measured *= self.noise.std / math.sqrt(
            sum((self.noise.std if fact is None else fact.added) ** 2 for fact in facts) / steps
        )
        planned = self.noise.std / self.clip.rule.sensitivity
        if not abs(measured - planned) <= SIGMA_TOLERANCE * planned:
            raise SelfTestError(f"the noise has sigma = {measured:.4f} where {planned:.4f} is planned")
        return measured

    def _streams_differ(self, drawn: list[Capture]) -> None:
        """Checks that noise is equal on replicas, and that otherwise no two parameters, ranks or steps begin with the
        same noise."""
        heads = [tuple(v[:HEAD].tolist()) for captured in drawn[:2] for _, v in captured.found if len(v) >= HEAD]
        whole = hashlib.sha256()
        for _, values in drawn[0].found:
            whole.update(values.numpy().tobytes())
        parts = self.ranks.gather((heads, whole.hexdigest()))
        first, *others = by_copy(parts, self.ranks_per_copy)
        if any([part[1] for part in other] != [part[1] for part in first] for other in others):
            raise SelfTestError("replicas drew different noise")
        every = [head for part in first for head in part[0]]
        if len(set(every)) != len(every):
            raise SelfTestError("the same noise was drawn for different elements or steps")

    def _sum_of_clipped(self) -> dict[str, Tensor]:
        """What one pass in evaluation mode and two as they are must come to, by parameter. Its totals are freed with
        it."""
        own, _ = self._totals(self.batch.inputs, self.batch.present)
        with evaluating(self.engine.model):
            first, _ = self._totals(self.batch.inputs, self.batch.present)
        return {name: self.ranks.add(first[name] + 2 * own[name]).flatten().cpu().double() for name in sorted(own)}

    def _sum_is_the_sum(self, gradients: Capture, expected: dict[str, Tensor]) -> None:
        """Compares the engine's reduction over micro-batches and ranks with the clip engine's sums: no mean, no
        scale."""
        error = [values.double() - expected[f.name][f.start : f.start + f.length] for f, values in gradients.found]
        parts = self.ranks.gather(_norm(error) ** 2)
        wrong = max(sum(copy) if math.isfinite(sum(copy)) else math.inf for copy in by_copy(parts, self.ranks_per_copy))
        off = math.sqrt(wrong) / max(_norm(expected.values()), 1e-30)
        # Every rank must reach the same verdict, and sums over ranks may be rounded otherwise on each.
        if not max(self.ranks.gather(off if math.isfinite(off) else math.inf)) <= SUM_TOLERANCE:
            raise SelfTestError(
                f"the reduced sum differs from the sum of the clipped gradients by {off:.3g} of its size; "
                "something scales, drops or repeats micro-batches or ranks"
            )

    def _weights_move(self, weights: list[Tensor]) -> None:
        """Checks that one step at a real learning rate moves every element; then restores the weights, on every
        rank."""
        self._agree(self._forget_moments)  # so that the first moment shows the gradient that arrived
        self.engine.accumulate(self.absent)
        self.engine.update(Push(), learning_rate=PROOF_RATE)
        still = None
        for shard, kept in zip(self.engine.shards(), weights, strict=True):
            for fragment in shard.fragments:
                if bool((fragment.of(shard.weights.detach()) == fragment.of(kept)).any()):
                    still = f"the optimizer does not move {fragment.name}, although it is declared as trained"
                if not arrived_evenly(shard, fragment, kept):
                    still = f"something changes the gradient of {fragment.name} after the noise was added"
            with torch.no_grad():
                shard.weights.copy_(kept)
        self._stop_all(still)
        # The engine hands the restored shards to the model, as after every step.
        self.engine.accumulate(self.absent)
        self.engine.update(PlainUpdate(batch=1), learning_rate=0.0)

    def _unchanged(self, before: dict[str, str]) -> None:
        after = fingerprint(self.engine)
        if after.keys() != before.keys():
            raise SelfTestError(
                f"the model keeps something of the records that it is given ({min(after.keys() ^ before.keys())}); "
                "forward() must not write into a buffer"
            )
        for name, digest in before.items():
            if after.get(name) != digest:
                raise SelfTestError(
                    f"the self-test changed the weights ({name}); the optimizer moves at learning rate 0"
                )

    def _forget_moments(self) -> None:
        self.engine.set_optimizer_step(0)
        if self.engine.optimizer_step() or any(
            bool(t.any()) for shard in self.engine.shards() for t in shard.state.values()
        ):
            raise SelfTestError("the self-test left something in the optimizer's state")


def _nothing_left(captured: Capture) -> None:
    for fragment, values in captured.found:
        if bool((values != 0).any()):
            raise SelfTestError(f"{fragment.name} keeps a gradient from the previous step")


def _norm(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


# The weights during a self-test: nothing hides behind zeros, and afterwards they are unchanged, bit for bit.


def fill_zeros(engine: Engine, absent: MicroBatch, ranks: Ranks) -> None:
    """Gives matrices that are all zeros fixed numbers, until `put_back`.

    A classifier's head starts at zero, and so does a LoRA's second matrix: the layers before them get no gradient, so
    the test could see neither that they are trained nor whether they couple records.
    """
    filled = {f.name for shard in engine.shards() for f in shard.fragments if bool(f.of(shard.weights.detach()).any())}
    anywhere = set().union(*ranks.gather(filled))
    zero = {name for name, shape in engine.shapes.items() if len(shape) > 1 and name not in anywhere}
    if not zero:
        return
    for shard in engine.shards():
        weights = shard.weights.detach()
        for fragment in shard.fragments:
            if fragment.name in zero:
                places = torch.arange(fragment.start + 1.0, fragment.start + fragment.length + 1.0)
                fragment.of(weights).copy_(places.sin() * 0.5)
    # The engine hands the shards to the model, as after every step.
    engine.accumulate(absent)
    engine.update(PlainUpdate(batch=1), learning_rate=0.0)


def put_back(engine: Engine, weights: list[Tensor]) -> None:
    """Restores the shards; the model gets them with the next update."""
    with torch.no_grad():
        for shard, kept in zip(engine.shards(), weights, strict=True):
            shard.weights.copy_(kept)


def fingerprint(engine: Engine) -> dict[str, str]:
    """Digests of the model as it computes, and of this rank's shards."""
    tensors = engine.whole_weights()
    tensors |= {f"shard {i}": shard.weights.detach() for i, shard in enumerate(engine.shards())}
    return digests_of(tensors)
