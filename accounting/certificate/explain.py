"""What an epsilon means, for a reader who has never heard of differential privacy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from murmuration.accounting.epsilon.accountant import show_delta
from murmuration.accounting.epsilon.trade_off import TradeOff
from murmuration.accounting.unit import noun_of

# The two shares of false alarms that the text mentions.
ONE_PERCENT, ONE_IN_A_THOUSAND = 0.01, 0.001
ASSUMPTION = (
    "Noise and draws come from a cipher under a secret key (AES-256-CTR, or for the noise ChaCha20 where the ledger "
    "names it), not from true randomness. The promise is therefore computational: it holds against everyone who has "
    "neither the key nor a way to tell the cipher's output from true randomness. Computers without limits are not "
    "covered."
)


class Attacks(NamedTuple):
    """Upper bounds for any spy: share of right answers at even odds, and shares of used records that are found."""

    best_guess: float
    at_one_percent: float
    at_one_in_a_thousand: float

    @staticmethod
    def of_curve(curve: TradeOff) -> Attacks:
        return Attacks(curve.best_guess(), curve.power(ONE_PERCENT), curve.power(ONE_IN_A_THOUSAND))

    @staticmethod
    def of_limits(limits: dict[str, Any]) -> Attacks:
        found = {point["false_alarms"]: point["at_most"] for point in limits["true_positives"]}
        return Attacks(limits["best_guess"], found[ONE_PERCENT], found[ONE_IN_A_THOUSAND])


def explain(epsilon: float, delta: float, unit: str, attacks: Attacks, not_private: str | None = None) -> str:
    """A few paragraphs of plain language; `unit` as a certificate states it."""
    one = noun_of(unit)
    if not_private is not None:
        return (
            f"{not_private}.\n\nNo promise is made about the people or things in the training data: whoever sees the "
            "model may be able to tell what was in them, and nothing limits how much."
        )
    return "\n\n".join(
        (
            f"The promise protects {unit}. Imagine that this one {one} had been blanked out before training. The "
            "model that came out would have been almost as likely either way, and so would everything else that the "
            "run published.",
            f"How almost: epsilon = {epsilon:g} bounds the change of every probability by a factor of "
            f"{_factor(epsilon)}, except in a share of delta = {show_delta(delta)} of all cases. Smaller is stronger; "
            f"0 would mean that nothing at all can be learned about the {one}.",
            f"What a spy gains at the very most: one who guesses by tossing a coin whether the {one} was used is right "
            f"in 50 % of the cases, and with the model in at most {percent(attacks.best_guess)}. One who accepts a "
            f"false alarm in 1 % of the cases finds at most {percent(attacks.at_one_percent)} of the {one}s that were "
            f"used, and at 0.1 % false alarms at most {percent(attacks.at_one_in_a_thousand)}. These are limits on all "
            f"attacks, also on one with all the other {one}s in hand; the attacks that people have measured usually "
            "reach less.",
            f"What that rests on: {ASSUMPTION[0].lower()}{ASSUMPTION[1:]}",
            _verdict(epsilon),
            f"What it does not promise: facts that hold for many {one}s (a style, a language, a disease's look) can "
            f"still be learned; a person with several {one}s is protected less, and not in proportion; and data that "
            "the model saw outside the private phases, or a stolen copy of the raw data, are not covered.",
        )
    )


def _verdict(epsilon: float) -> str:
    if epsilon <= 1:
        return "At this size the promise is strong: the limits above leave every attacker little to gain."
    if epsilon <= 10:
        return (
            "At this size the worst-case promise is moderate. It is common for models of this kind, and the "
            "attacks measured on such models recover little; the limits above are what is guaranteed."
        )
    return (
        "At this size the worst-case promise is weak: read it as a safeguard against the worst leaks, and do not rely "
        "on it for sensitive data."
    )


def _factor(epsilon: float) -> str:
    """e^epsilon, rounded up: the text says that it is a bound."""
    if epsilon > 20:
        return f"10^{math.ceil(epsilon / math.log(10))}"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 100) / 100:,.2f}" if epsilon < 3 else f"{math.ceil(factor):,}"


def percent(share: float) -> str:
    """Rounded up: the text states limits."""
    return f"{min(100.0, math.ceil(share * 1e4) / 100):g} %"
