"""Which of the clip engine's kernels there are, as far as a test is concerned, on a processor; totals are added to
without one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from murmuration.train.clip import kernels

NAMES = ("gram", "layer_norm_backward", "group_norm_backward", "scale", "row_sums", "standardised")


def have_only(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    """As on a GPU that has the kernels which are given, and no others."""
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    assert given.keys() <= set(NAMES)
    for name in NAMES:
        monkeypatch.setattr(kernels, name, partial(lambda kernel, device: kernel, given.get(name)))


def have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor."""
    have_only(monkeypatch)
    monkeypatch.setattr(kernels, "DEVICES", ())
