"""Micro-batches reach a GPU by a stream of their own, one ahead, and are read only once they have arrived."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import pretended

WHY_NOT = pretended.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
SCRIPT = Path(pretended.__file__).with_name("transfer.py")


def test_no_byte_is_read_before_it_has_arrived_and_the_next_micro_batch_is_on_its_way() -> None:
    done = pretended.run(SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.split()
    assert len(told) == 9 and told[-1] == "none", "three steps of three micro-batches"
    # Of each step, the second is handed out when the third was read for certain.
    assert told[1::3] == ["ahead"] * 3, told


def test_a_step_that_does_not_wait_for_the_copy_is_caught() -> None:
    """The sanitizer that saw nothing above would see it."""
    done = pretended.run(SCRIPT, "races")
    assert done.returncode != 0 and "CUDASanitizerErrors" in done.stderr, done.stdout + done.stderr
