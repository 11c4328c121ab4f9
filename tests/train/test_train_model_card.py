"""The page of an export promises what the certificate promises: nothing where that promises nothing or is refuted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmuration.train.export import card
from murmuration.train.export.forms import Loading

CLAIM = "(8.0, 1e-05)-differential privacy for one record"
REFUTED: Any = {"made": True, "one_run": {"made": False}, "replay": {"made": True, "steps": 1, "refuted": True}}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setattr(card, "_task", lambda finished: "text-generation")
    monkeypatch.setattr(card, "_what", lambda finished: "A model")

    def written(certificate: dict[str, Any], measured: dict[str, float] | None = None, *chosen: bool) -> str:
        model = SimpleNamespace(shape=SimpleNamespace(reads_texts=True))
        finished: Any = SimpleNamespace(model=model, class_names=(), closer=False)
        whole = {"run": "tiny", "claim": {"private": True, "statement": CLAIM}, "signature": {"public_key": "ab"},
                 "unit": "one record", "adjacency": "zero-out", **certificate}  # fmt: skip
        card.write_card(tmp_path, finished, Loading("hf", "load()\n", ()), whole, measured or {}, "unknown", *chosen)
        return (tmp_path / card.NAME).read_text()

    return written


@pytest.mark.parametrize(
    ("certificate", "bounded"),
    [({}, True), ({"claim": {"private": False, "statement": "NOT PRIVATE (debug)"}}, False),
     ({"audit": REFUTED}, False)],
)  # fmt: skip
def test_the_card_bounds_nothing_without_a_promise_that_stands(
    page: Callable[..., str], certificate: dict[str, Any], bounded: bool
) -> None:
    text = page(certificate)
    assert "chosen among checkpoints" not in text
    assert ("which bounds what its private phases can reveal" in text) == ("differential-privacy\n" in text) == bounded
    assert ("REFUTED by this run's own audit" in text) == ("audit" in certificate), text
    assert text.startswith("---\nlicense: unknown\n") and "\n---\n\n# tiny\n" in text


def test_a_measurement_that_chose_the_weights_is_said_to_be_too_favourable(page: Callable[..., str]) -> None:
    for chosen in (True, False):
        assert ("which were chosen among checkpoints" in page({}, {"accuracy": 0.5}, chosen)) == chosen
