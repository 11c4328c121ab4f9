"""How many cores a rank may fill: by real masks and quotas, whatever the launcher's variables say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import murmuration.train.distributed.cores as cores
from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip.rule import ClipRule
from murmuration.train.distributed.cores import Allowance, Group, cpu_quotas, share
from murmuration.train.distributed.process import DeviceError, device_number, refuse_idle_gpus
from murmuration.train.planner.micro_batch import main_memory
from murmuration.train.self_test import self_test as module
from murmuration.train.self_test.probes import RoomError, SyntheticRecords, require_room
from tests.support import forking
from tests.support.launching import ROOT
from tests.support.self_test_world import caption_model
from tests.support.train_helpers import SHAPE, LocalEngine, alone, on_ranks, plan_for, private_engine

# One rank: binds itself as srun would bind it, finds the others, and says what it takes.
RANK = """
import os, sys
import torch, torch.distributed as dist
from murmuration.train.distributed.cores import own_cores
from murmuration.train.planner.micro_batch import main_memory
from murmuration.train.distributed.ranks import Ranks
rank, mask, store = int(sys.argv[1]), {int(core) for core in sys.argv[2].split(",")}, sys.argv[3]
os.sched_setaffinity(0, mask)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=int(sys.argv[4]))
print(own_cores(Ranks(rank, int(sys.argv[4]), torch.device("cpu"))))
"""


def started(store: Path, *masks: set[int]) -> list[int]:
    """What ranks with these masks take, each in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LOCAL_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    running = [
        forking.start(
            [sys.executable, "-c", RANK, str(rank), ",".join(map(str, mask)), str(store), str(len(masks))],
            stdout=subprocess.PIPE, env=environment, text=True, cwd=ROOT,
        )
        for rank, mask in enumerate(masks)
    ]  # fmt: skip
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_real_ranks_with_real_masks(tmp_path: Path) -> None:
    limit = min(cpu_quotas().values(), default=Fraction(2))
    if limit < 2:
        pytest.skip("this container may use less than two cores")
    one, other, *_ = sorted(os.sched_getaffinity(0))
    assert started(tmp_path / "alone", {one, other}) == [2]
    assert started(tmp_path / "everywhere", {one, other}, {one, other}) == [1, 1]
    assert started(tmp_path / "bound", {one}, {other}) == [1, 1]


def shares(*everyone: Allowance) -> list[int]:
    return [share(own, everyone) for own in everyone]


def on(*cores: int, machine: str = "one", quotas: dict[Group, Fraction] | None = None) -> Allowance:
    return Allowance(machine, frozenset(cores), quotas or {})


def test_ranks_that_may_run_everywhere_share_and_bound_ones_keep_what_they_have() -> None:
    assert shares(*[on(*range(128))] * 8) == [16] * 8, "as deepspeed starts them"
    assert shares(*[on(*range(16 * rank, 16 * rank + 16)) for rank in range(8)]) == [16] * 8, "as srun binds them"
    assert shares(on(*range(8)), on(*range(4))) == [6, 2], "four of the cores belong to both"
    assert shares(on(0)) == [1] and shares(*[on(0, 1)] * 4) == [1] * 4, "never none"


def test_a_quota_is_shared_by_those_in_its_group_alone() -> None:
    pod, inner, other = (1, 7), (1, 8), (1, 9)
    assert shares(on(*range(128), quotas={pod: Fraction(4)})) == [4]
    assert shares(*[on(*range(128), quotas={pod: Fraction(9)})] * 2) == [4, 4], "half a core is none"
    assert shares(*[on(*range(8), quotas={each: Fraction(4)}) for each in (inner, other)]) == [4, 4]
    within = {pod: Fraction(6), inner: Fraction(5)}, {pod: Fraction(6), other: Fraction(2)}
    assert shares(*[on(*range(64), quotas=quotas) for quotas in within]) == [3, 2]
    assert shares(on(0, 1, quotas={pod: Fraction(64)})) == [2], "a quota gives no cores"


def test_equal_numbers_on_another_machine_are_other_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares(on(*range(8)), on(*range(8), machine="two", quotas={(1, 7): Fraction(3)})) == [8, 3]
    # Containers of one machine have other names, and share its cores.
    machine = cores.allowance().machine
    monkeypatch.setattr(cores.socket, "gethostname", lambda: "another name")
    assert cores.allowance().machine == machine


V1 = """31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
32 23 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
"""
V2 = "31 23 0:28 {shown} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def system(root: Path, groups: str, mounts: str, files: dict[str, str]) -> list[Fraction]:
    """Quotas found in a file system with these control groups."""
    for name, content in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return list(cpu_quotas(root).values())


