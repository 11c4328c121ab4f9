"""Keyed dropout and drop-path alone: rates, independence, and that a mask is a function of key, module and place."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from murmuration.model.build import Objective
from murmuration.model.drop import KeyedDropout, KeyedDropPath, RowKeys, dropout
from murmuration.model.inputs import DROP_KEY
from tests.support.drop_world import OBJECTIVES, dropping, drops_of, inputs_of

LIKELY = 1e-7  # of a single check: about a thousand are made, and no honest mask is to fail by chance


def under(module: KeyedDropout | KeyedDropPath, keys: Tensor, x: Tensor) -> Tensor:
    return module.row_keys.around(lambda inputs: module(inputs["x"]), {"x": x, DROP_KEY: keys})


def drawn(rows: int, seed: int = 0) -> Tensor:
    """Keys as records have them."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), generator=torch.Generator().manual_seed(seed))


def kept_by(module: KeyedDropout | KeyedDropPath, keys: Tensor, *shape: int) -> Tensor:
    return under(module, keys, torch.ones(len(keys), *shape)) != 0


def module_number(number: int, rate: float = 0.5) -> KeyedDropout:
    row_keys = RowKeys()
    return [KeyedDropout(rate, row_keys) for _ in range(number)][-1]


def fits(dropped: int, tries: int, rate: float) -> bool:
    """Whether a binomial count may well be of this rate: within 5.3 standard deviations, which is LIKELY."""
    return abs(dropped - tries * rate) <= 5.3 * math.sqrt(tries * rate * (1 - rate))


def unrelated(one: Tensor, other: Tensor) -> bool:
    """Pearson's chi-square on the 2x2 table of two masks."""
    a, b = one.flatten().double(), other.flatten().double()
    count = torch.tensor([[(x * y).sum() for y in (b, 1 - b)] for x in (a, 1 - a)])
    expected = count.sum(1, keepdim=True) * count.sum(0, keepdim=True) / count.sum()
    return float(((count - expected) ** 2 / expected).sum()) < chi2.isf(LIKELY, 1)


@pytest.mark.parametrize("rate", [0.003, 0.1, 0.5, 0.9, 0.997])
@pytest.mark.parametrize("kind", [KeyedDropout, KeyedDropPath])
def test_rates_and_scale_are_those_asked_for(kind: type[KeyedDropout] | type[KeyedDropPath], rate: float) -> None:
    rows, shape = (500, (40, 50)) if kind is KeyedDropout else (1_000_000, (1,))
    x = torch.rand(rows, *shape) + 0.5
    found = under(kind(rate, RowKeys()), drawn(rows), x)
    zeros, tries = int((found == 0).sum()), x.numel()
    assert tries == 1_000_000 and fits(zeros, tries, rate)
    # As many tries tell it from a rate that is off by 0.6 percentage points.
    assert not fits(zeros, tries, rate + (0.006 if rate < 0.9 else -0.006))
    there = found != 0
    torch.testing.assert_close(found[there], x[there] / (1 - rate), rtol=1e-6, atol=0)


def test_no_place_and_no_row_is_dropped_more_often_than_others() -> None:
    rows, places, rate = 3000, 401, 0.2
    kept = kept_by(module_number(3, rate), drawn(rows), places)

    def scatter(dropped: Tensor, tries: int) -> float:
        return float(((dropped - tries * rate) ** 2 / (tries * rate * (1 - rate))).sum())

    for across, tries in ((0, rows), (1, places)):
        dropped = (~kept).double().sum(across)
        degrees = len(dropped)
        assert chi2.isf(1 - LIKELY, degrees) < scatter(dropped, tries) < chi2.isf(LIKELY, degrees)
    # It would find one place in forty whose rate is 0.25.
    biased = (~kept).double().sum(0)
    biased[::40] += 0.05 * rows
    assert scatter(biased, rows) > chi2.isf(LIKELY, places)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("keys", ["drawn", "counted"])
