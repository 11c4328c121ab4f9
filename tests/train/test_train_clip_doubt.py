"""At the widths of the shipped recipes, under the rule that GPUs use, no record has its gradients written out.

Records whose norm may be off by rounding are taken again in fp64, one by one: right, and some twenty times slower. On a
GPU, the error bound of the Gram kernel grows with the width of a layer, and a head of 32,768 words is wide. Depth adds
records of the same kind, so one block of each kind stands for all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import murmuration.train.clip.accumulator as accumulator
import murmuration.train.clip.norms as norms
from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.model.sizes import RESNETS
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import Float32Sums, trainable_shapes
from murmuration.train.config.load import load
from murmuration.train.self_test.probes import synthetic_batch
from tests.support.gram_in_torch import gram
from tests.support.kernel_doubles import have_only
from tests.support.shipped_recipes import FILES, PLANS, private_phase

SHALLOW = {"depth": 1, "decoder_depth": 1, "mae_decoder_depth": 1}


def widths() -> dict[str, tuple[dict[str, Any], str]]:
    """One recipe for each model that is trained privately; ResNets have no Gram matrices to speak of. Of GPT-2, whose
    texts have 1,024 tokens and whose table is tied, this does not hold: docs/recipes.md says so."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for name in sorted(FILES.keys() & PLANS.keys()):
        config = load(FILES[name], [])
        phase = config.phases[private_phase(config)]
        model = config.model.model_dump()
        if config.model.size in RESNETS or config.model.family == "gpt2" or phase.trainable != "all":
            continue
        if (model, phase.objective) not in found.values():
            found[name] = (model, str(phase.objective))
    return found


WIDTHS = widths()
# More than half of the file's time; their blocks differ from those of the others in width and length alone.
LARGEST = {"dpcap_huge", "transfer_vith_full", "transfer_vith_full_384", "transfer_vitl_full"}
assert WIDTHS.keys() >= LARGEST, "a recipe has another name"


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    have_only(monkeypatch, gram=gram)


def largest_doubt(monkeypatch: pytest.MonkeyPatch, name: str, steps: int = 0, records: int = 2) -> float:
    """Of all records, in units of what a norm may be off by before it is taken again."""
    settings, objective = WIDTHS[name]
    cut = {key: value for key, value in SHALLOW.items() if settings["family"] != "classifier" or key == "depth"}
    shape = ModelSettings.model_validate(settings | cut).resolved()
    torch.manual_seed(1)
    model = build(shape, objective)  # pyright: ignore[reportArgumentType]
    batch = synthetic_batch(shape, objective, records, seed=1)
    if "tokens" in batch.inputs:
        for record, length in enumerate(torch.linspace(8, shape.text_length, records).int().tolist()):
            batch.inputs["tokens"][record, length:] = 0
    trained = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    for _ in range(steps):  # in fp32, which every processor multiplies fast; bf16 matters where norms are taken
        model(batch.inputs).mean().backward()
        trained.step()
        trained.zero_grad()
    seen: list[float] = []
    honest = accumulator.NormAccumulator.norms

    def watched(self: Any, eligible: Tensor) -> Tensor:
        squares, doubts, _ = zip(*(terms.added(self._none) for terms in self._terms), strict=True)
        seen.append(float((sum(doubts) / (accumulator.TOLERANCE * sum(squares))).max()))
        return honest(self, eligible)

    monkeypatch.setattr(accumulator.NormAccumulator, "norms", watched)
    clip = BookKeepingClip(ClipRule("flat", 1.0, 0.0), "bf16", round_operands=True)
    clip.prepare(model)
    found = clip.add_clipped(model, batch.inputs, batch.present, Float32Sums(trainable_shapes(model)))
    assert (found.doubtful is not None) == (seen[0] > 1)
    return seen[0]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGEST else name for name in sorted(WIDTHS)]
)
def test_no_record_is_doubtful_at_the_first_step(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert largest_doubt(monkeypatch, name) < 0.5, "half of what is tolerated"


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["dpcap_nano", "dpcap_base", "vip_base", "transfer_vitb_full"])
def test_nor_after_a_few_steps(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A hundred on the same four records fit them so well that gradients of their tokens cancel as no others do."""
    assert largest_doubt(monkeypatch, name, steps=20, records=4) < 0.5


@pytest.mark.usefixtures("as_on_a_gpu")
def test_without_parts_every_caption_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "KERNEL_PART", 1 << 12)
    assert largest_doubt(monkeypatch, "dpcap_nano") > 1
