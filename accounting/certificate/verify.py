"""Checks that a ledger alone supports what its certificate and the checkpoints beside it say."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate.attached import Attached, CertificateError, check_attached
from murmuration.accounting.certificate.evidence import fault_of as fault_of_audit
from murmuration.accounting.certificate.evidence import refutations
from murmuration.accounting.certificate.limits import claimed_events
from murmuration.accounting.certificate.pages import html_sections, pages
from murmuration.accounting.certificate.signature import fault_of
from murmuration.accounting.certificate.statement import FORMAT, compose, deviations_of, uncovered
from murmuration.accounting.days import fault_of as fault_of_dates
from murmuration.accounting.epsilon.accountant import Accountant
from murmuration.accounting.errors import AccountingError, RunError, written_before
from murmuration.accounting.escaping import printable
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import Lines
from murmuration.accounting.ledger.heads import lost_charges, noted_in, read_heads, uncharged, unknown
from murmuration.accounting.ledger.history import History
from murmuration.accounting.strict_json import JsonError, parse

# Bounds that two processors compute for the same ledger agree to about 1e-12; a difference above this is refused.
AGREEMENT = 1e-9
# Limits are read off a curve at fixed points, where small differences between processors grow.
LIMITS_AGREEMENT = 1e-6
# Its number was counted on before forms began anew.
BEFORE = ("murmuration-certificate/2",)
# What follows from the ledger alone; everything else in a certificate is somebody's word.
DERIVED = ("run", "unit", "adjacency", "mechanism", "phases", "segments", "tuned_on_private_data")
DERIVED_CLAIMS = (
    "private", "statement", "epsilon", "epsilon_rounded_up", "epsilon_claimed", "claimed_because", "delta",
    "epsilon_budget", "epsilon_rdp",
)  # fmt: skip
# Only some claims have these; if they do, the pages show them.
OPTIONAL_CLAIMS = ("delta_claimed",)


@dataclass(frozen=True)
class Verdict:
    """What could be recomputed from the ledger alone."""

    run: str
    objection: str | None
    epsilon: float
    delta: float | None
    budget: float
    opened: int
    committed: int
    lines: int
    head: str
    certified: float | None
    claimed: float | None = None
    delta_claimed: float | None = None
    """At which the claim holds; what was spent is stated at `delta`."""
    claimed_because: str | None = None
    checkpoints: int = 0
    attached: Attached | None = None
    """None where there is no certificate yet."""
    refuted: list[str] = field(default_factory=list)
    """What of the claim does not stand by the run's own audit."""

    @property
    def unchecked(self) -> list[str]:
        """What full success would need besides; sentences."""
        return ["there is no certificate"] if self.attached is None else self.attached.unchecked


def verify(
    target: Path, accountant: Accountant = "pld", signer: str | None = None, witness: Path | None = None
) -> Verdict:
    """Recomputes epsilon from the ledger of a run directory (or beside a certificate) and compares it. `signer` is the
    run's public key from another source; `witness` is a file with the heads that a witness recorded."""
    run_dir = target if target.is_dir() else target.parent
    named = target if target.is_file() and target.suffix == ".json" else None
    certificate_path = named or run_dir / "certificate.json"
    history, entries = History.read(run_dir / "ledger.jsonl")
    _require_newest(run_dir, history, entries)
    if witness is not None:
        _check_witness(witness, history, entries)
    checkpoints = _check_checkpoints(run_dir, entries)
    private = bool(history.plans)
    # A run whose ledger records a fault has no epsilon: this raises an error that names the step.
    spent = history.epsilon(accountant) if private else 0.0
    if private and accountant == "pld" and spent > history.budget() * (1 + AGREEMENT):
        raise CertificateError(f"the ledger charges epsilon = {spent:.6f}, above the budget of {history.budget():g}")
    opened, committed = history.steps()
    certified = claimed = because = attached = None
    refuted: list[str] = []
    if certificate_path.is_file():
        try:
            certificate = parse(certificate_path.read_bytes())
            certified = _compare(certificate, history, entries)
            claimed, because = certificate["claim"]["epsilon_claimed"], certificate["claim"]["claimed_because"]
            refuted = refutations(certificate)
            attached = check_attached(run_dir, certificate, history, signer)
            _check_audit(certificate, attached)
            if certificate_path.name == "certificate.json":
                _check_pages(run_dir, pages(certificate), "certificate.json", attached)
                _check_report(run_dir / "report.html", certificate, attached)
                _check_statements(run_dir, certificate, history, attached)
            else:
                attached.unchecked.append(f"the pages: they show certificate.json, not {certificate_path.name}")
        except (CertificateError, AccountingError):
            raise
        except JsonError as error:
            raise CertificateError(f"{certificate_path} {error}; restore it") from None
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, ArithmeticError) as error:
            raise CertificateError(f"{certificate_path} is damaged ({error!r}); restore it") from None
    return Verdict(
        run=history.run["name"], objection=history.why_not_private(), epsilon=spent,
        delta=history.delta() if private else None, budget=history.budget() if private else 0.0,
        opened=opened, committed=committed, lines=len(entries), head=entries.head,
        certified=certified, claimed=claimed, delta_claimed=history.claimed_delta() if private else None,
        claimed_because=because, checkpoints=checkpoints, attached=attached, refuted=refuted,
    )  # fmt: skip


