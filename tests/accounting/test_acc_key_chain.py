"""Forward secrecy: what a leak of the secret file or of the memory gives, and what it must not give."""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from murmuration.accounting import key_chain
from murmuration.accounting.key_chain import KeyChain, PhaseKeys, burn, enter, forget, why_unusable
from murmuration.accounting.keys import (
    KeyFileError,
    KeyNotWritten,
    Link,
    Purpose,
    RunKey,
    StepPurpose,
    destroy,
    load,
    rewrite,
    secrets_in,
    store,
)

PURPOSES = get_args(StepPurpose)
FIRST = Link("a segment", 1, bytes(range(32)))
STEPS = range(1, 12)


def by_hand(secret: bytes, info: str) -> bytes:
    """RFC 5869 without salt, for 32 bytes."""
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(extracted, info.encode() + b"\x01", hashlib.sha256).digest()


def all_keys(link: Link, steps: range) -> set[bytes]:
    return {link.at(step).key(purpose) for step in steps for purpose in PURPOSES}


def all_that_follows(secret: bytes, steps: int = 40) -> set[bytes]:
    """Whatever can be derived from 32 bytes by any of our derivations, in any role that they may have."""
    found, state = {secret}, secret
    for _ in range(steps):
        link, key = Link("", 0, state), RunKey(state)
        found |= {link.key(purpose) for purpose in PURPOSES}
        found |= {
            key.derive(purpose, phase, segment)
            for purpose in get_args(Purpose) for phase in range(3) for segment in ("a segment", "0:salt", "public", "-")
        }  # fmt: skip
        state = link.at(1).state
        found.add(state)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store(RunKey.fresh(), tmp_path / "secret" / "run.key")
    return tmp_path / "secret" / "run.key"


# The derivation


def test_every_key_is_what_the_documentation_says() -> None:
    state, chain = FIRST.state, KeyChain(FIRST)
    for step in STEPS:
        for purpose in PURPOSES:
            assert chain.key(purpose, step) == by_hand(state, f"murmuration/2|key|{purpose}")
        state = by_hand(state, "murmuration/2|next step")
    assert len(all_keys(FIRST, STEPS)) == len(STEPS) * len(PURPOSES), "every step and purpose has its own key"
    with pytest.raises(KeyFileError, match="no key for the purpose 'self-test'"):
        KeyChain(FIRST).key("self-test", 1)  # pyright: ignore[reportArgumentType]


def test_neither_the_order_of_asking_nor_what_was_forgotten_changes_a_key() -> None:
    expected = {step: FIRST.at(step).key("noise") for step in range(1, 60)}
    backwards, saved = KeyChain(FIRST), KeyChain(FIRST)
    assert {step: backwards.key("noise", step) for step in range(59, 0, -1)} == expected
    found = {}
    for step in range(1, 60):
        found[step] = saved.key("noise", step)
        saved.key("sampling", step + 1)  # ahead of the step, as the loader asks
        if step % 7 == 0:
            saved.forget(step - 2)
    assert found == expected
    assert KeyChain(FIRST.at(31)).key("noise", 40) == expected[40], "as after a resume"


def test_threads_that_ask_ahead_while_the_past_is_forgotten_get_the_right_keys() -> None:
    chain, wrong = KeyChain(FIRST), list[int]()
    expected = {step: FIRST.at(step).key("noise") for step in range(1, 300)}

    def ask() -> None:
        wrong.extend(step for step in range(200, 300) if chain.key("noise", step) != expected[step])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(1, 200):
        chain.forget(step)
    for thread in threads:
        thread.join()
    assert not wrong and chain.first == 200