def first_version(group: str, quota: str) -> dict[str, str]:
    folder = f"sys/fs/cgroup/cpu/{group}cpu.cfs_"
    return {f"{folder}quota_us": f"{quota}\n", f"{folder}period_us": "100000\n"}


def test_quotas_of_this_group_and_of_those_around_it(tmp_path: Path) -> None:
    job = {"sys/fs/cgroup/job/cpu.max": "800000 100000\n", "sys/fs/cgroup/job/step/cpu.max": "250000 100000\n"}
    assert system(tmp_path / "2", "0::/job/step\n", V2.format(shown="/"), job) == [Fraction(5, 2), 8]
    # A container sees its own group as the root, under whatever name the host knows it.
    own = {"sys/fs/cgroup/cpu.max": "400000 100000\n"}
    for groups, shown in (("0::/\n", "/"), ("0::/docker/a1\n", "/docker/a1"), ("0::/../b2\n", "/../b2")):
        assert system(tmp_path / shown.strip("/.") / "c", groups, V2.format(shown=shown), own) == [4]
    first = {
        f"sys/fs/cgroup/cpu/job/cpu.cfs_{name}_us": value for name, value in (("quota", "400000"), ("period", "100000"))
    }
    groups = "3:memory:/elsewhere\n2:cpu,cpuacct:/job\n0::/\n"
    assert system(tmp_path / "1", groups, V1, first) == [4]


def test_memory_is_limited_by_this_group_and_those_around_it(tmp_path: Path) -> None:
    """Where Slurm or systemd limits a job: no file at the top of the hierarchy says so."""
    job = {"sys/fs/cgroup/job/memory.max": "8000000\n", "sys/fs/cgroup/job/step/memory.max": "max\n"}
    system(tmp_path / "2", "0::/job/step\n", V2.format(shown="/"), job)
    machine, *limits = main_memory(tmp_path / "2")
    assert machine > 8e6 and limits == [8e6]
    first = {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "7000000\n"}
    system(tmp_path / "1", "3:memory:/job\n2:cpu,cpuacct:/elsewhere\n0::/\n", V1, first)
    assert main_memory(tmp_path / "1")[1:] == [7e6]
    assert len(main_memory(tmp_path / "nowhere")) == 1


def test_where_nothing_is_limited_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quotas(tmp_path) == {}, "no /proc"
    assert system(tmp_path / "max", "0::/\n", V2.format(shown="/"), {"sys/fs/cgroup/cpu.max": "max 100000\n"}) == []
    assert system(tmp_path / "root", "0::/\n", V2.format(shown="/"), {}) == []
    assert system(tmp_path / "1", "2:cpu,cpuacct:/\n", V1, first_version("", "-1")) == []


# What a process finds out about its machine: its GPU.


def test_a_process_that_sees_one_gpu_takes_it_and_one_without_is_refused() -> None:
    assert [device_number(rank, 8) for rank in (0, 7)] == [0, 7]
    assert device_number(5, 1) == 0, "srun --gpus-per-task=1"
    with pytest.raises(DeviceError, match=r"process 5 of its machine .* sees 4 GPUs"):
        device_number(5, 4)


def test_gpus_that_cannot_be_used_are_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    refuse_idle_gpus(tmp_path)  # no GPU at all
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    refuse_idle_gpus(tmp_path)
    (tmp_path / "dev" / "nvidia0").touch()
    with pytest.raises(DeviceError, match="driver: unknown"):
        refuse_idle_gpus(tmp_path)
    (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "proc" / "driver" / "nvidia" / "version").write_text("NVRM version: 535.54.03\nGCC version: 12\n")
    with pytest.raises(DeviceError, match=r"driver: NVRM version: 535\.54\.03\)"):
        refuse_idle_gpus(tmp_path)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        refuse_idle_gpus(tmp_path)


# A micro-batch that the device's memory does not hold is one sentence on every rank, with one that fits.


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
    from murmuration.train import core as private

    engine, clip, _ = private_engine(alone(), plan_for(), False, caption_model())
    core = private.PrivateCore(plan_for(), clip, engine, lambda purpose: b"k" * 32, alone())  # pyright: ignore[reportArgumentType]

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module._Test, "_records_are_bounded", full)
    with pytest.raises(RoomError, match="of 4 records does not fit into memory; use a smaller micro-batch"):
        core.prove(SyntheticRecords.of(SHAPE, "caption"), 0, 4)
