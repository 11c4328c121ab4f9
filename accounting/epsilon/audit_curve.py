"""Decides from right and wrong guesses about canaries whether a trade-off curve is refuted.

The setting is that of `audit_bound`: m fair coins, r of them guessed, c correctly. Mahloujifar, Melis and Chaudhuri
("Auditing f-differential privacy in one run", 2024) ask which trade-off curves make c too unlikely. What is computed
here rests on the following.

Let `power(x)` be the largest share of true members that any test finds at a share x of false alarms; it is concave and
increasing.
Fix all coins but one, and look at the event "the guess about this coin is right, and i or more guesses are right". If
the coin is flipped, the same outputs make the guess wrong and leave i - 1 or more right ones. So the first event
has at most `power` of the probability of "this guess is wrong, and i - 1 or more are right". Averaging over the coin's
two sides, all other coins, and which of the m coins it was (`power` is concave, so Jensen's inequality helps), with
p_k for the probability of exactly k right guesses:

    (1/m) Σ_{k ≥ i} k·p_k  ≤  power( (1/m) Σ_{k ≥ i-1} (r - k)·p_k )          for every i.

How large can the tail P = Σ_{k ≥ c} p_k be? Moving all mass above c down to c loosens every inequality, so p_c = P and
there is nothing above it. Mass at k that its inequality does not need may move to k - 1, which loosens the ones below,
so the least total mass is what each inequality needs in turn, from c downwards. If that exceeds 1, no algorithm with
this curve has a tail of P.
"""

from __future__ import annotations

import math

from murmuration.accounting.epsilon.trade_off import TradeOff

# More than the rounding of some thousand additions; a total counts only if it exceeds what is possible by this share.
ROUNDING = 1e-9
LEAST_TAIL = 1e-15


def curve_p_value(canaries: int, guesses: int, correct: int, curve: TradeOff) -> float:
    """Upper bound on the probability of `correct` or more right guesses under any algorithm with this curve; at least
    1e-15."""
    if not is_refuted(canaries, guesses, correct, curve, 1.0):
        return 1.0
    if is_refuted(canaries, guesses, correct, curve, LEAST_TAIL):
        return LEAST_TAIL
    possible, impossible = math.log(LEAST_TAIL), 0.0
    for _ in range(40):
        middle = (possible + impossible) / 2
        refuted = is_refuted(canaries, guesses, correct, curve, math.exp(middle))
        possible, impossible = (possible, middle) if refuted else (middle, impossible)
    return math.exp(impossible)


def is_refuted(canaries: int, guesses: int, correct: int, curve: TradeOff, level: float) -> bool:
    """Whether `correct` or more right guesses are at most `level` likely under every algorithm with this curve: a tail
    of this probability would need a total probability above 1."""
    limit = guesses / canaries * (1 + ROUNDING)
    right, wrong = level * correct / canaries, level * (guesses - correct) / canaries
    for count in range(correct, 0, -1):
        needed = curve.false_alarms(right)
        if needed <= wrong:
            return False  # nothing changes from here on
        right += (count - 1) / (guesses - count + 1) * (needed - wrong)
        wrong = needed
        if right + wrong > limit:
            return True
    return False
