"""What a whole run leaves says nothing to somebody who has all private records and can hash them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.ledger.history import History
from murmuration.data.index.keyed_digest import ledger_digests
from murmuration.data.index.shard_index import ShardIndex
from murmuration.train.config.load import load
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.ready_phase import prepare


def test_no_file_of_a_run_holds_a_hash_that_the_records_alone_give(
    finished: tuple[Path, str], small_data: Path
) -> None:
    run_dir, output = finished
    private = ShardIndex.open(small_data / "private")
    own, _ = ledger_digests(private, public=False)
    history, _ = History.read(run_dir / "ledger.jsonl")
    config = load(run_dir.parents[1] / "whole.json", [])
    ready = prepare(config)[1]
    bare = ready.contents() | {"data": private.manifest_digest}
    guesses = {private.manifest_digest, config.digest(1, bare)}
    guesses |= {shard.sha256 for shard in private.shards} | {shard.offsets_sha256 for shard in private.shards}
    contents = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for guess in guesses:
        assert guess not in output and not [path for path, found in contents.items() if guess.encode() in found]
    assert {segment.manifest_digest for segment in history.segments} == {own}
    assert {segment.config_digest for segment in history.segments} == {config.digest(1, ready.contents())}
    certificate = json.loads((run_dir / "certificate.json").read_text())
    assert certificate["hashes"]["data_manifests"]["private"] == own
    assert history.run["record_digests"] == "hmac-sha256"
    assert verify(run_dir).certified is not None


def test_weights_of_a_run_are_recognised_on_the_records_that_it_protected(
    finished: tuple[Path, str], small_config: dict[str, Any], tmp_path: Path
) -> None:
    config = json.loads(json.dumps(small_config))
    start = {"name": "start", "data": {"source": "checkpoint", "path": str(finished[0]), "public": False}}
    config["phases"] = [start, config["phases"][1]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="was trained on the private records of phase 'private'"):
        prepare(load(tmp_path / "config.json", []))
