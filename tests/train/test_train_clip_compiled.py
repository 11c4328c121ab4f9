"""Blocks that run as compiled code in private passes: each record's gradient, apart from all others, or as written.

Most tests run what is recorded operation by operation; one has it compiled.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, ViTConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.vit.modeling_vit import ViTLayer

from murmuration.model.build import build
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import Precision, clipped_totals
from murmuration.train.clip.rule import ClipError, ClipRule
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.clip_world import FLAT, apart
from tests.support.parity_cases import CASES, two_micro_batches
from tests.support.parity_engines import judged, only, rule_of, summed
from tests.support.recorded_blocks import RecordedClip
from tests.support.train_helpers import SHAPE, nano_inputs

RECORDS = 5


# The same gradients


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", ["mae", "captioner", "classifier", "dropping_mae", "dropping_captioner"])
def test_sums_of_recorded_blocks_equal_a_loop_over_records(name: str, precision: str) -> None:
    """With a record that is not finite, a large one, and absent ones full of rubbish."""
    dtype, tolerance = {"fp32": (torch.float32, 1e-5), "fp64": (torch.float64, 1e-10)}[precision]
    model = CASES[name].model(dtype)
    inputs, present = two_micro_batches(CASES[name], dtype)
    records = brute_force.records_of(model, inputs)
    bound, factors, expected = judged(records, present)
    clip = prepared(RecordedClip(rule_of("flat", bound), compiled=RECORDS), model)
    halves = [(only(inputs, rows), present[rows]) for rows in (slice(0, 5), slice(5, 10))]
    totals, seen = summed(clip, model, halves, double=dtype == torch.float64)
    assert clip.blocks.kinds and not clip.blocks.why_not, "all ran as recorded"
    assert relative_error(totals, expected) <= tolerance
    for parameter, tensor in expected.items():
        assert relative_error({parameter: totals[parameter]}, {parameter: tensor}) <= 20 * tolerance, parameter
    assert torch.cat([s.factors for s in seen]).tolist() == pytest.approx(factors, rel=1e-5)


class Stack(nn.Module):
    """Blocks of others' models on rows, and a loss."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.below = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        x = self.below(inputs["x"])
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x.square().sum((1, 2))


def rows(records: int = RECORDS) -> dict[str, Tensor]:
    return {"x": torch.randn(records, 4, 6, generator=torch.Generator().manual_seed(1))}


def timm_block() -> nn.Module:
    from timm.models.vision_transformer import Block

    return Block(8, 2, init_values=0.1)


