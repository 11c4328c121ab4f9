"""Ranks that are processes share their draws over connections beside those of training."""

from __future__ import annotations

from tests.support.launching import run_worker


def test_draws_are_shared_beside_the_collectives_of_training() -> None:
    found = run_worker("shared_draw_worker.py", ranks=3)
    assert found["world"] == 3
    assert len(found["same"]) == 30 and all(found["same"])
    assert found["sums"] == [6.0] * 30, "nothing of one exchange came into another"
