"""Exit codes of every command, which scripts and schedulers act on, and the errors that carry them."""

from __future__ import annotations

from typing import ClassVar

DONE, BAD_INPUT, BUDGET_SPENT, SELF_TEST_FAILED, REFUSED, REFUTED, NOT_ALL_CHECKED, NOT_STRICT, RESUME_ME = (
    0, 2, 3, 4, 5, 6, 7, 8, 75,
)  # fmt: skip


class RunError(Exception):
    """Ends a command with one sentence, which names the cause and the fix, and with the code of its class.

    Errors without this base are mistakes in the program and keep their traceback.
    """

    exit_code: ClassVar[int] = BAD_INPUT


class InputError(RunError, ValueError):
    """What was asked for cannot be done; the message names the option and the fix."""


class AccountingError(RunError, ValueError):
    """No trustworthy epsilon can be given; the message says why."""


class PlanError(RunError, ValueError):
    """The numbers of a plan cannot give the promise; the message says which and what to change."""


# How the owner goes on where a run stops because something is not as it was.
NEW_SEGMENT = "--new-segment 'why' (new_segment='why' in a program)"

# Forms of files began anew at this version: what an earlier one wrote is refused in one sentence.
FIRST = "0.3.0"


def written_before(what: str, remedy: str) -> str:
    return f"{what} was written by a version before {FIRST}; {remedy}"