def test_keys_of_steps_come_from_the_chain_and_all_others_last() -> None:
    key = RunKey.fresh()

    def lasting(purpose: Purpose) -> bytes:
        return key.derive(purpose, 0, "0:salt")

    keys = PhaseKeys(lasting, KeyChain(FIRST))
    for purpose in get_args(Purpose):
        found = keys(purpose)
        if purpose in PURPOSES:
            assert callable(found) and found(4) == FIRST.at(4).key(purpose) != lasting(purpose)
        else:
            assert found == lasting(purpose)
    assert PhaseKeys(lasting, None)("noise") == lasting("noise"), "in phases without noise"


@pytest.mark.parametrize("first", [1, 3, 4])
def test_steps_of_an_epoch_sample_by_one_key_and_have_all_other_keys_of_their_own(first: int) -> None:
    secret, slots = bytes(range(32)), 3
    link = Link.first("a segment", first, secret, slots)
    state, epoch = secret, by_hand(secret, "murmuration/2|epoch")
    for step in range(first, first + 10):
        if step > first and step % slots == 1:
            epoch = by_hand(state, "murmuration/2|epoch")
        assert link.at(step).state == state + epoch
        for purpose in PURPOSES:
            of = epoch if purpose == "sampling" else state
            assert link.at(step).key(purpose) == by_hand(of, f"murmuration/2|key|{purpose}")
        state = by_hand(state, "murmuration/2|next step")
    chain = KeyChain(link.at(first + 1))
    assert chain.key("sampling", first + 5) == link.at(first + 5).key("sampling"), "as after a resume"
    chain.forget(first + 5)
    assert not any(link.at(step).state[:32] in held for step in range(first, first + 6) for held in chain.held())


def test_the_file_keeps_an_epochs_key_with_the_link_and_forgets_it_with_the_epoch(path: Path) -> None:
    before = enter(path, "a segment", 1, 0, False, slots=3)
    assert load(path).chain == before and before.slots == 3
    for done in range(1, 8):
        forget(path, "a segment", done)
        assert load(path).chain == before.at(done + 1)
        assert enter(path, "a segment", 1, done, True, slots=3) == before.at(done + 1)
        kept = before.state[32:] in path.read_bytes() or before.state[32:].hex().encode() in path.read_bytes()
        assert kept == (done < 3)


# In memory


def test_what_was_forgotten_cannot_be_derived_from_what_the_object_still_holds() -> None:
    chain = KeyChain(FIRST)
    for step in STEPS:
        for purpose in PURPOSES:
            chain.key(purpose, step)
    states = list(chain._states.values())
    chain.forget(8)
    for step in range(-1, 9):
        with pytest.raises(KeyFileError, match=f"the keys of step {step} were forgotten"):
            chain.key("noise", step)
    reachable = set[bytes]().union(*(all_that_follows(held) for held in chain.held()))
    assert reachable >= all_keys(FIRST, range(9, 12)), "the attempt has power: what comes later is found"
    assert not reachable & all_keys(FIRST, range(1, 9))
    assert not reachable & {FIRST.at(step).state for step in range(1, 9)}
    assert any(state == bytes(32) for state in states), "overwritten, not only dropped"
    chain.close()
    assert chain.held() == []
    with pytest.raises(KeyFileError):
        chain.key("noise", 12)


def test_little_is_held_however_rarely_a_run_is_saved() -> None:
    guarded = list[bytes | bytearray]()
    chain = KeyChain(FIRST, guarded.append)
    for step in range(1, 500):
        chain.key("noise", step)
        chain.key("sampling", step + 1)
    assert len(chain.held()) < 30
    assert chain.key("noise", 2) == FIRST.at(2).key("noise"), "what was dropped is derived again, until it is forgotten"
    assert chain.key("noise", 2) in guarded, "keys are handed to whoever locks them into memory"


# In the file


