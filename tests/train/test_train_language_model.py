"""GPT-2 on texts without pictures: it is the library's, and each text is clipped by itself."""

from __future__ import annotations

import copy
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.index.open import open_index
from murmuration.data.text.encoder import TextEncoder, word_tokenizer
from murmuration.model.build import build
from murmuration.model.captioner import PAD
from murmuration.model.language_model import LanguageModel
from murmuration.model.load_report import WeightsError
from murmuration.model.settings import ModelSettings, SettingsError
from murmuration.model.warm_start import initialise_with
from murmuration.train.config.load import load
from murmuration.train.config.section import RecipeError
from tests.support import brute_force, forking
from tests.support.brute_force import relative_error
from tests.support.launching import ROOT, environment
from tests.support.parity_engines import ENGINES, factor_of, median_norm, only, prepared, rule_of, summed
from tests.support.texts import write_texts

SIZES: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "text_length": 9, "vocabulary": 23}
WORDS = ["def", "return", "if", "else", "x", "y", "one", "two", "plus", "minus"]


def small(seed: int = 0) -> LanguageModel:
    model = build(ModelSettings(family="gpt2", **SIZES), "text")
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # no parameter at a special value: a lost term would not be seen
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    return model


def texts(count: int, seed: int = 1) -> Tensor:
    """With repeats within a text, and padding at the end of some."""
    tokens = torch.randint(
        1, SIZES["vocabulary"], (count, SIZES["text_length"]), generator=torch.Generator().manual_seed(seed)
    )
    tokens[::2, -3:] = PAD
    return tokens


def test_its_losses_are_those_of_the_library() -> None:
    model = small().eval()
    config = GPT2Config(vocab_size=23, n_positions=9, n_embd=16, n_layer=2, n_head=2)
    theirs = GPT2LMHeadModel(config).eval()
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, "the head is the table of words"
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    tokens = texts(6)
    found = model({"tokens": tokens})
    for row, loss in zip(tokens, found, strict=True):
        own = row[row != PAD][None]
        assert loss.item() == pytest.approx(theirs(input_ids=own, labels=own).loss.item(), abs=1e-5)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    doubled = model({"tokens": tokens, "record_weight": torch.full((6,), 2.0)})
    torch.testing.assert_close(doubled, 2 * found)


@pytest.mark.parametrize(("size", "published"), [("small", 124_439_808), ("large", 774_030_080)])
def test_the_published_sizes_are_those_of_gpt_2(size: Literal["small", "large"], published: int) -> None:
    settings = ModelSettings(family="gpt2", size=size, text_length=1024, vocabulary=50257)
    assert sum(p.numel() for p in build(settings, "text", "meta").parameters()) == published


def test_the_first_weights_are_the_seeds_and_nothing_elses() -> None:
    torch.manual_seed(3)
    one = build(ModelSettings(family="gpt2", **SIZES), "text").state_dict()
    torch.manual_seed(4)
    before = torch.get_rng_state()
    same, other = (build(ModelSettings(family="gpt2", init_seed=s, **SIZES), "text").state_dict() for s in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    names = ("transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight")
    assert not any(torch.equal(one[name], other[name]) for name in names)


def test_weights_of_another_run_are_taken_whole_or_not_at_all() -> None:
    start, model = small(1), small(2)
    initialise_with(model, start.state_dict(), {"what": "export"})
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), start.parameters(), strict=True))
    wider = build(ModelSettings(family="gpt2", **SIZES | {"vocabulary": 24}), "text")
    with pytest.raises(WeightsError, match=r"transformer\.wte\.weight is"):
        initialise_with(wider, start.state_dict(), {"what": "export"})


@pytest.mark.parametrize("kind", ["flat", "automatic"])
@pytest.mark.parametrize("engine", ENGINES)
def test_each_text_is_clipped_by_itself(engine: str, kind: str) -> None:
    """Conv1D layers, and a table that is embedding and head in one: against a loop over single texts."""
    model = small()
    present = torch.ones(8, dtype=torch.bool)
    present[5] = False
    weights = torch.tensor([1.0, 1, 3, 1, 1e-12, math.nan, 1, math.nan])
    inputs = {"tokens": texts(8), "record_weight": weights}
    records = brute_force.records_of(model, inputs)
    usual = torch.tensor([row in (0, 1, 2, 3, 6) for row in range(8)])
    bound = median_norm(records, usual)
    factors = brute_force.factors_of(records, present, factor_of(kind, bound))
    expected = brute_force.clipped_sum(records, factors)
    clip = prepared(engine, rule_of(kind, bound), model)
    halves = [(only(inputs, rows), present[rows]) for rows in (slice(0, 4), slice(4, 8))]
    totals, seen = summed(clip, model, halves)
    for name, tensor in expected.items():
        assert relative_error({name: totals[name]}, {name: tensor}) <= 1e-4, name
    assert torch.cat([each.factors for each in seen]).tolist() == pytest.approx(factors, rel=1e-4)
    assert statistics.median(record.norm() for row, record in enumerate(records) if usual[row]) > 0
    tied = [record.gradient["transformer.wte.weight"] for record in records]
    assert all(bool((each != 0).any(dim=1).all()) for each in tied[:4]), "the head reaches words that no text has"


