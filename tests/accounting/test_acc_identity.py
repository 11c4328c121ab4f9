"""A copied run directory is recognised, and draws its noise with other keys than the original."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.copied_run import recognise
from tests.support.acc_world import CONFIG, DATA, begin, reopen, train


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


@pytest.mark.parametrize("since", ["a copy", "another segment", "another step"])
def test_an_unnamed_checkpoint_of_before_is_no_place_to_go_on_from(tmp_path: Path, since: str) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    written_at = journal.ledger.length
    journal.admit_checkpoint(0, 2, "unnamed", written_at)  # a kill came before its line
    if since == "a copy":
        journal.note_copied("another folder")
    elif since == "another step":
        train(journal, range(3, 4))
    else:
        journal.begin_segment(0, CONFIG, DATA, 0, "rolled back")
        train(journal, range(1, 3))
    with pytest.raises(LedgerError, match="does not know this checkpoint of step 2"):
        journal.admit_checkpoint(0, 2, "unnamed", written_at)


def test_two_copies_that_begin_the_same_segment_never_have_the_same_keys(tmp_path: Path) -> None:
    begin(tmp_path).ledger.close()
    shutil.copytree(tmp_path, tmp_path / "copy")
    ways = [reopen(folder).begin_segment(0, CONFIG, DATA, 0, "again") for folder in (tmp_path, tmp_path / "copy")]
    assert ways[0].number == ways[1].number and ways[0].key_name != ways[1].key_name
