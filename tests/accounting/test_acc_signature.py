"""A signed certificate: what a forger without the run key can change, and is found to have changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from murmuration.accounting.certificate.attached import lists_tensors_of
from murmuration.accounting.certificate.pages import write
from murmuration.accounting.certificate.provenance import Provenance
from murmuration.accounting.certificate.signature import public_key, signed
from murmuration.accounting.certificate.statement import compose
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.certificate.weights import (
    RENAMED,
    WeightsFileError,
    digests_of_renamed,
    digests_of_safetensors,
    list_digest,
    read_lists,
    tensor_digest,
    write_lists,
)
from murmuration.accounting.cli.main import main
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.keys import RunKey, store
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.heads import NAME, append, note_logs
from murmuration.accounting.ledger.history import History
from murmuration.train.commands.retire import main as retire
from murmuration.train.storage.certify import NO_LOG, OF_THIS_TRAINER, RETIRED, earlier_certificate
from murmuration.train.storage.run_dir import RunDir
from tests.support.acc_world import KEY, PLAN, begin, every, on, reopen, rewritten, train

TENSORS = {"weight": np.arange(12, dtype=np.float32).reshape(3, 4), "bias": np.ones(3, dtype=np.float32)}


def run(folder: Path, key: RunKey = KEY, steps: int = 40) -> None:
    journal = begin(folder, key=key)
    journal.witnesses["file"] = lambda head: append(folder / "witness.jsonl", head.as_dict(), 0o644)
    train(journal, range(1, steps + 1))
    journal.checkpointed(0, steps, "digest")
    journal.finish()
    journal.ledger.close()


def certify(folder: Path, key: RunKey | None = KEY) -> dict[str, Any]:
    history, entries = History.read(folder / "ledger.jsonl")
    save_file(TENSORS, folder / "model.safetensors", Provenance.of(history).metadata())
    lists = {"phase00-step00000040": digests_of_safetensors(folder / "model.safetensors")}
    write_lists(lists, folder)
    document = compose(history, entries, {"siblings": []})
    document["weights"] = [
        {"phase": 0, "step": 40, "checkpoint_manifest_sha256": "0" * 64, "tensors": 2,
         "sha256": list_digest(lists["phase00-step00000040"])}
    ]  # fmt: skip
    document = document if key is None else signed(document, key)
    write(document, folder)
    return document


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    run(tmp_path / "run")
    certify(tmp_path / "run")
    return tmp_path / "run"


def test_what_was_signed_verifies_and_says_what_it_could_not_check(finished: Path) -> None:
    found = verify(finished).attached
    assert found is not None and found.signed_by == public_key(KEY)
    assert "model.safetensors holds certified weights" in found.checked
    assert any("--signer" in sentence for sentence in found.unchecked)
    known = verify(finished, signer=public_key(KEY), witness=finished / "witness.jsonl").attached
    assert known is not None and known.unchecked == []
    (finished / "model.pt").write_bytes(b"a pickle")
    found = verify(finished).attached
    assert found is not None and "model.pt: not a safetensors file" in found.unchecked


def log(folder: Path, signer: str = public_key(KEY)) -> None:
    """As a run does whose log of runs lies elsewhere."""
    history, _ = History.read(folder / "ledger.jsonl")
    (folder / "secret").mkdir(exist_ok=True)
    append(folder.parent / "runs.jsonl", {"id": history.run_id, "signer": signer}, 0o644)
    note_logs(folder / "secret", [folder.parent / "runs.jsonl"], None)


def log_within(folder: Path) -> None:
    """What a forger can send along."""
    log(folder)
    (folder / "runs.jsonl").write_bytes((folder.parent / "runs.jsonl").read_bytes())
    (folder / "secret" / "logs.jsonl").unlink()
    note_logs(folder / "secret", [folder / "runs.jsonl"], None)


def log_by_the_way(folder: Path) -> None:
    """Of what he sends along, a forger knows no path from the root, but how to get there from any."""
    log(folder)
    (folder / "secret" / "logs.jsonl").unlink()
    up = os.path.relpath("/", Path.cwd())
    for way in (f"{up}{folder.parent}", f"/proc/self/cwd/{up}{folder.parent}", f"{folder}/.."):
        append(folder / "secret" / "logs.jsonl", {"logs": [f"{way}/runs.jsonl"], "unknown": None}, 0o600)


def log_that_is_none(folder: Path) -> None:
    """A pipe, on which a reader would wait for ever, a link to itself, and what no file system has."""
    log(folder)
    (folder / "secret" / "logs.jsonl").unlink()
    os.mkfifo(folder.parent / "pipe")
    (folder.parent / "loop").symlink_to("loop")
    for name in ("pipe", "loop", "a\0b", ""):
        append(folder / "secret" / "logs.jsonl", {"logs": [f"{folder.parent}/{name}"], "unknown": None}, 0o600)


def log_of_anybody(folder: Path) -> None:
    log(folder)
    (folder.parent / "runs.jsonl").chmod(0o666)


def other_provenance(folder: Path) -> None:
    told = {"format": "pt", "murmuration": json.dumps({"origins": [], "undeclared": None})}
    save_file(TENSORS, folder / "model.safetensors", told)


def no_provenance(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors", {"format": "pt", "murmuration": "{"})


def moved(folder: Path) -> None:
    (folder / "in").mkdir()
    (folder / "model.safetensors").rename(folder / "in" / "model.safetensors")


SIGNER_GIVEN = ("--signer", public_key(KEY))


def test_pages_of_another_certificate_are_not_checked(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "earlier.json").write_bytes((finished / "certificate.json").read_bytes())
    assert main(["verify", str(finished / "earlier.json"), *SIGNER_GIVEN]) == 7
    assert "the pages: they show certificate.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "more", "codes", "told"),
    [
        (lambda folder: None, (), (7, 8), "whether that is the run's key"),
        (lambda folder: None, SIGNER_GIVEN, (0, 0), "all that can be recomputed was checked; "),
        (log, (), (0, 0), "that is the run's key by the log of runs"),
        (lambda folder: log(folder, "ab" * 32), (), (7, 8), "whether that is the run's key"),
        (log_within, (), (7, 8), "whether that is the run's key"),
        (log_by_the_way, (), (7, 8), "whether that is the run's key"),
        (log_that_is_none, (), (7, 8), "whether that is the run's key"),
        (log_of_anybody, (), (7, 8), "whether that is the run's key"),
        (lambda folder: (folder / "certificate.json").unlink(), SIGNER_GIVEN, (7, 8), "there is no certificate"),
        (lambda folder: (folder / "model.pt").write_bytes(b"a pickle"), SIGNER_GIVEN, (7, 8), "not a safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), SIGNER_GIVEN, (7, 8), "none of those"),
        (moved, SIGNER_GIVEN, (7, 8), "in another place"),
        (lambda folder: (folder / "certificate.html").write_text("ε = 0.099"), SIGNER_GIVEN, (7, 8), "html: differs"),
        (lambda folder: (folder / "certificate.md").unlink(), SIGNER_GIVEN, (7, 8), "certificate.md: it is missing"),
        (lambda folder: save_file(TENSORS, folder / "model.safetensors"), SIGNER_GIVEN, (7, 8), "was made from"),
        (other_provenance, SIGNER_GIVEN, (5, 5), "made from other runs"),
        (lambda folder: None, ("--signer", "ab" * 32), (5, 5), "not the expected"),
    ],
)  # fmt: skip
def test_the_exit_code_tells_full_success_from_valid_as_far_as_checked(
    finished: Path, change: Callable[[Path], object], more: tuple[str, ...], codes: tuple[int, int], told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    change(finished)
    for strict, code in zip(((), ("--strict",)), codes, strict=True):
        assert main(["verify", str(finished), *more, *strict]) == code
        said = capsys.readouterr()
        lines = (said.err if code == 5 else said.out).splitlines()
        assert told in ("\n".join(lines) if code in (0, 5) else lines[-1]), lines
        assert code == 5 or lines[-1].startswith(
            "all that can be recomputed was checked; " if code == 0 else "what was checked holds; not checked: "
        )


def tenfold(value: float) -> float:
    return 10 * value


# As if ten times the noise had been drawn.
CHEAPER = every(on("plan", {"plan.noise_multiplier": tenfold}), on("open commit", {"facts.noise.std": tenfold}))


def test_a_forged_ledger_needs_the_key(finished: Path) -> None:
    """Every hash made anew, and the certificate composed from the result by the product's own functions."""
    honest = verify(finished).epsilon
    rewritten(finished, CHEAPER)
    certify(finished, key=None)
    with pytest.raises(CertificateError, match="carries no signature, although its run signs"):
        verify(finished)
    certify(finished, RunKey.fresh())
    with pytest.raises(CertificateError, match="signed by another key"):
        verify(finished)
    with pytest.raises(CertificateError, match="line 84 is not the one that the witness recorded"):
        verify(finished, witness=finished / "witness.jsonl")
    # A forger who replaces the key in the first line makes another run: its key is not the one that is known.
    own = RunKey.fresh()
    rewritten(finished, lambda fields: fields.update(signer=public_key(own)) if fields["kind"] == "run" else None)
    certify(finished, own)
    assert verify(finished).epsilon < honest / 3
    with pytest.raises(CertificateError, match="not the expected"):
        verify(finished, signer=public_key(KEY))
    with pytest.raises(CertificateError, match="has no head of this run"):
        verify(finished, witness=finished / "witness.jsonl")


