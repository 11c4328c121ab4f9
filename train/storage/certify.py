"""The end of a run: its certificate, with the digests of the weights that it names, signed while the key exists."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.evidence import PENDING
from murmuration.accounting.certificate.signature import fault_of, signed
from murmuration.accounting.certificate.statement import compose, uncovered
from murmuration.accounting.certificate.verify import Verdict, verify
from murmuration.accounting.certificate.weights import list_digest, write_lists
from murmuration.accounting.keys import destroy, load
from murmuration.accounting.ledger.chain import Ledger, LedgerError, Lines
from murmuration.accounting.ledger.heads import logs_of, lost_charges, noted_in
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.strict_json import parse
from murmuration.train.clip.rule import RECORDS_AT_ONCE, rounding_allowance
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.storage.checkpoint_read import Loaded
from murmuration.train.storage.open_run import OpenRun
from murmuration.train.storage.run_dir import RunDir

if TYPE_CHECKING:
    from murmuration.train.storage.sibling_runs import RunLog

# Where this trainer deviates from the textbook, whatever is trained.

ALLOWANCE = (
    f"Sums of up to {RECORDS_AT_ONCE} records are added up in fp32 and may err by the allowance (at most "
    f"{rounding_allowance(RECORDS_AT_ONCE):.1e}·C); C is lowered by it."
)
KERNELS = (
    "Proved at every start on the devices of this run; kernels of other devices may round a record's gradient "
    "depending on its row."
)
WATCHED = (
    "Nobody watches the run: who sees the console, the files or the load of the machine while it lasts sees when steps "
    "end, and so roughly how long their records took. What is kept does not tell it (rates were timed on synthetic "
    "records, and files have the modification times that the run set), with two exceptions: at which step a start was "
    "ended by a clock, by hand or by a failure, and the change times that the file system itself notes, which no copy "
    "carries. What a witness was told, where there was one, is stated besides."
)
SECRET_FOLDER = "Everything is as private as the run directory's secret folder was while the run lasted."
RETIRED = (
    "The run was retired before its end, and no weights are certified. Neither are its devices stated, nor deviations "
    "that only the program which trained knows of."
)
NO_LOG = "No log of runs outside the run directory is known, so other runs on the same records are not known."
OF_THIS_TRAINER = (ALLOWANCE, KERNELS, WATCHED, SECRET_FOLDER)


@dataclass(frozen=True)
class Told:
    """What a certificate says of a run and the ledger does not contain."""

    model: str
    engine: EngineSettings
    records: dict[str, str]
    """Digests of the records of each phase, as the ledger has them."""
    data: str | None
    """What they are, in the owner's words."""
    owner: str | None
    config: dict[str, Any] = field(default_factory=dict)
    """The config's digest."""
    others: dict[str, Any] = field(default_factory=dict)
    """Digests of other records."""


def finish(
    run: OpenRun, logs: Sequence[RunLog], newest: Loaded, told: Callable[[], Told], *,
    others: Callable[[], list[Loaded]] = list, deviations: Sequence[str] = (), keep_key: bool = False,
    audited: bool = False, publish: Callable[[dict[str, Any]], None] = lambda document: None,
) -> Verdict:  # fmt: skip
    """On the main rank: certifies the run, destroys its key, and verifies it all from the ledger alone. `others`:
    checkpoints beside the newest one whose weights may be exported. `audited`: an audit follows, which needs the key to
    sign its result. `publish`: shows the certificate, while the key still exists."""

    def describe() -> dict[str, Any]:
        found = told()
        return {
            "about": {"data": found.data, "owner": found.owner},
            "model": found.model,
            # Of the last start, like the files' times: when the run ended would reveal how long its private steps took.
            "dates": {"last_start": run.checkpoints.times.day},
            **({"audit": _audit_before(run.folder, run.writer.history)} if audited else {}),
            "engine": str(found.engine),
            "machine": f"{'cuda' if run.ranks.device.type == 'cuda' else 'cpu (gloo)'}; not yet proved on several GPUs",
            "hashes": {
                **found.config,
                "data_manifests": found.records,
                **found.others,
                "checkpoint_manifest_sha256": newest.digest,
            },
        }

    publish(certify(run.folder, run.writer, logs, describe, lambda: [newest, *others()], deviations))
    if not keep_key and not audited and destroy(run.folder.key):
        run.say("the run key is destroyed: without a copy of it, nobody can redraw the noise")
    return verify(run.folder.root)


def _audit_before(run_dir: RunDir, history: History) -> dict[str, Any]:
    """The evidence in a certificate that is written again; nobody repeats an audit until it pleases."""
    try:
        document = parse((run_dir.root / "certificate.json").read_bytes())
        signed_here = fault_of(document, history.run["signer"]) is None
        return document["audit"] if signed_here else PENDING
    except (OSError, ValueError, KeyError, TypeError):
        return PENDING