SDPA: Any = {"attn_implementation": "sdpa"}
SMALL: Any = SDPA | {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
FOREIGN: dict[str, Callable[[], nn.Module]] = {
    "timm": timm_block,
    "vit of transformers": lambda: ViTLayer(ViTConfig(**SMALL)),
    "gpt2 of transformers": lambda: GPT2Block(
        GPT2Config(n_embd=8, n_head=2, resid_pdrop=0.0, attn_pdrop=0.0, **SDPA), layer_idx=0
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_blocks_of_timm_and_transformers_share_one_code_and_have_the_same_gradients(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, present = Stack(*(FOREIGN[name]() for _ in range(3))), rows(), torch.ones(RECORDS, dtype=torch.bool)
    expected, before = clipped_totals(prepared(BookKeepingClip(FLAT), model), model, inputs, present)
    clip = prepared(RecordedClip(FLAT, compiled=RECORDS), model)
    found, seen = clipped_totals(clip, model, inputs, present)
    assert (clip.blocks.kinds, clip.blocks.why_not) == (1, {}), clip.blocks.about()
    assert apart(found, expected) < 1e-6 and torch.allclose(seen.norms, before.norms, rtol=1e-6)


def prepared(clip: BookKeepingClip, model: nn.Module) -> Any:
    clip.prepare(model)
    return clip


class TakenBack(torch.autograd.Function):
    """Between the two passes, what an engine does that shards weights: their memory is reused, and the backward pass
    finds them elsewhere, or nowhere."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weights: Any) -> Tensor:
        del weights
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.take_back = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.take_back()
        return gradient, None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lent_weights_are_read_where_they_lie_in_the_backward_pass(precision: Precision) -> None:
    class Lent(Stack):
        def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
            x = self.below(inputs["x"])
            for block in self.blocks:
                x = block(x)
            return TakenBack.apply(x, self.take_back).square().sum((1, 2))  # pyright: ignore

        def take_back(self) -> None:
            for weight in self.blocks.parameters():
                old, weight.data = weight.data, weight.data.clone()
                old.fill_(math.nan)
                if gone:
                    weight.data.untyped_storage().resize_(0)

    gone = False
    torch.manual_seed(0)
    model, inputs, present = Lent(timm_block(), timm_block()), rows(), torch.ones(RECORDS, dtype=torch.bool)
    expected, _ = clipped_totals(prepared(BookKeepingClip(FLAT, precision), model), model, inputs, present)
    for weight in model.parameters():
        weight.lent = True  # pyright: ignore[reportAttributeAccessIssue]
    clip = prepared(RecordedClip(FLAT, precision, compiled=RECORDS), model)
    found, _ = clipped_totals(clip, model, inputs, present)
    assert clip.blocks.kinds and not clip.blocks.why_not, clip.blocks.about()
    assert apart(found, expected) < (1e-6 if precision == "fp32" else 1e-2)
    gone = True
    with pytest.raises(ClipError, match="not there in its backward pass"):
        clipped_totals(clip, model, inputs, present)


# Compiled


COMPILED: list[tuple[str, Precision]] = [("classifier", "fp32")]
COMPILED_SLOWLY: list[tuple[str, Precision]] = [
    ("captioner", "fp32"), ("captioner", "bf16"), ("mae", "fp32"), ("mae", "bf16"),
    ("dropping_captioner", "fp32"), ("dropping_mae", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "precision"), [*COMPILED, *(pytest.param(*each, marks=pytest.mark.slow) for each in COMPILED_SLOWLY)]
)
def test_compiled_blocks_keep_each_record_and_its_neighbours_apart(name: str, precision: Precision) -> None:
    """Each record adds its own gradient and nothing else; a hostile neighbour changes no bit of what the others add,
    and whatever it is, adds no more than C."""
    model, inputs = CASES[name].model(), CASES[name].batch(RECORDS)
    records = brute_force.records_of(model, inputs)
    clip = prepared(BookKeepingClip(replace(FLAT, bound=1e30), precision, compiled=RECORDS), model)
    everyone, tolerance = torch.ones(RECORDS, dtype=torch.bool), 1e-5 if precision == "fp32" else 3e-2
    _, seen = clipped_totals(clip, model, inputs, everyone)
    assert clip.blocks.kinds and not clip.blocks.why_not, clip.blocks.about()
    for row in range(RECORDS):
        only_it = torch.arange(RECORDS) == row
        found, _ = clipped_totals(clip, model, inputs, only_it)
        assert relative_error(found, records[row].gradient) <= tolerance, row
    tight = prepared(BookKeepingClip(ClipRule("flat", 0.01, 0.0), precision, compiled=RECORDS), model)
    base, _ = clipped_totals(tight, model, inputs, torch.arange(RECORDS) > 0)
    for value in (math.nan, math.inf, 1e19, 1e-25):
        hostile = {name: x.clone() for name, x in inputs.items()}
        for x in hostile.values():
            if x.is_floating_point():
                x[0] = x[0] * value
        moved, other = clipped_totals(tight, model, hostile, everyone)
        assert torch.equal(other.norms[1:], seen.norms[1:]) and torch.equal(other.losses[1:], seen.losses[1:])
        size = math.sqrt(sum(float((moved[each].double() - base[each].double()).square().sum()) for each in base))
        assert size <= 0.01 * (1 + 1e-5), value
    again, _ = clipped_totals(tight, model, inputs, everyone)
    assert all(torch.equal(again[each], clipped_totals(tight, model, inputs, everyone)[0][each]) for each in again)


# What cannot be compiled runs as it is written


class Changing(nn.Module):
    """One layer, and something that a recording must not do or cannot know."""

    def __init__(self, act: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(8, 8), act

    def forward(self, x: Tensor) -> Any:
        return self.act(self, x)


def writes(block: Any, x: Tensor) -> Tensor:
    return block.layer(x.add_(1.0))


def holds(block: Any, x: Tensor) -> Tensor:
    return block.layer(x) * HELD


def scaled(block: Any, x: Tensor) -> Tensor:
    return block.layer(x) * float(block.layer.weight.detach().sum())


def counted(block: Any, x: Tensor) -> Any:
    return block.layer(x), x.argmax(-1)


HELD = torch.linspace(0.5, 1.5, 8)
AS_WRITTEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "writes into its input": (lambda: Changing(writes), "writes into what it is given"),
    "a tensor that is no weight": (lambda: Changing(holds), "FakeTensor"),
    "a number of its weights": (lambda: Changing(scaled), "_local_scalar_dense"),
    "a result that is no number": (lambda: Changing(counted), "more than numbers of records"),
    "a weight that is computed": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.GELU()),
        "found by further code",
    ),
    "a checkpointed part": (
        lambda: Changing(lambda block, x: checkpoint(block.layer, x, use_reentrant=False)),
        "a part of it is checkpointed",
    ),
}


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_what_cannot_be_recorded_runs_as_written_to_the_bit_and_says_why(name: str) -> None:
    make, why = AS_WRITTEN[name]
    torch.manual_seed(0)
    model, inputs, present = Stack(make(), make()), rows(), torch.ones(RECORDS, dtype=torch.bool)
    expected, _ = clipped_totals(prepared(BookKeepingClip(FLAT), model), model, inputs, present)
    clip = prepared(RecordedClip(FLAT, compiled=RECORDS), model)
    found, _ = clipped_totals(clip, model, inputs, present)
    assert all(torch.equal(found[each], expected[each]) for each in expected)
    assert list(clip.blocks.why_not) == ["blocks.0", "blocks.1"]
    assert clip.blocks.kinds == 0 and re.search(why, clip.blocks.about()), clip.blocks.about()


def test_a_compiler_that_fails_ends_nothing() -> None:
    def failing(*given: Any) -> Any:
        raise RuntimeError("no space left on device\nand more")

    model, inputs, present = build(SHAPE, "mae"), nano_inputs("mae", RECORDS), torch.ones(RECORDS, dtype=torch.bool)
    expected, _ = clipped_totals(prepared(BookKeepingClip(FLAT), model), model, inputs, present)
    clip = prepared(BookKeepingClip(FLAT, compiled=RECORDS), model)
    clip.blocks.compiler = failing
    found, _ = clipped_totals(clip, model, inputs, present)
    assert all(torch.equal(found[each], expected[each]) for each in expected)
    assert clip.blocks.about().endswith("as written run blocks.0, decoder_blocks.0: no space left on device")


def test_other_sizes_and_passes_without_gradients_run_as_written() -> None:
    model = build(SHAPE, "mae")
    clip = prepared(RecordedClip(FLAT, compiled=RECORDS), model)
    clipped_totals(clip, model, nano_inputs("mae", 3), torch.ones(3, dtype=torch.bool))
    assert clip.blocks.kinds == 0 and not clip.blocks.why_not


def test_a_tensor_of_an_earlier_micro_batch_is_refused_in_a_block_too() -> None:
    class Keeping(Stack):
        kept: Any = None

        def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
            x = self.blocks[0](self.below(inputs["x"]))
            given, Keeping.kept = (x if Keeping.kept is None else Keeping.kept), x
            return self.blocks[1](given).square().sum((1, 2))

    model, present = Keeping(timm_block(), timm_block()), torch.ones(RECORDS, dtype=torch.bool)
    clip = prepared(RecordedClip(FLAT, compiled=RECORDS), model)
    clipped_totals(clip, model, rows(), present)
    with pytest.raises(ClipError, match="earlier micro-batch"):
        clipped_totals(clip, model, rows(), present)


def test_modes_and_trained_weights_have_code_of_their_own_and_the_model_is_left_as_it_was() -> None:
    model = CASES["dropping_mae"].model()
    inputs, present = CASES["dropping_mae"].batch(RECORDS), torch.ones(RECORDS, dtype=torch.bool)
    clip = prepared(RecordedClip(FLAT, compiled=RECORDS), model)
    names = [set(vars(module)) for module in model.modules()]

    def same() -> bool:
        found, _ = clipped_totals(clip, model, inputs, present)
        expected, _ = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
        return apart(found, expected) < 1e-6

    assert same()
    model.eval()
    assert same(), "nothing is dropped"
    model.train()
    next(model.parameters()).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("fc1.bias"):
            parameter.requires_grad_(False)
    assert same() and not clip.blocks.why_not
    assert [set(vars(module)) for module in model.modules()] == names
    inputs.pop("drop_key")
    with pytest.raises(ValueError, match="no keys"):
        clipped_totals(clip, model, inputs, present)
    assert [set(vars(module)) for module in model.modules()] == names


def test_no_tensor_of_a_micro_batch_waits_for_the_garbage_collector() -> None:
    model, inputs, present = build(SHAPE, "mae"), nano_inputs("mae", RECORDS), torch.ones(RECORDS, dtype=torch.bool)
    clip = prepared(RecordedClip(FLAT, compiled=RECORDS), model)
    clipped_totals(clip, model, inputs, present)
    gc.disable()
    gc.collect()
    gc.collect()  # what was ended by the first
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        clipped_totals(clip, model, inputs, present)
        gc.collect()
        assert not any(isinstance(x, Tensor) for x in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
