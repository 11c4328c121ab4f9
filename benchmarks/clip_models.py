"""The workloads of the clip benchmark: models and random inputs at the shapes of the published recipes.

Quick workloads keep widths, token counts and aspect ratios but reduce the depth; smoke ones only show that the
program runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from murmuration.model.build import build
from murmuration.model.encoder import PatchProjection
from murmuration.model.settings import ModelSettings

Inputs = dict[str, Tensor]
CLASSES = 1000
PLAIN = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv2d, PatchProjection)


@dataclass(frozen=True)
class Workload:
    """A model and its inputs; `micro_batch` records are timed at once and `judged` are compared with brute force."""

    about: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Inputs]
    micro_batch: int
    judged: int = 3
    # Whole logical steps: numbers of micro-batches, and their size (0: as above).
    logical: tuple[int, ...] = (8,)
    logical_micro_batch: int = 0
    # Engines that are of interest only for this model.
    also: tuple[str, ...] = ()

    def model(self, device: torch.device) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().to(device)

    def batch(self, count: int, device: torch.device, seed: int = 1) -> Inputs:
        made = self.inputs(count, torch.Generator().manual_seed(seed))
        return {name: tensor.to(device) for name, tensor in made.items()}


class Classifier(nn.Module):
    def __init__(self, name: str, **overrides: Any) -> None:
        super().__init__()
        self.vit = timm.create_model(name, num_classes=CLASSES, **overrides)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.vit(inputs["images"]).float(), inputs["label"], reduction="none")


class Head(nn.Module):
    """A linear classifier on features that were computed beforehand."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(inputs["features"]).float(), inputs["label"], reduction="none")