def test_a_leak_of_the_file_gives_no_key_of_an_earlier_step(path: Path) -> None:
    link = enter(path, "a segment", 1, 0, begun=False)
    forget(path, "a segment", 8)
    reachable = set[bytes]().union(*(all_that_follows(secret) for secret in secrets_in(path)))
    assert reachable >= all_keys(link, range(9, 30))
    assert not reachable & (all_keys(link, range(1, 9)) | {link.at(step).state for step in range(1, 9)})
    for file in (each for each in path.parents[1].rglob("*") if each.is_file()):
        content = file.read_bytes()
        for step in range(1, 9):
            state = link.at(step).state
            assert state not in content and state.hex().encode() not in content, file
    forget(path, "a segment", 5)
    assert load(path).chain == link.at(9), "nothing goes back"


def test_the_key_of_an_epoch_is_looked_for_by_itself(path: Path) -> None:
    """An export is searched for each secret, so that half of what lies side by side in the file is found, too."""
    link = enter(path, "a segment", 1, 0, begun=False, slots=4)
    _, state, epoch = secrets_in(path)
    assert state + epoch == link.state and len(state) == len(epoch) == 32 and state != epoch


def test_a_leak_after_a_new_segment_began_gives_no_key_of_the_one_before(path: Path) -> None:
    old = enter(path, "a segment", 1, 0, begun=False)
    new = enter(path, "another", 6, 5, begun=False)
    assert new.step == 6 and load(path).chain == new
    reachable = set[bytes]().union(*(all_that_follows(secret) for secret in secrets_in(path)))
    assert reachable >= all_keys(new, range(6, 20)) and not reachable & all_keys(old, range(1, 40))
    backwards = set[bytes]().union(*(all_that_follows(secret) for secret in (old.state, old.at(9).state)))
    assert not backwards & all_keys(new, range(6, 20)), "and an earlier leak gives none of the new one"


def test_the_old_bytes_are_overwritten_once_the_new_file_has_its_name(path: Path) -> None:
    first = enter(path, "a segment", 1, 0, begun=False)
    inode = os.open(path, os.O_RDONLY)
    try:
        forget(path, "a segment", 1)
        left = os.pread(inode, 10_000, 0)
    finally:
        os.close(inode)
    assert left and first.state.hex().encode() not in left
    assert path.stat().st_mode & 0o777 == 0o600 and [each.name for each in path.parent.iterdir()] == ["run.key"]


