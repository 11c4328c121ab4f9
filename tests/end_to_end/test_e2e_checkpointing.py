"""`run.gradient_checkpointing` in whole runs of two processes: blocks run again where weights are sharded, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.accounting.certificate.verify import verify
from tests.support.launching import Launch
from tests.support.runs import ZERO_3, final_weights

Make = Callable[..., tuple[Launch, Path]]


@pytest.mark.parametrize(
    ("engine", "stage"),
    [("deepspeed", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("deepspeed", 1), ("fsdp2", 0)))],
)
def test_a_run_that_computes_again_trains_the_same_weights(
    launch: Make, finished: tuple[Path, str], engine: str, stage: int
) -> None:
    def checkpointed(config: dict[str, Any]) -> None:
        config["run"] |= {"gradient_checkpointing": True, "engine": engine}
        config["zero_optimization"] = {"stage": stage}

    sharded = [word for setting in ZERO_3 if stage == 3 for word in ("--set", setting)]
    job, run_dir = launch("again", checkpointed, arguments=sharded)
    code, output = job.run()
    assert code == 0, output
    whole, _ = finished
    found, expected = final_weights(run_dir), final_weights(whole)
    # Sharded weights are summed over the ranks in another order.
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)
    assert verify(run_dir).epsilon == verify(whole).epsilon
