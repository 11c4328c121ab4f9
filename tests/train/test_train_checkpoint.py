"""Checkpoints: whole or absent, readable at any world size, and every damaged byte is named."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.train.storage import checkpoint as checkpoint_module
from murmuration.train.storage.checkpoint import (
    CheckpointError,
    Checkpoints,
    Keep,
    KeptCheckpoint,
    Loaded,
    Position,
    pointer_text,
)
from tests.support.checkpoint_world import HEADER, damage, save, saved, stored, trained, whole_state
from tests.support.train_helpers import LocalEngine, Toy, alone, on_ranks, private_engine


@pytest.mark.parametrize(("write_world", "replicated"), [(1, False), (2, False), (3, False), (2, True)])
def test_what_one_number_of_ranks_wrote_another_reads_bit_by_bit(
    tmp_path: Path, write_world: int, replicated: bool
) -> None:
    def write(ranks: Any) -> LocalEngine:
        engine = trained(ranks, replicated)
        Checkpoints(tmp_path, ranks, Keep(2)).save(Position(1, 2), engine, engine.ranks_per_copy, HEADER)
        return engine

    written = on_ranks(write_world, write)
    expected = whole_state(written)
    assert len(list(tmp_path.glob("phase*/piece-*"))) == (1 if replicated else write_world)
    for world in (1, 2, 3):
        for again in (False, True):

            def read(ranks: Any, again: bool = again) -> LocalEngine:
                loaded = Checkpoints(tmp_path, ranks, Keep(2)).latest()
                assert loaded is not None and loaded.position == Position(1, 2)
                model = Toy()
                with torch.no_grad():
                    for p in model.parameters():
                        p.zero_()
                model.load_state_dict(loaded.state_dict(model.state_dict()))
                engine, _, _ = private_engine(ranks, replicated=again, model=model)
                loaded.restore_optimizer(engine)
                return engine

            engines = on_ranks(world, read)
            found = whole_state(engines)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            assert {engine.optimizer_step() for engine in engines} == {2}
            fixed = engines[0].model.state_dict()
            assert torch.equal(fixed["frozen"], Toy().frozen) and torch.equal(fixed["table"], Toy().table)


def test_the_manifest_carries_the_head_of_the_ledger_and_its_digest_is_returned(tmp_path: Path) -> None:
    digest = saved(tmp_path, alone())
    loaded = Checkpoints(tmp_path, alone(), Keep(2)).latest()
    assert loaded is not None and loaded.digest == digest
    assert loaded.manifest["ledger"] == HEADER["ledger"]
    assert loaded.weights()["first.weight"].shape == (6, 48)


def test_a_position_is_written_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, alone(), Keep(2))
    first = checkpoints.save(Position(1, 2), trained(alone()), 0, HEADER)
    second = checkpoints.save(Position(1, 2), trained(alone(), steps=1), 0, HEADER)
    assert first == second
    marked: list[str] = []
    checkpoints.begin(Position(1, 2), trained(alone(), steps=1), 0, HEADER)
    assert checkpoints.settle(marked.append, {}) == first and marked == [first], "the ledger may lack its line"


def test_another_format_is_refused_and_not_misread(tmp_path: Path) -> None:
    saved(tmp_path, alone())
    manifest = next(tmp_path.glob("phase*/manifest.json"))
    changed = manifest.read_bytes().replace(b"murmuration-checkpoint/1", b"murmuration-checkpoint/2")
    manifest.write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"has format 'murmuration-checkpoint/2', not"):
        Loaded.open(manifest.parent, hashlib.sha256(changed).hexdigest())


def test_any_damaged_or_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    on_ranks(2, lambda ranks: saved(tmp_path / "good", ranks))
    files = [path for path in sorted((tmp_path / "good").rglob("*")) if path.is_file()]
    assert len(files) == 4  # pointer, manifest, two pieces
    for path in files:
        content = path.read_bytes()
        for place in {0, len(content) // 3, len(content) // 2, len(content) - 2}:
            bad = tmp_path / "bad"
            shutil.copytree(tmp_path / "good", bad)
            target = bad / path.relative_to(tmp_path / "good")
            target.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(CheckpointError) as refused:
                Checkpoints(bad, alone(), Keep(2)).latest()
            # A flipped byte of the pointer makes it point nowhere, or at a manifest that it does not fit.
            expected = (target.name,) if path.name != "latest" else ("latest", "phase01", "manifest.json")
            assert any(name in str(refused.value) for name in expected), str(refused.value)
            shutil.rmtree(bad)
        if path.name != "latest":
            shutil.copytree(tmp_path / "good", tmp_path / "bad")
            (tmp_path / "bad" / path.relative_to(tmp_path / "good")).unlink()
            with pytest.raises(CheckpointError):
                Checkpoints(tmp_path / "bad", alone(), Keep(2)).latest()
            shutil.rmtree(tmp_path / "bad")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, alone())
    loaded = Checkpoints(tmp_path, alone(), Keep(2)).latest()
    assert loaded is not None
    with pytest.raises(CheckpointError, match="another model"):
        loaded.state_dict({"something": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="has 288 of 300 elements"):
        loaded.read("weights", "first.weight", 0, 300)


class Killed(BaseException):
    """As SIGKILL: nothing is cleaned up by an `except Exception`."""


OPERATIONS: list[tuple[Any, str]] = [
    (os, "fsync"), (os, "replace"), (os, "rename"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"),
    (Path, "write_bytes"), (Path, "write_text"), (Path, "unlink"), (shutil, "rmtree"),
    (checkpoint_module, "save_file"),
]  # fmt: skip


def kill_at(moment: int, monkeypatch: pytest.MonkeyPatch, before: bool) -> Callable[[], int]:
    """Counts file operations and dies before, or right after, the given one; returns how many there were."""
    count = 0

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if before and count == moment:
                raise Killed
            result = real(*arguments, **options)
            if not before and count == moment:
                raise Killed
            return result

        return act

    for holder, name in OPERATIONS:
        monkeypatch.setattr(holder, name, wrapped(getattr(holder, name)))
    return lambda: count


@pytest.mark.parametrize("before", [True, False])
def test_a_kill_between_any_two_file_operations_leaves_a_whole_checkpoint(tmp_path: Path, before: bool) -> None:
    engines = {step: trained(alone(), steps=step) for step in (1, 2, 3)}
    weights = {step: engines[step].flats[0].detach().clone() for step in engines}
    moment, finished = 0, False
    while not finished:
        moment += 1
        folder = tmp_path / f"at{moment}"
        for step in (1, 2):
            Checkpoints(folder, alone(), Keep(1)).save(Position(0, step), engines[step], 0, HEADER)
        with pytest.MonkeyPatch.context() as patch:
            operations = kill_at(moment, patch, before)
            with contextlib.suppress(Killed):
                Checkpoints(folder, alone(), Keep(1)).save(Position(0, 3), engines[3], 0, HEADER)
            finished = operations() < moment
        loaded = Checkpoints(folder, alone(), Keep(1)).latest()
        assert loaded is not None and loaded.position.step in (2, 3), f"after operation {moment}"
        stored = torch.cat([loaded.read("weights", name, 0, p.numel()) for name, p in engines[1].parameters.items()])
        assert torch.equal(stored, weights[loaded.position.step])
        # The next start cleans up and goes on.
        Checkpoints(folder, alone(), Keep(1)).save(Position(0, 3), engines[3], 0, HEADER)
        again = Checkpoints(folder, alone(), Keep(1)).latest()
        assert again is not None and again.position.step == 3
        if not finished:
            Checkpoints(folder, alone(), Keep(1)).save(Position(0, 4), engines[3], 0, HEADER)
            left = sorted(path.name for path in folder.iterdir())
            assert left == ["latest", "phase00-step00000004"], "orphans are gone"
    assert moment > 10


def test_old_checkpoints_are_retired_but_never_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, alone(), Keep(3))
    engine = trained(alone())
    for position in (Position(0, 5), Position(0, 10), Position(1, 0), Position(1, 5), Position(1, 10)):
        checkpoints.save(position, engine, 0, HEADER)
    names = sorted(path.name for path in tmp_path.glob("phase*"))
    assert names == [Position(1, s).folder for s in (0, 5, 10)]
    loaded = checkpoints.latest()
    assert loaded is not None and loaded.position == Position(1, 10)


def test_no_key_lies_in_a_checkpoint(tmp_path: Path) -> None:
    """The engine draws its noise with b's'*32; no form of it may reach the disk, in any file or file name."""
    saved(tmp_path, alone())
    secret = b"s" * 32
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert secret not in content and secret.hex().encode() not in content


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nothing", alone(), Keep(2)).latest() is None


# Which checkpoints are kept and which go; a choice of the best is one by outputs: the planned budget is claimed.


def folders(path: Path) -> list[str]:
    return sorted(each.name for each in path.glob("phase*"))


def test_what_a_kill_left_goes_before_its_steps_are_made_again(tmp_path: Path) -> None:
    """On other ranks they round otherwise: two results with the same noise must not lie side by side."""
    engine = trained(alone())
    checkpoints = Checkpoints(tmp_path, alone(), Keep())
    digest = checkpoints.save(Position(0, 2), engine, 0, HEADER)
    shutil.copytree(tmp_path / "phase00-step00000002", tmp_path / "phase00-step00000004")  # renamed, never named
    (tmp_path / ".phase00-step00000006.tmp").mkdir()
    (tmp_path / ".phase00-step00000006.tmp" / "piece-00000-of-00001.safetensors").write_bytes(b"weights")
    assert checkpoints.recover([KeptCheckpoint(0, 2, digest)]) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "phase00-step00000002"]
    (tmp_path / "latest").unlink()
    assert checkpoints.recover([KeptCheckpoint(0, 2, digest)]) == f"{tmp_path / 'latest'} is lost"
    assert stored(checkpoints, engine)[0] == 2
    (tmp_path / "latest").unlink()
    assert checkpoints.recover([]) is None
    assert not list(tmp_path.iterdir()), "before the ledger names any checkpoint, none may be gone on from"


def test_after_a_rollback_the_abandoned_one_goes_although_its_name_is_later(tmp_path: Path) -> None:
    engine = trained(alone())
    for step in (10, 20, 30):
        save(tmp_path, engine, step, Keep(2))
    damage(tmp_path / Position(0, 30).folder / "manifest.json", "missing")
    checkpoints = Checkpoints(tmp_path, alone(), Keep(2))
    assert checkpoints.fall_back().position.step == 20
    save(tmp_path, engine, 25, Keep(2))
    assert folders(tmp_path) == [Position(0, step).folder for step in (20, 25)]
    assert stored(checkpoints, engine)[0] == 25


def test_retention_keeps_the_last_the_regular_and_the_best(tmp_path: Path) -> None:
    engine = trained(alone())
    keep = Keep(last=2, every=30, best="public_loss")
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5, 50: 2.6, 60: 1.5, 70: 1.4}
    for step, loss in losses.items():
        save(tmp_path, engine, step, keep, public_loss=loss)
    assert folders(tmp_path) == [Position(0, step).folder for step in (20, 30, 60, 70)]
    best = keep.best_of(Checkpoints.listed(tmp_path))
    assert {phase: entry.step for phase, entry in best.items()} == {0: 20}
    accurate = Keep(best="zero_shot_colour")
    for step, right in ((80, 0.5), (90, 0.9), (100, 0.1), (110, 0.2)):
        save(tmp_path, engine, step, accurate, zero_shot_colour=right)
    assert folders(tmp_path) == [Position(0, step).folder for step in (90, 100, 110)]


def test_folders_of_other_names_are_never_retired(tmp_path: Path) -> None:
    engine = trained(alone())
    copy = tmp_path / f"{Position(0, 1).folder}-my-copy"
    copy.mkdir()
    for step in (1, 2, 3):
        save(tmp_path, engine, step, Keep(1))
    assert copy.exists() and folders(tmp_path) == [copy.name, Position(0, 3).folder]


def test_a_step_of_nine_digits_is_retired_like_any_other(tmp_path: Path) -> None:
    engine = trained(alone())
    for step in (99_999_999, 100_000_000, 100_000_001):
        save(tmp_path, engine, step, Keep(1))
    assert folders(tmp_path) == [Position(0, 100_000_001).folder]


def test_a_loss_that_is_not_finite_is_never_the_best_and_leaves_a_pointer_that_can_be_read(tmp_path: Path) -> None:
    losses = {40: math.nan, 30: 0.5, 20: math.inf, 10: 0.4}
    entries = [KeptCheckpoint(0, step, "0", {"loss": loss}) for step, loss in losses.items()]
    (tmp_path / "latest").write_bytes(pointer_text(entries))
    listed = Checkpoints.listed(tmp_path)
    assert {entry.step: entry.public for entry in listed} == {40: {}, 30: {"loss": 0.5}, 20: {}, 10: {"loss": 0.4}}
    for known in (entries, listed):
        assert [entry.step for entry in Keep(last=1, best="loss").chosen(known)] == [40, 10]


def test_each_phase_has_a_best_of_its_own_and_of_equals_the_newest() -> None:
    losses = {(1, 20): 5.0, (1, 10): 3.0, (0, 30): 1.0, (0, 20): 1.0, (0, 10): 2.0}
    entries = [KeptCheckpoint(phase, step, "", {"public_loss": loss}) for (phase, step), loss in losses.items()]
    best = Keep(best="public_loss").best_of(entries)
    assert {phase: entry.step for phase, entry in best.items()} == {0: 30, 1: 10}


def test_the_regular_ones_begin_with_the_first_that_was_trained() -> None:
    entries = [KeptCheckpoint(0, step, "") for step in (25, 20, 15, 10, 0)]
    assert [entry.step for entry in Keep(last=1, every=10).chosen(entries)] == [25, 20, 10]
