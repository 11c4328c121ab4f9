"""A run directory that a job writes: its ledger, its key, its checkpoints, and where the run continues.

The ledger is the authority. The pointer `checkpoints/latest` repeats what the ledger says, and is rebuilt from it if
lost. A checkpoint older than the newest one is used only if a new segment was declared, because that is a rollback.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from murmuration.accounting import key_chain
from murmuration.accounting.certificate.signature import public_key
from murmuration.accounting.days import day_of
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.errors import NEW_SEGMENT
from murmuration.accounting.escaping import printable_lines
from murmuration.accounting.keys import KeyFileError, Link, Purpose, RunKey, load, rewrite
from murmuration.accounting.ledger.chain import Ledger, LedgerError
from murmuration.accounting.ledger.copied_run import recognise
from murmuration.accounting.ledger.facts import Head, Segment
from murmuration.accounting.ledger.heads import NAME as HEADS
from murmuration.accounting.ledger.heads import (
    append,
    contains,
    lost_charges,
    note_logs,
    noted_in,
    read_heads,
    remember,
)
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.ledger.lines import Origin, PublicUse, RecordDigests, Word
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.strict_json import parse, read
from murmuration.accounting.unit import RECORD
from murmuration.train.distributed.process import keep_from_swap
from murmuration.train.distributed.ranks import Ranks, raised_on_all_ranks
from murmuration.train.storage.checkpoint import CheckpointError, Checkpoints, Keep, KeptCheckpoint, Loaded
from murmuration.train.storage.checkpoint_read import ledger_of
from murmuration.train.storage.run_dir import RunDir, open_private

if TYPE_CHECKING:
    from murmuration.train.storage.sibling_runs import RunLog

LOCK_WAIT_SECONDS = 60
PUBLIC_SEGMENT = "public"


@dataclass
class OpenRun:
    """`journal` exists on the main rank alone: one writer. `secret` is None for a finished run."""

    name: str
    folder: RunDir
    ranks: Ranks
    journal: Journal | None
    secret: RunKey | None
    checkpoints: Checkpoints
    new_segment: str | None
    """The user's declared reason for a new segment (--new-segment)."""
    chain: key_chain.KeyChain | None = field(default=None, init=False, repr=False)
    """The keys of the private steps that are being made; None in a phase without noise."""
    _together: int = field(default=1, init=False, repr=False)
    """How many steps use each other's keys."""
    _log: RunLog | None = field(default=None, init=False, repr=False)
    """That others look into."""
    _continues: int | None = field(default=None, init=False, repr=False)
    """The phase of the checkpoint that this start continues from."""

    @property
    def key(self) -> RunKey:
        assert self.secret is not None, "nothing is drawn for a finished run"
        return self.secret

    @property
    def writer(self) -> Journal:
        assert self.journal is not None, "the main rank holds the ledger"
        return self.journal

    def say(self, text: str) -> None:
        """The console is a public sink."""
        if self.ranks.main:
            print(printable_lines(text), flush=True)

    def note(self, phase: str, text: str) -> None:
        """For the owner: how the run is protected and computed, with nothing about its records."""
        if self.ranks.main:
            with open_private(self.folder.private_logs / "notes.jsonl") as file:
                file.write(json.dumps({"phase": phase, "note": text}) + "\n")

    def derive(self, phase: int, segment: Segment | None, done: int = 0) -> key_chain.PhaseKeys:
        """The keys of a phase, on all ranks together; those of its private steps after `done` are derived per step."""
        if self.chain is not None:
            self.chain.close()
        self.chain = None
        if segment is not None:
            self._together = self.ranks.on_main(lambda: self._together_in(phase))
            link = self.ranks.on_main(lambda: self._enter(segment, done))
            self.chain = key_chain.KeyChain(link, guard=keep_from_swap, together=self._together)
        return key_chain.PhaseKeys(partial(derive_key, self.key, phase, segment), self.chain)

    def _enter(self, segment: Segment, done: int) -> Link:
        """On the main rank: the link of the segment's chain to continue from."""
        begun, before = self._opened_in(segment), self._needs_after(segment, done)
        plan = self.writer.history.plans[segment.phase]
        epoch = plan.sampling.steps_of_a_key
        return key_chain.enter(self.folder.key, segment.chain_name, segment.from_step + 1, before, begun, epoch)

    def _together_in(self, phase: int) -> int:
        plan = self.writer.history.plans.get(phase)
        return 1 if plan is None else plan.noise.bands

    def _needs_after(self, segment: Segment, done: int) -> int:
        """The step after which the segment's keys are needed to continue after `done`."""
        return max(segment.from_step, key_chain.forgettable(done, self._together_in(segment.phase)))

    def forget(self, done: int) -> None:
        """Forgets the keys of the steps up to `done`, on all ranks together and for good. Called only once a checkpoint
        of `done` is durable and in the ledger, so that no step up to it is ever made again in this segment. Keys that
        later steps of the same block need are kept with it."""
        if (chain := self.chain) is not None:
            done = key_chain.forgettable(done, self._together)
            self.ranks.on_main(lambda: key_chain.forget(self.folder.key, chain.segment, done))
            chain.forget(done)

    def burn(self, done: int) -> None:
        """Forgets the keys of step `done` for good, on all ranks together, before its weights can be seen: they could
        otherwise draw its noise again over another sum, if the ledger were restored from a backup."""
        chain = self.chain
        assert chain is not None, "segments that begin now have a key chain"

        def in_the_file() -> None:
            self.writer.settle()  # the file must never be ahead of a ledger that a power failure cut
            head = self.writer.head()
            key_chain.burn(self.folder.key, chain.segment, done, head.as_dict())
            if self._log is not None:  # a directory that is restored as a whole has an older key
                self._log.remember(head)

        self.ranks.on_main(in_the_file)
        # Within a block the process itself still needs the earlier ones.
        chain.forget(key_chain.forgettable(done, self._together))

    def first_norm(self, phase: int, plan: PrivacyPlan, loaded: Loaded | None) -> float | None:
        """C of the next step, which follows from what was released before it; None if C does not adapt. `loaded`: the
        phase's own checkpoint."""
        if plan.adaptive is None:
            return None
        at = (0, None) if loaded is None else (loaded.position.step, loaded.digest)
        return self.ranks.on_main(lambda: self.writer.clip_norm_after(phase, *at))

    def remember(self, order: str | None) -> None:
        """On the main rank, once the segment's chain is in the file: how long the ledger is now, and the `order`."""
        key = load(self.folder.key)
        rewrite(replace(key, head=self.writer.head().as_dict(), order=order), self.folder.key)

    def header(self, phase: int, manifest_digest: str, objective: str) -> dict[str, Any]:
        """What ties a checkpoint to its run: ledger head and length, plan, data. Never a key."""
        ledger, plan = self.writer.ledger, self.writer.history.plans.get(phase)
        return {
            "run": self.name,
            "ledger": {"length": ledger.length, "head": ledger.head},
            "plan": plan.as_dict() if plan else None,
            "manifest_digest": manifest_digest,
            "objective": objective,
        }

    def segment(
        self, phase: int, name: str, config_digest: str, manifest_digest: str, done: int,
        never_again: str | None = None, anew: str | None = None,
    ) -> Segment:  # fmt: skip
        """On the main rank: the segment whose keys the next step uses; a new one where the old keys must not be used.

        `never_again`: why opened steps after the checkpoint must not be made again under their old keys. `anew`: why a
        segment in which steps were opened must not be continued.
        """
        reason = self.writer.new_segment_reason(phase, done, config_digest)
        known = self.writer.history.segments_of(phase)
        if reason is None and never_again is not None and self._opened_behind(phase, done):
            reason = f"steps after step {done} were opened, and {never_again}"
        if reason is None and anew is not None and known and self._opened_in(known[-1]):
            reason = anew
        if reason is None and self._continues not in (None, phase) and self._opened_behind(phase, done):
            # The phase had a checkpoint before its first step. Where processors add in another order, its weights are
            # not found again, and noise that is drawn twice must meet the same sum twice.
            reason = f"the checkpoint that phase {name!r} began from is lost, and its steps were opened"
        if reason is None:
            # Why the segment's keys cannot be used although nothing in the ledger speaks against them; None if they
            # can. Other keys would draw other numbers under the same name.
            segment = known[-1]
            key = load(self.folder.key)
            before = self._needs_after(segment, done)
            fault = key_chain.why_unusable(key, segment.chain_name, before, self._opened_in(segment))
            if fault is not None and self.new_segment is None:
                raise KeyFileError(
                    f"{fault}; restore the run key, the ledger and the checkpoints as they last were, or declare "
                    f"{NEW_SEGMENT} (all opened steps stay charged)"
                )
            reason = fault
        if known and known[-1].manifest_digest != manifest_digest:
            raise LedgerError(
                f"the records of phase {name!r} changed since the run began, or the salt.key beside their index did; "
                "restore them or start a new run directory"
            )
        if reason is None:
            self.writer.resumed(phase, done)
            return known[-1]
        if known and self.new_segment is None and reason == "the config changed":
            raise LedgerError(
                f"phase {name!r} was configured differently when it began, other records were excluded, or another "
                "version of Pillow, simplejpeg or cykooz-resizer made its pictures; restore these, or declare the "
                f"change with {NEW_SEGMENT} (all opened steps stay charged)"
            )
        salt = "debug" if self.key.debug else None
        return self.writer.begin_segment(phase, config_digest, manifest_digest, done, self.new_segment or reason, salt)

    def _opened_behind(self, phase: int, done: int) -> bool:
        newest = len(self.writer.history.segments_of(phase)) - 1
        known = self.writer.history.progress.get((phase, newest))
        return known is not None and known.opened > done

    def _opened_in(self, segment: Segment) -> bool:
        known = self.writer.history.progress[segment.phase, segment.number]
        return known.opened > known.begun

    def declare(
        self, phase: int, name: str, make: Callable[[PrivacyPlan | None], PrivacyPlan], log: RunLog | None,
        records: str, *, without_noise: Iterable[str] = (), origins: Iterable[Origin] = (),
        public: Mapping[PublicUse, str] = MappingProxyType({}), stores: Iterable[str] = (), words: Iterable[Word] = (),
    ) -> PrivacyPlan:  # fmt: skip
        """On the main rank: all that the ledger must know of a private phase before its first step; returns its plan,
        which is frozen there. Plans of later phases are declared then, too: they depend on no output.

        `make`: makes the plan, given the one that the ledger knows. `log`: of all runs on the records, if they have
        one; `records`: their digest in the ledger. Of its initial weights: `origins`, the runs that made them, and the
        digests of what these used `without_noise`. `public`: digests of what else is used without noise. `stores`: the
        hosts that hold the records.
        """
        writer = self.writer
        finished = writer.history.finished
        if not finished:
            self.declare_start(name, without_noise, origins)
        plan = make(writer.history.plans.get(phase))
        writer.declare_plan(phase, name, plan, describe("pld"))
        if finished:
            return plan
        for use, digest in public.items():
            writer.declare_public(phase, use, digest)
        for host in stores:
            writer.declare_store(phase, host)
        for word in words:
            writer.declare_word(word)
        if log is not None:
            self.enter_log(log, name, plan, records)
        return plan

    def declare_start(self, name: str, without_noise: Iterable[str], origins: Iterable[Origin]) -> None:
        """On the main rank: where the initial weights of a phase come from."""
        self.writer.declare_earlier(without_noise)
        for origin in origins:
            if self.writer.declare_origin(origin):
                self.say(f"{name}  {origin.deviation()}")

    def tell_objection(self) -> None:
        """On the main rank: what the certificate will say is known before the first step, while another config costs
        nothing."""
        history = self.writer.history
        if (history.plans or self.key.debug) and (objection := history.why_not_private()) is not None:
            self.say(objection)

    def enter_log(self, log: RunLog, phase: str, plan: PrivacyPlan | None, records: str) -> None:
        """On the main rank: registers a phase in the log of all runs on its records, within their budget, and has the
        log note the ledger from here on. `plan`: None for a phase without noise on private records. `records`: their
        digest in the ledger."""
        history = self.writer.history
        seeded = history.run["debug"]  # promises nothing, and shares its id with every run of this seed and name
        for noted in [] if seeded or plan is None else log.heads(history.run_id):
            self.writer.admit_lost(lost_charges(self.writer.ledger.entries, noted), self.new_segment)
        promised = (None, None) if plan is None or seeded else (plan.epsilon_budget, plan.delta)
        unit = RECORD if plan is None else plan.unit
        with log.alone() as held:
            held.require_budget((history.run_id,), None if promised[0] is None else history.budget(), unit)
            warning = held.register(
                history.run_id, phase, self.name, *promised, unit, folder=str(self.folder.root.resolve()),
                copied_from=history.ids[:-1], signer=history.run["signer"],
                records=records, private=plan is not None,
            )  # fmt: skip
            unknown = held.unknown_to_others(history.run_id)
        if warning is not None:
            self.say(warning)
        note_logs(self.folder.key.parent, log.files, unknown)
        if plan is not None and not seeded:
            self.writer.witnesses[str(log)] = log.note
            self._log = log if unknown is None else None

    def measured(self, entry: KeptCheckpoint, phase: str) -> dict[str, float]:
        """What was measured on public records with a checkpoint's weights; `phase`: the name of its phase."""
        del entry, phase
        return {}

    def latest(self) -> Loaded | None:
        """The last durable checkpoint; refused if it does not belong to this ledger, or the ledger ends before it."""
        checkpoints, ranks = self.checkpoints, self.ranks
        ranks.on_main(self.recover)
        try:
            loaded = checkpoints.latest()
        except CheckpointError as damage:
            if self.new_segment is None:
                raise raised_on_all_ranks(
                    CheckpointError(
                        f"{damage}; restore it, or declare {NEW_SEGMENT} to continue from the "
                        "newest checkpoint that is whole (all opened steps stay charged)"
                    )
                ) from None
            loaded = checkpoints.fall_back()
            self.say(f"{damage}; continuing from {loaded.position.folder}, and all opened steps stay charged")

        def check() -> None:
            if loaded is not None:
                stored = ledger_of(loaded.manifest)
                if stored is None:
                    raise CheckpointError(
                        f"{loaded.position.folder} does not say which ledger it belongs to; restore it"
                    )
                length, head = stored
                self.writer.admit_checkpoint(loaded.position.phase, loaded.position.step, loaded.digest, length)
                _require_ledger(self.writer, length, head, loaded.position.folder)
                # On the main rank: forgets keys up to the last checkpoint, if a kill came between its ledger line and
                # that.
                last = self.writer.history.last_checkpoint()
                if self.secret is not None and last is not None and last.digest == loaded.digest:
                    for segment in self.writer.history.segments_of(last.phase)[last.segment :]:
                        done = key_chain.forgettable(last.step, self._together_in(last.phase))
                        key_chain.forget(self.folder.key, segment.chain_name, done)
                self._continues = loaded.position.phase

        ranks.on_main(check)
        ranks.require_same("the last checkpoint (is the run directory shared?)", loaded.digest if loaded else None)
        return loaded

    def newest(self) -> Loaded:
        """Its last checkpoint, at the end of a run."""
        found = self.checkpoints.latest()
        if found is None:
            raise raised_on_all_ranks(CheckpointError(f"{self.checkpoints.folder} contains no checkpoint; restore one"))
        return found

    def recover(self) -> None:
        """Restores pointer and folders to what the ledger says. It names every checkpoint before the pointer does."""
        history = self.writer.history
        for manifest in self.checkpoints.folder.glob("phase*-step*/manifest.json"):  # before any of them is retired
            with contextlib.suppress(OSError, ValueError):  # a damaged manifest proves nothing
                stored = ledger_of(parse(manifest.read_bytes()))
                if stored is not None:
                    _require_ledger(self.writer, *stored, manifest.parent.name)

        def of(entry: KeptCheckpoint) -> dict[str, float]:
            name = history.phase_names.get(entry.phase)
            return {} if name is None else self.measured(entry, name)

        named = [KeptCheckpoint(mark.phase, mark.step, mark.digest) for mark in reversed(history.checkpoints)]
        reason = self.checkpoints.recover(named, of)
        if reason is not None:
            self.say(f"{reason}; rebuilt from the checkpoints that the ledger names")

    def settle_times(self) -> None:
        """Sets public times on all files but the checkpoints, which have theirs already: with new times, backups would
        copy them again."""
        if self.ranks.main:
            self.checkpoints.times.stamp_all(self.folder.root, but=(self.folder.checkpoints.name,))

    def close(self) -> None:
        """Lets go of keys and of the ledger's lock; the run can be continued."""
        if self.chain is not None:
            self.chain.close()
        if self.journal is not None:
            self.journal.ledger.close()
        self.settle_times()


