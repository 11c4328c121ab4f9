"""The run directory's key: kills around the ledger's first line."""

from __future__ import annotations

from pathlib import Path

import pytest

from murmuration.accounting.keys import KeyFileError
from murmuration.train.storage.run_dir import RunDir


def test_a_kill_around_the_first_ledger_line_leaves_a_run_that_can_start(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    first = run_dir.run_key(fresh=True, debug_seed=None)
    assert not run_dir.key.exists()
    # Killed before the ledger's first line: nothing was drawn, so a new key takes its place.
    second = run_dir.run_key(fresh=True, debug_seed=None)
    assert first.secret != second.secret
    # Killed after it, before the key had its name: the ledger knows the key, and so does the next start.
    assert run_dir.run_key(fresh=False, debug_seed=None).secret == second.secret
    assert run_dir.key.exists() and not run_dir.new_key.exists()
    # A named key without a ledger means that the ledger was removed.
    with pytest.raises(KeyFileError, match="exists without a ledger"):
        run_dir.run_key(fresh=True, debug_seed=None)
