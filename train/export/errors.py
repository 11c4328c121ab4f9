"""What an export refuses."""

from __future__ import annotations

from murmuration.accounting.errors import RunError


class ExportError(RunError, ValueError):
    """Nothing was exported; the message says why."""
