"""The page of an export promises what the certificate promises: nothing where that promises nothing or is refuted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmuration.train.export import card
from murmuration.train.export.forms import Loading

CLAIM = "(8.0, 1e-05)-differential privacy for one record"
REFUTED: Any = {"made": True, "one_run": {"made": False}, "replay": {"made": True, "steps": 1, "refuted": True}}


@pytest.mark.parametrize(
    ("claim", "audit", "bounded"),
    [((True, CLAIM), {}, True), ((False, "NOT PRIVATE (debug)"), {}, False), ((True, CLAIM), REFUTED, False)],
)
def test_the_card_bounds_nothing_without_a_promise_that_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claim: tuple[bool, str], audit: Any, bounded: bool
) -> None:
    monkeypatch.setattr(card, "_task", lambda finished: "text-generation")
    monkeypatch.setattr(card, "_what", lambda finished: "A model")
    finished: Any = SimpleNamespace(
        model=SimpleNamespace(shape=SimpleNamespace(reads_texts=True)), class_names=(), closer=False
    )
    certificate = {
        "run": "tiny", "claim": {"private": claim[0], "statement": claim[1]}, "signature": {"public_key": "ab"},
        "unit": "one record", "adjacency": "zero-out", **({"audit": audit} if audit else {}),
    }  # fmt: skip
    card.write_card(tmp_path, finished, Loading("hf", "load()\n", ()), certificate, {}, "unknown")
    page = (tmp_path / card.NAME).read_text()
    assert "chosen among checkpoints" not in page
    assert ("which bounds what its private phases can reveal" in page) == ("differential-privacy\n" in page) == bounded
    assert ("REFUTED by this run's own audit" in page) == bool(audit), page
    assert page.startswith("---\nlicense: unknown\n") and "\n---\n\n# tiny\n" in page


def test_a_measurement_that_chose_the_weights_is_said_to_be_too_favourable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "_task", lambda finished: "text-generation")
    monkeypatch.setattr(card, "_what", lambda finished: "A model")
    finished: Any = SimpleNamespace(
        model=SimpleNamespace(shape=SimpleNamespace(reads_texts=True)), class_names=(), closer=False
    )
    certificate = {
        "run": "tiny", "claim": {"private": True, "statement": CLAIM}, "signature": {"public_key": "ab"},
        "unit": "one record", "adjacency": "zero-out",
    }  # fmt: skip
    for chosen in (True, False):
        card.write_card(
            tmp_path, finished, Loading("hf", "load()\n", ()), certificate, {"accuracy": 0.5}, "unknown", chosen
        )
        assert ("which were chosen among checkpoints" in (tmp_path / card.NAME).read_text()) == chosen