def test_a_rewrite_that_fails_leaves_the_old_file_and_says_why(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = enter(path, "a segment", 1, 0, begun=False)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(KeyNotWritten, match=r"not be rewritten \(No space left.*start the same command again"):
            forget(path, "a segment", 3)
    assert load(path).chain == before
    forget(path, "a segment", 3)
    assert load(path).chain == before.at(4)


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(1, 5))
def test_a_kill_in_the_middle_of_a_rewrite_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Before each fsync, and after the last one."""
    before, count = enter(path, "a segment", 1, 0, begun=False), [0]
    really = os.fsync

    def until(descriptor: int) -> None:
        count[0] += 1
        if count[0] == moment:
            raise _Killed
        really(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", until)
        if moment <= 3:  # the new file, the folder, the old file's bytes
            with pytest.raises(_Killed):
                forget(path, "a segment", 3)
        else:
            forget(path, "a segment", 3)
    assert load(path).chain in (before, before.at(4))
    forget(path, "a segment", 3)
    assert enter(path, "a segment", 1, 3, begun=True) == load(path).chain == before.at(4)
    assert [each.name for each in path.parent.iterdir()] == ["run.key"], "what a kill left is gone"


def test_destroying_the_file_takes_what_a_killed_rewrite_left_with_it(path: Path) -> None:
    left = path.with_name(".run.key.tmp")
    store(RunKey.fresh(), left)
    assert destroy(path) and not path.exists() and not left.exists() and not destroy(path)


# On resume


def test_a_chain_that_no_step_used_may_be_replaced_and_one_that_was_used_may_not(path: Path) -> None:
    """The ledger names a segment before the file does; a kill may come between."""
    first = enter(path, "a segment", 1, 0, begun=False)
    assert enter(path, "a segment", 1, 0, begun=False) == first == load(path).chain
    assert enter(path, "a segment", 1, 0, begun=True) == first
    with pytest.raises(KeyFileError, match=r"older or newer than the ledger.*restore the run key"):
        enter(path, "another", 4, 4, begun=True)
    assert load(path).chain == first, "a refusal changes nothing"
    assert enter(path, "another", 4, 4, begun=False) != first


def test_keys_that_were_forgotten_too_early_are_a_refusal_and_no_other_draw(path: Path) -> None:
    first = enter(path, "a segment", 1, 0, begun=False)
    forget(path, "a segment", 5)
    for done in range(5):
        with pytest.raises(KeyFileError, match=f"steps up to 5 were forgotten, so none after step {done} can be"):
            enter(path, "a segment", 1, done, begun=True)
        assert why_unusable(load(path), "a segment", done, begun=True) is not None
    assert load(path).chain == first.at(6)
    for done in (5, 7):
        assert enter(path, "a segment", 1, done, begun=True) == first.at(6)


def test_a_segment_that_another_one_followed_is_forgotten_already(path: Path) -> None:
    enter(path, "a segment", 1, 0, begun=False)
    new = enter(path, "another", 4, 3, begun=False)
    forget(path, "a segment", 9)
    assert load(path).chain == new


def test_steps_are_burnt_in_the_chain_that_made_them_alone(path: Path) -> None:
    first, head = enter(path, "a segment", 1, 0, begun=False), {"ledger_of": "run", "lines": 3}
    with pytest.raises(KeyFileError, match="exchanged while the run lasted"):
        burn(path, "another", 4, head)
    assert load(path).chain == first and load(path).head is None
    burn(path, "a segment", 4, head)
    assert load(path).chain == first.at(5) and load(path).head == head


def test_chains_of_a_debug_seed_repeat_and_all_others_never_do() -> None:
    seeded, fresh = RunKey.from_debug_seed(1), RunKey.fresh()
    assert seeded.first_link("a", 1) == RunKey.from_debug_seed(1).first_link("a", 1, slots=1)
    assert len({seeded.first_link(name, 1).state for name in "ab"} | {RunKey.from_debug_seed(2).secret}) == 3
    assert fresh.first_link("a", 1) != fresh.first_link("a", 1)


# Forms of the file


@pytest.mark.parametrize(
    "damage", [lambda t: t[:-20], lambda t: t.replace(b'"step": 3', b'"step": 2'), lambda t: b"{}" + b" " * 50]
)
def test_a_damaged_file_is_told_from_a_whole_one(path: Path, damage) -> None:
    rewrite(replace(load(path), chain=replace(FIRST, step=3)), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(KeyFileError, match="is damaged; restore it"):
        load(path)


def test_a_file_of_a_newer_form_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"murmuration-key/1", b"murmuration-key/3"))
    with pytest.raises(KeyFileError, match="format 'murmuration-key/3'; read it with a newer version"):
        load(path)


def test_a_key_does_not_show_its_chain() -> None:
    key = replace(RunKey.fresh(), chain=FIRST)
    for shown in (repr(key), repr(KeyChain(FIRST)), repr(key_chain.PhaseKeys(lambda purpose: b"", KeyChain(FIRST)))):
        assert FIRST.state.hex() not in shown and repr(FIRST.state) not in shown
    assert key.without_chain().chain is None


def test_a_forked_process_has_no_key_of_a_step() -> None:
    """Those that read records outlive many steps. Another thread may be in the middle of something at that moment."""
    chain = KeyChain(FIRST)
    chain.key("noise", 3)
    with chain._lock:
        if (child := os.fork()) == 0:
            try:
                signal.alarm(20)  # it waits for nobody
                left = len(chain.held())
                with pytest.raises(KeyFileError):
                    chain.key("noise", 3)
                os._exit(left)
            finally:
                os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert chain.key("noise", 3) == FIRST.at(3).key("noise")
