"""Texts in indexed tar shards, without pictures, and models of texts that were trained on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tars import indexed


def write_texts(folder: Path, texts: Sequence[str], suffix: str = "txt") -> Path:
    indexed(folder, ({suffix: text.encode()} for text in texts))
    return folder


def exports_agree(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, logits: Callable[[Any], Tensor]) -> None:
    """Of `folder/run`, which began with `folder/model`: as a model of transformers and as an adapter of PEFT it
    computes the same, and something else than before. `kind`: what loads such a model."""
    from peft import PeftModel

    from murmuration.train.commands import export

    for form in ("hf", "peft"):
        monkeypatch.setattr(sys, "argv", ["export.py", str(folder / "run"), str(folder / form), "--form", form])
        assert export.main() == 0
    before, after, base = (kind.from_pretrained(folder / name).eval() for name in ("model", "hf", "model"))
    merged, adapted = logits(after), logits(PeftModel.from_pretrained(base, folder / "peft").eval())
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=1e-4)
    assert (merged - logits(before)).abs().max() > 1e-3