class Texts(nn.Module):
    """A Llama whose linear layers have adapters of PEFT's, which alone are trained: a text's mean loss."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=688 * width // 256, num_hidden_layers=depth,
            num_attention_heads=8, num_key_value_heads=4, attn_implementation="eager",
        )  # fmt: skip
        adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.net = get_peft_model(LlamaForCausalLM(config).float(), adapters)  # pyright: ignore[reportArgumentType]
        for name, parameter in self.net.named_parameters():
            if "lora_B" in name:  # at 0, the other half would have no gradient
                nn.init.normal_(parameter, std=0.1)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens = inputs["tokens"]
        logits = self.net(input_ids=tokens, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2).float(), tokens[:, 1:], reduction="none").mean(1)


def images(count: int, side: int, draw: torch.Generator) -> Tensor:
    return torch.randn(count, 3, side, side, generator=draw)


def labels(count: int, classes: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, classes, (count,), generator=draw)


def mae(about: str, micro_batch: int, **settings: object) -> Workload:
    shape = ModelSettings.model_validate({"family": "mae", **settings}).resolved()

    def inputs(count: int, draw: torch.Generator) -> Inputs:
        noise = torch.rand(count, shape.patches, generator=draw)
        return {"images": images(count, shape.image_size, draw), "mask_noise": noise}

    return Workload(about, lambda: build(shape, "mae"), inputs, micro_batch)


def captioner(about: str, micro_batch: int, **settings: object) -> Workload:
    shape = ModelSettings.model_validate({"family": "captioner", **settings}).resolved()

    def inputs(count: int, draw: torch.Generator) -> Inputs:
        # One more than the decoder reads: the last token is only predicted.
        tokens = torch.randint(1, shape.vocabulary, (count, shape.text_length + 1), generator=draw)
        return {"images": images(count, shape.image_size, draw), "tokens": tokens}

    return Workload(about, lambda: build(shape, "caption"), inputs, micro_batch)


def classifier(about: str, micro_batch: int, name: str, side: int, **overrides: int) -> Workload:
    def inputs(count: int, draw: torch.Generator) -> Inputs:
        return {"images": images(count, side, draw), "label": labels(count, CLASSES, draw)}

    return Workload(
        about, lambda: Classifier(name, img_size=side, **overrides), inputs, micro_batch, also=("ours_faster",)
    )


def last_layer(micro_batch: int, width: int = 768, classes: int = CLASSES) -> Workload:
    def inputs(count: int, draw: torch.Generator) -> Inputs:
        features = torch.randn(count, width, generator=draw)
        return {"features": features, "label": labels(count, classes, draw)}

    about = f"head {width} -> {classes} on cached features"
    return Workload(
        about, lambda: Head(width, classes), inputs, micro_batch, judged=min(32, micro_batch),
        logical=(2, 8, 32, 128), logical_micro_batch=min(64, micro_batch),
    )  # fmt: skip


def adapters(about: str, micro_batch: int, width: int, depth: int, length: int, vocabulary: int) -> Workload:
    def inputs(count: int, draw: torch.Generator) -> Inputs:
        return {"tokens": torch.randint(3, vocabulary, (count, length), generator=draw)}

    return Workload(about, lambda: Texts(width, depth, vocabulary), inputs, micro_batch)


SMALL_MAE: dict[str, object] = dict(
    width=768, depth=3, heads=12, mae_decoder_width=512, mae_decoder_depth=1, mae_decoder_heads=16
)
SMALL_CAPTIONER: dict[str, object] = dict(
    width=768, depth=4, heads=12, decoder_depth=2, text_length=40, vocabulary=10_000
)
TINY: dict[str, object] = dict(
    image_size=32, patch_size=8, width=32, depth=1, heads=2, decoder_depth=1, mae_decoder_width=16, mae_decoder_depth=1,
    mae_decoder_heads=2, text_length=8, vocabulary=32,
)  # fmt: skip

QUICK: dict[str, Workload] = {
    "mae_s": mae("MAE 768/512, 50 encoder and 197 decoder tokens, 3 + 1 blocks", 4, **SMALL_MAE),
    "captioner_s": captioner("captioner 768, 197 + 40 tokens, vocabulary 10k, 4 + 2 blocks", 2, **SMALL_CAPTIONER),
    "vit_s": classifier("ViT-S 384, 197 tokens, 6 blocks", 4, "vit_small_patch16_224", 224, depth=6),
    "last_layer": last_layer(512),
    "llama_lora": adapters(
        "Llama 256, adapters of rank 8 on all linear layers, 128 tokens, 4 blocks", 8, 256, 4, 128, 2000
    ),
}
SMOKE: dict[str, Workload] = {
    "mae_s": mae("a toy masked autoencoder", 4, **TINY),
    "captioner_s": captioner("a toy captioner", 4, **TINY),
    "vit_s": classifier("a toy classifier", 4, "vit_tiny_patch16_224", 32, depth=1, embed_dim=24, patch_size=8),
    "last_layer": last_layer(8, 16, 10),
    "llama_lora": adapters("a toy language model", 4, 32, 1, 8, 32),
}
FULL: dict[str, Workload] = {
    **{f"vip_mae_{s}": mae(f"ViP MAE {s}, 75 % masked", 32, size=s) for s in ("base", "large", "huge")},
    **{
        f"dpcap_{s}_{length}": captioner(f"DP-Cap {s}, text {length}", 32, size=s, text_length=length)
        for s in ("base", "large")
        for length in (40, 77)
    },
    **{
        f"vit_{s}_{side}": classifier(f"ViT-{s} classifier at {side}", 32, f"vit_{s}_patch{patch}_224", side)
        for s, patch in (("base", 16), ("large", 16), ("huge", 14))
        for side in (224, 392 if s == "huge" else 384)
    },
    "last_layer": last_layer(4096),
}


class Weights:
    """One set of weights for all engines: every copy's parameters are views of the first model's storage."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def copy(self) -> nn.Module:
        shared: dict[int, object] = {
            id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in self.model.parameters()
        }
        return copy.deepcopy(self.model, shared)

    def plain_layers_only(self) -> nn.Module:
        """For peers, which support only layers: free tokens are frozen, and the patch projection is a Linear on its
        weights.

        Both favour the peers a little: they have less to do, and a layer for which they have a fast rule.
        """
        model = self.copy()
        for module in list(model.modules()):
            if not isinstance(module, PLAIN):
                for p in module.parameters(recurse=False):
                    p.requires_grad_(False)
            if isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(_contiguous)
            for name, child in list(module.named_children()):
                if isinstance(child, PatchProjection):
                    setattr(module, name, as_linear(child))
        return model


def _contiguous(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Opacus's ghost rule for embeddings views its indices as one column, which a slice of captions does not allow."""
    return tuple(x.contiguous() for x in args)


def as_linear(projection: PatchProjection) -> nn.Linear:
    flat = projection.weight.detach().flatten(1)
    layer = nn.Linear(flat.shape[1], flat.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(flat), nn.Parameter(projection.bias.detach())
    return layer
