"""The content of a certificate: everything that a ledger supports saying, as one JSON document."""

from __future__ import annotations

from typing import Any

from murmuration.accounting.certificate.explain import ASSUMPTION
from murmuration.accounting.certificate.limits import allowed, limits
from murmuration.accounting.days import stated as stated_days
from murmuration.accounting.epsilon.accountant import describe, epsilon, round_up, show_delta
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.ledger.chain import Lines
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.lines import Word
from murmuration.accounting.noise import EXACT
from murmuration.accounting.plan import AnyNoise
from murmuration.accounting.sampling import AnySampling
from murmuration.accounting.unit import Unit, adjacency_in_words, unit_in_words

FORMAT = "murmuration-certificate/1"
# Ledger lines after which a certificate no longer covers its run.
UNCOVERED = ("open", "commit", "segment", "origin", "lost", "tuning", "choice")
MECHANISM = (
    "per-record gradients clipped in L2 norm over all trainable parameters, summed over an exact "
    "Poisson sample, Gaussian noise added once to the sum, divided by the constant q·n"
)
# For a run all of whose noise is exact.
EXACT_MECHANISM = (
    "per-record gradients clipped in L2 norm over all trainable parameters, summed over an exact "
    "Poisson sample, the sum rounded to a grid (which enlarges what one record does by the share `growth` of the "
    "plan at most, for which the noise is charged), Gaussian noise rounded to that grid added once in whole numbers, "
    "drawn exactly, divided by the constant q·n"
)
DEVIATIONS = [
    "Noise and sums are floating-point numbers (64-bit draws and totals, 32-bit products and results), not samples of "
    "the ideal distributions.",
    "A whole run directory, secret folder included, that is restored in place is recognised by a log of runs outside "
    "of it alone, where there is one; restored together with that log, it cannot be told from the original.",
]
CURVES = (
    "Curves of the private records without noise (losses, norms, batch sizes, times) were kept for the owner of the "
    "run. Decisions taken by them are outside the claim: when to stop, which settings, checkpoint or run to prefer."
)
KEPT_KEY = (
    "The run's key was kept on request (`run.keep_key`): whoever has it can sign another certificate for this run. The "
    "keys of its private steps are not in it."
)
WITNESSED = (
    "A witness was told the ledger's head at every checkpoint. Whoever can read what the witness keeps knows when "
    "checkpoints were made, and so roughly how long the private steps between them took; no noise covers that."
)
# Words of the config, in the ledger, and what they mean for the claim.
WORDS: dict[Word, str] = {"private_curves": CURVES, "keep_key": KEPT_KEY, "witness": WITNESSED}
RATCHETED = (
    "The keys of private steps are forgotten behind every durable checkpoint, by rewriting the secret file (where a "
    "kill came in between, at the next start). Whoever copied the run's secret folder while the run lasted has the "
    "keys of the steps after the newest checkpoint for which the file had been rewritten by then, to the end of the "
    "segment that was running, and no earlier ones. With kept weights they can take the noise off those steps and tell "
    "who was drawn for them, so against them the claim covers the steps before alone. It does not cover even those if "
    "the storage kept an older state of the secret file: in a snapshot, a backup, or flash memory that was not really "
    "overwritten."
)
# Stated where a phase began with weights that have no ledger of ours.
FOREIGN_WEIGHTS = (
    "Weights that come from elsewhere may have been trained on the very records that this run protects, or on copies "
    "of them, and nothing here can tell. Epsilon bounds what this run added about a record. It does not cover what "
    "the weights held of the record before, which can be read from what is released as well: for such records the "
    "claim is not one about the released weights."
)


