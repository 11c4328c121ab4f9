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


# Of modules that are refused in the same words one is enough.
FIRST_OF_A_REASON = {why: name for name, why in reversed(REFUSED.items())}.values()
# Shared and tied weights, positions, transforms and checkpoints: where the hooks of sharding meet isolation.
WHERE_HOOKS_MEET = [
    *FIRST_OF_A_REASON, *(key.partition(" ")[2] for key in WHERE_SHARDED), "tokens of the batch", "sorted by length",
    "negatives of the batch", "late mixup", "last labels", "a hook through PyTorch", "batch norm without statistics",
    "function with a rule",
    "tied", "positions", "class token", "weight norm", "checkpointed", "lstm", "t5",
]  # fmt: skip
OTHERS = [name for name in [*zoo.hostile(), *zoo.ordinary()] if name not in WHERE_HOOKS_MEET]


@pytest.mark.parametrize("names", [WHERE_HOOKS_MEET, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_a_module_is_refused_or_clipped_record_by_record(names: list[str]) -> None:
    for key, result in run_worker("isolation_worker.py", *names).items():
        layout, name = key.split(" ", 1)
        if (why := WHERE_SHARDED.get(key, REFUSED.get(name))) is not None:
            assert f"{result}".startswith("refused: ") and why in result, (layout, name, result)
        else:
            assert isinstance(result, float) and result <= 1e-4, (layout, name, result)
