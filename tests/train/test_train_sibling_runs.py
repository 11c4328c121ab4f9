"""The log of runs on a set of records: in several places, torn, read-only; and the budget that they share."""

from __future__ import annotations

import math
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from webdataset import TarWriter

from murmuration.accounting.certificate.composition import known_runs
from murmuration.accounting.durable import try_lock
from murmuration.accounting.ledger.facts import Charge, Head
from murmuration.accounting.unit import RECORD
from murmuration.data.draw.stream import StreamIndex
from murmuration.data.index.open import open_index
from murmuration.data.index.salt import SALT
from murmuration.data.index.shard_index import build
from murmuration.data.store.place import ShardError
from murmuration.data.synthetic.index import shape_samples, write_shards
from murmuration.launch import prepare as prepare_command
from murmuration.train.storage import sibling_runs
from murmuration.train.storage.certify import siblings_of
from murmuration.train.storage.sibling_runs import BESIDE_SHARDS, LOG, DataBudgetError, RunLog
from tests.support.own_module import own
from tests.support.range_server import RangeServer, serving


def log_in(*folders: Path) -> RunLog:
    return RunLog.at(*(folder / LOG for folder in folders))


def test_runs_on_the_same_records_know_of_each_other(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    assert log.register("a", "private", "first", 8.0, 1e-5) is None
    assert log.register("a", "private", "first", 8.0, 1e-5) is None
    assert log.register("b", "private", "second", 2.0, 1e-5) is None
    assert [entry["run"] for entry in log.siblings({"b"})] == ["first"]
    assert [entry["run"] for entry in log.siblings({"a"})] == ["second"]
    with (tmp_path / LOG).open("a") as file:
        file.write('{"id": "torn')
    assert len(log.siblings()) == 2
    assert log.register("b", "second-phase", "second", 4.0, 1e-5) is None
    assert [entry["epsilon_budget"] for entry in log.siblings({"a"})] == [2.0, 4.0], "each private phase counts"
    assert log.unknown_to_others("a") is None and log.unknown_to_others("c") is not None


def test_a_log_that_cannot_be_used_does_not_read_as_if_there_were_no_others(tmp_path: Path) -> None:
    assert "run.registry" in (log_in(tmp_path / "absent").register("a", "private", "first", 8.0, 1e-5) or "")
    (tmp_path / LOG).mkdir()
    log = log_in(tmp_path)
    assert "cannot be read" in str(log.siblings({"a"}))
    assert "cannot be written" in (log.register("a", "private", "first", 8.0, 1e-5) or "")
    log.note(Head("a", 3, "f" * 64, ()))  # and ends no run


def test_one_place_that_can_be_written_is_enough(tmp_path: Path) -> None:
    (tmp_path / LOG).mkdir()
    registry = tmp_path / "registry"
    registry.mkdir()
    log = log_in(tmp_path, registry)
    assert log.register("a", "private", "first", 8.0, 1e-5) is None
    assert [entry["id"] for entry in log_in(registry).siblings()] == ["a"]
    assert {"first"} < {entry["run"] for entry in log.siblings({"b"})}, "and the other place is named as unreadable"


def test_another_index_of_the_same_shards_finds_the_log(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    with TarWriter(str(shards / "000000.tar"), encoder=False) as writer:
        for number in range(4):
            writer.write({"__key__": f"{number:03d}", "txt": b"text"})
    one, two = build(shards), build(shards, tmp_path / "elsewhere")
    assert RunLog.of(one).register("a", "private", "first", 8.0, 1e-5) is None
    assert [entry["id"] for entry in RunLog.of(two).siblings()] == ["a"]
    assert (shards / BESIDE_SHARDS).exists() and (shards / "index" / LOG).exists()
    assert [entry["id"] for entry in RunLog.of(one).siblings()] == ["a"], "two places, one run"


def test_an_index_of_some_of_the_shards_finds_the_log_and_is_found(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        with TarWriter(str(tmp_path / name / "000000.tar"), encoder=False) as writer:
            writer.write({"__key__": name, "txt": name.encode()})
    both = build([tmp_path / name / "000000.tar" for name in "ab"], tmp_path / "both")
    one, other = build(tmp_path / "a", tmp_path / "one"), build(tmp_path / "b", tmp_path / "other")
    assert RunLog.of(both).register("x", "private", "on both", 8.0, 1e-5) is None
    assert RunLog.of(one).register("y", "private", "on one", 8.0, 1e-5) is None
    assert [entry["id"] for entry in RunLog.of(one).siblings({"y"})] == ["x"]
    assert [entry["id"] for entry in RunLog.of(both).siblings({"x"})] == ["y"]
    assert [entry["id"] for entry in RunLog.of(other).siblings()] == ["x"], "and not what was done to other shards"


def test_heads_are_told_apart_by_run(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    mine, other = Head("a", 3, "e" * 64, (Charge(1, 0.5, 1.0, 2),)), Head("b", 4, "f" * 64, ())
    log.register("a", "private", "first", 8.0, 1e-5)
    log.note(mine)
    log.note(other)
    assert log.heads("a") == [[mine]] and log.heads("c") == [[]]
    assert len(log.siblings()) == 1, "a head is no run"


def test_later_runs_are_held_to_the_budget_of_the_records(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.require_budget({"a"}, 100.0)  # none was set
    log.set_budget(10.0)
    log.require_budget({"a"}, 8.0)
    log.register("a", "private", "first", 8.0, 1e-5)
    log.require_budget({"a"}, 8.0)  # its own share does not count twice
    with pytest.raises(DataBudgetError, match=r"ε = 10 .* take 8, so a run of ε = 2.5 is too much"):
        log.require_budget({"b"}, 2.5)
    log.require_budget({"b"}, 2.0)
    log.claim("a", 7.0)  # it finished below its budget
    log.require_budget({"b"}, 3.0)
    with pytest.raises(DataBudgetError, match="a run without noise, or with"):
        log.require_budget({"c"}, None)
    log.register("twin", "private", "a twin", None, None)
    with pytest.raises(DataBudgetError, match="take inf"):
        log.require_budget({"b"}, 0.1)
    log.set_budget(5.0)
    assert log.budget() == 5.0, "the newest word counts"


def test_a_run_that_goes_on_after_its_claim_may_spend_its_budget_again(tmp_path: Path) -> None:
    """Restored from a backup of before its end; its first checkpoint tells."""
    log = log_in(tmp_path)
    log.register("a", "private", "first", 8.0, 1e-5)
    log.note(Head("a", 9, "e" * 64, ()))
    log.claim("a", 1.0)
    assert log.spent() == 1.0
    log.note(Head("a", 11, "f" * 64, ()))
    assert log.spent() == 8.0
    log.claim("a", 2.0)
    assert log.spent() == 2.0


def test_numbers_that_are_no_epsilon_make_no_room(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.set_budget(10.0)
    log.register("a", "private", "first", 8.0, 1e-5)
    with (tmp_path / LOG).open("a") as file:
        file.write('{"claim_of": "a", "epsilon": -100.0}\n{"claim_of": "a", "epsilon": NaN}\n{"budget": NaN}\n')
    assert (log.budget(), log.spent()) == (10.0, 8.0)
    log.register("b", "private", "second", -50.0, 1e-5)
    assert log.spent({"c"}) == math.inf, "nobody knows what that run may spend"


def test_of_two_runs_that_start_at_once_the_second_sees_the_first(tmp_path: Path) -> None:
    """The one asks while the other stands between its question and its line in the log."""
    log_in(tmp_path).set_budget(3.0)
    refused: list[bool] = []

    def second() -> None:
        log = log_in(tmp_path)
        asking.set()
        with log.alone() as held:
            try:
                held.require_budget({"b"}, 2.0)
            except DataBudgetError:
                refused.append(True)

    asking, thread = threading.Event(), threading.Thread(target=second)
    first = log_in(tmp_path)
    with first.alone() as held:
        held.require_budget({"a"}, 2.0)
        thread.start()
        asking.wait()
        thread.join(0.2)  # had it not to wait, it would be through by now
        held.register("a", "private", "first", 2.0, 1e-5)
    thread.join()
    assert refused == [True]


def test_a_place_that_is_named_twice_is_one(tmp_path: Path) -> None:
    """A registry in the index's own folder, there or by a link: the second lock would wait for the first forever."""
    with TarWriter(str(tmp_path / "000000.tar")) as tar:
        tar.write({"__key__": "a", "txt": "words", "jpg": b"picture"})
    index = build(tmp_path)
    (tmp_path / "link").symlink_to(index.folder)
    RunLog.of(index).note(Head("b", 3, "f" * 64, ()))  # both files are there
    for registry in (index.folder, tmp_path / "link"):
        log = RunLog.of(index, str(registry))
        assert len(log.files) == 2 and all(map(os.path.samefile, log.files, RunLog.of(index).files))
        with log.alone() as held:
            held.register("a", "private", "first", 2.0, 1e-5)
    (tmp_path / "hard").hardlink_to(index.folder / LOG)  # or a mount of the same folder
    with RunLog.at(index.folder / LOG, tmp_path / "link" / LOG, tmp_path / "hard").alone() as held:
        held.register("b", "private", "second", 2.0, 1e-5)
    assert (index.folder / LOG).read_text().count('"id": "b"') == 1


def test_within_the_lock_each_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start asked 12 times in a row for what nobody may change meanwhile; what it adds itself is there at once."""
    files, opened = [tmp_path / name / LOG for name in ("a", "b")], list[Path]()
    for file in files:
        file.parent.mkdir()
    log = RunLog.at(*files)
    log.set_budget(5.0)
    log.register("a", "private", "first", 2.0, 1e-5)
    whole = sibling_runs.whole_lines
    monkeypatch.setattr(sibling_runs, "whole_lines", lambda file: (opened.append(file), whole(file))[1])
    with log.alone() as held:
        held.require_budget({"b"}, 3.0)
        assert held.register("b", "private", "second", 3.0, 1e-5) is None
        assert held.unknown_to_others("b") is None
        with pytest.raises(DataBudgetError, match="earlier ones take 5,"):
            held.require_budget({"c"}, 1.0)
        assert opened == files
    assert log.spent() == 5.0 and [file.read_text().count('"id": "b"') for file in files] == [1, 1]


def test_runs_whose_registry_is_the_others_folder_lock_in_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    locked: list[int] = []

    def lock(descriptor: int) -> bool:
        locked.append(os.fstat(descriptor).st_ino)
        return try_lock(descriptor)

    monkeypatch.setattr(sibling_runs, "try_lock", lock)
    for one, other in (("a", "b"), ("b", "a")):
        with RunLog.at(tmp_path / one / LOG, tmp_path / other / LOG).alone():
            pass
    assert len(set(locked)) == 2 and locked[:2] == locked[2:]


def test_places_that_cannot_be_locked_hold_nobody_up(tmp_path: Path) -> None:
    (tmp_path / LOG).mkdir()
    with log_in(tmp_path, tmp_path / "absent").alone():
        pass


def test_a_budget_that_no_place_takes_is_refused(tmp_path: Path) -> None:
    """A folder in the place of the log: what nobody can write, not even root."""
    (tmp_path / LOG).mkdir()
    with pytest.raises(ShardError, match=r"cannot be written .* with --registry"):
        log_in(tmp_path).set_budget(3.0)
    (tmp_path / "registry").mkdir()
    log = RunLog.at(tmp_path / LOG, tmp_path / "registry" / LOG)
    [fault] = log.set_budget(3.0)
    assert str(tmp_path / LOG) in fault and log.budget() == 3.0


def test_a_sibling_that_claimed_more_than_its_budget_counts_with_its_claim(tmp_path: Path) -> None:
    """It was chosen among several, and its ledger is not at hand."""
    log = log_in(tmp_path)
    log.register("a", "private", "first", 8.0, 1e-5, folder=str(tmp_path / "gone"))
    log.claim("a", 11.0)
    assert [known.epsilon for known in known_runs(log.siblings({"b"}))] == [11.0]
    log.claim("a", 3.0)
    assert [known.epsilon for known in known_runs(log.siblings({"b"}))] == [8.0], "no ledger shows that it was less"


PATIENTS = "one unit (all records that have the same 'patient_id'; a record without one is a unit of its own)"
PLACES = "one unit (by place)"


def test_a_run_with_a_debug_seed_promises_nothing_after_its_folder_is_gone_either(tmp_path: Path) -> None:
    """Its noise can be drawn again by anybody, and only its own ledger would tell."""
    own(tmp_path / "seeded", dataset="A", debug_seed=5, registry=tmp_path / "registry").close()
    shutil.rmtree(tmp_path / "seeded")
    log = RunLog.beside(tmp_path / "registry")
    (found,) = known_runs(log.siblings())
    assert not found.private and found.epsilon == math.inf and log.protecting() == "seeded"
    log.set_budget(100.0)
    for unit in (RECORD, "patient"):
        log.set_budget(100.0, unit)
        assert log.spent(unit=unit) == math.inf, unit
    with pytest.raises(DataBudgetError, match="which a run without noise, or with a debug seed, exceeds"):
        own(tmp_path / "again", dataset="A", debug_seed=6, registry=tmp_path / "registry")


def test_each_kind_of_unit_has_a_budget_of_its_own(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.register("p", "private", "on patients", 3.0, 1e-5, PATIENTS)
    log.set_budget(10.0)
    assert log.siblings()[0]["unit"] == PATIENTS and (log.budget(), log.budget(PATIENTS)) == (10.0, None)
    with pytest.raises(DataBudgetError, match="take inf"):
        log.require_budget({"r"}, 1.0)  # nobody knows what the run on patients costs a record
    with pytest.raises(DataBudgetError, match="what it costs the others is not known"):
        log.require_budget({"q"}, 1.0, PATIENTS)
    log.set_budget(4.0, PATIENTS)
    log.require_budget({"r"}, 10.0)
    with pytest.raises(DataBudgetError, match=r"ε = 4 .* take 3, so a run of ε = 1.5"):
        log.require_budget({"q"}, 1.5, PATIENTS)
    log.claim("p", 2.0)
    log.require_budget({"q"}, 2.0, PATIENTS)
    log.require_budget({"r"}, 10.0)
    log.register("r", "private", "on records", 9.0, 1e-5)
    log.claim("r", 8.5)
    assert (log.spent(), log.spent(unit=PATIENTS)) == (8.5, 2.0)
    log.require_budget({"q"}, 2.0, PATIENTS)
    with pytest.raises(DataBudgetError, match="what it costs the others is not known"):
        log.require_budget({"s"}, 0.1, PLACES)
    log.register("twin", "private", "a twin", None, None)
    for unit in (PATIENTS, None):
        with pytest.raises(DataBudgetError, match="take inf"):
            log.require_budget({"s"}, 0.1, *([unit] if unit else []))


def test_budgets_of_earlier_versions_are_for_records(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text('{"budget": 5.0}\n{"id": "a", "run": "old", "phase": "p", "private": true, '
                                '"epsilon_budget": 2.0, "delta": 1e-5}\n')  # fmt: skip
    log = log_in(tmp_path)
    assert (log.budget(), log.spent()) == (5.0, 2.0)
    log.set_budget(4.0)
    log.register("b", "p", "new", 1.0, 1e-5)
    assert "unit" not in (tmp_path / LOG).read_text(), "nothing changes in a log where nobody names a unit"


# Whichever index, folder or address leads to the same records.


def _copied(shards: Path, target: Path) -> None:
    target.mkdir()
    for shard in shards.glob("*.tar"):
        shutil.copy(shard, target)


def _hard_linked(shards: Path, target: Path) -> None:
    target.mkdir()
    for shard in shards.glob("*.tar"):
        os.link(shard, target / shard.name)


def _grown(shards: Path, target: Path) -> None:
    _copied(shards, target)
    write_shards(target / "more", shape_samples(8, 6, 16), 6)
    (target / "more" / "000000.tar").rename(target / "000007.tar")


@pytest.mark.parametrize("make", [_copied, _hard_linked, _grown])
def test_a_registry_knows_records_by_their_contents_in_any_folder(
    tmp_path: Path, make: Callable[[Path, Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """And one registry serves many sets: what is about other records does not count."""
    for seed, name in enumerate(("set", "other")):
        write_shards(tmp_path / name, shape_samples(seed + 2, 12, 16), 6)
    (registry := tmp_path / "registry").mkdir()
    command = ["index", str(tmp_path / "set"), "--budget", "8", "--registry", str(registry)]
    assert prepare_command.main(command) == 0
    first = RunLog.of(open_index(tmp_path / "set"), str(registry))
    assert first.register("a", "private", "first", 8.0, 1e-5, records="named") is None
    make(tmp_path / "set", tmp_path / "again")
    assert prepare_command.main(["index", str(tmp_path / "again")]) == 0
    log = RunLog.of(open_index(tmp_path / "again"), str(registry))
    assert [entry["run"] for entry in log.siblings()] == ["first"] and log.names() == {"named"}
    with pytest.raises(DataBudgetError, match=r"ε = 8 .* take 8"):
        log.require_budget({"b"}, 1.0)
    assert prepare_command.main(["index", str(tmp_path / "other")]) == 0
    other = RunLog.of(open_index(tmp_path / "other"), str(registry))
    other.require_budget({"b"}, 100.0)
    first.claim("a", 7.5)
    assert (other.siblings(), other.budget(), other.spent(), other.names()) == ([], None, 0.0, frozenset())
    assert log.spent() == 7.5
    assert stat.S_IMODE((registry / SALT).stat().st_mode) == 0o600
    found = (registry / LOG).read_text()
    assert not any(shard.sha256 in found for shard in open_index(tmp_path / "set").shards), "keyed"


def test_what_no_log_can_know_is_said_and_no_budget_pretends_to_bind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind a URL nothing lies beside the shards, and a hard link leads to no folder."""
    write_shards(tmp_path / "set", shape_samples(2, 12, 16), 6)
    (registry := tmp_path / "registry").mkdir()
    with serving(RangeServer(tmp_path / "set")) as server:
        command = ["index", f"{server.url}/{{000000..000001}}.tar", "--out", str(tmp_path / "one")]
        assert prepare_command.main([*command, "--budget", "8"]) == 2
        assert (
            "so other runs would not know of a budget; name a writable folder with --registry"
            in capsys.readouterr().err
        )
        assert RunLog.of(open_index(tmp_path / "one")).budget() is None, "refused, and so nowhere"
        assert prepare_command.main([*command, "--budget", "8", "--registry", str(registry)]) == 0
        assert prepare_command.main([*command[:-1], str(tmp_path / "two")]) == 0
        stream = RunLog.of(StreamIndex(command[1], 1, 4))
        assert stream.places == (), "nothing in the folder that a program happens to be started in"
    one, two = (open_index(tmp_path / name) for name in ("one", "two"))
    alone = RunLog.of(two)
    assert "name a writable folder in run.registry" in (alone.register("b", "private", "alone", 8.0, 1e-5) or "")
    assert "other runs unknown" in siblings_of([alone], "b")[0]["run"]
    with pytest.raises(DataBudgetError, match="or no budget can bind"):
        RunLog.of(one).register("c", "private", "without", 1.0, 1e-5)
    assert RunLog.of(one).siblings() == []
    assert RunLog.of(one, str(registry)).register("d", "private", "with", 8.0, 1e-5) is None
    with pytest.raises(DataBudgetError, match=r"ε = 8 .* take"):
        RunLog.of(two, str(registry)).require_budget({"e"}, 1.0)
    _hard_linked(tmp_path / "set", tmp_path / "hard")
    linked = RunLog.of(build(tmp_path / "hard"))
    assert linked.register("f", "private", "linked", 8.0, 1e-5) is None
    assert "shards have hard links" in siblings_of([linked], "f")[0]["run"]
    shutil.rmtree(tmp_path / "set")
    assert siblings_of([linked], "f") == []


def test_of_shards_in_one_folder_only_those_that_are_shared_count(tmp_path: Path) -> None:
    write_shards(tmp_path, shape_samples(2, 18, 16), 6)
    first, second = (
        build([tmp_path / f"{number:06d}.tar" for number in numbers], tmp_path / f"index{len(numbers)}")
        for numbers in ((0,), (1, 2))
    )
    RunLog.of(first).register("a", "private", "on the first shard", 8.0, 1e-5, records="first")
    assert (RunLog.of(second).siblings(), RunLog.of(second).names()) == ([], frozenset())
    (tmp_path / "000001.tar").write_bytes((tmp_path / "000000.tar").read_bytes())
    again = build([tmp_path / "000001.tar"], tmp_path / "again")
    assert RunLog.of(again).names() == {"first"}, "the same contents under another name"
    write_shards(tmp_path, shape_samples(9, 6, 16), 6)
    packed_again = build([tmp_path / "000000.tar"], tmp_path / "packed")
    assert [entry["id"] for entry in RunLog.of(packed_again).siblings()] == ["a"], "under the same name"


def test_what_a_registry_holds_of_other_records_or_under_another_salt_hides_no_run(tmp_path: Path) -> None:
    for seed, name in enumerate(("set", "other")):
        write_shards(tmp_path / name, shape_samples(seed + 2, 12, 16), 6)
        build(tmp_path / name)
    (registry := tmp_path / "registry").mkdir()
    other, log = (RunLog.of(open_index(tmp_path / name), str(registry)) for name in ("other", "set"))
    other.set_budget(8.0)  # a line about no run
    assert log.register("a", "private", "first", 8.0, 1e-5) is None
    alone = RunLog(tuple(place for place in log.places if place.registry))
    assert [entry["run"] for entry in alone.siblings()] == ["first"] and alone.budget() is None
    (registry / SALT).write_bytes(bytes(32))
    assert [entry["run"] for entry in alone.siblings()] == ["first"] and alone.budget() == 8.0
    (registry / SALT).write_bytes(b"cut")
    assert [entry["run"] for entry in alone.siblings()] == ["first"]
    with pytest.raises(DataBudgetError, match="damaged"):
        alone.register("b", "private", "second", 8.0, 1e-5)
