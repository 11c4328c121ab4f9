"""Scaled gradients through real launches: wherever the weights lie, and after a stop; what verify refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.accounting.certificate.attached import CertificateError
from murmuration.accounting.certificate.certificate import verify
from murmuration.accounting.ledger.history import History
from murmuration.accounting.scale_table import ScaleTable
from tests.end_to_end.test_e2e_exact_noise import LAYOUTS
from tests.support.launching import Launch, committed
from tests.support.runs import SMALL_STEPS, different, final_weights

Make = Callable[..., tuple[Launch, Path]]


def public_alone(config: dict[str, Any]) -> None:
    """The warm-up, as a run of its own."""
    del config["phases"][1]
    config["run"] |= {"engine": "local", "checkpoint_every": 100}
    del config["run"]["private_curves"], config["run"]["debug_seed"]


@pytest.fixture
def source(launch: Make) -> Path:
    job, run_dir = launch("source", public_alone, launcher="python")
    code, output = job.run()
    assert code == 0, output
    return run_dir


def scaling(source: Path, **more: Any) -> list[str]:
    settings = {"source": "checkpoint", "path": str(source), "public": True} | more
    return ["--set", f"phases.1.privacy.scaling={json.dumps(settings)}"]


def of_other_people(config: dict[str, Any]) -> None:
    """A private run on records that nobody else uses, with little noise on so few."""
    private, run = config["phases"][1], config["run"]
    held_out, theirs = Path(private.pop("evaluation")["path"]), Path(run["dir"]).parent / "theirs"
    if not theirs.exists():  # a copy: what is protected once cannot be what other tests evaluate on
        for source, target in ((held_out, theirs), (Path(f"{held_out}.index"), Path(f"{theirs}.index"))):
            if source.is_dir():
                shutil.copytree(source, target)
    private["data"]["path"] = str(theirs)
    del private["data"]["expected_records"]
    private["privacy"] |= {"noise_multiplier": 0.3, "epsilon": 1e3, "expected_batch": 32, "release": []}
    run["engine"] = "local"
    del run["private_curves"], run["debug_seed"]


@pytest.fixture
def alone(launch: Make, source: Path) -> Path:
    """By one process, in plain PyTorch."""
    job, run_dir = launch("alone", launcher="python", arguments=[*scaling(source), "--set", 'run.engine="local"'])
    code, output = job.run()
    assert code == 0, output
    return run_dir


@pytest.mark.parametrize("layout", ["ZeRO-1", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LAYOUTS)[1:])])
def test_two_processes_that_stop_and_go_on_release_what_one_does(
    launch: Make, source: Path, alone: Path, layout: str
) -> None:
    job, run_dir = launch("two", arguments=[*scaling(source), *LAYOUTS[layout]])
    job.stopped(run_dir, 5)
    code, output = job.run()
    assert code == 0, output

    (plan,) = History.read(run_dir / "ledger.jsonl")[0].plans.values()
    table = ScaleTable.read((run_dir / "scales-1.json").read_bytes())
    assert plan.scaling is not None and plan.scaling.scales == table.digest and table.span[0] < 0 < table.span[1]
    commits = committed(run_dir)
    assert len(commits) == SMALL_STEPS
    for facts in commits:
        assert facts["clipping"]["scales"] == facts["noise"]["scales"] == table.digest
        assert facts["clipping"]["sensitivity"] == pytest.approx(plan.clip_norm, rel=1e-12)
        assert facts["noise"]["std"] == plan.noise_std
    found, expected = final_weights(run_dir), final_weights(alone)
    # The same noise to the last bit; sums of two processes round otherwise than those of one.
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)

    told = json.loads((run_dir / "certificate.json").read_text())
    assert "scaled gradients" in told["mechanism"]
    assert told["phases"][1]["scaled_space"]["sensitivity"] == plan.clip_norm
    assert any("second moments scaled gradients" in text for text in told["known_deviations"])
    verdict = verify(run_dir)
    assert verdict.epsilon == verify(alone).epsilon <= 8.0
    assert verdict.attached is not None and any("scales-1.json" in text for text in verdict.attached.checked)
    name, (rows, columns) = next(iter(table.weights.items()))
    other = ScaleTable(dict(table.weights) | {name: ((rows[0] + 1, *rows[1:]), columns)})
    (run_dir / "scales-1.json").write_text(other.text())
    with pytest.raises(CertificateError, match="other scales"):
        verify(run_dir)


def test_a_run_that_is_killed_and_goes_on_has_every_bit_of_one_that_is_not(
    launch: Make, source: Path, alone: Path
) -> None:
    job, run_dir = launch("killed", launcher="python", arguments=[*scaling(source), "--set", 'run.engine="local"'])
    job.killed(run_dir, 5)
    code, output = job.run()
    assert code == 0, output
    assert different(final_weights(run_dir), final_weights(alone)) == []
    history, _ = History.read(run_dir / "ledger.jsonl")
    assert history.opened == History.read(alone / "ledger.jsonl")[0].opened and len(history.segments) == 1


@pytest.mark.slow
def test_other_scales_are_another_plan(launch: Make, source: Path) -> None:
    job, run_dir = launch("first", launcher="python", arguments=[*scaling(source), "--set", 'run.engine="local"'])
    job.killed(run_dir, 5)
    job.arguments = [*scaling(source, floor=0.1), "--set", 'run.engine="local"']
    code, output = job.run()
    assert code == 5 and "scaling changed" in output, output


@pytest.mark.slow
def test_scales_that_a_private_run_released_bring_its_promise_along(launch: Make) -> None:
    first, source = launch("of others", of_other_people, launcher="python")
    code, output = first.run()
    assert code == 0, output
    there, _ = History.read(source / "ledger.jsonl")

    def without_their_records(config: dict[str, Any]) -> None:
        of_other_people(config)
        config["phases"][1]["data"]["path"] = own

    (own,) = {phase["data"]["path"] for phase in json.loads(launch("plain")[0].config.read_text())["phases"][1:]}
    released = json.dumps({"source": "released", "path": str(source), "decay": 0.95})
    arguments = ["--set", f"phases.1.privacy.scaling={released}"]
    job, run_dir = launch("scaled", without_their_records, launcher="python", arguments=arguments)
    job.killed(run_dir, 5)
    code, output = job.run()
    assert code == 0, output
    history, _ = History.read(run_dir / "ledger.jsonl")
    (plan,), (origin,) = history.plans.values(), history.origins
    assert plan.scaling is not None and origin.used == "scales" and len(history.segments) == 1
    assert (origin.epsilon, set(origin.protected)) == (there.budget(), there.protected())
    assert history.protected() > there.protected()
    assert there.without_noise() and there.without_noise() <= history.without_noise()
    told = json.loads((run_dir / "certificate.json").read_text())["known_deviations"]
    assert any("a private run had released" in text for text in told)
    assert any("scaled by what was released by run" in text and "sum of both" in text for text in told)
    assert not any("by the word of the run's owner" in text and "second moments" in text for text in told)
    assert verify(run_dir).objection is None

    same, _ = launch("same", of_other_people, launcher="python", arguments=arguments)
    code, output = same.run()
    assert code == 2 and "would have to be added to this run's" in output, output
    public, _ = launch("public", without_their_records, launcher="python", arguments=scaling(source))
    code, output = public.run()
    assert code == 2 and "or source = released" in output, output
