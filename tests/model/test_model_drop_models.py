"""Models that drop: where they do so, that a record's loss depends on its own key alone, and recomputation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import timm
import torch
from timm.layers import calculate_drop_path_rates
from timm.layers.drop import DropPath
from torch import Tensor, nn

from murmuration.model.build import Objective, build
from murmuration.model.captioner import Captioner, DecoderLayer
from murmuration.model.drop import KeyedDropPath, RowKeys
from murmuration.model.encoder import Inputs
from murmuration.model.inputs import DROP_KEY
from murmuration.model.safety import CouplingError, refuse_coupling
from murmuration.model.settings import Shape
from murmuration.model.trainable import select
from tests.support.drop_world import OBJECTIVES, dropping, drops_of, inputs_of, settings_of

# Where


@pytest.mark.parametrize("depth", [2, 5])
def test_drops_stand_where_timm_has_them_and_paths_grow_linearly(depth: int) -> None:
    ours = drops_of(dropping("classify", 0.1, 0.3, depth=depth).get_submodule("blocks"))
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=depth, num_heads=2, num_classes=5,
        proj_drop_rate=0.1, drop_path_rate=0.3,
    ).get_submodule("blocks")  # fmt: skip
    expected = {name: part.p for name, part in theirs.named_modules() if isinstance(part, nn.Dropout) and part.p > 0}
    expected |= {
        name: float(part.drop_prob or 0) for name, part in theirs.named_modules() if isinstance(part, DropPath)
    }
    assert {name: part.rate for name, part in ours.items()} == pytest.approx(expected)
    rates = [ours[f"{block}.drop_path1"].rate for block in range(1, depth)]
    assert [0.0, *rates] == pytest.approx(calculate_drop_path_rates(0.3, depth)) and rates[-1] == 0.3


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_paths_are_dropped_in_the_encoder_alone_and_every_module_has_a_number_of_its_own(objective: Objective) -> None:
    found = drops_of(dropping(objective))
    paths = {name for name, part in found.items() if isinstance(part, KeyedDropPath)}
    assert paths == {f"blocks.{block}.drop_path{half}" for block in (1, 2) for half in (1, 2)}
    decoder = {"mae": 2 * 3, "caption": 2 * 4, "classify": 0}[objective]
    assert len(found) == 4 + 3 * 3 + decoder
    assert all(part.rate == 0.2 for name, part in found.items() if name not in paths)
    assert sorted(part.number for part in found.values()) == list(range(1, len(found) + 1))
    # The encoder's come first: both objectives of one recipe drop alike in it.
    assert {name: part.number for name, part in found.items() if name.startswith("blocks.")} == {
        name: part.number for name, part in drops_of(dropping("mae")).items() if name.startswith("blocks.")
    }
    assert not drops_of(dropping(objective, 0.0, 0.5)).keys() - paths
    assert not drops_of(dropping(objective, 0.2, 0.0)).keys() & paths


def test_the_text_decoder_drops_where_pytorchs_own_layer_does() -> None:
    """The same weights and the same four masks in torch's layer give the same numbers."""
    row_keys = RowKeys()
    ours = DecoderLayer(16, 2, True, "relu", 0.3, row_keys)
    theirs = nn.TransformerDecoderLayer(16, 2, 64, dropout=0.0, activation="relu", batch_first=True)
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.2)
        for part in ("linear1", "linear2", "norm1", "norm2", "norm3"):
            theirs.get_submodule(part).load_state_dict(ours.get_submodule(part).state_dict())
        for kind in ("weight", "bias"):
            getattr(theirs.self_attn, f"in_proj_{kind}").copy_(getattr(ours.self_attn.c_attn, kind))
            both = [getattr(ours.multihead_attn.q_proj, kind), getattr(ours.multihead_attn.kv_proj, kind)]
            getattr(theirs.multihead_attn, f"in_proj_{kind}").copy_(torch.cat(both))
            for part in ("self_attn", "multihead_attn"):
                own = getattr(ours.get_submodule(part).c_proj, kind)
                getattr(theirs.get_submodule(part).out_proj, kind).copy_(own)
    for name in ("dropout", "dropout1", "dropout2", "dropout3"):
        assert isinstance(getattr(theirs, name), nn.Dropout)
        setattr(theirs, name, getattr(ours, name))
    x, memory = torch.randn(5, 6, 16), torch.randn(5, 9, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    keys = inputs_of("mae", 5)[DROP_KEY]

    def both(inputs: Inputs) -> Tensor:
        assert set(inputs) == {DROP_KEY}
        return torch.stack([ours(x, memory), theirs(x, memory, tgt_mask=mask, tgt_is_causal=True)])

    found, expected = row_keys.around(both, {DROP_KEY: keys})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, row_keys.around(lambda _: ours(x, memory), {DROP_KEY: keys + 1}))


