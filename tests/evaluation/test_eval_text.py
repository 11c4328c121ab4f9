"""The protocol for language models: their loss and perplexity on public texts, by every form of weights."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from murmuration.data.text.encoder import TextEncoder
from murmuration.train.commands import export
from tests.support.evaluation_world import evaluate, result
from tests.support.texts import write_texts
from tests.train.test_train_language_model import sentences, started
from tests.train.test_train_named_language_model import LENGTH, page_config

UNEVEN = [each[: 12 + 6 * (number % 3)] for number, each in enumerate(sentences(64, 1))]
NUMBERS = ["loss, mean over texts", "loss, mean over tokens", "perplexity"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters on a Llama, its exports, and public texts."""
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder / "uneven", UNEVEN)
    done = started(folder, json.loads(page_config(folder).read_text()))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def measured(world: Path, out: Path, what: str | Path, *more: Any) -> dict[str, Any]:
    assert evaluate("text", world / what, "--data", world / "uneven", "--public", "--out", out, *more) == 0
    return result(out)


def by_transformers(folder: Path, length: int) -> tuple[list[float], list[int]]:
    net = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = TextEncoder(folder, length, of_language_model=True)
    losses, counts = [], []
    for each in UNEVEN:
        row = torch.tensor([token for token in text.encode(each) if token >= 0])[None]
        with torch.no_grad():
            losses.append(net(input_ids=row, labels=row).loss.item())
        counts.append(row.shape[1] - 1)
    return losses, counts


def test_a_folder_has_the_losses_that_transformers_gives(world: Path, tmp_path: Path) -> None:
    told = measured(world, tmp_path / "out", "model", "--micro-batch", 24)
    losses, counts = by_transformers(world / "model", 32)
    assert told["settings"]["length"] == 32, "its positions"
    texts = sum(losses) / len(losses)
    tokens = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert list(told["numbers"]) == NUMBERS and texts != pytest.approx(tokens, rel=1e-4)
    for name, expected in zip(NUMBERS, (texts, tokens, math.exp(tokens)), strict=True):
        found = told["numbers"][name]
        assert found["value"] == pytest.approx(expected, rel=1e-5) and found["low"] < found["value"] < found["high"]
    with (tmp_path / "out" / "texts.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["tokens"]) for row in rows] == counts
    assert [float(row["loss"]) for row in rows] == pytest.approx(losses, rel=1e-4)


def test_runs_and_exports_are_measured_as_trained_and_certified(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["export.py", str(world / "run"), str(tmp_path / "ours")])
    assert export.main() == 0
    monkeypatch.setattr(sys, "argv", ["export.py", str(world / "run"), str(tmp_path / "hf"), "--form", "hf"])
    assert export.main() == 0
    tokenizer = ["--tokenizer", world / "model"]
    run = measured(world, tmp_path / "1", "run", *tokenizer)
    ours = measured(world, tmp_path / "2", tmp_path / "ours", *tokenizer)
    theirs = measured(world, tmp_path / "3", tmp_path / "hf", *tokenizer, "--length", LENGTH)
    before = measured(world, tmp_path / "4", "model", "--length", LENGTH)
    assert run["numbers"] == ours["numbers"] and run["settings"]["length"] == LENGTH
    assert run["certificate"]["private"] and run["certificate"]["epsilon"] == ours["certificate"]["epsilon"]
    for name in NUMBERS:
        value = run["numbers"][name]["value"]
        assert theirs["numbers"][name]["value"] == pytest.approx(value, rel=1e-4)
        assert value < before["numbers"][name]["value"], "it has learnt"


REFUSED: list[tuple[str, str, list[Any], str]] = [
    ("text", "run", [], "texts are read by a tokenizer; pass --tokenizer"),
    ("text", "model", ["--length", 33], "has 32 positions"),
    ("text", "public", [], "has neither checkpoints nor"),
    ("reconstruct", "run", [], """was trained for 'text', which is none of mae, caption, classify; evaluate it by"""),
]


@pytest.mark.parametrize(("protocol", "what", "more", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    protocol: str, what: str, more: list[Any], reason: str, world: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    code = evaluate(protocol, world / what, "--data", world / "public", "--public", "--out", tmp_path, *more)
    error = capsys.readouterr().err
    assert code == 2 and reason in error and error.count("\n") == 1
    assert not (tmp_path / "result.json").exists()


def test_private_texts_are_refused(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--tokenizer", world / "model", "--data", world / "notes", "--public", "--out", tmp_path]
    assert evaluate("text", world / "run", *given) == 2
    assert "protects these records" in capsys.readouterr().err
