"""A record's weight comes from its .json; what is none makes a bad record, and never a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from murmuration.data.batch.reader import WEIGHT, BatchReader, DataSpec
from murmuration.data.draw.stream import StreamEpochs, StreamIndex
from murmuration.data.index.shard_index import ShardIndex, build

SPEC = DataSpec(16, weight="score")
GOOD = [0, 1, 0.25, 1e6, 3e-9]
DEEP = b'{"score":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.fixture
def scored(tmp_path: Path, write_tar: Callable[..., Path], picture: Callable[..., bytes]) -> ShardIndex:
    """Good ones first, then each way of being none."""
    members = [json.dumps({"score": weight}).encode() for weight in GOOD]
    members += [
        b'{"score": %s}' % each for each in (b"-1e-9", b"1000001", b"NaN", b"Infinity", b'"1"', b"true", b"null")
    ]
    members += [b"{}", b"[1]", b"no json", DEEP, b'{"score": 1' + b"0" * 400 + b"}", None]
    samples = [
        {"__key__": f"{number:02d}", "jpg": picture(number)} | ({} if fields is None else {"json": fields})
        for number, fields in enumerate(members)
    ]
    write_tar(tmp_path / "scored" / "a.tar", samples)
    return build(tmp_path / "scored")


def test_weights_are_read_and_a_record_without_a_usable_one_is_bad(scored: ShardIndex) -> None:
    reader = BatchReader(scored, SPEC)
    batch = reader.read(np.array([*range(18), -1]), 0)
    assert batch.inputs[WEIGHT].dtype == torch.float32
    assert batch.inputs[WEIGHT].tolist() == torch.tensor([*GOOD, *[0.0] * 14], dtype=torch.float32).tolist()
    assert batch.present.tolist() == [True] * len(GOOD) + [False] * 14
    assert sorted(reader.bad_records) == list(range(len(GOOD), 18))
    assert all("score" in reason for reason in reader.bad_reasons.values())
    assert WEIGHT not in BatchReader(scored, DataSpec(16)).read(np.array([0]), 0).inputs


def test_a_stream_carries_them_too(scored: ShardIndex) -> None:
    stream = StreamIndex(str(scored.folder.parent), 1, 4).begin(b"k", 18)
    batch = BatchReader(stream, SPEC).read(StreamEpochs(1, 18).ids(0), 1)
    assert sorted(batch.inputs[WEIGHT][batch.present].tolist()) == sorted(torch.tensor(GOOD).tolist())


def test_a_label_and_a_weight_come_from_one_reading(scored: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    real = json.loads
    monkeypatch.setattr(
        "murmuration.data.decode.fields.json.loads", lambda text, **how: read.append(text) or real(text, **how)
    )
    batch = BatchReader(scored, DataSpec(16, labels=("score",), weight="score")).read(np.array([1, 3]), 0)
    assert batch.inputs[WEIGHT].tolist() == [1.0, 1e6] and batch.inputs["score"].tolist() == [1, 1_000_000]
    assert len(read) == 2


def test_labels_nested_too_deep_make_a_bad_record(scored: ShardIndex) -> None:
    reader = BatchReader(scored, DataSpec(16, labels=("score",)))
    assert reader.read(np.array([1, 15]), 0).present.tolist() == [True, False]