# What a rate of 0 leaves


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_rates_nothing_drops_and_weights_have_the_same_names(objective: Objective) -> None:
    plain, drops = build(settings_of(objective), objective), dropping(objective)
    assert not drops_of(plain) and not plain.shape.drops and drops.shape.drops  # pyright: ignore[reportAttributeAccessIssue]
    state = plain.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in drops.state_dict().items())
    assert state.keys() == drops.state_dict().keys()
    drops.load_state_dict(state, strict=True)
    inputs = inputs_of(objective, 4)
    without = {name: tensor for name, tensor in inputs.items() if name != DROP_KEY}
    assert torch.equal(plain(without), plain(inputs)), "keys that nothing asks for change nothing"
    assert torch.equal(plain(without), drops.eval()(without)), "in evaluation mode nothing is dropped"
    assert torch.equal(drops(inputs), drops(without))
    kinds = {type(part) for part in plain.modules()}
    assert kinds == {type(part) for part in build(settings_of(objective), objective, device="meta").modules()}


def test_an_encoder_of_one_block_may_drop_units() -> None:
    assert settings_of("mae", depth=1, dropout=0.1).resolved().drops


# One record, one key


@pytest.mark.parametrize("trainable", ["all", "lora"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_key_changes_the_loss_of_its_record_alone(objective: Objective, trainable: Any) -> None:
    model, inputs = dropping(objective), inputs_of(objective, 6)
    select(model, trainable, rank=2)
    losses = model(inputs).detach()
    assert not torch.equal(losses, model.eval()(inputs))
    model.train()
    for row in range(6):
        keys = inputs[DROP_KEY].clone()
        keys[row] += 1
        moved = model({**inputs, DROP_KEY: keys}).detach() != losses
        assert moved.tolist() == [other == row for other in range(6)]
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    there = model({name: tensor[order] for name, tensor in inputs.items()})
    torch.testing.assert_close(there, losses[order], rtol=1e-6, atol=0)
    for row in range(6):
        alone = model({name: tensor[row : row + 1] for name, tensor in inputs.items()})
        torch.testing.assert_close(alone, losses[row : row + 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_keyed_drops_are_not_refused(objective: Objective) -> None:
    refuse_coupling(dropping(objective))


@pytest.mark.parametrize("part", [nn.Dropout(0.1), nn.Dropout2d(0.1), DropPath(0.1), nn.AlphaDropout(0.1),
                                  nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(4, 4, 2, dropout=0.1)])  # fmt: skip
def test_drops_without_keys_are_refused_beside_keyed_ones(part: nn.Module) -> None:
    model = dropping("classify")
    model.add_module("extra", part)
    with pytest.raises(
        CouplingError, match=r"^extra .* is not keyed by sample; set it to 0, or use the layers of model\.drop"
    ):
        refuse_coupling(model)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_without_keys_is_an_error_and_a_part_alone_never_has_stale_ones(objective: Objective) -> None:
    model, inputs = dropping(objective), inputs_of(objective, 4)
    without = {name: tensor for name, tensor in inputs.items() if name != DROP_KEY}
    with pytest.raises(ValueError, match=r"has no keys .* add drop_key \(int64 \[B\]\) to its inputs, or call eval"):
        model(without)
    losses = model(inputs)
    for act in (lambda: None, lambda: losses.sum().backward()):
        act()
        with pytest.raises(ValueError, match="add drop_key"):
            model.tokens(inputs["images"])  # pyright: ignore[reportCallIssue]
    model.eval()
    assert model.tokens(inputs["images"]).shape[0] == 4  # pyright: ignore[reportCallIssue]
    if isinstance(model, Captioner):
        memory = model.encode_images(inputs["images"])
        assert model.decode(memory, inputs["tokens"])[:, -1].shape == (4, 16)


def test_shapes_tell_rates_apart() -> None:
    shapes: list[Shape] = [settings_of("mae", dropout=rate, drop_path=path).resolved() for rate in (0.0, 0.1)
                           for path in (0.0, 0.1)]  # fmt: skip
    assert [shape.drops for shape in shapes] == [False, True, True, True]
    assert all(one != other for one, other in pairwise(shapes)) and replace(shapes[3], dropout=0.0) == shapes[1]
