"""The best of a random number of private runs, bounded by the deltas that one run has at all epsilons.

One run gives an outcome in an order (ties are broken by lot), at random as Q says, or Q' without the record; K of them
are made, and the best is published. Let f be the generating function of K, m its mean, and S(y), S'(y) the chances that
one run beats the outcome y. The published outcome then has the density q(y) f'(1 - S(y)), and without the record
q'(y) f'(1 - S'(y)). If f'(1 - S) <= e^a f'(1 - S') for all y, with f' <= f'(1) = m, then for every epsilon

    delta of the best at epsilon + a  =  sum of [q f'(1 - S) - e^(epsilon + a) q' f'(1 - S')]+
                                     <=  sum of f'(1 - S) [q - e^epsilon q']+  <=  m · delta of one run at epsilon.

What remains is a. That one run beats y is an event, so S' <= e^x S + d(x) for every x, where d(x) is the run's delta
at x, in either direction.

- Truncated negative binomial K with shape h and parameter g: f'(1 - S) is proportional to (g + (1 - g) S)^-(h + 1).
  Choose x with d(x) <= (e^x - 1) g / (1 - g): then g + (1 - g) S' <= e^x (g + (1 - g) S), and a = (h + 1) x.
- Poisson K: f'(1 - S) = m e^(-m S), and S' - S <= d(0), so a = m d(0).

So epsilon of the best at delta is that of one run at delta / m, plus a. Nothing is assumed of the run but its deltas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from murmuration.accounting.epsilon.accountant import AccountingError, Event, deltas_at, epsilon

# Of the parameter g and of the comparison with d(x); rounding there is far smaller.
ROOM = 1e-9
MOST = 200.0


def selected_epsilon(events: Sequence[Event], delta: float, mean: float, shape: float) -> float:
    """`mean` runs on average, each of which is `events`; shape 0 is logarithmic, 1 geometric, infinity Poisson."""
    if mean == 1 and not math.isinf(shape):
        return epsilon(events, delta)  # always one run
    best = epsilon(events, delta / mean)
    if math.isinf(shape):
        return best + mean * deltas_at(events, [0.0], delta)[0]
    return best + (shape + 1) * _least(events, parameter(mean, shape) * (1 - ROOM))


def _least(events: Sequence[Event], g: float) -> float:
    """An x, close to the least one, with d(x) <= (e^x - 1) g / (1 - g)."""
    low, high = 0.0, 1.0
    while not _covers(events, g, high):
        low, high = high, 2 * high
        if high > MOST:
            raise AccountingError("the cost of tuning did not converge; use fewer runs or more noise")
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if _covers(events, g, middle) else (middle, high)
    return high


def _covers(events: Sequence[Event], g: float, x: float) -> bool:
    allowed = math.expm1(x) * g / (1 - g) * (1 - ROOM)
    return allowed >= 1 or deltas_at(events, [x], 1e-6)[0] <= allowed


def parameter(mean: float, shape: float) -> float:
    """The g in (0, 1) of the truncated negative binomial law of this shape whose mean is `mean`, which is above 1."""
    return 1 / mean if shape == 1 else math.exp(_root(lambda log_g: _mean(math.exp(log_g), shape) - mean))


def _mean(g: float, shape: float) -> float:
    spread = -math.log(g) if shape == 0 else -math.expm1(shape * math.log(g)) / shape
    return (1 - g) / (g * spread)


def _root(falling: Callable[[float], float]) -> float:
    low, high = -MOST, -1e-12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return low
