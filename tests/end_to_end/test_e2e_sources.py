"""Whole runs from each kind of source: shards spread over nodes, streams of webdataset, folders of images."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from murmuration.data.index.folders import build_folder
from murmuration.data.index.shard_index import build
from murmuration.data.synthetic.index import shape_samples, write_shards
from tests.support.launching import TIMEOUT, Launch, ledger_lines, wait_for
from tests.support.runs import SMALL_STEPS, final_weights
from tests.support.texture_samples import texture_samples

Make = Callable[..., tuple[Launch, Path]]
Change = Callable[[dict[str, Any]], None]


def _draws(run_dir: Path) -> list[dict[str, Any]]:
    return [line["facts"]["sampling"] for line in ledger_lines(run_dir) if line["kind"] == "commit"]


@pytest.mark.slow
def test_nodes_that_hold_their_own_shards_train_on_the_same_draws(launch: Make, tmp_path: Path) -> None:
    """Each rank plays a node: its folder holds some of the shards, one of them lies on both. The index alone is
    shared; where it was made there are no shards any more, so what is not read at home cannot be read at all."""
    private = tmp_path / "private"
    paths = write_shards(private, shape_samples(5, 600, 32), 120)
    build(private)

    def ordinary(config: dict[str, Any]) -> None:
        config["phases"][1]["data"]["path"] = str(private)

    whole, whole_dir = launch("whole", ordinary)
    code, output = whole.run()
    assert code == 0, output
    for node, part in enumerate(([0, 3, 4], [1, 2, 4])):
        (tmp_path / f"node{node}").mkdir()
        for shard in part:
            os.link(paths[shard], tmp_path / f"node{node}" / paths[shard].name)
    for path in paths:
        path.unlink()

    spread, spread_dir = launch("spread", ordinary)
    spread.arguments = ["--set", f"phases.1.data.reading.node_shards={tmp_path}/node$LOCAL_RANK"]
    code, output = spread.run()
    assert code == 0, output
    assert _draws(spread_dir) == _draws(whole_dir) and len(_draws(whole_dir)) == SMALL_STEPS, "same ids, same facts"
    claims = [json.loads((folder / "certificate.json").read_text())["claim"] for folder in (whole_dir, spread_dir)]
    assert claims[0] == claims[1]
    expected, found = final_weights(whole_dir), final_weights(spread_dir)
    for name in expected:  # the same records, summed in another order
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=2e-4)

    lost = next((tmp_path / "node1").glob("*1.tar"))
    lost.unlink()
    refused, refused_dir = launch("refused", ordinary)
    refused.arguments = spread.arguments
    code, output = refused.run()
    assert code == 2, output
    assert f"phases.1.data.reading.node_shards: {lost.name} lies on no node" in output, output
    assert not refused_dir.exists(), "refused before anything was written"


def _image_folder(folder: Path, counts: dict[str, int], seed: int) -> None:
    """As ImageNet is unpacked; the last image of the first class is none."""
    chance = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            out = io.BytesIO()
            Image.fromarray(chance.integers(0, 256, (9, 11, 3), dtype=np.uint8)).resize((50, 40)).save(out, "JPEG")
            (folder / name / f"{name}_{number}.JPEG").write_bytes(out.getvalue())
    first = next(iter(counts))
    (folder / first / f"{first}_{counts[first] - 1}.JPEG").write_bytes(b"<html>404</html>")
    build_folder(folder)


def _streamed_then_private_folder(tmp_path: Path) -> Change:
    write_shards(tmp_path / "textures", texture_samples(3, 160, 32), 23)  # seven shards, the last one smaller
    _image_folder(tmp_path / "train", {"n01440764": 150, "n01443537": 90, "n02085620": 160}, 1)
    _image_folder(tmp_path / "val", {"n01440764": 20, "n01443537": 20}, 2)

    def change(config: dict[str, Any]) -> None:
        warm, private = config["phases"]
        warm |= {"steps": 40, "batch": 32}
        warm["data"] = {
            "source": "webdataset", "path": str(tmp_path / "textures" / "{000000..000006}.tar"), "public": True,
            "lanes": 3, "buffer": 20, "augment": "random_resized_crop",
        }  # fmt: skip
        private["objective"] = "mae"
        private["data"] = {"path": str(tmp_path / "train"), "augment": "random_resized_crop", "expected_records": 400}
        private["privacy"]["release"] = []
        private["evaluation"] = {"path": str(tmp_path / "val"), "public": True, "records": 40}

    return change


@pytest.mark.slow
def test_a_streamed_phase_resumes_exactly_and_a_private_one_trains_on_an_image_folder(
    launch: Make, tmp_path: Path
) -> None:
    change = _streamed_then_private_folder(tmp_path)
    whole, whole_dir = launch("whole", change)
    code, output = whole.run()
    assert code == 0, output
    plan = next(line for line in ledger_lines(whole_dir) if line["kind"] == "plan")
    assert plan["plan"]["records"] == 400, "n counts the bad record, too"
    bad = [json.loads(line) for path in (whole_dir / "logs" / "private").glob("bad-records-*") for line in path.open()]
    place = sorted(f"{number}.JPEG" for number in range(150)).index("149.JPEG")
    assert {(each["phase"], each["record"]) for each in bad} == {("private", place)}, bad
    assert '"public_loss"' in (whole_dir / "logs" / "public.jsonl").read_text()

    broken, broken_dir = launch("broken", change)
    process = broken.start()
    wait_for(lambda: len(list((broken_dir / "checkpoints").glob("phase00-step*"))) > 1, process)
    (broken_dir / "stop").touch()
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75, output
    assert not list((broken_dir / "checkpoints").glob("phase01-*")), "it was over before it could be stopped"
    code, output = broken.run()
    assert code == 0, output
    expected, found = final_weights(whole_dir), final_weights(broken_dir)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
def test_a_stream_is_refused_for_private_records(launch: Make, small_data: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        data = config["phases"][1]["data"]
        data.pop("expected_records")
        data |= {"source": "webdataset", "lanes": 1}

    run, run_dir = launch("refused", change, launcher="python")
    code, output = run.run()
    assert code == 2 and "a stream is shuffled, and the accounting holds only for Poisson samples" in output, output
    assert not run_dir.exists()

    def copied(config: dict[str, Any]) -> None:
        private = small_data / "private"
        config["phases"][0]["data"] = {"source": "webdataset", "path": str(private), "lanes": 1, "public": True}

    run, run_dir = launch("copied", copied, launcher="python")
    code, output = run.run()
    assert code == 2 and "belongs to the private records of phase 'private'" in output, output
