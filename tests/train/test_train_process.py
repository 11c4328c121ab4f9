"""What a process finds out about its machine: its GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from murmuration.train.distributed.process import DeviceError, device_number, refuse_idle_gpus


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
