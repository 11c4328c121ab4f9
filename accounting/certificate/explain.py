"""What an epsilon means, for a reader who has never heard of differential privacy."""

from __future__ import annotations

import math


def best_guess(epsilon: float, delta: float) -> float:
    """Share of right answers, at most, of a spy who must say whether a record was used and has even odds before."""
    # (e^eps + delta) / (e^eps + 1), written with exp(-epsilon), so that a huge epsilon gives 1 and no overflow.
    shrunk = math.exp(-epsilon)
    return min(1.0, (1 + delta * shrunk) / (1 + shrunk))


def attack_power(epsilon: float, delta: float, false_alarms: float = 0.01) -> float:
    """Most true members that any test may find while it wrongly accuses `false_alarms` of the others."""
    grown = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    shrunk = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return max(0.0, min(1.0, grown, shrunk))


def explain(epsilon: float, delta: float, unit: str, not_private: str | None = None) -> str:
    """A few paragraphs of plain language."""
    if not_private is not None:
        return (
            f"{not_private}.\n\nNo promise is made about the people or things in the training data: whoever sees the "
            "model may be able to tell what was in them, and nothing limits how much."
        )
    likely, power = best_guess(epsilon, delta), attack_power(epsilon, delta)
    return "\n\n".join(
        (
            f"The promise protects {unit}. Imagine that this one record had been blanked out before training. The "
            "model that came out would have been almost as likely either way, and so would everything else that the "
            "run published.",
            f"How almost: epsilon = {epsilon:g} bounds the change of every probability by a factor of "
            f"{_factor(epsilon)}, except in a share of delta = {delta:.3g} of all cases. Smaller is stronger; 0 would "
            "mean that nothing at all can be learned about the record.",
            "What a spy gains at the very most: one who guesses by tossing a coin whether the record was used is right "
            f"in 50 % of the cases, and with the model in at most {_percent(likely)}. One who accepts a false alarm in "
            f"1 % of the cases finds at most {_percent(power)} of the records that were used. These are limits on all "
            "conceivable attacks, also on one with unlimited computers and with all the other records in hand; the "
            "attacks that people have measured usually reach less.",
            _verdict(epsilon),
            "What it does not promise: facts that hold for many records (a style, a language, a disease's look) can "
            "still be learned; a person with several records is protected less; and data that the model saw outside "
            "the private phases, or a stolen copy of the raw data, are not covered.",
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
    if epsilon > 20:
        return f"10^{epsilon / math.log(10):.0f}"
    return f"{math.exp(epsilon):,.2f}" if epsilon < 3 else f"{math.exp(epsilon):,.0f}"


def _percent(share: float) -> str:
    """Rounded up: the text states limits."""
    return f"{min(100.0, math.ceil(share * 1e4) / 100):g} %"
