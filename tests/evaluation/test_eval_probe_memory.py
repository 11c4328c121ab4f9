"""ViP's probe of many wide features: 100,000 × 9,216 numbers in a mapped file, within 2 GiB of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.launching import ROOT, environment

RECORDS, WIDTH, CLASSES = 100_000, 9_216, 10

PROBE = """
import resource, sys
# Everything that the process may write to; the mapped file, which it only reads, does not count.
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
import numpy as np
import torch
torch.set_num_threads(1)
from murmuration.evaluation.protocols.linear_probe import LarsSettings, fit_lars
from murmuration.train.measures.ranking import hits
from murmuration.evaluation.measures.rows import Rows
records, width, classes = map(int, sys.argv[2:])
features = np.memmap(sys.argv[1], np.float32, "r", shape=(records, width))
rows = Rows(features, np.arange(records) % classes, np.arange(records))
probe = fit_lars([rows], classes, torch.device("cpu"), LarsSettings(epochs=1, warmup=0), lambda done, total: None)
with torch.no_grad():
    first = next(rows.chunks())
    print(float(hits(probe.scores(first[0]), first[1], 1)[0]) / len(first[1]))
"""


@pytest.mark.slow
def test_a_hundred_thousand_wide_features_fit_into_two_gibibytes(tmp_path: Path) -> None:
    path = tmp_path / "features"
    # A sparse file: all but the first columns are zero and lie nowhere on the disk.
    features = np.memmap(path, np.float32, "w+", shape=(RECORDS, WIDTH))
    labels = np.arange(RECORDS) % CLASSES
    features[:, :CLASSES] = np.eye(CLASSES, dtype=np.float32)[labels]
    features.flush()
    del features
    command = [sys.executable, "-c", PROBE, str(path), *map(str, (RECORDS, WIDTH, CLASSES))]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    path.unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) > 0.9, "nothing was learnt"
