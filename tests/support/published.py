"""The published ViP-MAE and DP-Cap in plain functions of a state dict, written from their description.

Nothing of `model/` is imported: what the import of checkpoints is judged against must not share its mistakes. Masked
patches are put back in their original places here, and text is decoded at full length, unlike in the package.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]


def random_tensors(shapes: dict[str, list[int]], seed: int) -> State:
    """Every tensor at random, tables and their first rows as well: nothing can hide behind a zero."""
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in shapes.items():
        wide = 1.0 if "norm" in key or key.endswith("text.0.weight") else 0.0
        state[key] = wide * key.endswith("weight") + torch.randn(shape, generator=draw) * 0.2
        if key.endswith("self_attn.bias"):
            state[key] = torch.ones(shape).tril()
    return state


def encoder_shapes(width: int, depth: int, patches: int, patch: int, qkv_bias: bool) -> dict[str, list[int]]:
    shapes = {"cls_token": [1, 1, width], "pos_embed": [1, 1 + patches, width]}
    shapes |= {"patch_embed.proj.weight": [width, 3, patch, patch], "patch_embed.proj.bias": [width]}
    shapes |= block_shapes("blocks", width, depth, qkv_bias)
    return shapes | {"norm.weight": [width], "norm.bias": [width]}


def block_shapes(prefix: str, width: int, depth: int, qkv_bias: bool) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    layers = {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.fc1": (4, 1), "mlp.fc2": (1, 4)}
    for number in range(depth):
        for layer, (rows, columns) in layers.items():
            shapes[f"{prefix}.{number}.{layer}.weight"] = [rows * width, columns * width]
            if qkv_bias or layer != "attn.qkv":
                shapes[f"{prefix}.{number}.{layer}.bias"] = [rows * width]
        for norm in ("norm1", "norm2"):
            shapes |= {f"{prefix}.{number}.{norm}.{kind}": [width] for kind in ("weight", "bias")}
    return shapes


def vip_mae(
    width: int, depth: int, grid: int, patch: int, decoder_width: int, decoder_depth: int, seed: int = 0
) -> State:
    shapes = encoder_shapes(width, depth, grid**2, patch, qkv_bias=True)
    shapes |= {"mask_token": [1, 1, decoder_width], "decoder_pos_embed": [1, 1 + grid**2, decoder_width]}
    shapes |= {"decoder_embed.weight": [decoder_width, width], "decoder_embed.bias": [decoder_width]}
    shapes |= block_shapes("decoder_blocks", decoder_width, decoder_depth, qkv_bias=True)
    shapes |= {"decoder_norm.weight": [decoder_width], "decoder_norm.bias": [decoder_width]}
    shapes |= {"decoder_pred.weight": [3 * patch**2, decoder_width], "decoder_pred.bias": [3 * patch**2]}
    return random_tensors(shapes, seed)


def dpcap(
    width: int, depth: int, grid: int, patch: int, text_width: int, text_depth: int, length: int, vocabulary: int,
    biases: bool = False, seed: int = 0,
) -> State:  # fmt: skip
    shapes = encoder_shapes(width, depth, grid**2, patch, qkv_bias=biases)
    shapes |= {"text_pos_embed": [1, length, width], "text_decoder_pos_embed": [1, length, text_width]}
    shapes |= {"mask_token": [1, 1, text_width], "mask_token_text": [1, 1, text_width]}
    shapes |= {"decoder_pos_embed": [1, 1 + grid**2, text_width]}
    for kind in ("image", "text"):
        shapes |= {
            f"encoder_{kind}_type_embedding": [1, 1, width],
            f"decoder_{kind}_type_embedding": [1, 1, text_width],
        }
    shapes |= {"text_embedding_layer_SimVLM.weight": [vocabulary, text_width]}
    shapes |= {"decoder_embed.weight": [text_width, width], "decoder_embed.bias": [text_width]}
    layers = {"self_attn.c_attn": (3, 1), "self_attn.c_proj": (1, 1), "multihead_attn.q_proj": (1, 1)}
    layers |= {"multihead_attn.kv_proj": (2, 1), "multihead_attn.c_proj": (1, 1), "linear1": (4, 1), "linear2": (1, 4)}
    for number in range(text_depth):
        at = f"decoder.layers.{number}"
        shapes[f"{at}.self_attn.bias"] = [1, 1, 128, 128]
        for layer, (rows, columns) in layers.items():
            shapes[f"{at}.{layer}.weight"] = [rows * text_width, columns * text_width]
            if biases:
                shapes[f"{at}.{layer}.bias"] = [rows * text_width]
        for norm in ("norm1", "norm2", "norm3"):
            shapes |= {f"{at}.{norm}.{kind}": [text_width] for kind in ("weight", "bias")}
    shapes |= {f"decoder_pred_text.0.{kind}": [text_width] for kind in ("weight", "bias")}
    shapes |= {"decoder_pred_text.1.weight": [vocabulary, text_width], "decoder_pred_text.1.bias": [vocabulary]}
    return random_tensors(shapes, seed)


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def norm(state: State, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int, causal: bool = False) -> Tensor:
    """One head after the other, by definition."""
    outputs = []
    for q, k, v in zip(query.chunk(heads, -1), key.chunk(heads, -1), value.chunk(heads, -1), strict=True):
        scores = torch.einsum("bid,bjd->bij", q, k) / q.shape[-1] ** 0.5
        if causal:
            scores = scores + torch.full(scores.shape[1:], float("-inf")).triu(1)
        outputs.append(torch.einsum("bij,bjd->bid", scores.softmax(-1), v))
    return torch.cat(outputs, -1)


def block(state: State, at: str, x: Tensor, heads: int) -> Tensor:
    query, key, value = linear(state, f"{at}.attn.qkv", norm(state, f"{at}.norm1", x, 1e-6)).chunk(3, -1)
    x = x + linear(state, f"{at}.attn.proj", attention(query, key, value, heads))
    return x + linear(
        state, f"{at}.mlp.fc2", F.gelu(linear(state, f"{at}.mlp.fc1", norm(state, f"{at}.norm2", x, 1e-6)))
    )


def depth_of(state: State, prefix: str) -> int:
    return len({key.split(".")[prefix.count(".") + 1] for key in state if key.startswith(f"{prefix}.")})


def embedded(state: State, images: Tensor) -> Tensor:
    size = state["patch_embed.proj.weight"].shape[-1]
    x = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=size)
    return x.flatten(2).transpose(1, 2) + state["pos_embed"][:, 1:]


def with_class(state: State, x: Tensor) -> Tensor:
    return torch.cat([(state["cls_token"] + state["pos_embed"][:, :1]).expand(len(x), -1, -1), x], 1)


def vip_mae_loss(state: State, images: Tensor, noise: Tensor, heads: int, decoder_heads: int, ratio: float) -> Tensor:
    patches = embedded(state, images)
    count = patches.shape[1]
    kept = int(count * (1 - ratio))
    ranks = noise.argsort(1).argsort(1)
    losses = []
    size = state["patch_embed.proj.weight"].shape[-1]
    for row in range(len(images)):
        visible = (ranks[row] < kept).nonzero().flatten()
        x = with_class(state, patches[row : row + 1, visible])
        for number in range(depth_of(state, "blocks")):
            x = block(state, f"blocks.{number}", x, heads)
        x = linear(state, "decoder_embed", norm(state, "norm", x, 1e-6))
        whole = state["mask_token"].repeat(1, 1 + count, 1).clone()
        whole[:, 0], whole[:, 1 + visible] = x[:, 0], x[:, 1:]
        whole = whole + state["decoder_pos_embed"]
        for number in range(depth_of(state, "decoder_blocks")):
            whole = block(state, f"decoder_blocks.{number}", whole, decoder_heads)
        guess = linear(state, "decoder_pred", norm(state, "decoder_norm", whole, 1e-6))[0, 1:]
        hidden = [p for p in range(count) if p not in visible.tolist()]
        grid = images.shape[-1] // size
        errors = []
        for p in hidden:
            top, left = p // grid * size, p % grid * size
            target = images[row, :, top : top + size, left : left + size].permute(1, 2, 0).flatten()
            errors.append((guess[p] - target).square().mean())
        losses.append(torch.stack(errors).mean())
    return torch.stack(losses)


def dpcap_memory(state: State, images: Tensor, heads: int) -> Tensor:
    x = with_class(state, embedded(state, images)) + state["encoder_image_type_embedding"]
    for number in range(depth_of(state, "blocks")):
        x = block(state, f"blocks.{number}", x, heads)
    x = linear(state, "decoder_embed", norm(state, "norm", x, 1e-6))
    return x + state["decoder_pos_embed"] + state["decoder_image_type_embedding"]


def dpcap_loss(state: State, images: Tensor, tokens: Tensor, heads: int, text_heads: int, relu: bool = False) -> Tensor:
    memory = dpcap_memory(state, images, heads)
    x = state["text_embedding_layer_SimVLM.weight"][tokens] + state["text_decoder_pos_embed"][:, : tokens.shape[1]]
    x = x + state["decoder_text_type_embedding"]
    for number in range(depth_of(state, "decoder.layers")):
        at = f"decoder.layers.{number}"
        query, key, value = linear(state, f"{at}.self_attn.c_attn", x).chunk(3, -1)
        mixed = linear(state, f"{at}.self_attn.c_proj", attention(query, key, value, text_heads, causal=True))
        x = norm(state, f"{at}.norm1", x + mixed, 1e-5)
        query = linear(state, f"{at}.multihead_attn.q_proj", x)
        key, value = linear(state, f"{at}.multihead_attn.kv_proj", memory).chunk(2, -1)
        seen = linear(state, f"{at}.multihead_attn.c_proj", attention(query, key, value, text_heads))
        x = norm(state, f"{at}.norm2", x + seen, 1e-5)
        inner = linear(state, f"{at}.linear1", x)
        inner = inner.clamp(min=0) if relu else F.gelu(inner)
        x = norm(state, f"{at}.norm3", x + linear(state, f"{at}.linear2", inner), 1e-5)
    logits = linear(state, "decoder_pred_text.1", norm(state, "decoder_pred_text.0", x, 1e-5))
    chosen = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    counted = (tokens[:, 1:] != 0).float()
    return -(chosen * counted).sum(1) / counted.sum(1)
