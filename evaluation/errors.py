"""The error of every evaluation."""

from __future__ import annotations

from murmuration.accounting.errors import RunError


class EvaluationError(RunError, ValueError):
    """Nothing was evaluated; the message names the cause and the fix."""
