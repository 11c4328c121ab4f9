"""What an epsilon means, for a reader who has never heard of differential privacy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from murmuration.accounting.epsilon.accountant import show_delta, show_epsilon
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


def explain(
    epsilon: float, delta: float, unit: str, attacks: Attacks, not_private: str | None = None, n: int | None = None
) -> str:
    """A few paragraphs of plain language; `unit` as a certificate states it, `n` how many there are."""
    one = noun_of(unit)
    if not_private is not None:
        return (
            f"{not_private}.\n\nNo promise is made about the people or things in the training data: whoever sees the "
            "model may be able to tell what was in them, and nothing limits how much."
        )
    # The mechanism that publishes each record with probability delta has (0, delta), so delta must be read with n.
    permitted = f"By itself, delta would permit to publish each {one} with that probability"
    permitted += "." if n is None else f": {up_to_three(n * delta)} of the {n:,} on average."
    return "\n\n".join(
        (
            f"The promise protects {unit}. Imagine that this one {one} had been blanked out before training. The "
            "promise bounds how differently the model, and everything else that the run published, could then have "
            "come out.",
            f"How differently: whatever may be found in what was published, its probability with the {one} is at most "
            f"{factor(epsilon)} times its probability without, plus {show_delta(delta)}, and the same the other way "
            f"round. The factor is e^epsilon, epsilon = {show_epsilon(epsilon)}; what is added is delta. Smaller is "
            f"stronger. {permitted}",
            f"What a spy gains at the very most: one who guesses by tossing a coin whether the {one} was used is right "
            f"in 50 % of the cases, and with the model in at most {percent(attacks.best_guess)}. One who accepts a "
            f"false alarm in 1 % of the cases finds at most {percent(attacks.at_one_percent)} of the {one}s that were "
            f"used, and at 0.1 % false alarms at most {percent(attacks.at_one_in_a_thousand)}. These are limits on all "
            f"attacks, also on one with all the other {one}s in hand.",
            f"What that rests on: {ASSUMPTION[0].lower()}{ASSUMPTION[1:]}",
            verdict(attacks, delta, n),
            f"What it does not promise: facts that hold for many {one}s (a style, a language, a disease's look) can "
            f"still be learned; a person with several {one}s is protected less, and not in proportion; and data that "
            "the model saw outside the private phases, or a stolen copy of the raw data, are not covered.",
        )
    )


def up_to_three(value: float) -> str:
    """Three digits, rounded up."""
    scale = 10.0 ** (2 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale * (1 - 1e-12)) / scale:.6g}"


class Bar(NamedTuple):
    """What a word asks of the limits: neither a guess at even odds nor a spy with 0.1 % false alarms gains more."""

    best_guess: float
    at_one_in_a_thousand: float


BARS = {"strong": Bar(0.75, 0.01), "moderate": Bar(0.9, 0.1)}


def strength(attacks: Attacks, delta: float, n: int | None) -> str:
    """In a word, from the trade-off curve; weak where delta alone would permit to publish more than one record."""
    if n is not None and n * delta > 1 + 1e-9:
        return "weak"
    return next(
        (
            word
            for word, bar in BARS.items()
            if attacks.best_guess <= bar.best_guess and attacks.at_one_in_a_thousand <= bar.at_one_in_a_thousand
        ),
        "weak",
    )


def verdict(attacks: Attacks, delta: float, n: int | None) -> str:
    word = strength(attacks, delta, n)
    if word == "weak":
        return (
            "By these limits this program calls the promise weak: read it as a safeguard against the worst leaks, and "
            "do not rely on it for sensitive data."
        )
    bar = BARS[word]
    return (
        f"By these limits this program calls the promise {word}: at most {percent(bar.best_guess)} of guesses at even "
        f"odds are right, and at 0.1 % false alarms at most {percent(bar.at_one_in_a_thousand)} are found."
    )


def factor(epsilon: float) -> str:
    """e^epsilon, rounded up: the text says that it is a bound."""
    if epsilon > 20:
        return f"10^{math.ceil(epsilon / math.log(10))}"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 100) / 100:,.2f}" if epsilon < 3 else f"{math.ceil(factor):,}"


def percent(share: float) -> str:
    """Rounded up: the text states limits."""
    return f"{min(100.0, math.ceil(share * 1e4) / 100):g} %"