def _require_newest(run_dir: Path, history: History, entries: Lines) -> None:
    """Checks against the secret folder, if there is one: exports and copies of the public files have none."""
    try:
        noted = noted_in(run_dir / "secret")
    except OSError:
        return
    if (lost := lost_charges(entries, noted)) is not None:
        raise CertificateError(
            f"the ledger has {len(entries)} lines, but this run is known to have had another line {lost[0].length}: it "
            "was restored from a backup; restore the newest one"
        )
    if (head := uncharged(history.charges(), noted)) is not None:
        raise CertificateError(
            f"this run is known to have charged more by its line {head.length} than the whole ledger does; restore it"
        )


def _check_witness(witness: Path, history: History, entries: Lines) -> None:
    told = [head for head in read_heads(witness) if head.ledger_of in history.ids]
    if not told:
        raise CertificateError(f"{witness} has no head of this run; give the file that its witness recorded")
    if strange := unknown(entries, told):
        raise CertificateError(
            f"ledger line {told[strange[0]].length} is not the one that the witness recorded, so the ledger was "
            "rewritten or restored"
        )
    if (head := uncharged(history.charges(), told)) is not None:
        raise CertificateError(
            f"the witness recorded that more had been charged by line {head.length} than the whole ledger charges, so "
            "it was rewritten"
        )


def _check_checkpoints(run_dir: Path, entries: Lines) -> int:
    """A truncated ledger is a valid shorter ledger, but checkpoints written later record how long it had been."""
    manifests = sorted(run_dir.glob("checkpoints/phase*-step*/manifest.json"))
    for manifest in manifests:
        try:
            stored = parse(manifest.read_bytes())["ledger"]
            length, head = int(stored["length"]), stored["head"]
        except (OSError, KeyError, TypeError, ValueError):
            raise CertificateError(f"{manifest} is damaged, so it cannot vouch for the ledger; restore it") from None
        _require_line(entries, length, head, f"the checkpoint {manifest.parent.name}")
    return len(manifests)


def _check_audit(certificate: dict[str, Any], found: Attached) -> None:
    """Evidence is the signer's word; what can be recomputed is that its numbers agree."""
    if (audit := certificate.get("audit")) is None:
        return
    if (fault := fault_of_audit(audit)) is not None:
        raise CertificateError(f"the certificate's audit {fault}")
    for name, part in (
        ("audit", audit),
        ("audit with canaries", audit.get("one_run")),
        ("replay", audit.get("replay")),
    ):
        if part is not None and not part["made"]:
            found.unchecked.append(f"the {name} that run.audit asks for: not made")
    if audit["made"]:
        found.checked.append("the numbers of the run's own audit agree")


