"""Small rules of ledger, keys, plan and certificate that larger tests pass by, each found as a mutant that lived."""

from __future__ import annotations

import copy
import errno
import hashlib
import hmac
import io
import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from murmuration.accounting import durable, errors, keys
from murmuration.accounting.certificate import pages, weights
from murmuration.accounting.certificate.attached import check_attached, lists_tensors_of
from murmuration.accounting.certificate.composition import known_runs
from murmuration.accounting.certificate.limits import BUDGET, SPENT, claimed_events
from murmuration.accounting.certificate.signature import fault_of, public_key, signed
from murmuration.accounting.certificate.statement import RATCHETED, deviations_of
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.escaping import (
    LONGEST,
    first_line,
    html_page,
    json_text,
    printable,
    printable_leaves,
    sentence,
)
from murmuration.accounting.event import Event
from murmuration.accounting.key_chain import KeyChain
from murmuration.accounting.keys import Link, destroy, store
from murmuration.accounting.ledger import copied_run, heads
from murmuration.accounting.ledger.chain import BudgetSpent, Ledger, LedgerError
from murmuration.accounting.ledger.facts import Charge, CheckpointMark, Head, combined_sigma
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.ledger.lines import Origin
from murmuration.accounting.noise import GRID_GROWTH, ExactGrid
from murmuration.accounting.strict_json import parse, read
from tests.accounting.test_acc_adaptive import ADAPTIVE, at
from tests.support.acc_world import (
    CONFIG,
    DATA,
    KEY,
    PLAN,
    SIGNER,
    begin,
    certified,
    document_of,
    facts,
    reopen,
    rewritten,
    train,
    whole_run,
)

# The signature


def test_the_signing_key_follows_from_the_lasting_secret_as_documented() -> None:
    """RFC 5869 by hand: a run that another version began must be able to sign."""
    extracted = hmac.new(bytes(32), KEY.secret, hashlib.sha256).digest()
    info = b"murmuration/1|signature|phase 0|segment -\x01"
    private = Ed25519PrivateKey.from_private_bytes(hmac.new(extracted, info, hashlib.sha256).digest())
    assert public_key(KEY) == private.public_key().public_bytes_raw().hex()


def test_a_signature_is_of_the_content_whatever_order_a_tool_wrote_it_in() -> None:
    document = signed({"b": 1, "a": {"d": [1, 2], "c": 2.5}}, KEY)
    assert (
        fault_of(dict(sorted(document.items(), reverse=True)) | {"a": {"c": 2.5, "d": [1, 2]}}, public_key(KEY)) is None
    )
    assert fault_of(document | {"a": {"c": 2.5, "d": [2, 1]}}, public_key(KEY)) is not None


def test_what_json_cannot_hold_is_not_signed() -> None:
    with pytest.raises(ValueError, match="JSON"):
        signed({"epsilon": math.nan}, KEY)


# Keys


def test_forgetting_keeps_the_very_next_step() -> None:
    first = Link("a segment", 1, bytes(range(32)))
    for done in (1, 2, 5):
        chain = KeyChain(first)
        chain.forget(done)
        assert chain.first == done + 1 and chain.key("noise", done + 1) == first.at(done + 1).key("noise")


def test_a_destroyed_key_is_overwritten_on_the_disk_before_its_name_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "secret" / "run.key", list[bytes]()
    store(KEY, path)
    really = os.fsync

    def noting(descriptor: int) -> None:
        assert path.exists()
        synced.append(path.read_bytes())
        really(descriptor)

    monkeypatch.setattr(keys.os, "fsync", noting)
    assert destroy(path) and not path.exists()
    assert synced and all(KEY.secret.hex().encode() not in content for content in synced)


# Heads: what a ledger is known to have been


