"""Real launches: small shards, a small config derived from the demo's, and commands as a user would type them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.end_to_end.warm import WarmLauncher

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TIMEOUT = 420


def environment() -> dict[str, str]:
    """What a user's shell would have with the environment activated: nothing else that helps the trainer."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "DS_ACCELERATOR")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    # Two versions of ninja would take turns in compiling DeepSpeed's operation anew.
    return kept | {"PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")])}


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Launch:
    """One training command, run in its own session so that the whole tree can be signalled."""

    config: Path
    cwd: Path
    ranks: int = 2
    launcher: str = "deepspeed"
    arguments: list[str] = field(default_factory=list)

    @classmethod
    def written(
        cls, config: dict[str, Any], folder: Path, name: str, change: Callable[[dict[str, Any]], None] | None = None,
        **options: Any,
    ) -> tuple[Launch, Path]:  # fmt: skip
        """Of a copy of the config, changed and written into the folder; with its run directory."""
        config = json.loads(json.dumps(config))
        run_dir = folder / f"{name}-run"
        config["run"]["dir"] = str(run_dir)
        if change is not None:
            change(config)
        (folder / f"{name}.json").write_text(json.dumps(config))
        return cls(folder / f"{name}.json", folder, **options), run_dir

    def command(self) -> list[str]:
        script = [str(ROOT / "launch" / "train.py"), "--config", str(self.config), *self.arguments]
        if self.launcher == "deepspeed":
            return [str(BIN / "deepspeed"), "--master_port", str(free_port()), "--num_gpus", str(self.ranks), *script]
        if self.launcher == "torchrun":
            head = ["--nproc_per_node", str(self.ranks), "--master_port", str(free_port())]
            return [str(BIN / "torchrun"), *head, *script]
        return [sys.executable, *script]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(), cwd=self.cwd, env=environment(), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self) -> tuple[int, str]:
        process = self.start()
        output, _ = process.communicate(timeout=TIMEOUT)
        return process.returncode, output


def run_worker(
    name: str,
    *arguments: str,
    ranks: int = 2,
    seconds: float = TIMEOUT,
    launcher: str = "deepspeed",
    preload: Path | None = None,
) -> Any:
    """Starts a worker script of this folder and gives what it printed behind RESULTS, as JSON."""
    script = [str(Path(__file__).with_name(name)), *arguments]
    count = {"deepspeed": "--num_gpus", "torchrun": "--nproc_per_node"}[launcher]
    command = [str(BIN / launcher), "--master_port", str(free_port()), count, str(ranks), *script]
    env = environment() | ({"LD_PRELOAD": str(preload)} if preload else {})
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS "))
    return json.loads(line.removeprefix("RESULTS "))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = TIMEOUT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"ended too early ({process.returncode}):\n{process.communicate()[0]}")
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"the awaited moment never came:\n{process.communicate()[0]}")
        time.sleep(0.02)


def ledger_lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "ledger.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def opened_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in ledger_lines(run_dir) if line["kind"] == "open"]


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small_data")
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), "demo", "--out", str(folder)]
    subprocess.run(
        [*command, "--private", "600", "--held-out", "64", "--textures", "200"],
        check=True, env=environment(), capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def small_config(small_data: Path) -> dict[str, Any]:
    """The demo's config at toy size; a debug seed makes runs comparable bit by bit (and NOT PRIVATE)."""
    config = json.loads((ROOT / "ds_configs" / "demo.json").read_text())
    del config["$schema"]
    config["train_micro_batch_size_per_gpu"] = 8
    config["model"] |= {
        "width": 32, "depth": 1, "heads": 2, "decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2,
        "mae_decoder_width": 16, "mae_decoder_heads": 2,
    }  # fmt: skip
    warm, private = config["phases"]
    warm |= {"batch": 32, "steps": 2}
    warm["data"]["path"] = str(small_data / "textures")
    private["data"] |= {"path": str(small_data / "private"), "tokenizer": str(small_data / "tokenizer.json")}
    private["data"] |= {"expected_records": 600, "augment": "random_resized_crop"}
    private["privacy"] |= {"expected_batch": 48, "noise_multiplier": 2.0, "epsilon": 8.0}
    private["privacy"]["release"] = [
        {"name": "loss", "bound": 8.0, "noise_multiplier": 6.0}, {"name": "clipped", "noise_multiplier": 6.0},
    ]  # fmt: skip
    private["evaluation"] |= {"path": str(small_data / "held_out"), "records": 32}
    private["steps"] = 12
    config["run"] |= {"checkpoint_every": 3, "debug_seed": 7}
    return config


@pytest.fixture
def launch(tmp_path: Path, small_config: dict[str, Any]) -> Callable[..., tuple[Launch, Path]]:
    """Writes a config and gives the launch and its run directory; `change` edits the config first."""

    def make(name: str, change: Callable[[dict[str, Any]], None] | None = None, **options: Any) -> tuple[Launch, Path]:
        return Launch.written(small_config, tmp_path, name, change, **options)

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, small_config: dict[str, Any]) -> tuple[Path, str]:
    """An uninterrupted run by `deepspeed`, from a folder that is not the repository's; and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "whole.json").write_text(json.dumps(small_config))
    code, output = Launch(folder / "whole.json", folder).run()
    assert code == 0, output
    return folder / "runs" / "whole", output


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmLauncher]:
    from tests.end_to_end.warm import WarmLauncher

    launcher = WarmLauncher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def whole(warm: WarmLauncher, small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy run, never interrupted."""
    from tests.end_to_end.runs import toy

    folder = tmp_path_factory.mktemp("whole")
    job, run_dir = Launch.written(small_config, folder, "whole", toy)
    ended = warm.run(job.config, folder)
    assert ended.codes == [0, 0], ended.output
    return run_dir