def open_run(
    run_dir: RunDir, name: str, ranks: Ranks, keep: Keep, versions: dict[str, str], *, resume: str = "auto",
    debug_seed: int | None = None, new_segment: str | None = None, record_digests: RecordDigests,
) -> OpenRun:  # fmt: skip
    """Begins the directory's run, or continues the one it contains; refused while another process writes it.

    `record_digests`: how a new ledger names records.
    """
    journal = ranks.keep_on_main(lambda: _open_journal(run_dir, resume))
    try:
        secret = ranks.on_main(
            lambda: _key_of(run_dir, journal, name, debug_seed, versions, new_segment, record_digests)
        )
    except BaseException:
        if journal is not None:  # a program that lives on may try again
            journal.ledger.close()
        raise
    return OpenRun(name, run_dir, ranks, journal, secret, Checkpoints(run_dir.checkpoints, ranks, keep), new_segment)


def _require_as_new(journal: Journal, known: Head, new_segment: str | None) -> None:
    """The secret file follows every step: a ledger with more than the one step that a kill may have left open behind it
    goes with a newer file. (A ledger that is older than the file does not contain its head.)"""
    entries = journal.ledger.entries
    if new_segment is not None or not contains(entries, known):
        return
    later = {(e.fields["segment"], e.fields["step"]) for e in entries.beginning(known.length) if e.kind == "open"}
    if len(later) > 1:
        raise LedgerError(
            f"the secret folder is older than the ledger, which has {len(later)} later steps: it was restored from a "
            "backup; restore the newest one, or declare a new segment (all opened steps stay charged)"
        )