def test_a_ledger_contains_its_own_lines_from_the_first_on_and_what_it_took_over(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    entries, run = journal.ledger.entries, journal.history.run_id
    for length in range(1, len(entries) + 1):
        assert heads.contains(entries, Head(run, length, entries[length - 1].hash, ()))
    assert not heads.contains(entries, Head(run, 0, entries[-1].hash, ()))
    assert not heads.contains(entries, Head(run, len(entries) + 1, entries[-1].hash, ()))
    lost, other = Head(run, 90, "e" * 64, ()), Head(run, 91, "f" * 64, ())
    journal.admit_lost((lost, [Charge(0, 1.0, 20.0, 2)]), "the disk failed")
    assert heads.contains(journal.ledger.entries, lost) and not heads.contains(journal.ledger.entries, other)


def test_a_witness_that_recorded_what_was_lost_and_declared_agrees(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    witness = tmp_path / "witness.jsonl"
    lost = Head(journal.history.run_id, 90, "e" * 64, (Charge(0, 1.0, 20.0, 2),))
    heads.append(witness, lost.as_dict(), 0o644)
    with pytest.raises(CertificateError, match="the witness recorded"):
        verify(tmp_path, witness=witness)
    journal.admit_lost((lost, list(lost.charged)), "the disk failed")
    verify(tmp_path, witness=witness)


def test_a_note_is_durable_when_it_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after a checkpoint must not lose the note of it."""
    synced: list[bytes] = []
    monkeypatch.setattr(heads.os, "fsync", lambda descriptor: synced.append((tmp_path / "notes").read_bytes()))
    heads.append(tmp_path / "notes", {"ledger_of": "x"}, 0o600)
    assert synced == [b'\n{"ledger_of": "x"}\n']


# Copies


def test_a_run_that_lost_the_memory_of_its_place_counts_as_a_copy(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    journal = reopen(tmp_path)
    journal.start_run("tiny", "check", False, {}, "hmac-sha256", SIGNER)
    assert copied_run.recognise(journal, secret) is None, "it has just begun"
    memory = secret / copied_run.NAME
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600
    memory.unlink()
    journal.declare_plan(0, "private", PLAN, {})
    assert journal.ledger.length == 2 and "may be a copy" in (copied_run.recognise(journal, secret) or "")
    journal.begin_segment(0, CONFIG, DATA, 0, "first")
    original = journal.history.run_id
    memory.unlink()
    assert "may be a copy" in (copied_run.recognise(journal, secret) or "")
    assert copied_run.recognise(journal, secret) is None, "noted once"
    assert journal.history.run_id != original, "a budget of the records counts it as another run"
    memory.write_bytes(b"longer than any place" * 100)
    assert "cannot be read" in (copied_run.recognise(journal, secret) or "")
    assert copied_run.recognise(journal, secret) is None, "nothing is left of what lay there"


@pytest.mark.parametrize("named", [0, 77])
def test_a_place_is_known_by_its_file_system_or_else_by_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: int
) -> None:
    """Network file systems have no identifier."""

    class Told:
        f_fsid = named

    monkeypatch.setattr(copied_run.os, "statvfs", lambda path: Told)
    found = copied_run._identity(tmp_path / "ledger.jsonl", tmp_path)
    here = tmp_path.stat()
    assert found["folder"] == [named or here.st_dev, here.st_ino] and "ledger" not in found


# What a ledger may say


def test_another_format_is_another_programs(tmp_path: Path) -> None:
    begin(tmp_path).ledger.close()
    rewritten(tmp_path, lambda line: line.update(format="murmuration-ledger/9") if line["kind"] == "run" else None)
    with pytest.raises(LedgerError, match="format 'murmuration-ledger/9' is not"):
        History.read(tmp_path / "ledger.jsonl")


def test_what_a_step_did_counts_although_its_charge_was_asked_for_before(tmp_path: Path) -> None:
    """Log lines ask between the two."""
    journal = begin(tmp_path)
    journal.open_step(0, 1, facts(1))
    assert journal.history.charged() == [Event(1.0, 20.0, 1)]
    with pytest.raises(LedgerError, match="had announced"):
        journal.commit_step(0, 1, facts(1, std=15.0))
    assert journal.history.charged() == [Event(1.0, 15.0, 1)]


@pytest.mark.parametrize("norm", [0.125, 64.0])
def test_how_far_a_sensitivity_may_be_off_is_a_share_of_it(tmp_path: Path, norm: float) -> None:
    plan = replace(PLAN, clip_norm=norm)
    journal = begin(tmp_path / "fixed", plan)
    for off, stands in ((1e-13, True), (2e-12, False)):
        step = facts(1, plan, sensitivity=norm * (1 + off))
        assert (step.departure_from(plan) is None) == stands
    adaptive = replace(ADAPTIVE, clip_norm=norm)
    journal = begin(tmp_path / "adaptive", adaptive)
    off = at(1, norm, adaptive)
    off = replace(off, clipping=replace(off.clipping, sensitivity=norm * (1 + 2e-12)))
    with pytest.raises(LedgerError, match="step 1 clips at"):
        journal.open_step(0, 1, off)
    journal.open_step(0, 1, at(1, norm, adaptive))


@pytest.mark.parametrize("norm", [2.0**-10, 1.0, 2.0**10])
def test_how_coarse_a_grid_may_be_is_a_share_of_the_sensitivity(norm: float) -> None:
    plan = replace(PLAN, noise=ExactGrid(), clip_norm=norm)
    for exponent in range(-60, 20):
        grid = 2.0**exponent
        fits = grid * math.sqrt(10) <= GRID_GROWTH * norm
        assert (facts(1, plan, grid=grid).departure_from(plan) is None) == fits, exponent


@pytest.mark.parametrize("none", [(0.0, 1.0), (-0.5, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.nan)])
def test_what_has_no_bound_or_no_noise_is_no_mechanism(none: tuple[float, float]) -> None:
    for released in ([none], [(1.0, 2.0), none], [none, (1.0, 2.0)]):
        assert math.isnan(combined_sigma(released))
    assert combined_sigma([(2.0, 6.0)]) == 3.0


@pytest.mark.parametrize(
    ("epsilon", "delta", "fine"),
    [
        (0.0, 0.0, True), (0.5, 1e-6, True), (-0.5, 1e-6, False), (math.nan, 1e-6, False), (1.0, 1.0, False),
        (1.0, -1e-9, False), (1.0, math.nan, False),
    ],
)  # fmt: skip
def test_only_a_promise_can_be_the_origin_of_weights(epsilon: float, delta: float, fine: bool) -> None:
    def make() -> Origin:
        return Origin("earlier", "0" * 64, epsilon, delta, ("digest",))

    if fine:
        assert make().as_dict()["epsilon"] == epsilon
    else:
        with pytest.raises(ValueError, match="is no promise"):
            make()


def test_old_lines_of_tuning_mean_a_geometric_number_of_runs(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.ledger.append(
        journal.ledger.next("tuning", statement="several rates", runs={"mean": 4.0, "shape": 1.0, "fixed": False})
    )
    journal.ledger.close()
    assert History.read(tmp_path / "ledger.jsonl")[0].tunings == [Declared("several rates", Tuning(4.0, 1.0, False))]


# The certificate


def test_what_a_copied_secret_folder_gives_is_told(tmp_path: Path) -> None:
    assert RATCHETED in deviations_of(begin(tmp_path).history)


def test_any_file_of_a_run_names_it(tmp_path: Path) -> None:
    certified(whole_run(tmp_path))
    found = verify(tmp_path)
    assert verify(tmp_path / "ledger.jsonl") == verify(tmp_path / "certificate.md") == found
    assert found.claimed is not None


def test_limits_may_differ_by_what_processors_round_and_their_reasons_in_words(tmp_path: Path) -> None:
    journal = whole_run(tmp_path)
    document = document_of(journal)
    journal.ledger.close()
    for off, stands in ((1e-8, True), (1e-5, False)):
        changed = copy.deepcopy(document)
        changed["limits"]["groups"][0]["epsilon"] *= 1 + off
        changed["limits"]["groups"][0]["reason"] = "as told by another version"
        (tmp_path / "certificate.json").write_text(json.dumps(signed(changed, KEY)))
        if stands:
            verify(tmp_path)
        else:
            with pytest.raises(CertificateError, match=r"limits\.groups\.0\.epsilon"):
                verify(tmp_path)


def test_limits_of_one_among_several_runs_count_all_of_them(tmp_path: Path) -> None:
    for runs in (1, 3):
        journal = begin(tmp_path / str(runs))
        journal.declare_tuning(Declared("a fixed list", Tuning(runs, fixed=True)))
        train(journal, range(1, PLAN.steps + 1))
        journal.finish()
        events, told = claimed_events(journal.history)
        assert events == [Event(1.0, 20.0, PLAN.steps * runs)]
        assert told == (SPENT if runs == 1 else f"{SPENT}, in each of 3 runs")


def test_limits_never_count_fewer_steps_than_were_charged(tmp_path: Path) -> None:
    """Where lost steps passed the budget, so that it would have allowed fewer."""
    journal = begin(tmp_path)
    assert epsilon([Event(1.0, 20.0, 5000)], PLAN.delta) > PLAN.epsilon_budget
    lost = Head(journal.history.run_id, 90, "e" * 64, ())
    journal.admit_lost((lost, [Charge(0, 1.0, 20.0, 5000)]), "the disk failed")
    events, told = claimed_events(journal.history, finished=False)
    assert events == [Event(1.0, 20.0, 5000)] and told == BUDGET


def test_a_ledger_whose_noise_no_accountant_can_take_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflows(*asked: Any) -> float:
        raise OverflowError("too large")

    journal = begin(tmp_path)
    train(journal, range(1, 2))
    monkeypatch.setattr("murmuration.accounting.ledger.history.epsilon", overflows)
    with pytest.raises(AccountingError, match="no epsilon can be computed"):
        journal.history.epsilon()


def test_what_is_not_private_claims_nothing_beside_it(tmp_path: Path) -> None:
    journal = begin(tmp_path, debug=True)
    train(journal, range(1, 3))
    claim = document_of(journal)["claim"]
    assert claim["statement"] == journal.history.why_not_private() and "privacy for" not in claim["statement"]


# Composition with other runs


def test_a_sibling_that_was_chosen_among_several_counts_with_what_it_claims(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_tuning(Declared("a fixed list", Tuning(5, fixed=True)))
    train(journal, range(1, PLAN.steps + 1))
    journal.finish()
    journal.ledger.close()
    line = {"id": journal.history.run_id, "run": "tiny", "folder": str(tmp_path), "epsilon_budget": 2.0, "delta": 1e-3}
    [known] = known_runs([line])
    tuned = epsilon([Event(1.0, 20.0, 5 * PLAN.steps)], PLAN.delta)
    assert known.epsilon == pytest.approx(tuned, abs=1e-9) and tuned > PLAN.epsilon_budget


def test_a_claim_whose_delta_nobody_knows_cannot_be_added(tmp_path: Path) -> None:
    line = {"id": "gone", "run": "gone", "folder": str(tmp_path / "nowhere"), "epsilon_budget": 2.0}
    [unknown], [known] = known_runs([line]), known_runs([line | {"delta": 1e-5}])
    assert (known.private, known.epsilon, known.delta) == (True, 2.0, 1e-5)
    assert not unknown.private
    whole_run(tmp_path / "other").ledger.close()
    assert known_runs([line | {"delta": 1e-5, "folder": str(tmp_path / "other")}]) == [known], "another run's ledger"


# What is read strictly, and shown harmlessly


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"phase": "0"}, "phase: "), ({"phase": 0.5}, "phase: "), ({"count": True}, "count: "),
        ({"count": "3"}, "count: "), ({"rate": "0.5"}, "rate: "), ({"sigma": math.nan}, "sigma: "),
        ({"sigma": math.inf}, "sigma: "), ({"sigma": None}, "sigma: "), ({"more": 1}, "more: "),
        ({"phase": "0", "count": "3"}, "phase: "),
    ],
    ids=str,
)  # fmt: skip
def test_fields_have_their_own_type_and_the_first_that_has_not_is_named(wrong: dict[str, Any], fault: str) -> None:
    fields: dict[str, Any] = {"phase": 0, "rate": 0.5, "sigma": 2.0, "count": 3}
    assert read(Charge, fields) == Charge(0, 0.5, 2.0, 3)
    with pytest.raises(ValueError) as caught:
        read(Charge, fields | wrong)
    assert str(caught.value).startswith(fault) and "http" not in str(caught.value)
    with pytest.raises(ValueError, match="count"):
        read(Charge, {name: value for name, value in fields.items() if name != "count"})


def test_a_sentence_is_cut_in_its_middle_and_only_if_it_is_too_long() -> None:
    whole = "".join(chr(ord("a") + number % 26) for number in range(LONGEST))
    assert sentence(ValueError(whole)) == whole
    cut = sentence(ValueError(f"{whole}end"))
    assert cut == f"{whole[:500]} … {(whole + 'end')[-500:]}"


def test_only_the_first_line_of_a_library_s_error_is_told() -> None:
    assert first_line(ValueError("\n said \nand more")) == "said "
    assert first_line(ValueError(" \n")) == first_line(ValueError()) == "ValueError"
    assert first_line(ValueError("x" * 300)) == "x" * 200 and first_line(ValueError("x" * 300), most=3) == "xxx"
    assert first_line(ValueError("x" * 300), most=None) == "x" * 300


def test_numbers_are_printed_too_and_as_json_where_that_is_asked_for(tmp_path: Path) -> None:
    page = tmp_path / "page.jinja"
    page.write_text("{{ value }}")
    assert html_page(page, value=3) == "3" and html_page(page, value=["<"]) == "[&#x27;&lt;&#x27;]"
    assert [json_text(page, value=value) for value in (3, "3", [True])] == ["3", '"3"', "[true]"]


def test_a_full_disk_and_a_failing_one_are_the_storages_faults_and_a_missing_file_is_not() -> None:
    found = [durable.of_storage(OSError(number, "")) for number in (errno.ENOSPC, errno.EIO, errno.ENOENT)]
    assert found == [True, True, False]


def test_nothing_that_is_printed_as_json_moves_a_terminals_cursor() -> None:
    assert printable_leaves({"a\x1b": ["b\x1b[2K", {"c": ["\x1b"]}], "n": 3}) == {
        printable("a\x1b"): [printable("b\x1b[2K"), {"c": [printable("\x1b")]}], "n": 3
    }  # fmt: skip


def test_scripts_may_rely_on_the_exit_codes() -> None:
    found = (errors.DONE, errors.BAD_INPUT, errors.BUDGET_SPENT, errors.SELF_TEST_FAILED, errors.REFUSED)
    later = errors.REFUTED, errors.NOT_ALL_CHECKED, errors.NOT_STRICT, errors.RESUME_ME
    assert (*found, *later) == (0, 2, 3, 4, 5, 6, 7, 8, 75)
    assert (errors.RunError.exit_code, LedgerError.exit_code, BudgetSpent.exit_code) == (2, 5, 3)


# Files


def test_a_file_appears_whole_and_durable_with_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, synced, really = tmp_path / "certificate.json", list[Path](), os.fsync

    def noting(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert path == tmp_path or path.read_bytes() == b"whole", "nothing is left in a buffer"
        synced.append(path)
        really(descriptor)

    monkeypatch.setattr(durable.os, "fsync", noting)
    asides = set[str]()
    for _ in range(2):
        with durable.atomic(target) as file:
            file.write(b"whole")
            asides.update(path.name for path in tmp_path.iterdir() if path != target)
        assert target.read_bytes() == b"whole" and stat.S_IMODE(target.stat().st_mode) == 0o644
        assert [path.parent for path in synced] == [tmp_path, tmp_path.parent], "the file, and then its name"
        synced.clear()
    assert len(asides) == 2, "several writers do not share a file, and nobody can guess its name"
    # All that are read are links of descriptors; the one of the listing itself is gone by then.
    left = [link for link in map(_link, Path("/proc/self/fd").iterdir()) if link.startswith(str(tmp_path))]
    assert not left, "a descriptor stayed open"


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def test_a_file_that_could_not_be_finished_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), durable.atomic(tmp_path / "certificate.json"):
        raise OSError("the disk is full")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_writer_takes_for_left_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock it looks like one whose writer was killed."""
    really, asked = durable.try_lock, list[int]()

    def taken_first(descriptor: int) -> bool:
        asked.append(descriptor)
        return len(asked) > 1 and really(descriptor)

    monkeypatch.setattr(durable, "try_lock", taken_first)
    with durable.atomic(tmp_path / "a", tidy=False) as file:
        file.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole" and len(asked) == 2


def test_what_killed_writers_left_goes_with_the_next_write_and_what_is_being_written_stays(tmp_path: Path) -> None:
    target, victim, ours = tmp_path / "a", tmp_path / "victim", f".other.{'a' * 16}.tmp"
    victim.write_bytes(b"theirs")
    (tmp_path / ".notes.tmp").touch()
    with durable.atomic(target) as slow:
        slow.write(b"slow")
        (tmp_path / ours).write_bytes(b"left")
        (tmp_path / f".a.{'b' * 16}.tmp").symlink_to(victim)
        for once in (False, True):
            with durable.atomic(target, once=once) as fast:
                fast.write(b"fast")
            assert target.read_bytes() == b"fast" and not (tmp_path / ours).exists()
    assert target.read_bytes() == b"slow"
    with durable.atomic(target, once=True) as late:
        late.write(b"late")
    assert target.read_bytes() == b"slow" and victim.read_bytes() == b"theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".a.{'b' * 16}.tmp", ".notes.tmp", "a", "victim"]


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    monkeypatch.setattr(durable.secrets, "token_hex", lambda count: "0" * 2 * count)
    (tmp_path / f".a.{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError), durable.atomic(tmp_path / "a") as file:
        file.write(b"ours")
    assert not victim.exists() and not (tmp_path / "a").exists()


# What is declared is told


def test_choices_and_stores_are_told_as_they_were_declared(tmp_path: Path) -> None:
    journal = begin(tmp_path, replace(PLAN, steps=1))
    train(journal, range(1, 2), replace(PLAN, steps=1))
    for named in ("public_loss", "top1", "public_loss"):
        journal.declare_choice(named)
    assert journal.history.choices == ["public_loss", "top1"], "said once"
    journal.declare_store(0, "store.example")
    assert "checkpoints are kept by their public_loss" in (journal.history.why_budget_is_claimed() or "")
    assert any("fetched from store.example" in told for told in deviations_of(journal.history))


@pytest.mark.parametrize("content", ["{", "[]", '{"ledger": {"length": "x", "head": ""}}', '{"ledger": {}}'])
def test_a_damaged_manifest_vouches_for_nothing(tmp_path: Path, content: str) -> None:
    whole_run(tmp_path).ledger.close()
    manifest = tmp_path / "checkpoints" / "phase00-step00000003" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(content)
    with pytest.raises(CertificateError, match="is damaged, so it cannot vouch"):
        verify(tmp_path)


@pytest.mark.parametrize("name", ["known_deviations", "siblings"])
def test_lists_of_a_certificate_are_lists(tmp_path: Path, name: str) -> None:
    journal = whole_run(tmp_path)
    document = document_of(journal, {"siblings": []})
    (tmp_path / "certificate.json").write_text(json.dumps(document | {name: " ".join(document[name])}))
    with pytest.raises(CertificateError, match=f"{name} are not a list"):
        verify(tmp_path)


# Lists of weights


def with_checkpoint(folder: Path) -> Path:
    """A signed run whose certificate names the weights of a checkpoint that lies beside it."""
    place = folder / "checkpoints" / "phase00-step00000040"
    place.mkdir(parents=True)
    (place / "piece-0").write_bytes(b"weights")
    pieces = {"piece-0": hashlib.sha256(b"weights").hexdigest()}
    journal = Journal(Ledger.open(folder / "ledger.jsonl"))
    journal.start_run("tiny", KEY.check_value(), False, {}, "hmac-sha256", SIGNER)
    head = {"length": journal.ledger.length, "head": journal.ledger.head}
    (place / "manifest.json").write_text(json.dumps({"pieces": pieces, "ledger": head}))
    journal.declare_plan(0, "private", PLAN, {})
    journal.begin_segment(0, CONFIG, DATA, 0, "first")
    train(journal, range(1, PLAN.steps + 1))
    journal.finish()
    document = document_of(journal, {"siblings": []})
    digest = hashlib.sha256((place / "manifest.json").read_bytes()).hexdigest()
    tensors = {"weight": "0" * 64}
    document["weights"] = [
        {"phase": 0, "step": 40, "checkpoint_manifest_sha256": digest, "tensors": 1,
         "sha256": weights.list_digest(tensors)}
    ]  # fmt: skip
    weights.write_lists({place.name: tensors}, folder)
    pages.write(signed(document, KEY), folder)
    journal.ledger.close()
    return place


def test_checkpoints_that_the_certificate_does_not_name_are_those_of_the_ledger(tmp_path: Path) -> None:
    """Their weights were released, too, and `latest` may name them."""
    with_checkpoint(tmp_path)
    place = tmp_path / "checkpoints" / "phase00-step00000020"
    place.mkdir()
    (place / "piece-0").write_bytes(b"other weights")
    pieces = {"piece-0": hashlib.sha256(b"other weights").hexdigest()}
    history, entries = History.read(tmp_path / "ledger.jsonl")
    head = {"length": len(entries), "head": entries.head}
    (place / "manifest.json").write_text(json.dumps({"pieces": pieces, "ledger": head}))
    certificate = parse((tmp_path / "certificate.json").read_bytes())
    assert "the checkpoint phase00-step00000020: the ledger names no such one" in (
        check_attached(tmp_path, certificate, history).unchecked
    )
    digest = hashlib.sha256((place / "manifest.json").read_bytes()).hexdigest()
    history.checkpoints.append(CheckpointMark(0, 0, 20, digest))
    assert "the checkpoint phase00-step00000020 holds the bytes that the ledger names" in (
        check_attached(tmp_path, certificate, history).checked
    )
    (place / "piece-0").write_bytes(b"x")
    with pytest.raises(CertificateError, match="piece-0 is not the one that was certified"):
        check_attached(tmp_path, certificate, history)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda place: (place / "piece-0").write_bytes(b"Weights"), "piece-0 is not the one"),
        (lambda place: (place / "piece-0").unlink(), "piece-0 is not the one"),
        (lambda place: (place / "manifest.json").write_text((place / "manifest.json").read_text() + " "),
         r"manifest\.json is not the one"),
    ],
)  # fmt: skip
def test_a_checkpoint_beside_a_certificate_is_compared_to_the_last_byte(
    tmp_path: Path, change: Callable[[Path], object], fault: str
) -> None:
    place = with_checkpoint(tmp_path)
    found = verify(tmp_path).attached
    assert found is not None and f"the checkpoint {place.name} holds the certified bytes" in found.checked
    change(place)
    with pytest.raises(CertificateError, match=fault):
        verify(tmp_path)


