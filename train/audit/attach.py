"""The audit that a run asks for (`run.audit`): made in a process of its own once the run has ended and is certified.

The run's key is kept until then, so that the certificate can be signed once more with the evidence in it. Nothing here
can change what the run did: ledger, weights and claim stand. An interrupted audit leaves the certificate as it was, and
is made by the same command later; one that cannot be made is certified as not made.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.evidence import refutations
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.durable import atomic
from murmuration.accounting.errors import BUDGET_SPENT, DONE, REFUTED
from murmuration.accounting.escaping import printable, sentence
from murmuration.accounting.keys import destroy, load
from murmuration.accounting.strict_json import parse
from murmuration.train.audit.audit import audit
from murmuration.train.audit.replay import replay
from murmuration.train.audit.result import AuditReport
from murmuration.train.audit.setup import AuditOptions, set_up_audit
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.stop import Stopped
from murmuration.train.run.report import write_report
from murmuration.train.storage.run_dir import RunDir

RARE = 200
"""One step in so many is replayed, at least one and at most `REPLAYED`: each is made twice."""
REPLAYED = 4


def attach(config: Config, root: Path, ranks: Ranks) -> int:
    """Makes the audit, unless it was made, and returns the exit code of the run."""
    run_dir = RunDir(root)
    verify(root)
    document = parse((root / "certificate.json").read_bytes())
    if not document.get("audit", {}).get("made"):
        if not run_dir.key.exists():
            print("the run's key is destroyed, so no audit can be attached to its certificate", flush=True)
        else:
            print("auditing the run's recipe, as run.audit asks; the certificate stands without it", flush=True)
            document = _signed(run_dir, document, _evidence(config, run_dir, document, ranks))
            if not config.run.keep_key:
                destroy(run_dir.key)
            verify(root)
    write_report(run_dir, config, document, parse(run_dir.evaluation.read_bytes()))
    found = refutations(document)
    for each in found:
        print(f"REFUTED by the run's own audit: {printable(each)}", flush=True)
    if found:
        return REFUTED
    return BUDGET_SPENT if run_dir.state().get("status") == "budget spent" else DONE


def _signed(run_dir: RunDir, document: dict[str, Any], evidence: dict[str, Any]) -> dict[str, Any]:
    document = signed({**document, "audit": evidence}, load(run_dir.key))
    pages.write(document, run_dir.root)
    return document


def _evidence(config: Config, run_dir: RunDir, document: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    spent: dict[str, float] = {}

    def one_run() -> dict[str, Any]:
        planned = set_up_audit(config, AuditOptions())
        spent["one run"] = planned.plan.steps * planned.real
        return _of_report(audit(config, planned, ranks))

    def replayed() -> dict[str, Any]:
        steps = max(1, min(REPLAYED, phase_steps // RARE))
        report = replay(config, ranks, steps, None)
        spent["replay"] = 2 * steps * batch
        # All of the report but whether it passed is computed from real records without noise. Of an honest run it
        # always passes, so that one bit tells nothing of them.
        with atomic(run_dir.private_logs / "replay.json", mode=0o600) as file:
            file.write(report.as_json().encode())
        return {"steps": steps, "refuted": bool(report.refuted)}

    phase = next(each for each in document["phases"] if each["private"])  # the audit takes the first, too
    phase_steps, batch = phase["plan"]["steps"], phase["plan"]["records"] * phase["sampling_rate"]
    found = {"one_run": _tried(one_run, run_dir), "replay": _tried(replayed, run_dir)}
    return {"made": True, "share": sum(spent.values()) / (phase_steps * batch), **found}


def _tried(make: Callable[[], dict[str, Any]], run_dir: RunDir) -> dict[str, Any]:
    """What was found, or the kind of reason why nothing was: an audit never costs the run. Only what a config asks is
    told in full: other texts may name a record, or a shard that was drawn from, and the certificate is public."""
    try:
        return {"made": True, **make()}
    except Stopped:
        raise
    except RecipeError as error:
        return {"made": False, "reason": sentence(error)}
    except Exception as error:
        with atomic(run_dir.private_logs / "audit-failed.txt", mode=0o600) as file:
            file.write("".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace"))
        return {
            "made": False,
            "reason": f"it failed with {type(error).__name__}; logs/private tells more",
        }


def _of_report(report: AuditReport) -> dict[str, Any]:
    bound = report.bound
    return {
        "phase": report.phase, "engine": report.engine, "ranks": report.ranks, "steps": report.plan.steps,
        "claim": report.claim, "delta": bound.delta, "canaries": bound.canaries, "included": bound.included,
        "confidence": bound.confidence, "looks": bound.looks, "tried": [asdict(each) for each in bound.tried],
        "proven": bound.proven.epsilon, "best": bound.best.epsilon, "assumes": bound.best.assumes,
        "p_value": report.p_value, "refuted": report.refuted,
    }  # fmt: skip
