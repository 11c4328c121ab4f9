"""A copied run directory is recognised, and draws its noise with other keys than the original."""

from __future__ import annotations

import shutil
from pathlib import Path

from acc_world import CONFIG, DATA, begin, reopen, train

from accounting.identity import recognise


def test_a_copy_is_recognised_and_gets_new_keys(tmp_path: Path) -> None:
    original = tmp_path / "original"
    (original / "secret").mkdir(parents=True)
    journal = reopen(original)
    assert recognise(journal, original / "secret") is None
    journal.ledger.close()
    journal = begin(original)
    train(journal, range(1, 4))
    journal.checkpointed(0, 3, "a")
    journal.ledger.close()

    moved = original.rename(tmp_path / "moved")
    journal = reopen(moved)
    assert recognise(journal, moved / "secret") is None, "a renamed folder is no copy"
    assert journal.new_segment_reason(0, 3, CONFIG) is None
    journal.ledger.close()

    shutil.copytree(moved, tmp_path / "copy")
    journal = reopen(tmp_path / "copy")
    assert "copy" in (recognise(journal, tmp_path / "copy" / "secret") or "")
    assert "copied" in (journal.new_segment_reason(0, 3, CONFIG) or "")
    journal.ledger.close()
    journal = reopen(tmp_path / "copy")  # killed before the new segment: still noticed
    assert recognise(journal, tmp_path / "copy" / "secret") is None
    assert "copied" in (journal.new_segment_reason(0, 3, CONFIG) or "")
    journal.begin_segment(0, CONFIG, DATA, 3, "copied")
    assert journal.new_segment_reason(0, 3, CONFIG) is None
    for damage in (b"", b"{}"):
        (moved / "secret" / "identity.json").write_bytes(damage)
        again = reopen(moved)
        assert recognise(again, moved / "secret")
        again.ledger.close()
