"""DeepSpeed's own checkpoints are read, and its own tools read what is exported to its layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import run_worker


@pytest.mark.parametrize("world", [1, 2])
def test_deepspeed_and_we_read_each_others_checkpoints(tmp_path: Path, world: int) -> None:
    found = run_worker("layout_worker.py", str(tmp_path), ranks=world)
    assert len(found) == 5
    assert [name for name, right in found.items() if not right] == []
