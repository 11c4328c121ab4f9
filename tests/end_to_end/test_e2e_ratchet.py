"""Real runs of two processes under DeepSpeed forget their keys, and continue with the draws that were due."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from murmuration.accounting.keys import Link, load
from murmuration.accounting.ledger.history import History
from murmuration.data.draw.samplers import make_sampler
from tests.support.launching import Launch
from tests.support.runs import TOY_STEPS, account, toy
from tests.support.whole_history import steps_of

Make = Callable[..., tuple[Launch, Path]]


def without_a_seed(config: dict[str, Any]) -> None:
    toy(config)
    config["run"]["debug_seed"] = None


def link_of(run_dir: Path) -> Link:
    chain = load(run_dir / "secret" / "run.key").chain
    assert chain is not None
    return chain


def test_a_killed_run_goes_on_along_its_chain_on_other_ranks_and_saved_at_other_steps(launch: Make) -> None:
    job, run_dir = launch("forgets", without_a_seed)
    ended = job.end(kill={"rank": 0, "kind": "write", "at": 36, "before": True})
    assert ended.codes[0] == -9, ended.output
    before, _ = History.read(run_dir / "ledger.jsonl")
    saved, link = before.checkpoints[-1].step, link_of(run_dir)
    assert 2 <= saved < TOY_STEPS and 1 < link.step <= saved + 1, "forgotten, and never ahead of a checkpoint"
    assert link.segment == before.segments[-1].chain_name

    ended = job.end(ranks=1, arguments=["--set", "run.checkpoint_every=3"])
    assert ended.codes == [0], ended.output
    after, _ = History.read(run_dir / "ledger.jsonl")
    opened = steps_of(run_dir).opened
    assert len(after.segments) == 1 and [at.step for at in opened] == list(range(1, TOY_STEPS + 1))
    plan = after.plans[after.segments[0].phase]
    for at, facts in opened.items():
        if at.step >= link.step:
            keys = link.at(at.step).key("sampling"), link.at(at.step).key("sampling-digest")
            assert make_sampler(plan.sampling, *keys, plan.records).draw(at.step).digest == facts.sampling.digest

    assert link_of(run_dir) == link.at(TOY_STEPS + 1), "it is kept on request, and gives no step that was made"
    past = [link.at(step).state for step in range(link.step, TOY_STEPS + 1)]
    for path in (path for path in run_dir.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert not [state for state in past if state in content or state.hex().encode() in content], path
    assert "keys of private steps are forgotten" in (run_dir / "certificate.md").read_text()
    assert account("verify", str(run_dir)).returncode == 0