def derive_key(key: RunKey, phase: int, segment: Segment | None, purpose: Purpose) -> bytes:
    """A key outside the chain. In a phase without noise, public records are masked by the key of the phase's own."""
    if purpose == "public-masks" and segment is None:
        purpose = "masks"
    derived = key.derive(purpose, phase, segment.key_name if segment else PUBLIC_SEGMENT)
    keep_from_swap(derived)
    return derived


def _open_journal(run_dir: RunDir, mode: str) -> Journal:
    exists = run_dir.ledger.exists()
    if mode == "must" and not exists:
        raise LedgerError(f"--resume must: there is no run in {run_dir.root}; drop the flag to start one")
    if mode == "never" and exists:
        raise LedgerError(f"--resume never: {run_dir.root} has a run already; give another run.dir")
    run_dir.prepare()
    run_dir.stop_file.unlink(missing_ok=True)
    return Journal(Ledger.open(run_dir.ledger, LOCK_WAIT_SECONDS))


def _key_of(
    run_dir: RunDir, journal: Journal | None, name: str, debug_seed: int | None, versions: dict[str, str],
    new_segment: str | None,
    record_digests: RecordDigests,
) -> RunKey | None:  # fmt: skip
    """The run key; None if the run is finished: its key is gone, and nothing may be drawn any more."""
    assert journal is not None
    if journal.history.finished:
        return None
    fresh = journal.ledger.length == 0
    key = run_dir.run_key(fresh, debug_seed)
    if fresh:
        started = None if key.debug else day_of(time.time())  # a debug run gives the same bytes on every day
        journal.start_run(name, key.check_value(), key.debug, versions, record_digests, public_key(key), started)
        run_dir.adopt_key()
    elif journal.history.run["key_check"] != key.check_value():
        raise LedgerError(f"{run_dir.key} is not the key of this ledger; restore the right one or start a new run")
    copied = recognise(journal, run_dir.key.parent)
    if copied is not None:
        print(f"{copied}; new keys from here on, and all opened steps stay charged", flush=True)
    heads = run_dir.key.parent / HEADS
    noted, newest = read_heads(heads), noted_in(run_dir.key.parent)[-1:]
    if (own := load(run_dir.key).head) is not None:
        newest.append(read(Head, own))
        _require_as_new(journal, newest[-1], new_segment)
    for known in newest:
        if known not in noted:
            append(heads, known.as_dict(), 0o600)
            noted.append(known)
    journal.admit_lost(lost_charges(journal.ledger.entries, noted), new_segment)
    journal.witnesses[str(heads)] = lambda head: append(heads, head.as_dict(), 0o600)
    journal.remember = lambda head: remember(run_dir.key.parent, head)
    saved = max((entry.index for entry in journal.ledger.entries.acts if entry.kind == "checkpoint"), default=-1)
    if saved >= 0 and not any(head.length > saved and contains(journal.ledger.entries, head) for head in noted):
        journal.tell_witnesses()  # a kill came between a checkpoint's line and its note
    return key.without_chain()


def _require_ledger(journal: Journal, length: int, head: str, checkpoint: str) -> None:
    entries = journal.ledger.entries
    if not 0 < length <= len(entries) or entries[length - 1].hash != head:
        raise LedgerError(
            f"the checkpoint {checkpoint} was written with another or a longer ledger; restore the ledger that "
            "belongs to it"
        )