def test_a_certificate_that_names_no_weights_says_so(tmp_path: Path) -> None:
    certified(whole_run(tmp_path, PLAN.steps), {"siblings": []})
    found = verify(tmp_path).attached
    assert found is not None and "weights: this certificate names none" in found.unchecked
    (tmp_path / "with").mkdir()
    with_checkpoint(tmp_path / "with")
    found = verify(tmp_path / "with").attached
    assert found is not None and "weights: this certificate names none" not in found.unchecked


def test_nothing_is_listed_without_the_list(tmp_path: Path) -> None:
    place = with_checkpoint(tmp_path)
    (tmp_path / "weights.json").unlink()
    assert not lists_tensors_of(tmp_path, place / "piece-0")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"{"), lambda path: path.write_text("[]"),
        lambda path: path.write_text('{"x.safetensors": {"a": {"shape": 3, "parts": []}}}'),
        lambda path: path.write_text('{"x.safetensors": {"a": {"parts": []}}}'),
        lambda path: path.write_text('{"x.safetensors": ["a"]}'),
    ],
)  # fmt: skip
def test_a_damaged_map_of_renamed_tensors_is_a_sentence(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    damage(tmp_path / weights.RENAMED)
    with pytest.raises(weights.WeightsFileError, match="cannot be read"):
        weights.digests_of_renamed(tmp_path / "x.safetensors")


def test_a_file_that_becomes_shorter_while_it_is_read_is_no_tensor() -> None:
    with pytest.raises(ValueError, match="a tensor is cut"):
        list(weights._read(io.BytesIO(b"abc"), 5))
    with pytest.raises(ValueError, match="ends before it begins"):
        list(weights._stored(io.BytesIO(b"abc"), 0, {"data_offsets": [2, 1]}))
