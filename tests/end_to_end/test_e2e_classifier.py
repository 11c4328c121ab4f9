"""Fresh classifiers, whose heads are zero, through the real engines: the self-test passes at every stage."""

from __future__ import annotations

import pytest

from tests.support.launching import TIMEOUT, run_worker


@pytest.mark.slow
def test_the_self_test_passes_at_every_stage_whatever_is_trained() -> None:
    found = run_worker("classifier_worker.py", ranks=2, seconds=2 * TIMEOUT)
    assert len(found["results"]) == 5 * 6
    for result in found["results"]:
        assert not result["objection"], result
        assert result["sigma"] == pytest.approx(found["sigma"], rel=0.05) and result["hostile"] <= 1.0, result
