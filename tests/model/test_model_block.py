"""The transformer block computes what timm's does, from the same names, to the last bit."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import Block as TimmBlock

from murmuration.model.attention import use_fused
from murmuration.model.block import Block, norm_layer
from murmuration.model.drop import RowKeys
from murmuration.model.sizes import Stack


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_the_block_is_timms_name_for_name_and_bit_for_bit(fused: bool, qkv_bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    ours = Block(Stack(48, 2, 4), qkv_bias, RowKeys())
    theirs = TimmBlock(48, 4, mlp_ratio=4.0, qkv_bias=qkv_bias, norm_layer=norm_layer)  # pyright: ignore[reportArgumentType]
    state = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in theirs.state_dict().items()}
    for block in (ours, theirs):
        block.load_state_dict(state)
        use_fused(block, fused)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(3, 17, 48, generator=generator)
    out, wanted = ours(x), theirs(x)
    assert torch.equal(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # pyright: ignore[reportArgumentType]
