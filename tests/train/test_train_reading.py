"""How records are shared out and read: agreed between ranks, refused on all of them alike, and stopped in order."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.data.decode.resize import DECODER
from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.data.draw.stream import PLACES, Stream
from murmuration.data.index.shard_index import build
from murmuration.data.store.place import UnreadableError
from murmuration.data.synthetic.index import shape_samples, write_shards
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.distributed.stop import Stopped, StopRequest
from murmuration.train.private_phase import until_unreadable
from murmuration.train.recipe.open_data import hosts_of
from murmuration.train.recipe.read_options import agree, public_epochs, rank_plan, with_stream_order
from murmuration.train.recipe.ready_phase import ReadyPhase, RecipeError, prepare
from tests.support.range_server import RangeServer, serving
from tests.support.train_helpers import Disagreement, on_ranks

ROOT = Path(__file__).resolve().parents[2]
Nodes = list[list[int]]


def _config(tmp_path: Path, data: dict[str, Any], **phase: Any) -> Config:
    """One private phase over `data`, or a plain one where a batch is given."""
    base = json.loads((ROOT / "ds_configs" / "demo.json").read_text())
    del base["$schema"]
    private = base["phases"][1]
    private.pop("evaluation")
    private |= {"data": data, "objective": "mae", "schedule": {"peak": 0.1}, "steps": 3}
    private["privacy"] = None if "batch" in phase else {"epsilon": 8.0, "expected_batch": 6}
    base["phases"] = [private | phase]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base))
    return load(path, [])


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """40 records in 4 shards."""
    write_shards(tmp_path / "shards", shape_samples(2, 40, 32), 10)
    build(tmp_path / "shards")
    return tmp_path / "shards"


@pytest.mark.parametrize(("private", "host", "refused"), [
    (True, "http://store.example", True), (True, "https://store.example", False),
    (True, "http://127.0.0.1:9", False), (False, "http://store.example", False),
])  # fmt: skip
def test_private_records_are_not_read_over_plain_http(
    tmp_path: Path, shards: Path, private: bool, host: str, refused: bool
) -> None:
    """Neither their bytes nor the draw may be seen on the way; what is public may be fetched as anybody likes."""
    with serving(RangeServer(shards)) as server:
        build(server.url + "/{000000..000003}.tar", tmp_path / "remote", workers=1)
    manifest = tmp_path / "remote" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(server.url, f"{host.replace('//', '//me:word@')}/shards"))
    config = _config(
        tmp_path, {"path": str(tmp_path / "remote"), "public": not private}, **({} if private else {"batch": 4})
    )
    if refused:
        with pytest.raises(RecipeError, match=r"read over plain http \(http://store.example\).*use https, or copy"):
            prepare(config)
    else:
        assert hosts_of(prepare(config)[0].index) == [host], "without the word that opens it"


def _on_nodes(tmp_path: Path, shards: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> list[ReadyPhase]:
    """The phase as each node opens it."""
    config = _config(tmp_path, {"path": str(shards), "reading": {"node_shards": f"{tmp_path}/$HERE"}})
    phases = []
    for node, part in enumerate(nodes):
        (tmp_path / f"node{node}").mkdir()
        for shard in part:
            os.link(shards / f"{shard:06d}.tar", tmp_path / f"node{node}" / f"{shard:06d}.tar")
        monkeypatch.setenv("HERE", f"node{node}")
        phases += prepare(config)
    return phases


def test_ranks_find_out_who_holds_what(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: Nodes = [[0, 2], [1, 2, 3], [0, 2]]
    phases = _on_nodes(tmp_path, shards, nodes, monkeypatch)
    for shard in shards.glob("*.tar"):
        shard.unlink()

    def act(ranks: Any) -> np.ndarray:
        (phase,) = agree([phases[ranks.rank]], ranks)
        plan = rank_plan(phase, ranks, 4)
        assert plan is not None
        return plan(np.arange(40))

    rows = on_ranks(3, act)
    assert len({row.shape for row in rows}) == 1
    assert sorted(np.concatenate([row[row >= 0] for row in rows]).tolist()) == list(range(40))
    for node, row in zip(nodes, rows, strict=True):
        assert set((row[row >= 0] // 10).tolist()) <= set(node)


def test_a_shard_that_lies_nowhere_is_refused_on_every_rank(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = _on_nodes(tmp_path, shards, [[0, 1], [2]], monkeypatch)

    def act(ranks: Any) -> str:
        with pytest.raises(RecipeError) as caught:
            agree([phases[ranks.rank]], ranks)
        assert getattr(caught.value, "everywhere", False), "one rank speaks for all"
        return str(caught.value)

    first, second = on_ranks(2, act)
    assert first == second and first.startswith("phases.0.data.reading.node_shards: 000003.tar lies on no node")


def test_ranks_with_other_lists_of_shards_do_not_start(tmp_path: Path, shards: Path) -> None:
    """Equal numbers of records, equal draws: but record 7 would be another one on the other machine."""
    one = prepare(_config(tmp_path, {"path": str(shards)}))
    build([shards / f"{shard:06d}.tar" for shard in (1, 0, 2, 3)], tmp_path / "elsewhere")
    other = prepare(_config(tmp_path, {"path": str(tmp_path / "elsewhere")}))
    assert one[0].index.records == other[0].index.records
    with pytest.raises(Disagreement, match="the index of phase 'private'"):
        on_ranks(2, lambda ranks: agree(one if ranks.main else other, ranks))
    assert on_ranks(2, lambda ranks: rank_plan(agree(one, ranks)[0], ranks, 4)) == [None, None]


def test_ranks_whose_pictures_would_differ_do_not_start(tmp_path: Path, shards: Path) -> None:
    """A step that other ranks make again must have the same pixels."""
    phases, asked = prepare(_config(tmp_path, {"path": str(shards)})), dict[str, str]()

    def act(ranks: Any) -> None:
        ranks.require_same = asked.__setitem__
        agree(phases, ranks)

    on_ranks(1, act)
    assert DECODER in asked.values()


def test_a_stream_is_dealt_out_to_ranks(tmp_path: Path, shards: Path) -> None:
    data = {"source": "webdataset", "path": str(shards / "{000000..000003}.tar"), "lanes": 3, "label": None}
    phases = prepare(_config(tmp_path, data, batch=7))
    assert phases[0].data_spec(augment=True).augment == "none"

    def act(ranks: Any) -> np.ndarray:
        (phase,) = agree(phases, ranks)
        phase = with_stream_order(phase, b"key")
        assert isinstance(phase.index, Stream)
        plan, epochs = rank_plan(phase, ranks, 2), public_epochs(phase, 7, b"key")
        assert plan is not None and epochs.batch == 7
        return plan(epochs.ids(4))

    rows = on_ranks(2, act)
    assert [set((row[row >= 0] // PLACES).tolist()) for row in rows] == [{0, 1}, {2}]
    assert len({row.shape for row in rows}) == 1 and sum(int((row >= 0).sum()) for row in rows) == 7
    with pytest.raises(RecipeError, match=r"phases\.0\.data\.lanes: 3 lanes cannot feed 4 ranks"):
        on_ranks(4, lambda ranks: agree(phases, ranks))


def test_a_stream_behind_a_url_keeps_it(tmp_path: Path) -> None:
    config = _config(tmp_path, {"source": "webdataset", "path": "https://host/{0..9}.tar"}, batch=4)
    assert config.phases[0].data.path == "https://host/{0..9}.tar"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("each", [True, False])
def test_one_rank_that_cannot_read_stops_both(tmp_path: Path, each: bool) -> None:
    """Each rank has as many micro-batches; the one that fails looks like the others until all of them stop."""
    whole = MicroBatch({}, torch.ones(1, dtype=torch.bool))

    def act(ranks: Any) -> tuple[int, str]:
        stop = StopRequest(tmp_path / "stop")

        def micro_batches(_ids: np.ndarray, _step: int) -> Iterator[MicroBatch]:
            for number in range(5):
                if number == 3 and not ranks.main:
                    raise UnreadableError("http://host/1.tar: cannot be read (500)")
                yield whole

        done = 0
        with pytest.raises(Stopped) as stopped:
            for batch in stop.until_asked(until_unreadable(micro_batches, stop)(np.arange(3), 1), ranks, each):
                assert batch is whole
                done += 1
        return done, str(stopped.value)

    said = "records that cannot be read: http://host/1.tar: cannot be read (500)"
    assert on_ranks(2, act) == [(3 if each else 5, said), (3, said)]