def _check_pages(run_dir: Path, made: dict[str, bytes], source: str, found: Attached) -> None:
    """People read the pages, which nobody signs: they must follow from `source`."""
    for name, content in made.items():
        path = run_dir / name
        if not path.is_file():
            found.unchecked.append(f"{name}: it is missing")
        elif path.read_bytes() == content:
            found.checked.append(f"{name} shows what {source} says")
        else:
            found.unchecked.append(
                f"{name}: differs from the page that this version makes of {source}; another version may have written "
                f"it, or somebody changed it, so believe {source} alone"
            )


def _check_report(path: Path, certificate: dict[str, Any], found: Attached) -> None:
    """Its plots and pictures are nobody's signed word, but the claim that it shows must be the certificate's."""
    if not path.is_file():
        return
    text = path.read_bytes().decode(errors="replace")
    claims = re.findall(r"<p class='claim'>(.*?)</p>", text, re.DOTALL)
    claim = html.escape(printable(certificate["claim"]["statement"]))
    if all(each == claim for each in claims) and html_sections(certificate) in text:
        found.checked.append(f"{path.name} shows this certificate; its plots and pictures are not certified")
    else:
        found.unchecked.append(f"{path.name}: it does not show this certificate; believe certificate.json alone")


def _check_statements(run_dir: Path, certificate: dict[str, Any], history: History, found: Attached) -> None:
    """Statements about withdrawn records are signed or not: they must follow from ledger and certificate."""
    if not (paths := sorted(run_dir.glob("statement-*.json"))):
        return
    from murmuration.accounting.certificate import withdrawal  # few runs have any

    for path in paths:
        try:
            stated = parse(path.read_bytes())
            if "signature" in stated and (fault := fault_of(stated, history.run["signer"])) is not None:
                raise CertificateError(f"it {fault}")
            records, units = stated["withdrawn"]["records"], stated["withdrawn"]["units"]
            recomputed = dict(_leaves("bound", withdrawal.bound_of(history, certificate, records, units)))
            bound = dict(_leaves("bound", stated["bound"]))
            for place in sorted(recomputed.keys() | bound.keys()):
                if not _close(bound.get(place), recomputed.get(place, _MISSING)):
                    raise CertificateError(f"it says another {place}")
            # Its words follow from its own numbers, which may differ in their last digits from this processor's.
            expected = withdrawal.compose(certificate, records, units, stated["bound"])
            named = withdrawal.name_of(records, units)
            if path.stem != named or {**stated, "signature": 0} != {**expected, "signature": 0}:
                raise CertificateError("its words are others")
        except (RunError, KeyError, TypeError, AttributeError, ValueError) as error:
            told = error if isinstance(error, RunError) else repr(error)
            raise CertificateError(
                f"{path.name} does not follow from ledger and certificate ({told!s:.200}); make it again (account.py "
                "statement)"
            ) from None
        found.checked.append(f"{path.name} follows from ledger and certificate")
        _check_pages(run_dir, withdrawal.page(stated), path.name, found)


def _require_line(entries: Lines, length: int, head: str, witness: str) -> None:
    if len(entries) < length:
        raise CertificateError(
            f"the ledger has {len(entries)} lines but {witness} was written after {length}: lines were removed"
        )
    if length < 1 or entries[length - 1].hash != head:
        raise CertificateError(f"ledger line {length} is not the one that {witness} names as its head")


