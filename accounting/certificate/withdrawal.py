"""A statement for those who ask about withdrawn records: what would withdrawing them change, at most?

It follows from a run's ledger and certificate alone: the steps behind the certificate's limits, composed for the
records that are withdrawn. `account.py statement` writes it as JSON and as a page; `verify` recomputes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from murmuration.accounting import escaping
from murmuration.accounting.certificate.explain import (
    ASSUMPTION,
    ONE_IN_A_THOUSAND,
    ONE_PERCENT,
    Attacks,
    factor,
    percent,
    verdict,
)
from murmuration.accounting.certificate.limits import claimed_events, delta_of
from murmuration.accounting.certificate.pages import HERE, NOT_STATED, VERIFY, Block, Section, nist, percent_of
from murmuration.accounting.epsilon import trade_off
from murmuration.accounting.epsilon.accountant import round_up, show_delta, show_epsilon
from murmuration.accounting.epsilon.neighbours import group_curve, replacement_curve
from murmuration.accounting.errors import AccountingError, PlanError
from murmuration.accounting.escaping import printable_leaves
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.history import History
from murmuration.accounting.unit import noun, noun_of

FORMAT = "murmuration-statement/1"
# The outputs are mixtures with a part for each number of records drawn together: more of them take minutes.
MOST_RECORDS = 1000
# The European Data Protection Board's opinion of 17 December 2024 on AI models, by paragraph and section.
EDPB, NIST = "EDPB Opinion 28/2024", "NIST SP 800-226"


def name_of(records: int, units: bool) -> str:
    return f"statement-{records}-{'units' if units else 'records'}"


def bound_of(history: History, certificate: dict[str, Any], records: int, units: bool) -> dict[str, Any]:
    """Upper bounds of what withdrawing `records` records of one person changes, or so many whole `units`.

    Records withdrawn from a unit that a run protects change what this unit contributes, however many they are: that is
    the row for replacements."""
    n = max(plan.records for plan in history.plans.values())
    if units and history.unit is None:
        raise PlanError("this run protects single records and knows no units; leave --unit out")
    if not 1 <= records <= min(n, MOST_RECORDS):
        raise PlanError(
            f"--records {records}: give 1 to {min(n, MOST_RECORDS)}, of {n} {noun(history.unit)}s; where people have "
            "more, protect people (data.unit)"
        )
    events, holds_for = claimed_events(history)
    claimed, delta = certificate["claim"]["epsilon_claimed"], delta_of(certificate["claim"])
    exchanged = history.unit is not None and not units
    curve = _curve(history, events, claimed, delta, None if exchanged else records)
    return {
        "epsilon": max(curve.epsilons[-1], claimed),
        "delta": delta,
        "true_positives": [
            {"false_alarms": alpha, "at_most": curve.power(alpha)} for alpha in (ONE_IN_A_THOUSAND, ONE_PERCENT)
        ],
        "best_guess": curve.best_guess(),
        "advantage": 2 * curve.best_guess() - 1,
        "holds_for": holds_for,
    }


def _curve(
    history: History, events: Sequence[Event] | None, claimed: float, delta: float, records: int | None
) -> trade_off.TradeOff:
    """`records` None: one unit's contribution is exchanged for another."""
    if records == 1:
        return trade_off.of_point(claimed, delta) if events is None else trade_off.of_events(events, delta)
    if events is None:
        raise AccountingError(
            "nothing but the (ε, δ) of the claim is proved for this run, and nothing for several or exchanged records"
        )
    if records is None:
        return replacement_curve(events, delta)
    if why := next((plan.sampling.no_groups for plan in history.plans.values() if plan.sampling.no_groups), None):
        raise AccountingError(why)
    return group_curve(events, delta, records)


