"""What a process finds out about its machine: its GPU, and the cores that it may fill."""

from __future__ import annotations

from pathlib import Path

import pytest

import murmuration.train.distributed.process as process
from murmuration.train.distributed.process import DeviceError, device_number, own_cores, refuse_idle_gpus
from tests.support.train_helpers import on_ranks


def shares(masks: list[range]) -> list[int]:
    """Of ranks with these masks, what each takes."""
    return on_ranks(len(masks), lambda ranks: own_cores(ranks, masks[ranks.rank]))


def test_containers_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names differ. On another machine, equal numbers are other cores."""
    machine = process._machine()
    monkeypatch.setattr(process.socket, "gethostname", lambda: "another name")
    assert process._machine() == machine
    elsewhere = Told([(machine, frozenset(range(8))), ("another", frozenset(range(8)))])
    assert own_cores(elsewhere, range(8)) == 8  # pyright: ignore[reportArgumentType]


class Told:
    def __init__(self, found: list[tuple[str, frozenset[int]]]) -> None:
        self.found = found

    def gather(self, value: object) -> list[tuple[str, frozenset[int]]]:
        return self.found


def test_ranks_that_may_run_everywhere_share_and_bound_ones_keep_what_they_have() -> None:
    assert shares([range(96)] * 3) == [32, 32, 32], "as deepspeed starts them"
    assert shares([range(0, 12), range(12, 24)]) == [12, 12], "as srun binds them"
    assert shares([range(8), range(4)]) == [6, 2], "four of the cores belong to both"
    assert shares([range(2)] * 4) == [1] * 4, "never none"


def test_the_launcher_s_variables_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.setenv(name, "8")
    assert shares([range(12)]) == [12]


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
