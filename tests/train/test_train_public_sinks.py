"""Speed tells membership: with a record that is slow to decode or without it, public sinks hold the same bytes."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from murmuration.data.batch.loader import Loader
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.data.index.shard_index import build
from murmuration.train.run.board import Board, Feed, Pace
from murmuration.train.run.trainer import Trainer
from murmuration.train.step import StepSummary
from murmuration.train.storage.run_dir import PublicTimes, RunDir
from murmuration.train.storage.saving import Saving
from tests.support.tars import numbered
from tests.support.train_helpers import alone

RECORDS, STEPS, SLOW = 12, 120, 7
STARTED = 1_700_000_000


def png(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((side, side), np.uint8)).convert("1").save(buffer, "png")
    return buffer.getvalue()


def shard(folder: Path, slow: bool) -> Path:
    """Twelve small pictures, one of which has nine megapixels in a few kilobytes, or is not there: ⊥ in its place."""
    folder.mkdir()
    usual, other = png(16), png(3000) if slow else b""
    (folder / "0.tar").write_bytes(numbered({"png": other if n == SLOW else usual} for n in range(RECORDS)))
    return folder


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day at which the two runs started is not what they are to be told apart by."""
    monkeypatch.setattr(time, "time", lambda: float(STARTED))


class Charged:
    budget = 1.39

    def __call__(self, left: int) -> float:
        return 1.0


def trained(folder: Path, data: Path) -> dict[str, bytes]:
    """The product's sampler, reader, decoders, loop and board; a model that only waits for its pictures."""
    run_dir = RunDir(folder)
    run_dir.prepare()
    board = Board(run_dir, main=True, times=PublicTimes(STARTED))
    sampler = PoissonSampler(b"s" * 32, b"d" * 32, RECORDS, 1 << 30)
    loader = Loader(BatchReader(build(data), DataSpec(16)), sampler, 0, 1, 4, last=STEPS)

    def step(number: int, rate: float) -> StepSummary:
        seen = StepSummary()
        for batch in loader.micro_batches(loader.draw(number).ids, number):
            seen.add(batch.present, batch.inputs["images"].sum((1, 2, 3)), batch.present.float())
        return seen

    run: Any = SimpleNamespace(
        ranks=alone(), forget=lambda done: None,
        checkpoints=SimpleNamespace(begin=lambda *given: None, settle=lambda *given: None),
    )  # fmt: skip
    parts: dict[str, Any] = {
        "name": "private", "steps": STEPS, "rates": lambda step: 0.5, "make": step,
        "saving": Saving(run, 0, None, True, dict),  # pyright: ignore
        "board": board,
        "pace": Pace(RECORDS / 4, public=False, synthetic=1000.0, feed=Feed(lambda: loader.waited, 2)),
    }  # fmt: skip
    spent: Any = Charged()
    trainer = Trainer(ranks=alone(), every=STEPS, lag=1, log_every=5, clip_bound=1.0, spent=spent, **parts)
    try:
        trainer.run(0)
    finally:
        loader.close()
        board.close()
    assert loader.waited > 0, "what the sinks must not show was measured"
    return {"log": run_dir.public_log.read_bytes()} | {
        "events": b"".join(path.read_bytes() for path in sorted(run_dir.public_board.iterdir()))
    }


def test_a_slow_record_in_or_out_leaves_no_trace_in_any_public_sink(
    tmp_path: Path, frozen: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one machine the two rates differ by a factor of three, and so without error: an attack on ε = 1.39."""
    found = []
    for name, slow in (("with", True), ("without", False)):
        sinks = trained(tmp_path / f"run-{name}", shard(tmp_path / name, slow))
        found.append(sinks | {"console": capsys.readouterr().out.encode()})
    assert found[0] == found[1]
    assert b"samples/s (timed on synthetic records)  ETA" in found[0]["console"]
    assert b'"samples_per_second": 1000.0' in found[0]["log"] and b"samples_per_second" in found[0]["events"]


# Times of files


def files(folder: Path) -> Iterator[Path]:
    yield from (folder, *folder.rglob("*"))


def test_files_that_stay_have_the_time_of_the_start_and_of_no_step(tmp_path: Path) -> None:
    times = PublicTimes(STARTED)
    for name in ("logs", "checkpoints", "tb/public"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    times.advance()
    times.stamp(tmp_path / "checkpoints" / "file", tmp_path / "checkpoints")
    times.advance()
    times.stamp_all(tmp_path, but=("checkpoints",))
    found = {path.relative_to(tmp_path).as_posix(): int(os.lstat(path).st_mtime) - STARTED for path in files(tmp_path)}
    assert found.pop("checkpoints") == found.pop("checkpoints/file") == 1, "one second for each checkpoint"
    assert set(found.values()) == {2} and len(found) == 7


def test_a_file_that_may_not_be_touched_stops_nothing(tmp_path: Path) -> None:
    PublicTimes(STARTED).stamp(tmp_path / "is not there")
