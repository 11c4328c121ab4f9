"""The models that clip engines are judged on, by name, each with a maker of inputs. Deterministic given a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from murmuration.model.captioner import PAD
from tests.support.parity_drops import DroppingCaptioner, DroppingCheckpoints, DroppingMae
from tests.support.parity_models import (
    SHAPE,
    BigTransfer,
    CaptionerInOwnPrecision,
    Classifier,
    FreeParameters,
    Inputs,
    LastLayer,
    LowRank,
    MadeTables,
    MaeInOwnPrecision,
    Odd,
    OnX,
    ScoreBias,
    SelfAttention,
    ShippedClassifier,
    SomeFrozen,
    StandardisedConv,
    TiedLanguageModel,
    UsedTwice,
)


@dataclass(frozen=True)
class Case:
    """A model, and inputs of `count` records for it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Inputs]

    def model(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
            # No parameter at a special value (zero biases, unit scales): a lost term would not be seen.
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.05 * torch.randn(p.shape))
        return model.to(dtype)

    def batch(self, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
        made = self.inputs(count, torch.Generator().manual_seed(seed))
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in made.items()}


def dense(*shape: int) -> Callable[[int, torch.Generator], Inputs]:
    return lambda count, draw: {"x": torch.randn(count, *shape, generator=draw)}


def words(length: int, vocabulary: int) -> Callable[[int, torch.Generator], Inputs]:
    """With repeats within a record, and padding at the end of some."""

    def make(count: int, draw: torch.Generator) -> Inputs:
        ids = torch.randint(1, vocabulary, (count, length), generator=draw)
        ids[::2, -2:] = PAD
        return {"ids": ids}

    return make


def pictures(side: int, **more: Callable[[int, torch.Generator], Tensor]) -> Callable[[int, torch.Generator], Inputs]:
    def make(count: int, draw: torch.Generator) -> Inputs:
        images = torch.randn(count, 3, side, side, generator=draw)
        return {"images": images} | {name: one(count, draw) for name, one in more.items()}

    return make


def label(count: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, 5, (count,), generator=draw)


def caption(count: int, draw: torch.Generator) -> Tensor:
    return words(SHAPE.text_length, SHAPE.vocabulary)(count, draw)["ids"]


def mask_noise(count: int, draw: torch.Generator) -> Tensor:
    return torch.rand(count, SHAPE.patches, generator=draw)


def drop_key(count: int, draw: torch.Generator) -> Tensor:
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=draw)


def dropping(
    inputs: Callable[[int, torch.Generator], Inputs],
) -> Callable[[int, torch.Generator], Inputs]:
    return lambda count, draw: inputs(count, draw) | {"drop_key": drop_key(count, draw)}


def convolutions() -> Iterator[nn.Module]:
    yield nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
    yield nn.Conv2d(8, 8, 3, dilation=2, padding=2, groups=8, bias=False)
    yield nn.Conv2d(8, 6, (1, 3), padding=(0, 1), padding_mode="circular")
    yield StandardisedConv(6, 6, 2)
    yield nn.Flatten(2)
    yield nn.Conv1d(6, 4, 3, padding="same")


class AndLinear(nn.Conv2d):
    """Its kernel is also the weight of a linear layer, over the places that it sees."""

    def forward(self, input: Tensor) -> Tensor:
        linear = F.linear(input[:, :, :2, :2].flatten(1), self.weight.flatten(1))
        return super().forward(input) + linear[:, :, None, None]


def few_places() -> Iterator[nn.Module]:
    """Of kernels over two or three places a side, one twice: gradients are not written out, but patches are."""
    kernel, shared = nn.Conv2d(8, 16, (3, 2), padding=(2, 1), dilation=2, bias=False), nn.Conv2d(16, 16, 3, padding=1)
    yield from (nn.Conv2d(4, 8, 3, stride=2), nn.GELU(), kernel, nn.GELU(), shared, nn.GELU(), shared)
    yield from (nn.GELU(), AndLinear(16, 16, 2, padding=1), nn.Flatten())


def norms() -> Iterator[nn.Module]:
    yield from (nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.GELU())
    yield from (nn.Flatten(2), nn.RMSNorm(36), nn.LayerNorm([8, 36]))


VIT = {"width": 16, "depth": 1, "heads": 2}
CASES: dict[str, Case] = {
    "mae": Case(MaeInOwnPrecision, pictures(32, mask_noise=mask_noise)),
    "captioner": Case(CaptionerInOwnPrecision, pictures(32, tokens=caption)),
    "classifier": Case(Classifier, pictures(16, label=label)),
    "checkpointed": Case(lambda: Classifier(checkpointing=True), pictures(16, label=label)),
    "big_transfer": Case(BigTransfer, pictures(16, label=label)),
    "vit_sigmoid_lora": Case(
        lambda: ShippedClassifier("lora", **VIT, classify_loss="sigmoid"), pictures(18, label=label)
    ),
    "bit_bias": Case(lambda: ShippedClassifier("bias", width=8, stages=(1, 1)), pictures(18, label=label)),
    "dropping_mae": Case(DroppingMae, dropping(pictures(32, mask_noise=mask_noise))),
    "dropping_captioner": Case(DroppingCaptioner, dropping(pictures(32, tokens=caption))),
    "dropping_checkpoints": Case(DroppingCheckpoints, dropping(dense(5, 6))),
    "attention": Case(SelfAttention, dense(5, 8)),
    "hf_conv1d": Case(lambda: OnX(Conv1D(7, 6), nn.GELU(), Conv1D(6, 7)), dense(4, 6)),
    "low_rank": Case(lambda: OnX(LowRank(), nn.Tanh(), LowRank()), dense(4, 8)),
    "tied": Case(TiedLanguageModel, words(7, 11)),
    "used_twice": Case(UsedTwice, dense(5, 6)),
    "norms": Case(lambda: OnX(*norms()), dense(3, 8, 8)),
    "convolutions": Case(lambda: OnX(*convolutions()), dense(4, 7, 7)),
    "few_places": Case(lambda: OnX(*few_places()), dense(4, 5, 6)),
    "free_parameters": Case(FreeParameters, dense(5, 6)),
    "made_tables": Case(MadeTables, dense(5, 6)),
    "score_bias": Case(ScoreBias, dense(6, 6)),
    "odd_layers": Case(Odd, dense(3, 5)),
    "some_frozen": Case(SomeFrozen, dense(4, 6)),
    "four_dimensions": Case(lambda: OnX(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 4)), dense(2, 3, 5)),
    "one_token": Case(lambda: OnX(nn.Linear(9, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3)), dense(9)),
    "many_tokens": Case(lambda: OnX(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 40)), dense(150, 40)),
    "last_layer": Case(LastLayer, pictures(8, label=label)),
}  # fmt: skip


def two_micro_batches(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Ten records, among them one that is poisoned, one that is large, and two absent ones full of rubbish."""
    inputs = case.batch(10, dtype)
    for tensor in inputs.values():
        if tensor.is_floating_point():
            tensor[2, ..., 0] = math.nan
            tensor[6] *= 3
            tensor[4] = math.nan
            tensor[8] = 1e30
    present = torch.ones(10, dtype=torch.bool)
    present[[4, 8]] = False
    return inputs, present