def _compare(certificate: dict[str, Any], history: History, entries: Lines) -> float | None:
    if certificate["format"] in BEFORE or (certificate["format"] == FORMAT and "limits" not in certificate):
        raise CertificateError(written_before("the certificate", "nothing here can check it"))
    if certificate["format"] != FORMAT:
        raise CertificateError(f"the certificate has format {certificate['format']!r:.200}, not {FORMAT!r}")
    length = certificate["ledger"]["length"]
    _require_line(entries, length, certificate["ledger"]["head"], "the certificate")
    if uncovered(entries, certificate):
        raise CertificateError(
            "steps were opened, or tuning was declared, after the certificate was written; it no longer covers the run"
        )
    expected = compose(history, entries, {})
    pairs = [(key, certificate[key], expected[key]) for key in DERIVED]
    pairs += [(f"claim.{key}", certificate["claim"][key], expected["claim"][key]) for key in DERIVED_CLAIMS]
    pairs.append(("claim", _optional(certificate), _optional(expected)))
    pairs.append(("claim.method", _method(certificate), _method(expected)))
    for name, found, recomputed in pairs:
        # Through JSON and back, like the certificate.
        if not _same(found, json.loads(json.dumps(recomputed))):
            raise CertificateError(f"the certificate says {name} = {found!s:.200}, but the ledger gives {recomputed}")
    # Assumption and versions are compared to the letter, limits by their numbers, but not the reasons for missing ones.
    for name in ("assumption", "versions"):
        if certificate[name] != json.loads(json.dumps(expected[name])):
            raise CertificateError(f"the certificate's {name} are not those of this ledger and version; restore it")
    found, recomputed = (dict(_leaves("limits", document["limits"])) for document in (certificate, expected))
    for place in sorted(found.keys() | recomputed.keys()):
        if place not in found or not _close(found[place], recomputed.get(place, _MISSING)):
            raise CertificateError(
                f"the certificate says {place} = {found.get(place)!s:.200}, but the ledger gives "
                f"{recomputed.get(place)}"
            )
    # What is not in the ledger must not contradict it or the certificate's other parts.
    claimed = expected["claim"]["epsilon_claimed"]
    for name in ("known_deviations", "siblings"):
        if not isinstance(certificate.get(name, []), list):
            raise CertificateError(f"the certificate's {name} are not a list; restore it")
    left_out = set(deviations_of(history)) - set(certificate["known_deviations"])
    if left_out:
        raise CertificateError(f"the certificate leaves out a known deviation: {min(left_out)}")
    if (fault := fault_of_dates(certificate.get("dates", {}), history.run["started"])) is not None:
        raise CertificateError(f"the certificate's dates {fault}")
    if "composition" in certificate:
        _check_composition(certificate, history, claimed)
    claimed = certificate["claim"]["epsilon"]
    return None if claimed is None else float(claimed)


def _check_composition(certificate: dict[str, Any], history: History, claimed: float) -> None:
    """The numbers must follow from the stated runs and events, which must include this run's own."""
    from murmuration.accounting.certificate.composition import SUMS, total  # few runs have siblings

    stated = certificate["composition"]
    own = {"run": history.run["name"], "id": history.run_id, "epsilon": claimed}
    mine = next((run for run in stated["runs"] if own.items() <= run.items()), None)
    if mine is None:
        raise CertificateError("the certificate's composition of several runs leaves this run out")
    if stated["epsilon_sum"] is None:
        return
    charged = {event.kind: event.count for event in map(Event.of_dict, stated["events"])}
    events, _ = claimed_events(history)
    if (mine["by"] == "ledger") != (events is not None) or any(
        charged.get(event.kind, 0) < event.count for event in events or ()
    ):
        raise CertificateError("the certificate's composition of several runs leaves out steps of this run")
    again = total(stated["runs"], stated["events"], history.delta())
    for name in SUMS:
        if not _same(stated[name], again[name]):
            raise CertificateError(
                f"the certificate says composition.{name} = {stated[name]!s:.50}, but its own events give {again[name]}"
            )


_MISSING = object()


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            if key != "reason":
                yield from _leaves(f"{place}.{key}", value[key])
    elif isinstance(value, list):
        yield f"{place}.length", len(value)
        for number, each in enumerate(value):
            yield from _leaves(f"{place}.{number}", each)
    else:
        yield place, value


def _close(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, (int, float)) and not isinstance(found, bool):
        return abs(found - expected) <= LIMITS_AGREEMENT * abs(expected)
    return type(found) is type(expected) and found == expected


def _method(certificate: dict[str, Any]) -> dict[str, Any]:
    """The method without the version of the package that computes RDP, which may differ between run and check."""
    return {key: value for key, value in certificate["claim"]["method"].items() if key != "dp_accounting"}


def _optional(certificate: dict[str, Any]) -> dict[str, Any]:
    return {key: certificate["claim"][key] for key in OPTIONAL_CLAIMS if key in certificate["claim"]}


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, (int, float)) and not isinstance(found, bool):
        return abs(found - expected) <= AGREEMENT * min(1.0, abs(expected))
    return type(found) is type(expected) and found == expected
