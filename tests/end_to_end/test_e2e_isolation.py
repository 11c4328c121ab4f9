"""A record never meets another where frameworks' hooks gather the weights: ZeRO-3 and FSDP2, at 2 processes."""

from __future__ import annotations

import pytest

from tests.support import zoo
from tests.support.launching import run_worker
from tests.train.test_train_isolation import REFUSED

WHERE_SHARDED = {
    "3 penalty on the input": "transform of the model's own", "3 vmap within": "transform of the model's own",
    "3 sync batch norm": "statistics of all ranks", "fsdp2 sync batch norm": "statistics of all ranks",
}  # fmt: skip
"""What is refused in other words than in one process, or there not at all."""


# Shared and tied weights, positions, transforms and checkpoints: where the hooks of sharding meet isolation.
WHERE_HOOKS_MEET = [
    "tied", "penalty on the input", "vmap within", "positions", "class token", "weight norm", "checkpointed", "lstm",
    "cnn", "vit", "clip", "gemma2", "gpt2", "bert, padding 0", "t5",
]  # fmt: skip
OTHERS = [name for name in zoo.ordinary() if name not in WHERE_HOOKS_MEET]


@pytest.mark.parametrize("names", [[*zoo.hostile(), *WHERE_HOOKS_MEET], pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_a_module_is_refused_or_clipped_record_by_record(names: list[str]) -> None:
    for key, result in run_worker("isolation_worker.py", *names).items():
        layout, name = key.split(" ", 1)
        if (why := WHERE_SHARDED.get(key, REFUSED.get(name))) is not None:
            assert f"{result}".startswith("refused: ") and why in result, (layout, name, result)
        else:
            assert isinstance(result, float) and result <= 1e-4, (layout, name, result)