def compose(certificate: dict[str, Any], records: int, units: bool, bound: dict[str, Any]) -> dict[str, Any]:
    """The statement, unsigned, of a certificate whose claim is private."""
    one, what = noun_of(certificate["unit"]), _withdrawn(certificate, records, units)
    low, high = (point["at_most"] for point in bound["true_positives"])
    n = max(phase["plan"]["records"] for phase in certificate["phases"] if phase.get("plan"))
    epsilon = round_up(bound["epsilon"])
    return {
        "format": FORMAT,
        "run": certificate["run"],
        "ledger": certificate["ledger"],
        "withdrawn": {"records": records, "units": units, "in_words": what},
        "bound": bound,
        "statement": f"Withdrawing {what} changes the probability of whatever may be found in what this run released "
        f"by a factor of at most {factor(epsilon)} in either direction (e^ε, ε = {show_epsilon(epsilon)}), plus δ = "
        f"{show_delta(bound['delta'])}.",
        "meaning": [
            f"Compared are this run and the same run in which {what} had been blank from the start: drawn alike, and "
            "contributing nothing. All that the run released is meant, and all that anybody computes from it. "
            "Withdrawing records later takes nothing out of released weights; the bound says how much of these "
            "records can be in them.",
            verdict(Attacks(bound["best_guess"], high, low), bound["delta"], n),
            f"It holds for {bound['holds_for']}. {ASSUMPTION}",
        ],
        "not_covered": _not_covered(certificate, one, records, units),
        "answers": {
            EDPB: _edpb(certificate, what, bound),
            NIST: [row for table in nist(certificate) for row in table.content],
        },
    }


def page(statement: dict[str, Any]) -> dict[str, bytes]:
    """By its name."""
    withdrawn = statement["withdrawn"]
    name = f"{name_of(withdrawn['records'], withdrawn['units'])}.html"
    return {name: _html(statement).encode("utf-8", "backslashreplace")}


def _html(statement: dict[str, Any]) -> str:
    shown = printable_leaves(statement)
    bound, answers = shown["bound"], shown["answers"]
    found = [
        [f"found at {percent_of(point['false_alarms'])} false alarms", percent(point["at_most"])]
        for point in bound["true_positives"]
    ]
    sections = [
        Section(
            f"What withdrawing {shown['withdrawn']['in_words']} changes at most: {shown['run']}",
            [
                Block("strong", shown["statement"]),
                Block("table", [
                    ["measure", "at most"], ["ε", f"{round_up(bound['epsilon'])}"], ["δ", show_delta(bound["delta"])],
                    *found,
                    ["advantage: share found less share of false alarms, where that is largest",
                     percent(bound["advantage"])],
                ]),
                Block("text", "Found: how often somebody sees that the records were used, if they were, while accusing "
                      "so many runs that did not use them."),
                *(Block("text", text) for text in shown["meaning"]),
            ],
        ),
        Section("What this does not cover", [Block("list", shown["not_covered"])]),
        Section(f"The questions of {EDPB} on anonymity", [Block("table", answers[EDPB])]),
        Section(f"The components of {NIST}", [Block("table", answers[NIST])]),
        Section("Check it", [
            Block("text", f"Ledger: {shown['ledger']['length']} lines, head {shown['ledger']['head']}. "
                  + (f"Signed by {shown['signature']['public_key']}." if "signature" in shown else
                     "Not signed: the certificate is, and this statement follows from it.")),
            Block("text", "With this page and its JSON file beside ledger and certificate, recompute all of it:"),
            Block("code", VERIFY),
        ]),
    ]  # fmt: skip
    return escaping.html_page(HERE / "certificate.html.jinja", sections=sections, certificate=None, scripts=None)


def _withdrawn(certificate: dict[str, Any], records: int, units: bool) -> str:
    if units:
        return "one whole unit" if records == 1 else f"{records} whole units"
    counted = "one record" if records == 1 else f"{records} records of one person"
    return counted if noun_of(certificate["unit"]) == "record" else f"{counted} that belong to one unit"