def compose(
    history: History, entries: Lines, extra: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Everything a reader needs to recompute the claim. `extra` is what the ledger does not contain: hashes, the
    deviations of this trainer, `about` (a description of the data, who is responsible), `model`, `siblings` (other runs
    on the same records), `dates` but for the first start."""
    added = dict(extra)
    deviations = added.pop("known_deviations", [])
    private = bool(history.plans)
    objection = history.why_not_private()
    chargeable = private and not history.faults
    spent = history.epsilon() if chargeable else None
    delta = history.delta() if private else None
    claimed, basis, tunings = claim_of(history, spent)
    claim: dict[str, Any] = {
        "private": objection is None,
        "statement": objection or _statement(history, claimed or 0.0, history.claimed_delta()),
        "epsilon": spent,
        "epsilon_rounded_up": None if spent is None else round_up(spent),
        "epsilon_claimed": None if claimed is None else round_up(claimed),
        "claimed_because": basis or "every opened step is charged, and the planned number of steps was run",
        "delta": delta,
        **({"delta_claimed": history.claimed_delta()} if history.late_plans else {}),
        "epsilon_budget": history.budget() if private else None,
        "epsilon_rdp": _second_opinion(history) if chargeable else None,
        "method": describe("pld"),
    }
    if dates := stated_days(history.run["started"], added.pop("dates", {})):
        added = {"dates": dates, **added}
    return {
        "format": FORMAT,
        "run": history.run["name"],
        "claim": claim,
        "limits": limits(history, claimed) if claimed is not None else None,
        "assumption": ASSUMPTION,
        "versions": history.run["versions"],
        "unit": unit_in_words(history.unit),
        "adjacency": adjacency_in_words(history.unit),
        "mechanism": _mechanism(EXACT_MECHANISM if _all_exact(history) else MECHANISM, history.unit)
        + "".join(dict.fromkeys(part.sentence for part in _parts(history))),
        "phases": [_phase(history, index) for index in sorted(history.phase_names)],
        "segments": [segment.as_dict() for segment in history.segments],
        "tuned_on_private_data": tunings,
        "known_deviations": deviations_of(history) + deviations,
        **added,
        "ledger": {"length": len(entries), "head": entries.head},
    }


def claim_of(history: History, spent: float | None) -> tuple[float | None, str | None, list[dict[str, Any]]]:
    """The epsilon that a run claims given what it spent, why it claims more than that, and its tuning with its cost."""
    tunings = [declared.as_dict() for declared in history.tunings]
    if spent is None:
        return None, None, tunings
    basis = history.why_budget_is_claimed()
    claimed = max(spent, history.budget()) if basis else spent
    tuned = [history.charged()]
    if basis:
        # What each of several runs may have spent, where the budget is claimed: stopping early, and keeping a
        # checkpoint that was chosen, are post-processing of all planned steps; a new segment may have used up what was
        # left.
        anew = any(segment.number > 0 for segment in history.segments)
        tuned = [history.charged(), history.planned(), *([allowed(history)] if anew else [])]
    for declared, shown in zip(history.tunings, tunings, strict=True):
        if declared.tuning is None:
            continue
        shown["epsilon"] = cost = max(declared.tuning.epsilon(events, history.delta()) for events in tuned)
        claimed = max(claimed, cost)
        basis = f"{basis}; and the run was chosen among several" if basis else "the run was chosen among several"
    return claimed, basis, tunings


def may_claim(history: History) -> float:
    """The most that a run may claim in the end: one that may continue may still spend its budget, and if it was chosen
    among several, so may each of these."""
    claimed = max(history.budget(), claim_of(history, history.epsilon())[0] or 0.0)
    charged = [] if history.finished else [each.tuning for each in history.tunings if each.tuning is not None]
    return max([claimed, *(each.epsilon(allowed(history), history.delta()) for each in charged)])


def deviations_of(history: History) -> list[str]:
    """The deviations that follow from the ledger and that every certificate must state."""
    found = list(DEVIATIONS)
    if _all_exact(history):
        found.remove(DEVIATIONS[0])
    if history.segments:
        found.append(RATCHETED)
        found += dict.fromkeys(part.deviation for part in _parts(history) if part.deviation is not None)
    if lost := sum(charge.count for charge in history.lost):
        found.append(
            f"The ledger was restored from a backup; {lost} steps that its lost part had charged are charged here, and "
            "nothing else is known of them."
        )
    found += [line.deviation(history.phase_names[line.phase]) for line in (*history.public_uses, *history.stores)]
    found += [line.deviation() for line in history.earlier]
    if any(line.use in ("weights", "unknown-weights") for line in history.public_uses):
        found.append(FOREIGN_WEIGHTS)
    found += [text for word, text in WORDS.items() if word in history.words]
    return found + [origin.deviation(unit_in_words(history.unit)) for origin in history.origins]


def uncovered(entries: Lines, document: dict[str, Any]) -> bool:
    """Whether the ledger goes on, after the lines that the certificate covers, with any that it would have to cover."""
    return any(entry.kind in UNCOVERED for entry in entries.beginning(document["ledger"]["length"]))


def _parts(history: History) -> list[AnyNoise | AnySampling]:
    """Noise and sampling of all plans."""
    plans = history.plans.values()
    return [*(plan.noise for plan in plans), *(plan.sampling for plan in plans)]


def _all_exact(history: History) -> bool:
    """Whether every private step drew exact noise; for steps whose lines were lost, the generator is unknown."""
    sources = {generator for _, generator, _ in history.acting.values()}
    return sources == {EXACT} and not history.lost and not history.faults


def _phase(history: History, index: int) -> dict[str, Any]:
    plan, name = history.plans.get(index), history.phase_names[index]
    if plan is None:
        return {
            "phase": index,
            "name": name,
            "private": False,
            "data_declared_public": history.nonprivate[index],
        }
    faulty = bool(history.faults)
    opened, committed = history.steps(index)
    return {
        "phase": index,
        "name": name,
        "private": True,
        "plan": plan.as_dict(),
        "sampling_rate": plan.sampling_rate,
        **plan.noise.in_a_certificate(plan.noise_std),
        "steps_opened": opened,
        "steps_committed": committed,
        "segments": len(history.segments_of(index)),
        "events": [
            {"mechanism": event.mechanism, **event.as_dict()} for event in ([] if faulty else history.charged(index))
        ],
        # If C adapts: its first, last, lowest and highest values.
        **({"clip_norms": trail.norms} if (trail := history.trails.get(index)) and trail.norms else {}),
        **({"faults": history.faults} if faulty else {}),
    }


def _statement(history: History, claimed: float, delta: float) -> str:
    return (
        f"({round_up(claimed)}, {show_delta(delta)})-differential privacy for {unit_in_words(history.unit)}, "
        "for everything that this run released"
    )


def _mechanism(of_records: str, unit: Unit | None) -> str:
    """The mechanism in words; of a unit, each phase's plan says how many records a step takes at most."""
    if unit is None:
        return of_records
    gradients = (
        "per-unit gradients (each of the mean or the sum of the losses of at most `units.rows` of the unit's records, "
        "as the plan says)"
    )
    of_units = of_records.replace("per-record gradients", gradients)
    return of_units.replace("what one record does", "what one unit does")


def _second_opinion(history: History) -> float | str:
    try:
        return epsilon(history.charged(), history.delta(), "rdp")
    except AccountingError as error:
        return f"refused: {error}"
