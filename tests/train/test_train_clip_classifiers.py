"""Every layer of the shipped models has a clip rule of its own: none meets the slow fallback, whatever is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmuration.model.build import Objective, build
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import Trainable, select
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.tracker import ParameterTracker, TrackedTensor
from tests.support import brute_force
from tests.support.parity_engines import prepared, summed

VIT: dict[str, Any] = {"family": "classifier", "width": 16, "depth": 1, "heads": 2}
BIT: dict[str, Any] = {"family": "classifier", "width": 8, "stages": (1, 1)}
OLD: dict[str, Any] = {"family": "captioner", "width": 16, "depth": 1, "heads": 2, "decoder_depth": 1}
OLD |= {"decoder_bias": True, "decoder_activation": "relu", "qkv_bias": True, "vocabulary": 16, "text_length": 6}
MAE: dict[str, Any] = {"family": "mae", "width": 16, "depth": 1, "heads": 2}
MAE |= {"mae_decoder_width": 16, "mae_decoder_depth": 1, "mae_decoder_heads": 2}
WORDS: tuple[Trainable, ...] = ("all", "head", "bias", "lora")
RUNS = [(VIT, "classify", word) for word in WORDS] + [(BIT, "classify", word) for word in WORDS[:3]]
RUNS += [(VIT, "classify", "whitened"), (BIT, "classify", "whitened")]
RUNS += [({**VIT, "positions": "sincos"}, "classify", "all"), (OLD, "caption", "all"), (OLD, "caption", "lora")]
RUNS += [({**MAE, "qkv_bias": bias}, "mae", "all") for bias in (True, False)] + [(MAE, "mae", "bias")]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Weights that became one copy for each record: a layer without a rule of its own has them."""
    found: list[str] = []
    plain = ParameterTracker._per_record

    def noted(self: ParameterTracker, source: TrackedTensor) -> Tensor:
        found.extend(source.leaves)
        return plain(self, source)

    monkeypatch.setattr(ParameterTracker, "_per_record", noted)
    return found


@pytest.mark.parametrize(
    ("given", "objective", "word", "loss"),
    [(*run, loss) for run in RUNS for loss in (("softmax", "sigmoid") if run[1] == "classify" else ("softmax",))],
)
def test_no_layer_meets_the_fallback_and_sums_are_right(
    given: dict[str, Any], objective: Objective, word: Trainable, loss: str, copied: list[str]
) -> None:
    more = {"image_size": 18 if given in (VIT, BIT) else 16, "patch_size": 4, "classes": 5, "head_scale": 1.0}
    model = build(ModelSettings.model_validate({**more, **given, "classify_loss": loss}), objective)
    select(model, word, rank=2)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        whitening = [tensor for name, tensor in model.named_buffers() if name == "head.whitening"]
        for parameter in [*model.parameters(), *whitening]:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    inputs = {"images": torch.randn(4, 3, more["image_size"], more["image_size"], generator=draw)}
    if objective == "classify":
        inputs["labels"] = torch.tensor([0, 4, 2, 2])
    elif objective == "mae":
        inputs["mask_noise"] = torch.rand(4, 16, generator=draw)
    else:
        inputs["tokens"] = torch.randint(1, 16, (4, 6), generator=draw)
    present = torch.ones(4, dtype=torch.bool)
    records = brute_force.records_of(model, inputs)
    bound = sorted(record.norm() for record in records)[1]
    expected = brute_force.clipped_sum(records, brute_force.factors_of(records, present, brute_force.flat(bound)))
    totals, _ = summed(prepared("book-keeping", ClipRule("flat", bound, 0.0, 0.0), model), model, [(inputs, present)])
    layers = nn.Linear | nn.Conv2d | nn.LayerNorm | nn.GroupNorm | nn.Embedding
    ruled = {f"{path}.weight" for path, part in model.named_modules() if isinstance(part, layers)}
    assert not ruled & set(copied)
    assert set(totals) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, tensor in expected.items():
        assert brute_force.relative_error({name: totals[name]}, {name: tensor}) <= 2e-4, name
    assert brute_force.relative_error(totals, expected) <= 1e-5
