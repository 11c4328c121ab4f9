"""Pictures made by rule as shards: the same however they are made, going on after a kill."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.synthetic.textures import textures
from murmuration.data.synthetic.write import Request, make
from murmuration.launch import prepare

ROOT = Path(__file__).resolve().parents[2]


def _silent(done: int, total: int) -> None:
    pass


def test_shards_are_the_same_however_they_are_made(tmp_path: Path) -> None:
    request = Request("mixed", 10, 16, per_shard=4)
    one = make(request, tmp_path / "one", 1, _silent)
    two = make(request, tmp_path / "two", 2, _silent)
    assert one.manifest_digest == two.manifest_digest and one.records == 10
    assert [shard.records for shard in one.shards] == [4, 4, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}, "nothing half-made is left"
    picture = np.asarray(Image.open(io.BytesIO(ShardReader(one).read(9)["jpg"]))).astype(int)
    assert np.abs(picture - textures("mixed", 1, [9], 16)[0].numpy()).mean() < 8
    assert make(request, tmp_path / "one", 1, _silent).manifest_digest == one.manifest_digest
    with pytest.raises(ValueError, match="contains other data"):
        make(Request("mixed", 11, 16, per_shard=4), tmp_path / "one", 1, _silent)
    captioned = ShardReader(make(Request("shapes", 3, 16), tmp_path / "three", 1, _silent))
    assert captioned.read(0)["txt"].startswith(b"a ") or captioned.read(0)["txt"].startswith(b"there ")


def test_making_shards_goes_on_after_a_kill(tmp_path: Path) -> None:
    whole = make(Request("spectrum", 480, 48, per_shard=8), tmp_path / "whole", 1, _silent)
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), "synthetic", "--kind", "spectrum",
               "--records", "480", "--size", "48", "--per-shard", "8", "--workers", "1",
               "--out", str(tmp_path / "out")]  # fmt: skip
    partial = tmp_path / ".out.partial"
    for _ in range(10):  # a job that is over before it is killed is begun anew
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while not (partial / "000002.tar").exists() and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        if process.wait() and not (tmp_path / "out").exists():
            break
    assert not (tmp_path / "out").exists(), "it never was killed in the middle"
    stamps = {path.name: path.stat().st_mtime_ns for path in partial.glob("0*.tar")}
    assert 3 <= len(stamps) < 60
    first: list[int] = []
    made = make(Request("spectrum", 480, 48, per_shard=8), tmp_path / "out", 1, lambda done, total: first.append(done))
    assert first[0] == len(stamps) and made.manifest_digest == whole.manifest_digest
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())
    assert ShardIndex.open(tmp_path / "out").records == 480


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--records", "0"], "at least 1"),
        (["--records", "5", "--size", "4"], "8 to 1024"),
        pytest.param(
            ["--records", "5", "--device", "cuda"],
            "omit --device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_made_is_said(tmp_path: Path, options: list[str], message: str, capsys) -> None:
    assert prepare.main(["synthetic", "--out", str(tmp_path / "x"), *options]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
