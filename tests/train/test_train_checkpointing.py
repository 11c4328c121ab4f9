"""`run.gradient_checkpointing`: blocks run again in the backward pass, and nothing but memory and time changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from murmuration.accounting.errors import PlanError
from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import select
from murmuration.train.clip.blocks import repeated_blocks
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import Precision, clipped_totals
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.core import Computation
from murmuration.train.engines.forward import PlainForward
from murmuration.train.planner.cost import count
from murmuration.train.self_test.probes import synthetic_batch
from tests.support import brute_force, zoo
from tests.support.brute_force import relative_error
from tests.support.own_module import settings_of
from tests.support.parity_cases import CASES, two_micro_batches
from tests.support.parity_engines import judged, rule_of, with_adapters_that_do_something
from tests.support.planner_world import peak_of

LLAMA = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip
DINOV2 = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 7, "image_size": 14}


def of_a_case(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return CASES[name].model(torch.float32), two_micro_batches(CASES[name], torch.float32)[0]


def named(kind: str, folder: Path, trainable: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Of transformers, by a folder; adapters that do something."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **(LLAMA if kind == "llama" else DINOV2))
    if kind == "llama":
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        given, objective = {"text_length": 9}, "text"
    else:
        config.save_pretrained(folder)
        given, objective = {"image_size": 14, "classes": 3, "head_scale": 1.0}, "classify"
    settings = ModelSettings.model_validate({"family": "hf", "name": str(folder), **given})
    model = build(settings, objective)
    select(model, trainable, rank=2)
    with_adapters_that_do_something(model)
    return model, dict(synthetic_batch(settings.resolved(), objective, 10, 0).inputs)


MODELS: dict[str, Callable[[Path], tuple[nn.Module, dict[str, Tensor]]]] = {
    **{
        name: lambda _, name=name: of_a_case(name)
        for name in ("dropping_mae", "dropping_captioner", "vit_sigmoid_lora", "big_transfer", "classifier")
    },
    "llama": lambda folder: named("llama", folder, "all"),
    "llama_lora": lambda folder: named("llama", folder, "lora"),
    "dinov2": lambda folder: named("dinov2", folder, "all"),
    "dinov2_bias": lambda folder: named("dinov2", folder, "bias"),
}


def calls_of(model: nn.Module) -> list[str]:
    """Names of blocks, as their layers run."""
    seen: list[str] = []
    for number, block in enumerate(repeated_blocks(model)):
        layer = next(part for part in block.modules() if isinstance(part, (nn.Linear, nn.Conv2d)))
        layer.register_forward_hook(lambda *_, name=str(number): seen.append(name))
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_a_loop_and_keep_their_bits(name: str, tmp_path: Path) -> None:
    model, inputs = MODELS[name](tmp_path)
    present = torch.tensor([True] * 9 + [False])
    records = brute_force.records_of(model, inputs)
    bound, _, expected = judged(records, present)
    totals, calls, seen = {}, {}, calls_of(model)
    for checkpointed in (False, True):
        clip = BookKeepingClip(rule_of("flat", bound), checkpointed=checkpointed)
        clip.prepare(model)
        seen.clear()
        totals[checkpointed], _ = clipped_totals(clip, model, inputs, present)
        calls[checkpointed] = len(seen)
    assert relative_error(totals[True], expected) <= 1e-5
    assert all(torch.equal(totals[True][key], tensor) for key, tensor in totals[False].items())
    assert calls[True] == 2 * calls[False] > 0, "each block ran again"
    assert not any("forward" in vars(part) for part in model.modules()), "the model is left as it was"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_phases_without_privacy_have_the_same_gradients(precision: Precision) -> None:
    model, inputs = of_a_case("dropping_captioner")
    rows = torch.tensor([0, 1, 3, 5])
    inputs, seen = {name: tensor[rows] for name, tensor in inputs.items()}, calls_of(model)
    gradients, calls = [], []
    for checkpointed in (False, True):
        seen.clear()
        model.zero_grad()
        PlainForward(model, precision, checkpointed=checkpointed)(inputs, torch.ones(4, dtype=torch.bool)).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        calls.append(len(seen))
    assert gradients[0] and all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert calls[1] == 2 * calls[0] > 0


VIT = {"family": "classifier", "image_size": 64, "patch_size": 8, "width": 192, "depth": 6, "heads": 3, "classes": 10,
    "head_scale": 1.0,
}  # fmt: skip
TEXTS = {"family": "gpt2", "width": 64, "depth": 6, "heads": 2, "text_length": 256, "vocabulary": 101}


@pytest.mark.parametrize(
    ("given", "objective", "trainable", "least", "most"),
    [(VIT, "classify", "lora", 0.25, 0.4), (VIT, "classify", "all", 0.9, 1.1), (TEXTS, "text", "all", 0.25, 0.4)],
)
def test_the_planner_knows_what_it_saves_and_costs(
    given: Any, objective: Any, trainable: Any, least: float, most: float
) -> None:
    """Weight gradients wait for the norms of all layers: with wide layers and few tokens, their operands are no less
    than what the blocks keep otherwise."""
    shape = ModelSettings.model_validate(given).resolved()
    model = build(shape, objective)
    select(model, trainable)
    inputs = {k: (tuple(x.shape[1:]), x.dtype) for k, x in synthetic_batch(shape, objective, 1, 0).inputs.items()}
    plain, cost = (count(model, inputs, "fp32", checkpointed=checkpointed) for checkpointed in (False, True))
    clip = BookKeepingClip(ClipRule("flat", 1.0, 0.0), checkpointed=True)
    clip.prepare(model)
    peaks = []
    for records in (4, 8):
        batch = synthetic_batch(shape, objective, records, 0)
        peaks.append(peak_of(lambda batch=batch: clipped_totals(clip, model, batch.inputs, batch.present)))
    measured = (peaks[1] - peaks[0]) / 4
    assert 0.9 * measured < cost.bytes < 1.25 * measured
    assert least < cost.bytes / plain.bytes < most
    blocks = (cost.step_flops - plain.step_flops) / plain.forward_flops
    assert 0.8 < blocks <= 1 and cost.forward_flops == plain.forward_flops


def test_a_model_without_blocks_is_refused() -> None:
    clip = BookKeepingClip(ClipRule("flat", 1.0, 0.0), checkpointed=True)
    with pytest.raises(ClipError, match="no list of blocks that could be checkpointed; leave gradient_checkpointing"):
        clip.prepare(nn.Linear(2, 2))


class InABlock(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([module])

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.blocks[0](inputs)


def clipped_in_a_block(module: nn.Module, checkpointed: bool) -> dict[str, Tensor]:
    inputs: zoo.Inputs = module.data()  # pyright: ignore[reportCallIssue]
    present = torch.ones(len(next(iter(inputs.values()))), dtype=torch.bool)
    clip, model = BookKeepingClip(rule_of("flat", zoo.BOUND), checkpointed=checkpointed), InABlock(module)
    clip.prepare(model)
    for _ in range(2):
        totals, _ = clipped_totals(clip, model, inputs, present)
    return totals


@pytest.mark.parametrize("name", ["weight norm", "orthogonal weight", "bert, padding 0", "t5", "timm swin"])
def test_weights_that_a_block_computes_have_a_backward_pass_of_their_own(name: str) -> None:
    """Asked for what the block had saved, it once ran the block again where nothing watched."""
    totals = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        totals.append(clipped_in_a_block(zoo.ordinary()[name](), checkpointed))
    assert all(torch.equal(totals[1][key], tensor) for key, tensor in totals[0].items())


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("hostile", "queue", "computes something else when it runs again"),
        ("hostile", "global list", "computes something else when it runs again"),
        ("ordinary", "penalty on the input", "calls torch.func within a layer that is checkpointed"),
    ],
)
def test_what_cannot_run_again_is_refused_in_a_sentence(kind: str, name: str, why: str) -> None:
    with pytest.raises(ClipError, match=why):
        clipped_in_a_block(getattr(zoo, kind)()[name](), True)


def test_lists_may_share_a_block() -> None:
    torch.manual_seed(2)
    shared = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    model = nn.Sequential(nn.ModuleDict({name: nn.ModuleList([shared, nn.Linear(5, 5)]) for name in "ab"}))

    def forward(inputs: dict[str, Tensor]) -> Tensor:
        x = inputs["x"]
        for blocks in model[0].values():
            for block in blocks:
                x = block(x)
        return x.square().sum(1)

    model.forward = forward
    inputs, present = {"x": torch.randn(4, 5)}, torch.ones(4, dtype=torch.bool)
    totals = []
    for checkpointed in (False, True):
        clip = BookKeepingClip(rule_of("flat", 1.0), checkpointed=checkpointed)
        clip.prepare(model)
        totals.append(clipped_totals(clip, model, inputs, present)[0])
    assert all(torch.equal(a, b) for a, b in zip(*(each.values() for each in totals), strict=True))
    assert not any("forward" in vars(part) for part in model[0].modules()), "the model is left as it was"


@pytest.mark.parametrize("other", [{"compile": "blocks"}, {"clip_engine": "reference"}])
def test_the_library_refuses_what_configs_refuse(tmp_path: Path, other: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="gradient_checkpointing needs blocks"):
        settings_of(tmp_path, engine="local", computation=Computation(gradient_checkpointing=True, **other))


def test_a_training_that_computes_again_is_another_one() -> None:
    names = {Computation(gradient_checkpointing=again, compile=how).identity
             for again in (False, True) for how in ("off", "blocks")}  # fmt: skip
    assert len(names) == 4
