"""Weights to start from were made from records, too: of which runs is known, refused, or said in the certificate."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from murmuration.accounting.certificate.pages import write
from murmuration.accounting.certificate.provenance import Provenance
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.statement import compose
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.epsilon.tuning import Declared
from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson, threshold_for
from murmuration.data.index.keyed_digest import ledger_digests
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.index.shard_index import build as build_index
from murmuration.data.synthetic.index import shape_samples, write_shards
from murmuration.train.config.load import load
from murmuration.train.recipe.ready_phase import RecipeError, prepare
from murmuration.train.recipe.warm_start import EXPORTED, WarmStart
from murmuration.train.storage.sibling_runs import RunLog
from tests.support.acc_world import KEY, SIGNER

PLAN = PrivacyPlan(64, Poisson(threshold_for(64, 8)), 1.0, 2.0, 3, 1 / 128, 8.0)


def run(
    root: Path, digest: str, *before: WarmStart, public: bool = True, debug: bool = False,
    more: Callable[[Journal], Any] = lambda journal: None,
) -> WarmStart:  # fmt: skip
    """An export, as far as its ledger tells: weights from elsewhere, then a private phase on the records."""
    root.mkdir()
    (root / EXPORTED).write_bytes(root.name.encode())
    (root / "export.json").write_text(json.dumps({"objective": "mae", "shapes": {}}))
    journal = Journal(Ledger.open(root / "ledger.jsonl"))
    journal.start_run(root.name, "check", debug, {}, "hmac-sha256", SIGNER)
    for start in before:
        for origin in start.origins:
            assert journal.declare_origin(origin) and not journal.declare_origin(origin)
        journal.declare_nonprivate(0, "start", public, start.digest)
        journal.declare_earlier(start.without_noise)
    journal.declare_plan(1, "private", PLAN, {})
    journal.begin_segment(1, "config", digest, 0, "first")
    more(journal)
    journal.finish()
    journal.ledger.close()
    return WarmStart.at(root)


def test_what_a_run_began_from_is_remembered_however_many_runs_lie_between(tmp_path: Path) -> None:
    first = run(tmp_path / "a", "one")
    second = run(tmp_path / "b", "two", first)
    third = run(tmp_path / "c", "three", second)
    assert third.protected == {"one", "two", "three"} and third.undeclared is None
    assert [origin.run for origin in third.origins] == ["a", "b", "c"]
    assert {(origin.epsilon, origin.delta) for origin in third.origins} == {(8.0, 1 / 128)}


def test_the_certificate_says_what_the_weights_began_from_and_cannot_leave_it_out(tmp_path: Path) -> None:
    run(tmp_path / "b", "two", run(tmp_path / "a", "one"))
    history, entries = History.read(tmp_path / "b" / "ledger.jsonl")
    write(signed(compose(history, entries, {}), KEY), tmp_path / "b")
    assert verify(tmp_path / "b").certified is not None
    path = tmp_path / "b" / "certificate.json"
    document = json.loads(path.read_text())
    said = [text for text in document["known_deviations"] if "began from those of run 'a'" in text]
    assert len(said) == 1 and "epsilon = 8" in said[0] and "no more than the sum of both" in said[0]
    document["known_deviations"].remove(said[0])
    path.write_text(json.dumps(document))
    with pytest.raises(CertificateError, match="leaves out a known deviation: The weights began from"):
        verify(tmp_path / "b")


def test_the_certificate_names_records_that_earlier_runs_used_as_public(tmp_path: Path) -> None:
    first = run(tmp_path / "a", "one", more=lambda journal: journal.declare_public(1, "mixing", "open"))
    run(tmp_path / "b", "two", first)
    history, entries = History.read(tmp_path / "b" / "ledger.jsonl")
    write(signed(compose(history, entries, {}), KEY), tmp_path / "b")
    assert verify(tmp_path / "b").certified is not None
    document = json.loads((tmp_path / "b" / "certificate.json").read_text())
    (said,) = [text for text in document["known_deviations"] if text.startswith("Earlier runs used records")]
    assert "(digest open) without noise" in said and "by the word" not in said, "nobody gave it here"


def test_records_that_an_earlier_run_used_without_noise_cannot_be_protected_afterwards(tmp_path: Path) -> None:
    first = run(tmp_path / "a", "one", more=lambda journal: journal.declare_public(1, "mixing", "open"))
    run(tmp_path / "b", "open", first)  # by a trainer that does not refuse it
    objection = History.read(tmp_path / "b" / "ledger.jsonl")[0].why_not_private()
    assert objection is not None and "used without noise, by this run or one before it" in objection


def test_what_earlier_runs_used_is_noted_once(tmp_path: Path) -> None:
    first = run(tmp_path / "a", "one", more=lambda journal: journal.declare_public(1, "mixing", "open"))
    other = run(tmp_path / "c", "three", more=lambda journal: journal.declare_public(1, "monitor", "open"))
    run(tmp_path / "b", "two", first, other)
    path = tmp_path / "b" / "ledger.jsonl"
    assert path.read_text().count('"earlier"') == 1


def test_an_exported_file_that_was_copied_away_knows_what_it_must_not_meet(tmp_path: Path) -> None:
    mixed = lambda journal: journal.declare_public(1, "mixing", "open")  # noqa: E731
    start = run(tmp_path / "b", "two", run(tmp_path / "a", "one"), more=mixed)
    told = Provenance.of(History.read(tmp_path / "b" / "ledger.jsonl")[0])
    alone = tmp_path / "elsewhere" / "weights.safetensors"
    alone.parent.mkdir()
    save_file({"w": torch.ones(2)}, str(alone), told.metadata())
    copied = WarmStart.at(alone)
    assert (copied.protected, copied.origins, copied.undeclared) == (start.protected, start.origins, None)
    assert copied.without_noise == start.without_noise >= {"open"}
    # Anybody can write such metadata into any file: they add to what is known of it, and vouch for nothing.
    assert copied.protected == {"one", "two"} and copied.foreign
    # Beside the ledger of another run, which is easily copied there, it is bound by both.
    run(tmp_path / "c", "three")
    shutil.copy(tmp_path / "c" / "ledger.jsonl", alone.parent)
    assert WarmStart.at(alone).protected == {"one", "two", "three"}


def test_an_exported_file_of_a_run_that_was_not_private_says_so_wherever_it_is(tmp_path: Path) -> None:
    run(tmp_path / "b", "one", debug=True)
    told = Provenance.of(History.read(tmp_path / "b" / "ledger.jsonl")[0])
    save_file({"w": torch.ones(2)}, str(tmp_path / "weights.safetensors"), told.metadata())
    undeclared = WarmStart.at(tmp_path / "weights.safetensors").undeclared
    assert undeclared is not None and "NOT PRIVATE (debug)" in undeclared


def test_of_a_foreign_file_the_word_is_taken(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, str(tmp_path / "a.safetensors"), {"format": "pt"})
    (tmp_path / "b.pt").write_bytes(b"no safetensors")
    for name in ("a.safetensors", "b.pt"):
        start = WarmStart.at(tmp_path / name)
        assert start.foreign and (start.protected, start.origins, start.undeclared) == (frozenset(), (), None)


def test_metadata_that_name_no_records_are_nobodys_word(tmp_path: Path) -> None:
    """Anyone can write them into any file; what the owner says of it must then stand in the certificate."""
    harmless = {"murmuration": '{"origins": [], "undeclared": null}'}
    save_file({"weight": torch.zeros(2)}, str(tmp_path / "weights.safetensors"), harmless)
    assert WarmStart.at(tmp_path / "weights.safetensors").foreign


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"origins": {}, "undeclared": null}', '{"origins": [{"run": 1}], "undeclared": null}',
             '{"origins": [], "undeclared": 3}', '{"origins": [], "undeclared": null, "without_noise": [3]}',
             '{"origins": [], "undeclared": null, "without_noise": [""]}',
             '{"origins": [], "undeclared": null, "without_noise": ["\\ud800"]}',
             json.dumps({"origins": [], "undeclared": None, "without_noise": ["a" * 129]}),
             json.dumps({"origins": [], "undeclared": None, "without_noise": [str(n) for n in range(1001)]}),
             '{"origins": [], "undeclared": null, "more": 1}'],
)  # fmt: skip
def test_metadata_that_no_export_wrote_are_refused(tmp_path: Path, text: str) -> None:
    save_file({"w": torch.ones(2)}, str(tmp_path / "a.safetensors"), {"murmuration": text})
    with pytest.raises(RecipeError, match="its metadata do not say which records it was made from"):
        WarmStart.at(tmp_path / "a.safetensors")


def tuned(journal: Journal) -> None:
    journal.declare_tuning(Declared("looked at the captions"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"debug": True}, "NOT PRIVATE (debug)"), ({"public": False}, "on data not declared public"),
        ({"more": lambda journal: journal.declare_nonprivate(2, "after", True, "one")}, "that another phase protects"),
        ({"more": tuned}, "tuned on private data"),
    ],
)  # fmt: skip
def test_weights_that_are_not_private_are_no_public_start(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    start = run(tmp_path / "b", "one", run(tmp_path / "a", "zero"), **changes)
    assert start.undeclared is not None and message in start.undeclared


def test_weights_of_public_records_alone_are_a_public_start(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / EXPORTED).touch()
    journal = Journal(Ledger.open(tmp_path / "p" / "ledger.jsonl"))
    journal.start_run("p", "check", False, {}, "hmac-sha256", "signer")
    journal.declare_nonprivate(0, "warm", True, "open")
    journal.ledger.close()
    start = WarmStart.at(tmp_path / "p")
    assert (start.undeclared, start.origins, start.protected) == (None, (), frozenset())


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "model": {"family": "mae", "size": "nano", "image_size": 16, "patch_size": 8},
    "phases": [
        {"name": "start", "data": {"source": "checkpoint", "path": "", "public": True}, "objective": "mae"},
        {"name": "private", "data": {"path": ""},
         "objective": "mae", "privacy": {"epsilon": 8.0, "expected_batch": 8}, "optimizer": {"type": "AdamW"},
         "schedule": {"peak": 1e-3, "shape": "constant"}, "steps": 3},
    ],
}  # fmt: skip


@pytest.mark.parametrize("how", ["removed", "elsewhere", "grown"])
def test_weights_are_recognised_through_another_index_of_the_records(tmp_path: Path, how: str) -> None:
    mine = tmp_path / "mine"
    write_shards(mine, shape_samples(2, 64, 16), 32)
    indexes = [tmp_path / "one", tmp_path / "two"] if how == "elsewhere" else [mine, mine]
    index = build_index(mine, *indexes[:1] if how == "elsewhere" else [])
    named = ledger_digests(index, public=False)[0]
    assert RunLog.of(index).register("id", "private", "first", 8.0, 1e-5, records=named) is None
    run(tmp_path / "start", named)
    if how == "removed":
        shutil.rmtree(mine / "index")
    elif how == "grown":
        write_shards(tmp_path / "more", shape_samples(3, 8, 16), 8)
        (tmp_path / "more" / "000000.tar").rename(mine / "000007.tar")
    again = build_index(mine, *indexes[1:] if how == "elsewhere" else [])
    assert (ledger_digests(again, public=False)[0] == named) == (how != "grown"), "one salt names the records"
    config = copy.deepcopy(CONFIG)
    config["phases"][0]["data"]["path"] = str(tmp_path / "start")
    config["phases"][1]["data"]["path"] = str(indexes[1])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="was trained on the private records of phase 'private'"):
        prepare(load(tmp_path / "config.json", []))


def test_records_that_any_run_before_protected_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "mine", shape_samples(2, 64, 16), 32)
    build_index(tmp_path / "mine")
    mine = ShardIndex.open(tmp_path / "mine").manifest_digest
    first = run(tmp_path / "a", mine)
    second = run(tmp_path / "b", "others", first)
    run(tmp_path / "c", "elsewhere", second)
    run(tmp_path / "d", "elsewhere")
    run(tmp_path / "e", "elsewhere", more=lambda journal: journal.declare_nonprivate(2, "after", True, mine))
    run(tmp_path / "f", "elsewhere", more=lambda journal: journal.declare_public(1, "mixing", mine))
    run(tmp_path / "g", "elsewhere", run(tmp_path / "h", "elsewhere", WarmStart.at(tmp_path / "e")))
    run(tmp_path / "i", "elsewhere", debug=True)
    protected = "was trained on the private records of phase 'private'"
    public = "used the records that phase 'private' protects without noise"
    debug = r"come from a run that says 'NOT PRIVATE \(debug\)"
    for start, refused in [*zip("abcd", [protected] * 3 + [""], strict=True), *zip("efgh", [public] * 4, strict=True),
                           ("i", debug)]:  # fmt: skip
        config = copy.deepcopy(CONFIG)
        config["phases"][0]["data"]["path"] = str(tmp_path / start)
        config["phases"][1]["data"]["path"] = str(tmp_path / "mine")
        (tmp_path / "config.json").write_text(json.dumps(config))
        if refused:
            with pytest.raises(RecipeError, match=refused):
                prepare(load(tmp_path / "config.json", []))
        else:
            prepare(load(tmp_path / "config.json", []))
