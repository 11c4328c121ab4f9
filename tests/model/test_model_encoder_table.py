"""docs/encoders.md is made of the committed measurements, and as many of timm's encoders are exact as was promised."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current_and_nine_of_ten_encoders_without_batch_normalisation_are_exact() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "encoders.json").read_text())
    made = runpy.run_path(str(ROOT / "benchmarks" / "encoder_page.py"))
    remedy = "run: python benchmarks/encoders.py --page"
    assert (ROOT / "docs" / "encoders.md").read_text() == made["page"](found), remedy
    assert set(found["names"]) <= set(runpy.run_path(str(ROOT / "benchmarks" / "encoder_names.py"))["NAMES"])
    shares = made["shares"](found["names"])
    assert len(found["names"]) >= 60 and shares["exact"] >= 0.9 and shares["by_rules"] >= 0.7
    assert shares["free"] >= 50, "most are no convolutional networks with batch normalisation"
