"""A whole run with two processes, and one by a real launcher: finished, stopped, killed, resumed, verified."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from murmuration.accounting.keys import RunKey, store
from murmuration.train.commands.export import main as export
from murmuration.train.recipe.warm_start import WarmStart
from murmuration.train.storage.checkpoint import Loaded
from tests.support import forking
from tests.support.launching import ROOT, Launch, environment, ledger_lines, opened_steps
from tests.support.runs import SMALL_STEPS, account, different, final_weights, state_of, toy

Make = Callable[..., tuple[Launch, Path]]


def test_run_directory_holds_what_the_design_lists(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    for name in ("ledger.jsonl", "certificate.json", "certificate.md", "report.html", "run_state.json", "checkpoints"):
        assert (run_dir / name).exists(), name
    assert state_of(run_dir) == "done"
    assert not (run_dir / "secret" / "run.key").exists(), "the run key outlived the final certificate"
    for private in (run_dir / "secret", run_dir / "tb" / "private", run_dir / "logs" / "private"):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / "logs" / "private" / "curves.jsonl").stat().st_mode) == 0o600


def test_a_report_that_claims_something_else_is_named(finished: tuple[Path, str], tmp_path: Path) -> None:
    """Nobody signs it, and it is the page that people open first."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    assert "report.html shows this certificate" in account("verify", str(run_dir)).stdout
    page = (run_dir / "report.html").read_text()
    claim = json.loads((run_dir / "certificate.json").read_text())["claim"]["statement"]
    assert page.count(html.escape(claim)) > 1
    first, second, *_ = (place.start() for place in re.finditer(re.escape(html.escape(claim)), page))
    for place in (first, second):  # at the top, and in the certificate below
        forged = page[:place] + "none" + page[place + len(html.escape(claim)) :]
        (run_dir / "report.html").write_text(forged)
        told = account("verify", str(run_dir))
        assert told.returncode == 7 and "report.html: it does not show this certificate" in told.stdout


