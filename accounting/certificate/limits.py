"""What the claim means in numbers: limits on every test, for people with several records, and at other deltas.

All of it follows from the ledger. If the claim is what was spent, the opened steps are composed. If it is the budget,
because somebody may have chosen by outputs, all steps that the budget would have allowed are composed, and one more:
choosing when to stop is then post-processing, and no row is better than the headline. If only one (ε, δ) is proved, no
row for groups is; nor where noise is correlated or records are allocated: several records of a person may then be drawn
in different steps of one block or epoch, whose releases depend on each other or on one draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, TypeVar

from murmuration.accounting.epsilon import trade_off
from murmuration.accounting.epsilon.accountant import epsilon, merge
from murmuration.accounting.epsilon.neighbours import group_epsilon, replacement_epsilon
from murmuration.accounting.epsilon.trade_off import GRID, TradeOff
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.history import History
from murmuration.accounting.unit import noun

T = TypeVar("T")
GROUPS = (2, 5, 10)
DELTAS = (1e-5, 1e-6, 1e-8, 1e-10)
SPENT = "every step that the ledger opened"
BUDGET = "all steps that the budget would have allowed"
# Relative precision to which the number of those steps is found; it is rounded up.
CLOSE = 1.002
MOST_STEPS = 10**9


def limits(history: History, claimed: float) -> dict[str, Any]:
    """Limits for the certificate of a run whose ledger charges an epsilon; `claimed` is the headline epsilon."""
    events, holds_for = claimed_events(history)
    delta = history.claimed_delta()
    curve = trade_off.of_point(claimed, delta) if events is None else _known(events, trade_off.of_events, delta)
    rows = [{f"{noun(history.unit)}s": k, **group_row(history, events, delta, k)} for k in GROUPS]
    others = [{"delta": d, **row(lambda d=d: _known(events, epsilon, d))} for d in DELTAS]
    return {
        "holds_for": holds_for,
        "events": None if events is None else [
            event.as_dict() for event in events
        ],
        "delta": delta,
        "best_guess": curve.best_guess(),
        "true_positives": [{"false_alarms": alpha, "at_most": curve.power(alpha)} for alpha in GRID],
        "groups": rows,
        "replacement": row(lambda: _known(events, replacement_epsilon, delta)),
        "other_deltas": others,
        "gaussian": {key: number if math.isfinite(number) else None for key, number in asdict(curve.fit()).items()},
    }  # fmt: skip


def claimed_events(history: History, finished: bool = True) -> tuple[list[Event] | None, str]:
    """The steps for which the claim holds, and their description; None for the steps if only one (ε, δ) is proved.

    `finished`: without a certificate a run may continue until its budget is spent.
    """
    if history.late_plans:
        return None, "the (ε, δ) of the claim alone, since a plan was declared after private steps had run"
    charged = [declared.tuning for declared in history.tunings if declared.tuning is not None]
    if any(not tuning.fixed for tuning in charged):
        return None, "the (ε, δ) of the claim alone, since the number of runs that were tried was drawn"
    if finished and history.why_budget_is_claimed() is None:
        events, holds_for = history.charged(), SPENT
    else:
        events, holds_for = allowed(history), BUDGET
    runs = max((int(tuning.mean) for tuning in charged), default=1)
    if runs > 1:
        holds_for += f", in each of {runs} runs"
    return [replace(event, count=event.count * runs) for event in events], holds_for


def allowed(history: History) -> list[Event]:
    """All steps that the budgets of the phases would have allowed, and one more of each."""
    return merge(each for phase in history.plans for each in _allowed(history, phase))


def row(compute: Callable[[], float]) -> dict[str, Any]:
    """An epsilon, or the reason why there is none."""
    try:
        return {"epsilon": compute()}
    except AccountingError as error:
        return {"epsilon": None, "reason": str(error)}


def group_row(history: History, events: Sequence[Event] | None, delta: float, records: int) -> dict[str, Any]:
    """The row for a person with several records."""

    def compute() -> float:
        if why := next((plan.sampling.no_groups for plan in history.plans.values() if plan.sampling.no_groups), None):
            raise AccountingError(why)
        return _known(events, group_epsilon, delta, records)

    return row(compute)


def delta_of(claim: dict[str, Any]) -> float:
    """Delta of the claim; the spent epsilon is stated at the plans' own delta."""
    return claim.get("delta_claimed", claim["delta"])


def curve_of(certificate: dict[str, Any]) -> TradeOff:
    """The trade-off curve that follows from a certificate's claim alone, without its limits."""
    claim = certificate["claim"]
    return trade_off.of_point(claim["epsilon_claimed"] or 0.0, delta_of(claim) or 1.0)


def _known(events: Sequence[Event] | None, compute: Callable[..., T], *asked: float) -> T:
    if events is None:
        raise AccountingError("nothing but the (ε, δ) of the claim is proved")
    return _computed(tuple(events), compute, *asked)


@lru_cache(maxsize=64)
def _computed(events: tuple[Event, ...], compute: Callable[..., T], *asked: float) -> T:
    """Kept, since a certificate is verified as soon as it is written."""
    return compute(events, *asked)


def _allowed(history: History, phase: int) -> list[Event]:
    """Steps of one phase up to the first that its budget would have refused; no fewer than were opened or planned."""
    plan, delta = history.plans[phase], history.delta()
    kind = plan.event(0)
    opened = history.charged(phase)
    others = [event for event in opened if event.kind != kind]
    least = max(plan.participations, sum(event.count for event in opened if event.kind == kind))

    def passes(count: int) -> bool:
        try:
            return epsilon([*others, replace(kind, count=count)], delta) > plan.epsilon_budget
        except AccountingError:
            return True

    if passes(least):
        return [*others, replace(kind, count=least)]
    low, high = least, math.ceil(least * CLOSE)
    while not passes(high) and high < MOST_STEPS:
        low, high = high, 2 * high
    while high > max(low + 1, low * CLOSE):
        middle = min(high - 1, max(low + 1, round(math.sqrt(low * high))))
        low, high = (low, middle) if passes(middle) else (middle, high)
    return [*others, replace(kind, count=high)]
