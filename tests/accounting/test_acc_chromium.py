"""The certificate's page in a real browser, with a real drag and drop; skipped where no Chromium is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from murmuration.accounting.certificate.weights import digests_of_safetensors, list_digest, write_lists
from tests.accounting.test_acc_browser import NODE, ROOT, rewrites, signs, understated
from tests.accounting.test_acc_sentences import WHOLE, begun
from tests.support.acc_world import certified

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt install chromium)")


def dropped(profile: Path, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    command = [NODE, ROOT / "tests" / "support" / "chromium.js", CHROMIUM, profile]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def on_page(page: Path, folder: Path, **more: Any) -> dict[str, Any]:
    names = ("ledger.jsonl", "certificate.json", "weights.json", "model.safetensors")
    return {"page": str(page), "files": [str(folder / name) for name in names], **more}


def less_noise(fields: dict[str, Any]) -> None:
    if fields["kind"] == "open" and fields["step"] == 3:
        fields["facts"]["noise"]["std"] *= 0.9


def test_files_are_dropped_and_judged_and_nothing_leaves_the_page(tmp_path: Path) -> None:
    for name in ("honest", "forged", "noise", "cut"):
        folder = tmp_path / name
        journal = begun(folder, WHOLE, 12)
        save_file({"weight": np.arange(3, dtype=np.float32)}, folder / "model.safetensors")
        lists = {"phase00-step00000012": digests_of_safetensors(folder / "model.safetensors")}
        write_lists(lists, folder)
        (listed,) = lists.values()
        certified(journal, {"weights": [{"phase": 0, "step": 12, "sha256": list_digest(listed)}]})
    signs(understated)(tmp_path / "forged")
    rewrites(less_noise)(tmp_path / "noise")
    ledger = tmp_path / "cut" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-2]))
    verify, own = ROOT / "docs" / "verify.html", tmp_path / "honest" / "certificate.html"
    jobs = [
        on_page(verify, tmp_path / "honest"), on_page(own, tmp_path / "honest"), on_page(verify, tmp_path / "forged"),
        on_page(verify, tmp_path / "noise"), on_page(verify, tmp_path / "cut"),
        on_page(verify, tmp_path / "honest", withoutCrypto=True),
    ]  # fmt: skip
    honest, inside, forged, noise, cut, blind = found = dropped(tmp_path / "profile", *jobs)
    for each in (honest, inside):
        assert each["state"] == "holds" and each["verdict"].startswith("What this page could check holds: ("), each
        assert "holds: model.safetensors: every tensor is a certified one." in each["findings"] and each["drawn"]
        assert not any(line.startswith("DOES NOT HOLD") for line in each["findings"])
    assert forged["state"] == "fails" and "the certificate says ε = " in forged["verdict"], forged
    assert noise["state"] == "fails" and "step 3 of phase 0 has noise of" in noise["verdict"], noise
    assert cut["state"] == "fails" and "or this one was cut or rewritten" in cut["verdict"], cut
    assert blind["state"] == "open" and "cannot check Ed25519 signatures" in blind["verdict"], blind
    for each, job in zip(found, jobs, strict=True):
        assert each["requests"] == [f"file://{job['page']}"], "the page alone was loaded, and nothing was sent"
