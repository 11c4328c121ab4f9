"""Keys of a real run are forgotten at its durable checkpoints, and no draw changes for that."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from murmuration.accounting import key_chain
from murmuration.accounting.keys import KeyFileError, Link, RunKey, StepPurpose, load, secrets_in, store
from murmuration.accounting.ledger.history import History
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.chacha import ChaChaNoise
from murmuration.train.storage.open_run import OpenRun
from murmuration.train.storage.run_dir import RunDir
from tests.support.own_module import RATE, run, training
from tests.support.whole_history import steps_of


def link_of(run_dir: Path) -> Link:
    chain = load(run_dir / "secret" / "run.key").chain
    assert chain is not None
    return chain


def made(run_dir: Path, save_after: tuple[int, ...], until: int = 6, **changes: Any) -> dict[str, Tensor]:
    with training(run_dir, **changes) as found:
        found.prove()
        for step in [step for step in found.steps() if step <= until]:
            found.step(step, RATE)
            if step in save_after:
                found.save()
        return {name: tensor.clone() for name, tensor in found.weights().items()}


def digests(run_dir: Path) -> dict[int, str]:
    return {step_id.step: facts.sampling.digest for step_id, facts in steps_of(run_dir).opened.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_after_a_checkpoint_file_and_memory_give_the_keys_of_later_steps_alone(tmp_path: Path) -> None:
    with training(tmp_path, debug_seed=None) as found:
        first = link_of(tmp_path)
        assert first.step == 1 and found._run.secret.chain is None
        found.prove()
        for step in (1, 2, 3):
            found.step(step, RATE)
            assert link_of(tmp_path) == first.at(step + 1), "a step's weights may be seen when it returns"
        found.save()
        held = [*secrets_in(tmp_path / "secret" / "run.key"), *found._run.chain.held()]
        assert link_of(tmp_path) == first.at(4) and found._run.chain.first == 4
        reachable = {
            link.key(purpose)
            for secret in held for step in range(20) for purpose in get_args(StepPurpose)
            for link in [Link("", 0, secret).at(step)]
        } | set(held)  # fmt: skip
        past = {first.at(step).key(purpose) for step in (1, 2, 3) for purpose in get_args(StepPurpose)}
        past |= {first.at(step).state for step in (1, 2, 3)}
        assert first.at(5).key("noise") in reachable and not reachable & past
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) > 4
        assert not [key for key in past for content in files if key in content or key.hex().encode() in content]
        with pytest.raises(KeyFileError, match="forgotten"):
            found.phase.core.noise("noise").draw(3, 0, 0, 4)
        found.step(4, RATE)


def test_the_draws_are_those_of_the_chain_whenever_the_run_is_saved(tmp_path: Path) -> None:
    whole = made(tmp_path / "never", ())
    assert same(whole, made(tmp_path / "always", (1, 2, 3, 4, 5, 6)))
    made(tmp_path / "parts", (1, 2), until=2)
    assert same(whole, made(tmp_path / "parts", (3, 6)))
    assert len({tuple(digests(tmp_path / name).items()) for name in ("never", "always", "parts")}) == 1
    assert link_of(tmp_path / "never").step == link_of(tmp_path / "always").step == 7


def test_a_kill_between_a_checkpoint_and_the_forgetting_changes_no_draw_and_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In runs whose keys go at checkpoints alone, as those of recipes do."""

    class Killed(BaseException):
        pass

    def killed(*arguments: object) -> None:
        raise Killed

    for name in ("burn", "remember"):
        monkeypatch.setattr(OpenRun, name, lambda *arguments: None)
    whole = run(tmp_path / "whole", 6)
    with monkeypatch.context() as patched:
        patched.setattr(key_chain, "forget", killed)
        with pytest.raises(Killed):
            made(tmp_path / "killed", (3,), until=3)
    assert link_of(tmp_path / "killed").step == 1
    with training(tmp_path / "killed") as found:
        assert found.done == 3 and link_of(tmp_path / "killed").step == 4, "forgotten before anything else is done"
    assert same(whole, made(tmp_path / "killed", (6,)))
    assert len(History.read(tmp_path / "killed" / "ledger.jsonl")[0].segments) == 1


def test_keys_that_are_forgotten_too_early_end_in_a_sentence_until_a_new_segment_is_declared(tmp_path: Path) -> None:
    made(tmp_path, (1,), until=1)
    key_chain.forget(
        tmp_path / "secret" / "run.key", link_of(tmp_path).segment, 3
    )  # planted: no checkpoint is behind step 3
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(KeyFileError, match=r"none after step 1 can be repeated.*or declare --new-segment 'why'"):
        made(tmp_path, ())
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    made(tmp_path, (3,), until=3, new_segment="the keys were lost")
    history, _ = History.read(tmp_path / "ledger.jsonl")
    assert [segment.reason for segment in history.segments] == ["first", "the keys were lost"]
    assert link_of(tmp_path).segment == history.segments[1].chain_name and history.steps()[0] == 3


def test_a_new_segment_has_a_chain_of_its_own_that_begins_where_it_begins(tmp_path: Path) -> None:
    with training(tmp_path, debug_seed=None) as found:
        found.prove()
        found.step(1, RATE)
        found.save()
        found.step(2, RATE)  # lost, and perhaps seen
        found.close()
    old = link_of(tmp_path)
    with training(tmp_path, debug_seed=None) as found:
        new = link_of(tmp_path)
        assert (old.step, new.step) == (3, 2) and new.segment != old.segment
        assert not {old.at(s).key("noise") for s in range(3, 9)} & {new.at(s).key("noise") for s in range(2, 9)}
        assert old.state.hex() not in (tmp_path / "secret" / "run.key").read_text()
        found.prove()
        found.step(2, RATE)


def test_a_kept_key_signs_and_redraws_nothing(tmp_path: Path) -> None:
    with training(tmp_path, debug_seed=None, keep_key=True) as found:
        first = link_of(tmp_path)
        found.prove()
        for step in found.steps():
            found.step(step, RATE)
        verdict = found.finish()
    assert link_of(tmp_path) == first.at(7)
    with training(tmp_path, debug_seed=None) as found:
        assert found.finish() == verdict
    assert not (tmp_path / "secret" / "run.key").exists()


def test_noise_takes_the_key_of_its_step() -> None:
    chain = key_chain.KeyChain(Link("a segment", 1, bytes(32)))
    for step in (1, 2, 5):
        for kind in (AESNoise, ChaChaNoise):
            drawn = kind(partial(chain.key, "noise"), 1.0, 1.0).draw(step, 2, 3, 50)
            assert (drawn == kind(chain.key("noise", step), 1.0, 1.0).draw(step, 2, 3, 50)).all()


def test_the_first_key_of_a_run_has_no_chain_and_a_stored_one_is_found_again(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.run_key(fresh=True, debug_seed=None).chain is None
    run_dir.adopt_key()
    link = key_chain.enter(run_dir.key, "a segment", 1, 0, begun=False)
    assert run_dir.run_key(fresh=False, debug_seed=None).chain == link
    store(RunKey.fresh(), run_dir.new_key)
    assert run_dir.run_key(fresh=False, debug_seed=None).chain == link, "the named key is the run's"