def _not_covered(certificate: dict[str, Any], one: str, records: int, units: bool) -> list[str]:
    public = [phase["name"] for phase in certificate["phases"] if not phase["private"]]
    several = [
        f"{each.get('run')}" if isinstance(each, dict) else f"{each}" for each in certificate.get("siblings", [])
    ]
    found = certificate.get("composition") or {}
    together = (
        f"together with this run they have ε = {round_up(found['epsilon_sum'])}, δ = "
        f"{show_delta(found['delta_sum'])} for one {one}, the sums of all claims"
        if found.get("epsilon_sum") is not None
        else "nothing is stated of them together with this run"
    )
    label = (
        f"A record that gets another label, or is exchanged for another one: that has ε = "
        f"{_shown(certificate['limits']['replacement'])} for one {one}."
    )
    people = "Anybody with more than {} in the data.".format(
        _withdrawn(certificate, records, units) if units or one == "record" else "one unit, or with records in several,"
    )
    return [
        people,
        f"Records used without noise: phases {', '.join(public) or 'none'}; public records that were mixed in or "
        "measured on; what initial weights had been trained on. A person may be in them, too.",
        f"Other runs on the same records: {', '.join(several)} were known when the certificate was written; {together}."
        if several
        else "Other runs on the same records: none was known when the certificate was written; later ones add up.",
        "The person's data elsewhere: the stored records themselves, copies, backups, other data sets and models.",
        *([label] if one == "record" or units else []),
        "Other people's records that tell about the person: relatives, the same scene or text under another name, and "
        f"whatever is true of many {one}s. Such facts are learned from others whether or not the person takes part.",
        f"That the data have n {one}s, and all other numbers of the plan: they are public.",
        "The run's secret folder, private logs and the machine while it trained; whoever had those is not limited.",
        *certificate["known_deviations"],
    ]


def _shown(row: dict[str, Any]) -> str:
    return f"nothing proved ({row['reason']})" if row["epsilon"] is None else f"{round_up(row['epsilon'])}"


def _edpb(certificate: dict[str, Any], what: str, bound: dict[str, Any]) -> list[list[str]]:
    """Only what was confirmed of the opinion's text is cited; whether a likelihood is insignificant it leaves to the
    authorities, and so does this."""
    about = certificate.get("about") or {}
    at_most = ", ".join(f"{percent(p['at_most'])} at {percent_of(p['false_alarms'])}" for p in bound["true_positives"])
    delta = show_delta(bound["delta"])
    return [
        ["question", "what this run proves"],
        ["Is the model anonymous? Case by case, not by assertion (paragraph 34)",
         "not decided here: the rows below are evidence for that assessment"],
        ["Likelihood of direct, also probabilistic, extraction of personal data of those whose data were used "
         "(paragraph 43, i)",
         f"what would come out of a run without {what} with probability p comes out of this one with at most "
         f"e^ε·p + δ, ε = {round_up(bound['epsilon'])}, δ = {delta}"],
        ["Likelihood of obtaining such data from queries, intentionally or not (paragraph 43, ii)",
         "the same bound for any number of queries and any use: they are computed from the weights"],
        ["Insignificant for any data subject (paragraph 43)",
         f"the bound holds for the worst case, rare records included, but for nobody with more than {what}"],
        ["All the means reasonably likely to be used",
         "any means, also knowing all other records; but not breaking the cipher that the noise comes from"],
        ["Design: sources, preparation and minimisation of data (section 3.2.2)", about.get("data") or NOT_STATED],
        ["Design: methods of training (section 3.2.2)", "differential privacy; the mechanism is below"],
        ["Design: measures on outputs (section 3.2.2)", "none is assumed: the bound is about the weights themselves"],
        ["Analysis (section 3.2.2)", f"the ledger has every step and can be checked by anyone: {VERIFY}"],
        ["Testing and resistance to attacks: attribute and membership inference, exfiltration, regurgitation, model "
         "inversion, reconstruction (section 3.2.2)",
         f"no test of membership finds more than {at_most} false alarms, whatever it computes; what other attacks "
         "bring to light is limited by the second row, except for attributes that others' records give away"],
        ["Documentation (section 3.2.2)", "ledger, certificate with its known deviations, and this statement"],
    ]  # fmt: skip