def certify(
    run_dir: RunDir, journal: Journal, logs: Sequence[RunLog], describe: Callable[[], dict[str, Any]],
    kept: Callable[[], list[Loaded]], deviations: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Ends the run's ledger and writes its certificate; a finished run's is written again as it was. `describe`: what
    the ledger does not contain. `kept`: the checkpoints whose weights may be exported. `deviations`: what this kind of
    run states besides."""
    journal.finish()
    history, entries = journal.history, journal.ledger.entries
    document = earlier_certificate(run_dir, history, entries)
    if document is None:
        siblings = siblings_of(logs, history.run_id)
        extra = describe() | {
            "known_deviations": [*OF_THIS_TRAINER, *deviations],
            # Where a sibling's folder lies is not published.
            "siblings": [{key: value for key, value in other.items() if key != "folder"} for other in siblings],
        }
        document = compose(history, entries, extra)
        if (claimed := document["claim"]["epsilon_claimed"]) is not None and document["claim"]["private"]:
            for log in logs:
                log.claim(history.run_id, claimed)
            if siblings:
                from murmuration.accounting.certificate.composition import composed, known_runs

                if others := known_runs(siblings):
                    document["composition"] = composed(history, entries, claimed, others)
        document = completed(run_dir, document, kept())
    pages.write(document, run_dir.root)
    return document


def retire(root: Path) -> list[str]:
    """Closes the ledger of a run that will not continue, certifies what it spent, destroys its key; says what it did.
    Its trainer's own words, such as which machine it was, are not known here."""
    from murmuration.train.storage.sibling_runs import RunLog

    run_dir = RunDir(root)
    journal = Journal(Ledger.open(run_dir.ledger))
    try:
        name, secret, said = journal.history.run["name"], run_dir.key.parent, []
        if journal.history.finished:
            said.append(f"{name} was already finished; its certificate stays as it is")
        else:
            load(run_dir.key)
            # Nobody can sign another certificate later, so steps that a restored ledger lacks are charged now.
            journal.admit_lost(lost_charges(journal.ledger.entries, noted_in(secret)), "retired")
            noted = logs_of(root)
            logs = [RunLog.of_run(each.logs, journal.history.run_id) for each in noted]
            unknown = [
                f"Other runs on the same records may not be known: {each.unknown}." for each in noted if each.unknown
            ]
            certify(run_dir, journal, logs, dict, list, [RETIRED, *unknown, *([] if logs else [NO_LOG])])
            said.append(f"{name} is finished and certified as far as it went; it cannot be continued")
        destroyed = [destroy(path) for path in (run_dir.key, secret / "new.key")]
        said.append("its key is destroyed" if any(destroyed) else "there was no key left")
    finally:
        journal.ledger.close()
    return said


def siblings_of(logs: Sequence[RunLog], own: str) -> list[dict[str, Any]]:
    """Other runs on the records that this one protects; where this run could not be logged, neither could others."""
    found: dict[str, dict[str, Any]] = {}
    for log in logs:
        others = log.siblings({own})
        if log.places and (why := log.unknown_to_others(own)) is not None:
            others.append({"id": "unknown", "run": f"other runs unknown: {why}; run.registry names a common folder"})
        found |= {json.dumps(other, sort_keys=True): other for other in others}
    return list(found.values())


def earlier_certificate(run_dir: RunDir, history: History, entries: Lines) -> dict[str, Any] | None:
    """The certificate of a finished run whose key is destroyed: nobody can sign another one. None where a new one can
    be written."""
    path = run_dir.root / "certificate.json"
    if run_dir.key.exists():
        return None
    try:
        document: dict[str, Any] = parse(path.read_bytes())
        fault = fault_of(document, history.run["signer"])
    except (OSError, ValueError, KeyError, TypeError):
        document, fault = {}, "cannot be read"
    if fault is not None:
        raise LedgerError(f"{path} {fault}, and the key that could sign another one is destroyed; restore the file")
    if uncovered(entries, document):
        raise LedgerError(
            f"{path} no longer covers the run, since how the run or a checkpoint was chosen was declared after it was "
            "signed, and the key that could sign another one is destroyed; declare that before a run ends, or set "
            "run.keep_key"
        )
    return document


def completed(run_dir: RunDir, document: dict[str, Any], kept: list[Loaded]) -> dict[str, Any]:
    """The certificate with the digests of the weights that may be exported, signed."""
    lists = {loaded.position.folder: loaded.tensor_digests() for loaded in kept}
    write_lists(lists, run_dir.root)
    document["weights"] = [
        {
            "phase": loaded.position.phase,
            "step": loaded.position.step,
            "checkpoint_manifest_sha256": loaded.digest,
            "tensors": len(lists[loaded.position.folder]),
            "sha256": list_digest(lists[loaded.position.folder]),
        }
        for loaded in kept
    ]
    return signed(document, load(run_dir.key))