def sentences(count: int, seed: int) -> list[str]:
    """A word is followed by one of two, so that there is something to learn."""
    draw, found = np.random.default_rng(seed), []
    for _ in range(count):
        words = [int(draw.integers(len(WORDS)))]
        while len(words) < 6:
            words.append((words[-1] * 3 + int(draw.integers(2))) % len(WORDS))
        found.append(" ".join(WORDS[word] for word in words))
    return found


def test_texts_are_read_without_pictures_and_a_record_without_a_text_is_bad(tmp_path: Path) -> None:
    text = TextEncoder(word_tokenizer(WORDS, tmp_path / "tokenizer.json"), 9)
    spec = DataSpec(1, pictures=False)
    reader = BatchReader(open_index(write_texts(tmp_path / "texts", sentences(3, 1))), spec, text)
    batch = reader.read(np.arange(3), 1)
    assert batch.present.all() and batch.inputs["images"].shape == (3, 3, 1, 1)
    assert text.decode(batch.inputs["tokens"][0].tolist()).split()[0] in WORDS
    reader.close()
    bare = BatchReader(open_index(write_texts(tmp_path / "other", sentences(2, 1), "html")), spec, text)
    assert not bare.read(np.arange(2), 1).present.any() and len(bare.bad_records) == 2
    bare.close()


def config(folder: Path, **private: Any) -> dict[str, Any]:
    texts = {"path": str(folder / "private"), "tokenizer": str(folder / "tokenizer.json"), "reading": {"workers": 0}}
    return {
        "train_micro_batch_size_per_gpu": 16,
        "model": {"family": "gpt2", **SIZES},
        "phases": [
            {
                "name": "public", "objective": "text", "batch": 16, "steps": 6,
                "data": {**texts, "path": str(folder / "open"), "public": True},
                "optimizer": {"type": "AdamW"}, "schedule": {"peak": 0.01, "warmup": 1, "shape": "constant"},
            },
            {
                "name": "private", "objective": "text", "steps": 6, "data": texts,
                "privacy": {"epsilon": 8.0, "delta": "1/(2n)", "expected_batch": 60,
                            "clip": {"kind": "automatic", "norm": 1.0, "gamma": 0.01}},
                "optimizer": {"type": "AdamW", "carry": "second-moment"},
                "schedule": {"peak": 0.005, "warmup": 1, "shape": "constant"},
                "evaluation": {"path": str(folder / "open"), "public": True, "records": 40},
                **private,
            },
        ],
        "run": {"engine": "local", "checkpoint_every": 3, "log_every": 1},
    }  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_texts(folder / "open", sentences(64, 1))
    write_texts(folder / "private", sentences(300, 2))
    word_tokenizer(WORDS, folder / "tokenizer.json")
    return folder


def started(folder: Path, told: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(told))
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(folder / "config.json")]
    return forking.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


REFUSED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda raw: raw["phases"][1].update(objective="caption"), "belong together"),
    (lambda raw: raw["model"].update(family="captioner"), "belong together"),
    (lambda raw: raw.update(zero_optimization={"stage": 3}) or raw["run"].update(engine="deepspeed"), "ZeRO-3"),
    (lambda raw: raw["run"].update(engine="fsdp2"), "FSDP2 shard"),
    (lambda raw: raw["model"].update(patch_size=8), 'family "gpt2" has no model.patch_size'),
    (lambda raw: raw["model"].update(size="huge"), "choose small, large or custom"),
    (lambda raw: raw["phases"][1]["data"].pop("tokenizer"), "needs data.tokenizer"),
    (lambda raw: raw["phases"][1]["privacy"].update(views=2), "cropped in several ways"),
    (lambda raw: raw["phases"][1].update(trainable="bias"), "of which no part is called 'bias'"),
    (lambda raw: raw["phases"][1]["data"].update(label="cls"), "data.label would have no effect"),
    (lambda raw: raw["phases"][1]["data"].update(augment="center"), "sees no picture"),
    (lambda raw: raw["phases"][0].update(data={"source": "synthetic", "kind": "shapes", "tokenizer": "clip"}),
     "synthetic records are pictures"),
    (lambda raw: raw["phases"][1]["evaluation"].update(zero_shot={}), "names no classes"),
    (lambda raw: raw["phases"][1].update(monitor={"path": "x", "public": True}), "curvature is not measured"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_a_language_model_cannot_do_is_refused_in_a_sentence(
    world: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    from murmuration.train.recipe.ready_phase import resolve_shape

    raw = copy.deepcopy(config(world))
    change(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises((RecipeError, SettingsError, ValueError), match=reason):
        found = load(tmp_path / "config.json", [])
        for phase in found.phases:
            build(resolve_shape(found), phase.objective, "meta")


def test_its_parameters_can_all_be_trained_record_by_record() -> None:
    from murmuration.model.safety import refuse_coupling

    model: nn.Module = small()
    refuse_coupling(model)
