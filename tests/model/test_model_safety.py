"""What couples samples is refused by type, and found by measurement (pitfall A26)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from timm.layers.drop import DropPath
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from murmuration.model.build import build
from murmuration.model.classifier import TransformerClassifier
from murmuration.model.encoder import Encoder
from murmuration.model.safety import CouplingError, coupling_probe, refuse_coupling
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import select


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm1d(4), "whole batch"),
        (nn.BatchNorm2d(4, track_running_stats=False), "whole batch"),
        (nn.SyncBatchNorm(4), "whole batch"),
        (nn.LazyBatchNorm2d(), "whole batch"),
        (BatchNormAct2d(4), "whole batch"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "running statistics"),
        (nn.Dropout(0.1), "not keyed"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "not keyed"),
        (DropPath(0.1), "not keyed"),
    ],
)
def test_coupling_layers_are_refused_with_their_path(layer: nn.Module, reason: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer))
    with pytest.raises(CouplingError, match=rf"^1\.0 \({type(layer).__name__}\).*{reason}"):
        refuse_coupling(model)


def test_foreign_running_statistics_are_refused() -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("running_peak", torch.zeros(2))
    with pytest.raises(CouplingError, match="the model itself"):
        refuse_coupling(layer)


def test_our_models_pass(model: Encoder, inputs: dict[str, Tensor]) -> None:
    refuse_coupling(model)
    state = torch.get_rng_state()
    coupling_probe(model, {key: value[:3] for key, value in inputs.items()})
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("body", [{"width": 16, "depth": 1, "heads": 2}, {"width": 8, "stages": (1, 1)}])
def test_classifiers_pass(body: dict[str, Any], loss: str) -> None:
    """With a head that is not zero: behind zeros nothing of the body could be seen."""
    given = {"family": "classifier", "image_size": 16, "patch_size": 8, "classes": 5, "head_scale": 1.0, **body}
    model = build(ModelSettings.model_validate({**given, "classify_loss": loss}), "classify")
    refuse_coupling(model)
    inputs = {"images": torch.randn(3, 3, 16, 16), "labels": torch.tensor([4, 0, 2])}
    coupling_probe(model, inputs)
    inputs["features"] = model.features(inputs.pop("images")).detach()
    coupling_probe(model, inputs)
    with pytest.raises(CouplingError, match=r"labels .*was replaced"):
        coupling_probe(model, inputs, loss=lambda x: model({**x, "labels": x["labels"].roll(1)}))
    ones = torch.tensor([1, 1, 0])
    with pytest.raises(CouplingError, match=r"labels \(its neighbour's\) of sample 2"):
        coupling_probe(
            model, {**inputs, "labels": ones}, loss=lambda x: model({**x, "labels": x["labels"].amin() + ones})
        )


class CentredFeatures(TransformerClassifier):
    """Coupled in the body, where a head of zeros hides it at the start of a run."""

    def features(self, images: Tensor) -> Tensor:
        found = super().features(images)
        return found - found.detach().mean(0)


def test_coupling_is_found_behind_a_head_of_zeros() -> None:
    given = {
        "family": "classifier",
        "image_size": 16,
        "patch_size": 8,
        "width": 16,
        "depth": 1,
        "heads": 2,
        "classes": 5,
    }
    model = build(ModelSettings.model_validate(given), "classify")
    inputs = {"images": torch.randn(3, 3, 16, 16), "labels": torch.tensor([4, 0, 2])}
    with torch.no_grad():
        model.head.weight[0, 0] = -0.0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    coupling_probe(model, inputs)
    model.__class__ = CentredFeatures
    with pytest.raises(CouplingError, match="was replaced"):
        coupling_probe(model, inputs)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert math.copysign(1.0, float(model.head.weight[0, 0].detach())) == -1.0


def test_adapted_and_older_models_pass() -> None:
    given = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2, "decoder_depth": 1}
    older = {"decoder_bias": True, "decoder_activation": "relu", "vocabulary": 16, "text_length": 6}
    model = build(ModelSettings.model_validate({"family": "captioner", **given, **older}), "caption")
    select(model, "lora", rank=2)
    refuse_coupling(model)
    coupling_probe(model, {"images": torch.randn(3, 3, 16, 16), "tokens": torch.arange(1, 19).reshape(3, 6) % 16})


@pytest.mark.parametrize("variant", ["resnetv2_50", "resnetv2_50d"])
def test_batch_norm_variants_of_the_resnet_are_refused(variant: str) -> None:
    with torch.device("meta"):
        with pytest.raises(CouplingError, match="BatchNorm"):
            refuse_coupling(timm.create_model(variant))
        refuse_coupling(timm.create_model("resnetv2_50x1_bit"))


def test_harmless_layers_pass() -> None:
    refuse_coupling(nn.Sequential(nn.Dropout(0.0), nn.InstanceNorm2d(4), nn.GroupNorm(2, 4), DropPath(0.0)))


class Planted(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("memory", torch.zeros(()))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = self.linear(inputs["features"])
        match self.kind:
            case "batch norm":
                x = self.norm(x)
            case "batch mean":
                x = x - 1e-3 * x.mean(dim=0)
            case "detached mean":
                x = x - x.detach().mean(dim=0)
            case "tokens":
                x = x * (1 + inputs["tokens"].float().amax())
            case "memory":
                self.memory += x.detach().sum() * 0 + 1
            case "noise":
                x = x + torch.randn_like(x)
            case "scalar":
                return x.square().mean()
            case _:
                pass
        return x.square().mean(dim=1)


@pytest.mark.parametrize(
    ("kind", "finding"),
    [
        ("batch norm", "derivative|changed"),
        ("batch mean", "derivative"),
        ("detached mean", "was replaced"),
        ("tokens", "tokens .* was replaced"),
        ("memory", "buffer memory"),
        ("noise", "two passes"),
        ("scalar", "one loss per sample"),
    ],
)
def test_the_probe_finds_planted_coupling(kind: str, finding: str) -> None:
    model = Planted(kind)
    inputs = {"features": torch.randn(4, 5), "tokens": torch.arange(12).reshape(4, 3)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CouplingError, match=finding):
        coupling_probe(model, inputs)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    coupling_probe(Planted("none"), inputs)


def test_the_probe_follows_a_longer_path() -> None:
    model = Planted("none")
    inputs = {"features": torch.randn(3, 5)}
    coupling_probe(model, inputs, loss=lambda x: model({"features": x["features"] * 2}))
    with pytest.raises(CouplingError, match="derivative"):
        coupling_probe(model, inputs, loss=lambda x: model({"features": x["features"].roll(1, 0)}))
    with pytest.raises(ValueError, match="two samples"):
        coupling_probe(model, {"features": torch.randn(1, 5)})
