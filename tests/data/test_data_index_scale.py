"""Ten million records in 200,000 shards: opened, drawn from and planned for 16 ranks in less than 2 GB."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from murmuration.data.index import shard_index
from murmuration.data.index.build import write_offsets
from murmuration.data.index.format import SHARDS, write_manifest
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import Shard, ShardError

ROOT = Path(__file__).resolve().parents[2]
_COUNT, _PER_SHARD = 200_000, 50

_USE = """
import json, sys
from murmuration.data.index.shard_index import ShardIndex
index = ShardIndex.open(sys.argv[1])
digest = index.manifest_digest
from murmuration.data.draw.micro_batch import slots
from murmuration.data.draw.poisson import PoissonSampler
draw = PoissonSampler(bytes(32), bytes(32), index.records, 2**32 // 100).draw(7)
rows = [slots(draw.ids, rank, 16, 64) for rank in range(16)]
located = [index.locate(int(record)) for record in draw.ids[::10]]
print(json.dumps({
    "records": index.records, "digest": digest, "drawn": len(draw.ids), "shapes": [list(row.shape) for row in rows],
    "planned": sorted(int(i) for row in rows for i in row.ravel() if i >= 0) == draw.ids.tolist(),
    "located": [(place.name, start, end) for place, start, end in located[:1000]],
    "ids": draw.ids[::10][:1000].tolist(),
    # Not ru_maxrss, in which the memory of the process that started this one lives on.
    "mebibytes": int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024,
}))
"""


def _starts(shard: int) -> np.ndarray:
    return np.arange(_PER_SHARD + 1, dtype="<u8") * 1024 + 512 * shard


def written(target: Path, count: int) -> Path:
    """As `build` writes it; the shards themselves are not needed to open, draw and plan."""
    target.mkdir()
    shards = [
        Shard(f"{i:06d}.tar", _PER_SHARD, 1 << 20, f"{i:064x}", hashlib.sha256(_starts(i).tobytes()).hexdigest())
        for i in range(count)
    ]
    write_offsets(target, shards, (_starts(i) for i in range(count)), 0o600)
    write_manifest(target, SHARDS, target.parent, shards, {}, 0o600)
    return target


def test_ten_million_records_are_opened_drawn_from_and_planned_in_two_gigabytes(tmp_path: Path) -> None:
    huge = written(tmp_path / "index", _COUNT)
    done = subprocess.run([sys.executable, "-c", _USE, str(huge)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["records"] == _COUNT * _PER_SHARD == 10_000_000
    assert found["mebibytes"] < 2_000
    assert abs(found["drawn"] - 100_000) < 6 * 315 and found["planned"]
    assert len({tuple(shape) for shape in found["shapes"]}) == 1, "every rank has as many micro-batches"
    for record, (name, start, end) in zip(found["ids"], found["located"], strict=True):
        shard, at = divmod(record, _PER_SHARD)
        assert (name, start, end) == (f"{shard:06d}.tar", 1024 * at + 512 * shard, 1024 * (at + 1) + 512 * shard)
    # 8 bytes per record and shard, and a header.
    assert (huge / "offsets.npy").stat().st_size == 8 * (10_000_000 + _COUNT) + 128


def test_offsets_are_checked_where_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening does not read 17 GB; a damaged part is still never believed."""
    index = written(tmp_path / "index", 1500)
    at = 128 + 8 * (_PER_SHARD + 1) * 1000 + 8 * 20
    path, whole = index / "offsets.npy", (index / "offsets.npy").read_bytes()
    path.write_bytes(whole[:at] + b"\0" * 8 + whole[at + 8 :])
    with pytest.raises(ShardError, match="belong together"):
        ShardIndex.open(index)
    monkeypatch.setattr(shard_index, "_CHECK_AT_ONCE", 1 << 10)
    opened = ShardIndex.open(index)
    assert opened.locate(999 * _PER_SHARD)[1] == 512 * 999
    with pytest.raises(ShardError, match="belong together"):
        opened.locate(1000 * _PER_SHARD)
    assert ShardIndex.open(index, verify=False).locate(1000 * _PER_SHARD)[1] == 512 * 1000
    path.write_bytes(whole)
    assert ShardIndex.open(index).locate(1000 * _PER_SHARD + 20)[1] == 512 * 1000 + 20 * 1024


_UNITS = """
import json, sys, time
from pathlib import Path
import numpy as np
from murmuration.data.index.units import read_units, write_units
folder, records = Path(sys.argv[1]), int(sys.argv[2])
units = records // 3
def column():
    # Record r is of unit r mod units, whose hash is some 16 bytes that no other unit has.
    for first in range(0, records, 1 << 20):
        unit = np.arange(first, min(first + (1 << 20), records), dtype=np.uint64) % np.uint64(units)
        both = np.stack([unit * np.uint64(0x9E3779B97F4A7C15), ~unit], axis=1)
        yield both.view(np.uint8).reshape(-1, 16)
write_units(folder, "manifest", "patient_id", "refuse", column(), records)
made = time.process_time()
table = read_units(folder, "manifest", records)
opened = time.process_time()
seen = np.random.default_rng(0).integers(0, units, 1000).tolist()
right = all(table.records_of(u).tolist() == list(range(u, records, units)) for u in seen)
right = right and all(table.unit_of(u + units) == u for u in seen)
print(json.dumps({
    "units": table.count, "right": right, "made": made, "opened": opened - made,
    "chosen": len(table.chosen(seen[0], b"k", 1, 2)),
    "mebibytes": int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("records", [10_000_000])
def test_units_of_ten_million_records_take_a_hundred_bytes_of_memory_each(tmp_path: Path, records: int) -> None:
    command = [sys.executable, "-c", _UNITS, str(tmp_path), str(records)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["units"] == records // 3 and found["right"] and found["chosen"] == 2
    assert found["mebibytes"] < 200 + 100 * records / 2**20