def test_masks_of_two_records_modules_or_places_are_unrelated(keys: str, rate: float) -> None:
    """Also for keys that are 0, 1, 2, … : the hash must not lean on keys being random."""
    rows, places = 64, 4096
    own = drawn(rows) if keys == "drawn" else torch.arange(rows)
    masks = kept_by(module_number(1, rate), own, places)
    for lag in (1, 2, 3, 31, 32):
        assert unrelated(masks[lag:], masks[:-lag]), f"records {lag} apart"
    # Two numbers come from one hash: 1 is their distance; others are those at which weak hashes repeat.
    for lag in (1, 2, 3, 4, 64, 1024, 2048):
        assert unrelated(masks[:, lag:], masks[:, :-lag]), f"places {lag} apart"
    for number in (2, 3, 17, 200):
        others = kept_by(module_number(number, rate), own, places)
        assert unrelated(others, masks), f"module {number}"
        assert unrelated(others[1:], masks[:-1]) and unrelated(others[:-1], masks[1:]), "key + 1 is not module + 1"
        assert unrelated(others[:, 1:], masks[:, :-1])
    # The test has power: a mask of which one value in fifty is copied from the other is found out.
    copied = torch.where(kept_by(module_number(9, 0.02), own, places), others, masks)
    assert not unrelated(copied, masks)


def test_three_masks_together_are_unrelated_too() -> None:
    """The exclusive or of two masks says nothing of a third, as it would for a hash that is linear in its inputs."""
    own, places = drawn(64), 4096
    masks = [kept_by(module_number(number), own, places) for number in (1, 2, 3)]
    assert unrelated(masks[0] ^ masks[1], masks[2])
    flipped = [kept_by(module_number(1), own ^ mask, places) for mask in (0, 1, 2, 3)]
    assert unrelated(flipped[0] ^ flipped[1], flipped[2] ^ flipped[3])


def test_each_bit_of_a_key_changes_half_of_the_mask() -> None:
    own, module = drawn(16), module_number(1)
    plain = kept_by(module, own, 4096)
    for bit in range(64):
        flip = (1 << bit) if bit < 63 else -(1 << 63)
        changed = int((kept_by(module, own ^ flip, 4096) ^ plain).sum())
        assert fits(changed, plain.numel(), 0.5), bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [KeyedDropout, KeyedDropPath])
def test_a_row_has_its_mask_wherever_it_stands(
    kind: type[KeyedDropout] | type[KeyedDropPath], dtype: torch.dtype
) -> None:
    module, keys, x = kind(0.4, RowKeys()), drawn(33), torch.randn(33, 5, 7, dtype=dtype)
    whole = under(module, keys, x)
    assert whole.dtype == dtype
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    assert torch.equal(under(module, keys[order], x[order]), whole[order])
    for row in range(33):
        assert torch.equal(under(module, keys[row : row + 1], x[row : row + 1])[0], whole[row])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert torch.equal(under(module, keys, x), whole) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(under(module, keys + 1, x), whole)
    mapped = torch.vmap(lambda x, key: under(module, key.unsqueeze(0), x.unsqueeze(0)).squeeze(0))(x, keys)
    assert torch.equal(mapped, whole)


def test_a_path_is_dropped_whole_and_values_one_by_one() -> None:
    keys = drawn(400)
    paths = kept_by(KeyedDropPath(0.5, RowKeys()), keys, 3, 4).flatten(1)
    assert bool((paths.all(1) | ~paths.any(1)).all()) and 0 < int(paths.all(1).sum()) < 400
    assert not bool((kept_by(KeyedDropout(0.5, RowKeys()), keys, 3, 4).flatten(1).all(1)).any())


def test_what_is_dropped_is_zero_whatever_it_was_and_its_gradient_as_well() -> None:
    module, keys = KeyedDropout(0.5, RowKeys()), drawn(4)
    x = torch.full((4, 50), float("nan")).requires_grad_()
    kept = kept_by(module, keys, 50)
    found = under(module, keys, x)
    assert bool((found[~kept] == 0).all()) and bool(found[kept].isnan().all())
    gradient = torch.autograd.grad(found, x, torch.full_like(found, 3.0))[0]
    assert torch.equal(gradient, torch.where(kept, 6.0, 0.0))


PINNED = ["0000111010001001", "1111101100110111"]
KEYS, WRAP = (7, -(1 << 63)), 1 << 64