def test_ledger_has_each_step_once_with_the_facts_of_the_acting_parts(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    lines = ledger_lines(run_dir)
    assert opened_steps(run_dir) == list(range(1, SMALL_STEPS + 1))
    commits = [line for line in lines if line["kind"] == "commit"]
    assert [line["step"] for line in commits] == list(range(1, SMALL_STEPS + 1))
    weights = sum(t.numel() for n, t in final_weights(run_dir).items() if n in trainable_names(run_dir))
    for line in commits:
        assert line["facts"]["noise"]["elements"] == weights
        assert line["facts"]["sampling"]["rule"]["threshold"] == round(48 / 600 * 2**32)
        assert [metric["name"] for metric in line["facts"]["metrics"]] == ["loss", "clipped"]
    assert len({line["facts"]["sampling"]["digest"] for line in commits}) == SMALL_STEPS
    assert not any(re.search(r"\d{4}-\d\d-\d\d|time", json.dumps(line)) for line in lines if line["kind"] != "run")


def trainable_names(run_dir: Path) -> set[str]:
    pointer = json.loads((run_dir / "checkpoints" / "latest").read_text())
    loaded = Loaded.open(run_dir / "checkpoints" / pointer["folder"], pointer["manifest_sha256"])
    return set(loaded.names("weights"))


def test_verify_agrees_and_names_a_changed_line(finished: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, output = finished
    answer = account("verify", str(run_dir), "--json")
    assert answer.returncode == 0, answer.stderr
    verdict = json.loads(answer.stdout)
    certificate = json.loads((run_dir / "certificate.json").read_text())
    assert abs(verdict["epsilon"] - certificate["claim"]["epsilon"]) < 1e-6
    assert verdict["epsilon"] <= 8
    assert "NOT PRIVATE (debug)" in output and "NOT PRIVATE (debug)" in certificate["claim"]["statement"]

    copy = tmp_path / "copy"
    copy.mkdir()
    content = bytearray((run_dir / "ledger.jsonl").read_bytes())
    position = content.index(b'"std"')
    content[position + 7] ^= 1
    (copy / "ledger.jsonl").write_bytes(content)
    refused = account("verify", str(copy))
    line = content[:position].count(b"\n") + 1
    assert refused.returncode != 0 and f"line {line}:" in refused.stderr


def test_public_sinks_show_no_private_quantity(finished: tuple[Path, str]) -> None:
    """Contract 16: losses, norms and batch sizes of private records reach private sinks alone."""
    run_dir, output = finished
    board = EventAccumulator(str(run_dir / "tb" / "public")).Reload()
    public = board.Tags()["scalars"]
    times = {event.wall_time for tag in public for event in board.Scalars(tag)}
    assert len(times) == 1, "the times of private steps tell their batch sizes"
    private = EventAccumulator(str(run_dir / "tb" / "private")).Reload()
    assert {"dp/epsilon", "dp/lr", "dp/public_loss", "dp/update_snr"} <= set(public)
    assert any(tag == "dp signal to noise/blocks.0" for tag in public), "of each layer"
    # Released with noise, charged with the step's gradient: these may be seen.
    assert {"dp/noised_loss", "dp/noised_clipped"} <= set(public)
    assert {"private/loss", "private/records", "private/gradient_norm"} <= set(private.Tags()["scalars"])
    assert not {"dp/loss", "dp/records", "dp/gradient_norm", "dp/clipped_fraction"} & set(public)
    assert not [tag for tag in public if tag.startswith("private/")]
    secret = [json.loads(line) for line in (run_dir / "logs" / "private" / "curves.jsonl").read_text().splitlines()]
    shown = output + (run_dir / "report.html").read_text() + (run_dir / "logs" / "public.jsonl").read_text()
    assert all(0 <= entry["waiting_share"] <= 1 and entry["samples_per_second_per_core"] > 0 for entry in secret)
    assert "waiting" not in shown and "per_core" not in shown, "one slow record shows in them"
    assert not [tag for tag in public if "waiting" in tag or "core" in tag]
    for entry in secret:
        if entry["phase"] == "private":
            assert f"{entry['loss']:.6f}"[:8] not in shown
    assert "samples/s (timed on synthetic records)" in output
    assert any(line.get("what") == "private_curves" for line in ledger_lines(run_dir)), "this config asks for them"
    assert "Decisions taken by them are outside the claim" in (run_dir / "certificate.md").read_text()


def test_what_stays_tells_no_time_of_a_private_step(finished: tuple[Path, str]) -> None:
    """One rate in all lines of the private phase; and the files have the time of the start, not that of their steps."""
    run_dir, _ = finished
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    rates = [
        line["samples_per_second"] for line in lines if "samples_per_second" in line and line["phase"] == "private"
    ]
    assert len(rates) > 1 and len(set(rates)) == 1
    board = EventAccumulator(str(run_dir / "tb" / "public")).Reload()
    started = board.Scalars("dp/lr")[0].wall_time
    saved = sum(line["kind"] == "checkpoint" for line in ledger_lines(run_dir))
    times = {path: path.stat().st_mtime - started for path in (run_dir, *run_dir.rglob("*"))}
    assert set(times.values()) <= set(range(saved + 1)), times
    assert "<dc:date>" not in (run_dir / "report.html").read_text(), "which would say when the run ended"
    day = datetime.fromtimestamp(started, UTC).date().isoformat()
    assert json.loads((run_dir / "certificate.json").read_text())["dates"] == {"last_start": day}


def test_the_same_weights_by_torchrun_from_elsewhere(whole: Path, launch: Make) -> None:
    job, run_dir = launch("torchrun", toy, launcher="torchrun")
    code, output = job.run()
    assert code == 0, output
    assert different(final_weights(run_dir), final_weights(whole)) == []


def test_export_takes_weights_and_certificate_and_never_the_key(finished: tuple[Path, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    out = tmp_path / "out"
    script = [sys.executable, str(ROOT / "launch" / "export.py"), str(run_dir)]
    (run_dir / "certificate.md").write_text("(0.001, 0)-differential privacy")  # pages are not what is verified
    done = forking.run([*script, str(out)], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert (out / "NOT_PRIVATE.txt").read_text().startswith("NOT PRIVATE (debug)")
    exported = load_file(out / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in final_weights(run_dir).items())
    assert account("verify", str(out)).returncode == 7, "an export carries what its claim needs"
    signer = ledger_lines(run_dir)[0]["signer"]
    assert (
        f"signed with the key {signer}" in finished[1] and f"signer: {signer}" in (out / "certificate.md").read_text()
    )
    whole = account("verify", str(out), "--strict", "--signer", signer)
    assert whole.returncode == 0 and "\nall that can be recomputed was checked; " in whole.stdout, whole.stdout
    assert "(0.001, 0)" not in (out / "certificate.md").read_text()
    old = os.umask(0o077)
    try:
        assert export([str(run_dir), str(tmp_path / "closed")]) == 0
    finally:
        os.umask(old)
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "closed", *(tmp_path / "closed").rglob("*"))}
    assert modes == {0}, "what is not private is opened for nobody"
    alone = shutil.copy(out / "model.safetensors", tmp_path / "alone.safetensors")
    assert WarmStart.at(Path(alone)).protected == WarmStart.at(run_dir).protected != frozenset()
    uses = [line["use"] for line in ledger_lines(run_dir) if line["kind"] == "public"]
    assert uses == ["evaluation"] and "evaluated in phase 'private'" in (out / "certificate.md").read_text()

    # A key that occurs anywhere in what would leave: nothing may be written.
    key = run_dir / "secret" / "run.key"
    store(replace(RunKey.fresh(), secret=(out / "model.safetensors").read_bytes()[-32:]), key)
    refused = forking.run([*script, str(tmp_path / "leak")], capture_output=True, text=True, env=environment())
    assert refused.returncode == 2 and "contains the run key" in refused.stderr
    assert not (tmp_path / "leak").exists()
    inside = forking.run([*script, str(run_dir / "out")], capture_output=True, text=True, env=environment())
    assert inside.returncode == 2 and "secret folder" in inside.stderr