@pytest.mark.parametrize("field", ["machine", "hashes", "siblings"])
def test_words_that_no_ledger_holds_are_signed_too(finished: Path, field: str) -> None:
    document = json.loads((finished / "certificate.json").read_text())
    document[field] = ["something else"]
    (finished / "certificate.json").write_text(json.dumps(document))
    with pytest.raises(CertificateError, match="was changed after it was signed"):
        verify(finished)


def swapped(folder: Path) -> None:
    other = {name: np.random.default_rng(1).normal(size=t.shape).astype(np.float32) for name, t in TENSORS.items()}
    save_file(other, folder / "model.safetensors")


def relisted(folder: Path) -> None:
    swapped(folder)
    write_lists({"phase00-step00000040": digests_of_safetensors(folder / "model.safetensors")}, folder)


def one_more(folder: Path) -> None:
    save_file({**TENSORS, "extra": np.zeros(2, np.float32)}, folder / "model.safetensors")


def behind_a_nameless_one(folder: Path) -> None:
    """What a search for the first strange name finds is a name that is empty."""
    swapped(folder)
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    nameless = b'{"":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' + content[9 : 8 + length]
    (folder / "model.safetensors").write_bytes(len(nameless).to_bytes(8, "little") + nameless + content[8 + length :])


def number_as_provenance(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + length]) | {"__metadata__": {"murmuration": 5}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


@pytest.mark.parametrize(
    "change, fault",
    [
        (behind_a_nameless_one, "the tensor '' is not the one that was certified"),
        (swapped, "the tensor '(weight|bias)' is not the one that was certified"),
        (relisted, "weights.json is not the one that was certified"),
        (one_more, "the tensor 'extra' is not the one that was certified"),
        (lambda folder: (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40), "not a safetensors file"),
        (number_as_provenance, "its metadata are no texts"),
        (no_provenance, "^model.safetensors: its metadata do not say which records it was made from"),
        (lambda folder: (folder / "weights.json").unlink(), "weights.json is missing"),
        (lambda folder: (folder / "weights.json").write_text("[]"), "weights.json is not a list of tensors"),
    ],
)
def test_other_weights_are_not_the_certified_ones(finished: Path, change: Callable[[Path], None], fault: str) -> None:
    change(finished)
    with pytest.raises(CertificateError, match=fault):
        verify(finished)


def forged(folder: Path) -> dict[str, np.ndarray]:
    """Other weights, and their list in place of the certified one."""
    others = {name: tensor + 1 for name, tensor in TENSORS.items()}
    save_file(others, folder / "others.safetensors")
    write_lists({"phase00-step00000040": digests_of_safetensors(folder / "others.safetensors")}, folder)
    (folder / "others.safetensors").unlink()
    return others


def test_a_list_that_nobody_signed_is_refused_although_no_file_here_is_compared_with_it(finished: Path) -> None:
    """Other programs compare what they load with the list, and show the certificate's epsilon if it fits."""
    (finished / "model.safetensors").rename(finished / "model.pt")
    verify(finished)
    forged(finished)
    with pytest.raises(CertificateError, match=r"weights\.json is not the one that was certified"):
        verify(finished)


def test_a_list_of_one_checkpoint_more_is_refused(finished: Path) -> None:
    lists = read_lists(finished)
    assert lists is not None
    write_lists(lists | {"phase00-step00000041": {"weight": "0" * 64}}, finished)
    with pytest.raises(CertificateError, match="not the one that was certified for phase00-step00000041"):
        verify(finished)


def test_a_file_is_the_listed_one_only_if_all_of_it_is_listed_and_signed(finished: Path) -> None:
    file = finished / "model.safetensors"
    assert lists_tensors_of(finished, file)
    save_file(TENSORS | {"more": np.ones(2, np.float32)}, file)
    with pytest.raises(CertificateError, match="not the one that was certified"):
        lists_tensors_of(finished, file)
    save_file(forged(finished), file)
    with pytest.raises(CertificateError, match="not the one that was certified"):
        lists_tensors_of(finished, file)
    certify(finished, RunKey.fresh())
    assert not lists_tensors_of(finished, finished / "model.safetensors"), "signed by another run's key"


def test_bytes_of_no_tensor_are_in_no_file_that_verifies(finished: Path) -> None:
    content = (finished / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for entry in (header[name] for name in TENSORS):
        entry["data_offsets"] = [at + 4 for at in entry["data_offsets"]]
    shifted = json.dumps(header).encode()
    apart = len(shifted).to_bytes(8, "little") + shifted + b"more" + content[8 + length :]
    for changed, fault in ((content + b"more", "bytes follow its last tensor"), (apart, "bytes between them")):
        (finished / "model.safetensors").write_bytes(changed)
        with pytest.raises(CertificateError, match=fault):
            verify(finished)


def test_what_looks_like_weights_and_was_not_compared_is_named(finished: Path) -> None:
    save_file({"bias": TENSORS["bias"]}, finished / "model.safetensors")
    (finished / "part").mkdir()
    for name in ("part/other.safetensors", "MODEL.SAFETENSORS", "model.onnx"):
        (finished / name).write_bytes(b"anything")
    found = verify(finished).attached
    assert found is not None and "model.safetensors holds certified weights, 1 of 2 tensors" in found.checked
    assert {sentence.partition(":")[0] for sentence in found.unchecked if ":" in sentence} >= {
        "part/other.safetensors", "MODEL.SAFETENSORS", "model.onnx",
    }  # fmt: skip


def test_hashes_are_those_of_any_container(tmp_path: Path) -> None:
    halves = {"half": np.arange(6, dtype=np.float16).reshape(2, 3), "empty": np.zeros((0, 3), np.float32)}
    save_file(TENSORS | halves, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = digests_of_safetensors(tmp_path / "x.safetensors")
    assert found["half"] == tensor_digest("F16", [2, 3], [halves["half"].tobytes()])
    assert found["weight"] == tensor_digest("F32", (3, 4), [TENSORS["weight"].tobytes()])
    assert found["empty"] == tensor_digest("F32", [0, 3], []) and "__metadata__" not in found
    assert found["weight"] != tensor_digest("F32", [4, 3], [TENSORS["weight"].tobytes()]), "shapes count"
    content = (tmp_path / "x.safetensors").read_bytes()
    for damaged in (content[:-3], content[:20], b"", b"\xff" * 64):
        (tmp_path / "x.safetensors").write_bytes(damaged)
        with pytest.raises(WeightsFileError, match="is not a safetensors file"):
            digests_of_safetensors(tmp_path / "x.safetensors")


THREE = Declared("three rates", Tuning(3, fixed=True))


def test_renamed_tensors_are_known_by_the_digests_of_the_certified_ones(tmp_path: Path) -> None:
    matrix, more = TENSORS["weight"], np.ones(2, np.float32)
    save_file({"a": matrix}, tmp_path / "ours.safetensors")
    save_file({"upper": matrix[:2], "lower": matrix[2:], "more": more}, tmp_path / "x.safetensors")
    told = {"x.safetensors": {"a": {"shape": [3, 4], "parts": ["upper", "lower"]}}}
    (tmp_path / RENAMED).write_text(json.dumps(told))
    found = digests_of_renamed(tmp_path / "x.safetensors")
    assert found is not None and found.digests == digests_of_safetensors(tmp_path / "ours.safetensors")
    assert found.others == ["more"] and digests_of_renamed(tmp_path / "ours.safetensors") is None
    save_file({"upper": matrix[:2]}, tmp_path / "x.safetensors")
    with pytest.raises(WeightsFileError, match=r"names 'lower', which x\.safetensors lacks"):
        digests_of_renamed(tmp_path / "x.safetensors")


def test_a_certificate_no_longer_covers_a_run_of_which_more_was_declared(tmp_path: Path) -> None:
    run(tmp_path)
    certify(tmp_path)
    verify(tmp_path)
    journal = reopen(tmp_path)
    journal.declare_tuning(THREE)
    with pytest.raises(CertificateError, match="no longer covers the run"):
        verify(tmp_path)
    with pytest.raises(LedgerError, match=r"chosen was declared after it was signed, and the key .* is destroyed"):
        earlier_certificate(RunDir(tmp_path), journal.history, journal.ledger.entries)
    journal.ledger.close()


# `retire.py`: the key of a run that will not go on is destroyed, and what it spent is certified.


@pytest.mark.parametrize("logged", [False, True])
@pytest.mark.parametrize("unknown", [None, "shards have hard links"])
def test_a_retired_run_is_closed_certified_and_without_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logged: bool, unknown: str | None
) -> None:
    """The certificate states what that of a finished run states, and the siblings that the log of runs knows: those on
    the same records, and whether there may be others."""
    key, runs = RunKey.fresh(), tmp_path.parent / f"{tmp_path.name}.jsonl"
    store(key, tmp_path / "secret" / "run.key")
    journal = begin(tmp_path, key=key)
    if logged:
        own = journal.history.run_id
        for run, name, private, shard in (
            (own, "tiny", True, "1"),
            ("b", "twin", False, "1"),
            ("c", "other", True, "2"),
        ):
            line = {"id": run, "run": name, "phase": "private", "private": private, "shards": [shard]}
            append(runs, line, 0o644)
        note_logs(tmp_path / "secret", [runs], unknown)
    train(journal, range(1, 4))
    assert retire([str(tmp_path)]) == 5, "while a process writes the ledger"
    assert "in use by another process" in capsys.readouterr().err
    journal.ledger.close()

    assert retire([str(tmp_path)]) == 0
    assert "its key is destroyed" in capsys.readouterr().out
    assert not (tmp_path / "secret" / "run.key").exists()
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert {*OF_THIS_TRAINER, RETIRED} <= set(document["known_deviations"])
    assert (NO_LOG in document["known_deviations"]) is not logged
    assert [each["run"] for each in document["siblings"]] == (["twin"] if logged else [])
    assert not logged or "claim_of" in runs.read_text()
    told = [each for each in document["known_deviations"] if "may not be known: shards have hard links" in each]
    assert bool(told) is (logged and unknown is not None)
    verdict = verify(tmp_path)
    assert verdict.claimed == PLAN.epsilon_budget and "ended after 3 of 40" in (verdict.claimed_because or "")
    assert verdict.attached is not None and verdict.attached.signed_by == public_key(key)
    journal = reopen(tmp_path)
    with pytest.raises(LedgerError, match="finished before"):
        train(journal, range(4, 5))
    journal.ledger.close()

    assert retire([str(tmp_path)]) == 0
    assert "no key left" in capsys.readouterr().out
    assert retire([str(tmp_path / "absent")]) == 5


def test_a_ledger_that_was_restored_is_retired_with_what_its_lost_part_charged(tmp_path: Path) -> None:
    """Its key is destroyed with it, so what is signed now is the last word."""
    key, ledger = RunKey.fresh(), tmp_path / "ledger.jsonl"
    store(key, tmp_path / "secret" / "run.key")
    journal = begin(tmp_path, key=key)
    journal.witnesses["secret"] = lambda head: append(tmp_path / "secret" / NAME, head.as_dict(), 0o600)
    train(journal, range(1, 6))
    journal.checkpointed(0, 5, "five")
    backup = ledger.read_bytes()
    train(journal, range(6, 41))
    journal.checkpointed(0, 40, "forty")
    journal.ledger.close()
    ledger.write_bytes(backup)

    assert retire([str(tmp_path)]) == 0
    history, _ = History.read(ledger)
    assert sum(event.count for event in history.charged()) == 40, "5 in the ledger and 35 that are known to be lost"
    assert verify(tmp_path).epsilon == pytest.approx(epsilon(history.planned(), PLAN.delta))
