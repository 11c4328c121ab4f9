"""A micro-batch that the device's memory does not hold is one sentence on every rank, with one that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip.rule import ClipRule
from murmuration.train.self_test import self_test as module
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.self_test.room import RoomError, require_room
from tests.support.self_test_world import caption_model
from tests.support.train_helpers import SHAPE, LocalEngine, alone, on_ranks, plan_for, private_engine


class Small(LocalEngine):
    """A device that holds `room` records; where it does not, part of the sum has been made already."""

    room = 0

    def accumulate(self, batch: MicroBatch, rule: ClipRule | None = None) -> None:
        super().accumulate(batch, rule)
        if len(batch.present) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def discard(self) -> None:
        self.forward.sums.clear()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def refused(ranks: Any, room: int, micro_batch: int = 16) -> str:
    engine, _, _ = private_engine(ranks, plan_for(), False, caption_model(), engine=Small)
    engine.room = room
    try:
        require_room(engine, SyntheticRecords.of(SHAPE, "caption"), micro_batch, ranks)
    except RoomError as error:
        assert error.exit_code == 2
        return str(error)
    finally:
        assert not engine.forward.sums.totals or not any(t.any() for t in engine.forward.sums.totals.values())
    return ""


@pytest.mark.parametrize(("room", "said"), [(16, ""), (15, "; 8 fit: lower"), (3, "; 2 fit: lower"), (0, "; use a s")])
def test_the_sentence_names_a_micro_batch_that_fits(room: int, said: str) -> None:
    found = refused(alone(), room)
    assert found.startswith("a micro-batch of 16 records does not fit into memory" if said else "") and said in found


def test_all_ranks_say_the_same_where_one_of_them_has_less_room() -> None:
    first, second = on_ranks(2, lambda ranks: refused(ranks, 16 if ranks.main else 5))
    assert first == second and "; 4 fit: lower" in first


def test_memory_that_runs_out_later_in_the_self_test_is_a_sentence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from murmuration.train import private

    engine, clip, _ = private_engine(alone(), plan_for(), False, caption_model())
    core = private.PrivateCore(plan_for(), clip, engine, lambda purpose: b"k" * 32, alone())  # pyright: ignore[reportArgumentType]

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "_records_are_bounded", full)
    with pytest.raises(RoomError, match="of 4 records does not fit into memory; use a smaller micro-batch"):
        core.prove(SyntheticRecords.of(SHAPE, "caption"), 0, 4)
