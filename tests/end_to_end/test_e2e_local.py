"""`run.engine: "local"`: a run in one process, without launcher or DeepSpeed; test_e2e_resume.py goes on from one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.launching import Launch
from tests.support.runs import toy

Make = Callable[..., tuple[Launch, Path]]
LOCAL: dict[str, Any] = {"launcher": "python", "arguments": ["--set", 'run.engine="local"']}


def test_several_processes_of_it_are_refused_in_a_sentence(launch: Make) -> None:
    job, run_dir = launch("two", arguments=LOCAL["arguments"])
    code, output = job.run()
    assert code != 0 and 'run.engine = "local" is one process, but 2 were started' in output
    assert not (run_dir / "ledger.jsonl").exists()


def test_what_can_no_longer_be_private_is_said_before_the_first_step(launch: Make) -> None:
    """A run goes on with a phase of which nobody had thought, and turns out to be the best of several."""
    job, run_dir = launch("longer", lambda config: (toy(config), config["run"].pop("debug_seed"))[0], **LOCAL)
    job.stopped(run_dir, 1)

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