def mixed(state: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        state = ((state ^ (state >> 33)) * factor) % WRAP
    return state ^ (state >> 33)


def by_hand(key: int, module: int, places: int, rate: float) -> list[int]:
    """In Python's integers, which do not wrap by themselves: two numbers of 32 bits from each hash, the lower first."""
    golden, found = 0x9E3779B97F4A7C15, []
    own = mixed((key + module * golden) % WRAP)
    for pair in range(places // 2):
        both = mixed(own ^ mixed((pair + 1) * golden % WRAP))
        # Signed as C has it: the half of all numbers that has the highest bit comes first.
        found += [(number + (1 << 31)) % (1 << 32) for number in (both % (1 << 32), both >> 32)]
    return [int(number >= round(rate * 2**32)) for number in found]


@pytest.mark.parametrize("rate", [0.5, 0.07])
def test_masks_are_those_of_the_same_hash_in_unbounded_integers(rate: float) -> None:
    """A run that is resumed has them again; another hash would be another mechanism."""
    mask = kept_by(module_number(2, rate), torch.tensor(KEYS), 16).int().tolist()
    assert mask == [by_hand(key, 2, 16, rate) for key in KEYS]
    assert rate != 0.5 or ["".join(map(str, row)) for row in mask] == PINNED


def test_no_keys_wrong_keys_and_wrong_rates_are_errors() -> None:
    module, x = KeyedDropout(0.5, RowKeys()), torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"add drop_key"):
        module(x)
    with pytest.raises(ValueError, match=r"add drop_key"):
        module.row_keys.around(lambda inputs: module(inputs["x"]), {"x": x})
    assert torch.equal(module.eval()(x), x)
    assert torch.equal(under(module, drawn(3), x), x), "in evaluation mode keys are no matter"
    module.train()
    for keys in (drawn(2), drawn(3)[:, None], drawn(3).int(), torch.rand(3)):
        with pytest.raises(ValueError, match="one int64 for each record"):
            under(module, keys, x)
    with pytest.raises(ValueError, match="add drop_key"):
        module(x)  # keys of a call that failed are gone
    for rate in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"drop rate of .* is impossible"):
            KeyedDropout(rate, RowKeys())
    row_keys = RowKeys()
    assert not isinstance(dropout(0.0, row_keys), torch.nn.Module) and row_keys.number() == 1
    assert torch.equal(dropout(0.0, row_keys)(x), x)
    assert torch.equal(under(KeyedDropout(0.0, RowKeys()), drawn(3), x), x)


# Layers that run again, copies and compiled models drop the same.


def test_a_copy_has_keys_of_its_own() -> None:
    model, inputs = dropping("mae"), inputs_of("mae", 4)
    copied = copy.deepcopy(model)
    assert {id(part.row_keys) for part in drops_of(copied).values()} == {id(copied.row_keys)} != {id(model.row_keys)}
    assert torch.equal(copied(inputs), model(inputs))


class Checkpointed(nn.Module):
    """A block that keeps nothing for the backward pass but its input, and runs again there."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, *x: Tensor) -> Tensor:
        return checkpoint(self.block, *x, use_reentrant=self.reentrant)


def checkpointed(objective: Objective, reentrant: bool) -> nn.Module:
    model = dropping(objective)
    for stack in ("blocks", "decoder_blocks", "decoder.layers"):
        if any(name == stack for name, _ in model.named_modules()):
            layers = model.get_submodule(stack)
            for number, layer in enumerate(list(layers)):  # pyright: ignore[reportArgumentType]
                layers[number] = Checkpointed(layer, reentrant)  # pyright: ignore[reportIndexIssue, reportArgumentType]
    return model


def gradients_of(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_checkpointed_layers_see_the_same_masks_when_they_run_again(objective: Objective, reentrant: bool) -> None:
    plain, model = dropping(objective), checkpointed(objective, reentrant)
    batches = [inputs_of(objective, rows, seed) for seed, rows in enumerate((4, 4, 3))]
    expected = []
    for inputs in batches:
        plain(inputs).sum().backward()
        expected.append(gradients_of(plain))
    assert not any(
        torch.equal(one, other) for one, other in zip(expected[0], expected[1], strict=True) if one.dim() > 1
    )
    # Backward in the forward's order, the other way round, and after other passes in between.
    for order in ((0, 1, 2), (2, 0, 1)):
        losses = [model(inputs) for inputs in batches]
        with torch.no_grad():
            model(inputs_of(objective, 4, 9))
        for number in order:
            losses[number].sum().backward()
            assert all(map(torch.equal, gradients_of(model), expected[number]))
    # All in one backward pass, where autograd itself chooses the order.
    together = [sum(parts[1:], parts[0]) for parts in zip(*expected, strict=True)]
    torch.cat([model(inputs) for inputs in batches]).sum().backward()
    for found, total in zip(gradients_of(model), together, strict=True):
        torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_model_drops_alike() -> None:
    model, inputs = dropping("classify"), inputs_of("classify", 4)
    expected = model(inputs)
    compiled = torch.compile(model, backend="aot_eager")
    found = compiled(inputs)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    ours = gradients_of(model)
    expected.sum().backward()
    for one, other in zip(ours, gradients_of(model), strict=True):
        torch.testing.assert_close(one, other)
