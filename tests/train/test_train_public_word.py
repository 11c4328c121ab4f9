"""What is used without noise is public by somebody's word, and the word stands in the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from murmuration.train.config.load import ConfigError
from murmuration.train.config.root import Config
from tests.support.config_base import Change, put

EVALUATION, MONITOR = {"path": "held"}, {"path": "held", "records": 8}
START = {"name": "start", "data": {"source": "checkpoint", "path": "weights"}, "objective": "mae"}


def mixing(**more: Any) -> dict[str, Any]:
    return {"data": {"source": "shards", "path": "open", **more}, "batch": 4}


def with_start(**more: Any) -> Change:
    def change(raw: dict[str, Any]) -> None:
        raw["phases"].insert(0, START | {"data": START["data"] | more})

    return change


@pytest.mark.parametrize("word", [{}, {"public": False}, {"public": None}, {"public": "true"}, {"public": 1}])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda word: put("phases.1.evaluation", EVALUATION | word), "records to evaluate on are used without noise"),
        (lambda word: put("phases.1.monitor", MONITOR | word), "the monitor's records are used without noise"),
        (lambda word: put("phases.1.mixing", mixing(**word)), "mix in are not declared public|public"),
        (lambda word: with_start(**word), "weights to start from are used without noise|public"),
    ],
    ids=["evaluation", "monitor", "mixing", "weights"],
)
def test_nothing_is_public_because_nobody_said_anything(
    loaded: Callable[..., Config], change: Callable[[dict[str, Any]], Change], message: str, word: dict[str, Any]
) -> None:
    if word == {"public": False} and message.startswith("weights"):
        return  # said, and the run is marked for it
    with pytest.raises(ConfigError, match=message):
        loaded(change(word))
    loaded(change({"public": True}))


def test_weights_may_be_said_to_be_nobodys_but_public(loaded: Callable[..., Config]) -> None:
    assert not loaded(with_start(public=False)).phases[0].data.public
