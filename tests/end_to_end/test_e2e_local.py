"""`run.engine: "local"`: a whole run in one process, without launcher or DeepSpeed; another engine can continue it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from murmuration.accounting.certificate.verify import verify
from tests.support.launching import TIMEOUT, Launch, opened_steps, wait_for
from tests.support.runs import SMALL_STEPS, final_weights

Make = Callable[..., tuple[Launch, Path]]
LOCAL: dict[str, Any] = {"launcher": "python", "arguments": ["--set", 'run.engine="local"']}


def test_a_run_of_one_process_is_continued_by_two_of_deepspeed(launch: Make, finished: tuple[Path, str]) -> None:
    whole_dir, _ = finished
    job, run_dir = launch("changing", **LOCAL)
    process = job.start(hold_after_opened=5)
    wait_for(lambda: len(opened_steps(run_dir)) >= 5, process)
    (run_dir / "stop").touch()
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75, output
    # By the real launcher: of the tests that are not slow, this one alone trains a run with it.
    code, output = Launch(job.config, job.cwd, launcher="deepspeed").run()
    assert code == 0, output

    assert verify(run_dir).committed == verify(whole_dir).committed == SMALL_STEPS
    assert verify(run_dir).epsilon == verify(whole_dir).epsilon
    found, expected = final_weights(run_dir), final_weights(whole_dir)
    # The same draws and the same noise; sums of two processes round otherwise than those of one.
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)


def test_several_processes_of_it_are_refused_in_a_sentence(launch: Make) -> None:
    job, run_dir = launch("two", arguments=LOCAL["arguments"])
    code, output = job.run()
    assert code != 0 and 'run.engine = "local" is one process, but 2 were started' in output
    assert not (run_dir / "ledger.jsonl").exists()


def test_what_can_no_longer_be_private_is_said_before_the_first_step(launch: Make) -> None:
    """A run goes on with a phase of which nobody had thought, and turns out to be the best of several."""
    job, run_dir = launch("longer", lambda config: config["run"].pop("debug_seed"), **LOCAL)
    process = job.start(hold_after_opened=1)
    wait_for(lambda: opened_steps(run_dir), process)
    (run_dir / "stop").touch()
    assert process.wait(TIMEOUT) == 75

    config = json.loads(job.config.read_text())
    config["phases"].append({**config["phases"][-1], "name": "afterthought", "steps": 3})
    job.config.write_text(json.dumps(config))
    tuning = '{"statement": "three learning rates", "mean": 3, "fixed": true}'
    job.arguments = [*LOCAL["arguments"], "--set", f"run.tuned_on_private_data={tuning}"]
    code, output = job.run()
    assert code == 0, output
    told = output.index("NOT PRIVATE: the run was chosen among several, and the plan of phase afterthought")
    assert told < output.index("afterthought  step")
    assert json.loads((run_dir / "certificate.json").read_text())["engine"] == "one process (PyTorch)"
