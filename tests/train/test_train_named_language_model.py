"""Language models of transformers by their folder: their losses, clipping record by record, LoRA, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from murmuration.accounting.certificate.verify import verify
from murmuration.data.text.encoder import TextEncoder
from murmuration.model.build import build
from murmuration.model.language_model import NamedLanguageModel
from murmuration.model.settings import ModelSettings, SettingsError
from murmuration.model.trainable import select
from murmuration.model.warm_start import initialise_from
from murmuration.train.clip.rule import ClipError
from murmuration.train.config.load import ConfigError, load
from murmuration.train.planner.cluster import Cluster
from murmuration.train.planner.forecast import forecast
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.launching import ROOT
from tests.support.parity_engines import (
    judged,
    only,
    prepared,
    rule_of,
    summed,
    with_adapters_that_do_something,
)
from tests.support.texts import exports_agree, write_texts
from tests.train.test_train_language_model import WORDS, sentences, started

LENGTH = 9
SIZES: dict[str, Any] = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "llama tied": ("llama", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", SIZES | {"head_dim": 8}),
    "gemma2": ("gemma2", SIZES | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen3 moe": (
        "qwen3_moe",
        SIZES
        | {
            "head_dim": 8,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "output_router_logits": True,
        },
    ),
    "gpt2": ("gpt2", {"vocab_size": 13, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
}

MIXTURES = ("mixtral", "qwen3 moe")


def folder_of(kind: str, folder: Path) -> Any:
    """A folder of transformers with weights and a tokenizer, as users have them; and the model in it."""
    name, sizes = KINDS[kind]
    torch.manual_seed(1)
    how = "eager" if kind == "gemma2" else "sdpa"
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), attn_implementation=how).eval()
    net.save_pretrained(folder)
    write_tokenizer(folder)
    return net


def write_tokenizer(folder: Path, *more: str) -> None:
    vocabulary = {word: number for number, word in enumerate([*WORDS, "<unk>", "<s>", "</s>", *more])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def model_of(folder: Path, trainable: str = "all") -> NamedLanguageModel:
    model = build(ModelSettings(family="hf", name=str(folder), text_length=LENGTH), "text")
    assert isinstance(model, NamedLanguageModel)
    initialise_from(model, folder)
    select(model, trainable, rank=2)  # pyright: ignore[reportArgumentType]
    return model


def rows(folder: Path, count: int) -> Tensor:
    text = TextEncoder(folder, LENGTH, of_language_model=True)
    return torch.tensor([text.encode(each[: 12 + 6 * (number % 3)]) for number, each in enumerate(sentences(count, 3))])


@pytest.mark.parametrize("kind", KINDS)
def test_its_losses_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    theirs = folder_of(kind, tmp_path)
    theirs.config.output_router_logits = False
    tokens = rows(tmp_path, 6)
    assert (tokens == -1).any() and (tokens == 0).any(), "0 is a word"
    found = model_of(tmp_path).eval()({"tokens": tokens})
    for row, loss in zip(tokens, found, strict=True):
        own = row[row >= 0][None]
        assert loss.item() == pytest.approx(theirs(input_ids=own, labels=own).loss.item(), abs=1e-5)


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_texts_experts_and_loss_do_not_depend_on_other_texts(kind: str, tmp_path: Path) -> None:
    """Nor is the router's load-balancing loss trained on, which a folder may ask for: it counts over a whole batch."""
    theirs = folder_of(kind, tmp_path)
    model, tokens = model_of(tmp_path).eval(), rows(tmp_path, 6)
    together, alone = model({"tokens": tokens}), torch.cat([model({"tokens": row[None]}) for row in tokens])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    own = tokens[0][tokens[0] >= 0][None]
    balanced = theirs(input_ids=own, labels=own, output_router_logits=True)
    assert balanced.aux_loss > 0 and balanced.loss > alone[0] + 1e-4
    assert model.body.net.config.output_router_logits is False  # pyright: ignore


