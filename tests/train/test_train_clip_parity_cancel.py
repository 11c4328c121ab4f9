"""Records made to break a norm that is computed from products of tokens: huge tokens' gradients that cancel.

|Σ_t g_t a_tᵀ|² = Σ_{s,t} (a_s·a_t)(g_s·g_t): when two tokens of size H cancel and a small one remains, the right side
is lost in the rounding of H², the factor becomes 1, and the record adds far more than C. The promise is about what is
added, so that is what is measured: the totals after each record alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from murmuration.train.clip.engine import ClipEngine
from murmuration.train.clip.rule import FACTOR_ROUNDING, ClipRule
from tests.support import brute_force
from tests.support.parity_cancel import READERS, TOKENS, WIDTHS, Read, hostile, mutated
from tests.support.parity_engines import ENGINES, contribution, only, prepared, summed

C = 0.1
RULE = ClipRule("flat", C / (1 + FACTOR_ROUNDING), FACTOR_ROUNDING)
CHUNK = 512


def claimed_sizes(clip: ClipEngine, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """factor times the true norm, in units of C: what a record adds if the weighted sum itself rounds nothing.

    A guide for the search, not the verdict: an engine may sum gradients that were rounded, if it clips those.
    """
    count = len(inputs["a"])
    _, (seen,) = summed(clip, model, [(inputs, torch.ones(count, dtype=torch.bool))])
    return seen.factors.double() * true_norms(model, inputs) / C


def true_norms(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """By vmap over fp64 copies: exact to 1e-8 even where 1e8 cancels."""
    parameters = {name: p.detach().double() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], record: dict[str, Tensor]) -> Tensor:
        batch = {n: t.unsqueeze(0) for n, t in record.items()}
        return torch.func.functional_call(model, values, (batch,)).squeeze(0)

    double = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, double)
    return torch.cat([g.flatten(1) for g in found.values()], 1).norm(dim=1)


def worst_found(engine: str, reader: str, width: int, rounds: int, measured: int) -> float:
    """Breeds records round after round, and measures in each what `measured` of them really add: the worst of all.

    Half of those measured are the largest by claim, half are any; parents are the worst by claim and by measure.
    """
    model, draw = READERS[reader](width), torch.Generator().manual_seed(7)
    clip = prepared(engine, RULE, model)
    pool, worst = hostile(CHUNK, width, draw), 0.0
    for _ in range(rounds):
        order = claimed_sizes(clip, model, pool).argsort(descending=True)
        others = order[measured // 2 :]
        chosen = torch.cat(
            [order[: measured // 2], others[torch.randperm(len(others), generator=draw)[: measured // 2]]]
        )
        added = torch.tensor([contribution(clip, model, only(pool, [row]), 0) for row in chosen.tolist()]) / C
        assert not added.isnan().any()  # which `max` would pass over
        worst = max(worst, float(added.max()))
        parents = torch.cat([order[: CHUNK // 4], chosen[added.argsort(descending=True)[: CHUNK // 4]]])
        children, fresh = mutated(only(pool, parents), draw), hostile(CHUNK // 2, width, draw)
        pool = {name: torch.cat([children[name], fresh[name]]) for name in pool}
    return worst


def test_the_records_are_as_hostile_as_they_claim() -> None:
    """A norm taken from fp32 products of tokens, as described above, breaks the promise on them by far."""
    inputs = hostile(2000, 6, torch.Generator().manual_seed(1))
    a, g = inputs["a"], inputs["g"]
    products = (a @ a.transpose(1, 2)) * (g @ g.transpose(1, 2))
    naive = products.sum((1, 2)).clamp(min=0).sqrt().double()
    exact = torch.einsum("bti,btj->bij", g.double(), a.double()).flatten(1).norm(dim=1)
    size = (C / naive).clamp(max=1) * exact / C
    assert float(size.max()) > 10 and float((size > 1.01).float().mean()) > 0.2


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_cancelling_record_adds_more_than_c(engine: str, reader: str, width: int) -> None:
    assert worst_found(engine, reader, width, rounds=2, measured=24) <= 1 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_cancelling_record_adds_more_than_c_of_many_thousands(engine: str, reader: str, width: int) -> None:
    """10⁵ records over all ways in, each measured by itself, chosen from several times as many."""
    assert worst_found(engine, reader, width, rounds=40, measured=100) <= 1 + 1e-5


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("engine", ENGINES)
def test_tame_records_in_the_same_batch_are_summed_as_precisely_as_ever(engine: str, width: int) -> None:
    """The guard against cancellation costs no accuracy: neither to records that need it not, nor to their sum."""
    draw = torch.Generator().manual_seed(3)
    inputs = hostile(16, width, draw)
    tame = {"a": torch.randn(16, TOKENS, width, generator=draw), "g": torch.randn(16, TOKENS, width, generator=draw)}
    mixed = {n: torch.cat([inputs[n], tame.get(n, inputs[n])]) for n in inputs}
    model = Read(width)
    clip = prepared(engine, RULE, model)
    here = torch.arange(32) >= 16
    totals, (seen,) = summed(clip, model, [(mixed, here)])
    records = brute_force.records_of(model, mixed)
    expected = brute_force.clipped_sum(records, brute_force.factors_of(records, here, brute_force.flat(RULE.bound)))
    assert brute_force.relative_error(totals, expected) <= 1e-5
    assert seen.norms[16:].tolist() == pytest.approx([r.norm() for r in records[16:]], rel=1e-5)