class Balanced(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        ids = inputs["tokens"].clamp(min=0)
        found = self.net(input_ids=ids, attention_mask=torch.ones_like(ids), output_router_logits=True, use_cache=False)
        return found.logits.logsumexp(-1).mean(1) + found.aux_loss


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_routers_load_balancing_loss_is_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    model = Balanced(folder_of(kind, tmp_path))
    # With the oldest PyTorch, its routing is refused before.
    sentence = "the memory of a record's tensor" if torch.__version__.startswith("2.10.") else "load-balancing loss out"
    with pytest.raises(ClipError, match=sentence):
        clip = prepared("book-keeping", rule_of("flat", 1.0), model)
        summed(clip, model, [({"tokens": rows(tmp_path, 4)}, torch.ones(4, dtype=torch.bool))])


@pytest.mark.parametrize("trainable", ["all", "lora"])
@pytest.mark.parametrize("kind", ["llama", "llama tied", "gemma2", "mixtral", "qwen3 moe", "gpt2"])
def test_each_text_is_clipped_by_itself(kind: str, trainable: str, tmp_path: Path) -> None:
    if kind in MIXTURES and torch.__version__.startswith("2.10."):
        pytest.skip("its routing asks for a record's memory with this PyTorch, and is refused")
    folder_of(kind, tmp_path)
    if (kind, trainable) == ("gpt2", "lora"):  # its layers are convolutions of transformers
        with pytest.raises(ValueError, match="no linear layer to adapt"):
            model_of(tmp_path, trainable)
        return
    model = model_of(tmp_path, trainable)
    with_adapters_that_do_something(model)
    inputs = {"tokens": rows(tmp_path, 8), "record_weight": torch.tensor([1.0, 1, 3, 1, 1, 1, 0, 1])}
    present = torch.ones(8, dtype=torch.bool)
    present[5] = False
    records = brute_force.records_of(model, inputs)
    bound, _, expected = judged(records, present)
    clip = prepared("book-keeping", rule_of("flat", bound), model)
    totals, _ = summed(clip, model, [(only(inputs, part), present[part]) for part in (slice(0, 4), slice(4, 8))])
    for name, tensor in expected.items():
        assert relative_error({name: totals[name]}, {name: tensor}) <= 1e-4, name
    experts = [name for name, tensor in expected.items() if ".experts." in name and tensor.dim() == 3]
    assert len(experts) == (4 if kind in MIXTURES and trainable == "all" else 0), "two for each layer, of all experts"
    heads = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lm_head" in name}
    assert bool(heads) == (kind in ("llama", *MIXTURES) and trainable == "all")


def test_a_text_cannot_end_itself(tmp_path: Path) -> None:
    folder_of("llama", tmp_path)
    text = TextEncoder(tmp_path, LENGTH, of_language_model=True)
    row = text.encode("x </s> y")
    assert row.count(text.end) == 1 and -1 not in row[: row.index(text.end)], "its letters are read"


def page_config(folder: Path, **private: Any) -> Path:
    """The tutorial's, in a folder that has what it names."""
    folder_of("llama", folder / "model")
    write_texts(folder / "public", sentences(64, 1))
    write_texts(folder / "notes", sentences(300, 2))
    page = (ROOT / "docs" / "tutorials" / "language_models.md").read_text()
    told = json.loads(page.partition("```json")[2].partition("```")[0])
    told["model"]["text_length"] = LENGTH
    told["phases"][1] |= private
    told["run"] = {"engine": "local", "dir": str(folder / "run"), "checkpoint_every": 3}
    path = folder / "config.json"
    path.write_text(json.dumps(told))
    return path


def test_a_run_from_a_folder_trains_adapters_and_mixes_public_texts_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = {"path": str(tmp_path / "public"), "public": True, "tokenizer": "model/tokenizer.json"}
    mixing = {"data": public | {"reading": {"workers": 0}}, "batch": 16, "start": 0.5}
    done = started(tmp_path, json.loads(page_config(tmp_path, mixing=mixing).read_text()))
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = verify(tmp_path / "run")
    assert verdict.objection is None and verdict.committed == 9 and 7.9 < verdict.epsilon <= 8
    assert "a text" in json.loads((tmp_path / "run" / "certificate.json").read_text())["unit"]
    assert "texts, " in (tmp_path / "run" / "report.html").read_text()
    planned = load(tmp_path / "config.json", ["run.engine=deepspeed"])
    (phase,) = forecast(planned, Cluster(1, 80.0, 100.0, 1.0, 1e8))
    stored = [path.stat().st_size for path in (tmp_path / "run" / "checkpoints").rglob("*.safetensors")]
    assert phase.checkpoint_bytes * (phase.checkpoints - 1) < sum(stored) < phase.checkpoint_bytes * phase.checkpoints
    tokens = rows(tmp_path / "model", 4).clamp(min=0)
    exports_agree(tmp_path, monkeypatch, AutoModelForCausalLM, lambda net: net(tokens).logits)
    for form in ("hf", "peft"):
        assert "texts of 9 tokens" in (tmp_path / form / "README.md").read_text()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text_length": 33}, "has 32 positions; set model.text_length to at most 32"),
    ({"vocabulary": 12}, "has 13 tokens; leave it out"),
    ({"patch_size": 8}, 'has no model.patch_size, since it reads text alone'),
    ({"model_args": {"hidden_size": -1}}, "cannot be built as a causal language model"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_does_not_fit_is_refused_in_a_sentence(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder_of("llama", tmp_path)
    with pytest.raises(SettingsError, match=reason):
        ModelSettings.model_validate({"family": "hf", "name": str(tmp_path), "text_length": LENGTH} | change).resolved()


def test_objective_and_part_are_those_of_a_language_model(tmp_path: Path) -> None:
    for number, (change, reason) in enumerate(
        [({"objective": "caption"}, "belong together"), ({"trainable": "bias"}, "'all' or 'lora'")]
    ):
        with pytest.raises(ConfigError, match=reason):
            load(page_config(tmp_path / str(number), **change), [])
