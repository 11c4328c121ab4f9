"""Classifiers against timm's own models and hand-written losses; the head's rules; what a phase trains."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
from sklearn.linear_model import Ridge
from timm.layers.norm_act import GroupNormAct
from timm.layers.std_conv import StdConv2d
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn
from torch.nn import functional as F

from murmuration.model.build import build
from murmuration.model.classifier import Classifier, TransformerClassifier, classification_loss
from murmuration.model.resnet import ResNetClassifier
from murmuration.model.settings import ModelSettings
from murmuration.model.sizes import RESNETS, Size
from murmuration.model.statistics_head import StatisticsHead, largest_eigenvalue, solved_state
from murmuration.model.trainable import merged, select

TRANSFORMER: dict[str, Any] = {"image_size": 36, "patch_size": 8, "width": 32, "depth": 2, "heads": 4, "classes": 7}
RESNET: dict[str, Any] = {"image_size": 32, "width": 8, "stages": (1, 2), "classes": 7}
BOTH = pytest.mark.parametrize("given", [TRANSFORMER, RESNET], ids=["transformer", "resnet"])


def make(given: dict[str, Any], **more: Any) -> Classifier:
    return build(ModelSettings(family="classifier", **{**given, **more}), "classify")


def example(given: dict[str, Any], count: int = 4) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    side = given["image_size"]
    images = torch.randn(count, 3, side, side, generator=draw)
    return {"images": images, "labels": torch.randint(0, 7, (count,), generator=draw)}


def test_the_transformer_is_timms() -> None:
    """Class token, learned positions, and a remainder of 4 pixels that no patch covers, as in H/14 at 256."""
    ours = make(TRANSFORMER, head_scale=1.0)
    theirs = timm.create_model(
        "vit_base_patch16_224", img_size=36, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=7
    )
    assert set(ours.state_dict()) == set(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    images = example(TRANSFORMER)["images"]
    torch.testing.assert_close(ours.logits(images), theirs.eval()(images), rtol=1e-5, atol=1e-5)


def test_the_resnet_is_timms() -> None:
    ours = make(RESNET, head_scale=1.0)
    assert isinstance(ours, ResNetClassifier)
    theirs = ResNetV2(
        layers=[1, 2], channels=(32, 64), num_classes=7, stem_chs=8, stem_type="fixed",
        norm_layer=partial(GroupNormAct, num_groups=8), conv_layer=partial(StdConv2d, eps=1e-8),
    )  # fmt: skip
    body = {f"{name}": tensor for name, tensor in ours.body.state_dict().items()}
    head = {f"head.fc.{name}": tensor.view(theirs.get_parameter(f"head.fc.{name}").shape)
            for name, tensor in ours.head.state_dict().items()}  # fmt: skip
    theirs.load_state_dict(body | head)
    images = example(RESNET)["images"]
    torch.testing.assert_close(ours.logits(images), theirs.eval()(images), rtol=1e-5, atol=1e-5)


def test_a_wide_resnet_is_de_et_als() -> None:
    """By hand: no pooling after the stem, two 3 x 3 convolutions in a block, which is narrowed at its first."""
    ours = make({**RESNET, "size": "wrn16x4"}, head_scale=1.0)
    assert isinstance(ours, ResNetClassifier)
    state = ours.state_dict()

    def convolved(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = state[f"body.{name}.weight"]
        spread, middle = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
        padding = weight.shape[-1] // 2
        return F.conv2d(x, (weight - middle) / (spread + 1e-8).sqrt(), stride=stride, padding=padding)

    def normed(x: Tensor, name: str) -> Tensor:
        return F.group_norm(x, 8, state[f"body.{name}.weight"], state[f"body.{name}.bias"]).relu()

    images = example(RESNET)["images"]
    x = convolved(images, "stem.conv")
    for block, stride in (("stages.0.blocks.0", 1), ("stages.1.blocks.0", 2), ("stages.1.blocks.1", 1)):
        before, x = x, normed(x, f"{block}.norm1")
        straight = convolved(x, f"{block}.downsample.conv", stride) if block.endswith("0") else before
        x = convolved(x, f"{block}.conv1", stride)
        x = straight + convolved(normed(x, f"{block}.norm2"), f"{block}.conv2")
    logits = normed(x, "norm").mean((2, 3)) @ state["head.weight"].T + state["head.bias"]
    assert x.shape[2:] == (16, 16)
    torch.testing.assert_close(ours.logits(images), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [size for size in RESNETS if size not in ("r50x4", "wrn16x4")])
def test_published_resnets_have_timms_names_shapes_and_counts(size: Size) -> None:
    """timm has every size of which BiT published weights; of r50x4 there are none."""
    ours = build(ModelSettings(family="classifier", size=size, classes=17), "classify", device="meta")
    assert isinstance(ours, ResNetClassifier)
    with torch.device("meta"):
        model = timm.create_model(f"resnetv2_{size.removeprefix('r')}_bit", num_classes=17)
    body = {name: tensor.shape for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    assert {name: tensor.shape for name, tensor in ours.body.state_dict().items()} == body
    count, theirs = (sum(p.numel() for p in each.parameters()) for each in (ours, model))
    assert count == theirs
    kept = [(m.num_groups, m.eps) for m in ours.modules() if isinstance(m, GroupNormAct)]
    assert set(kept) == {(32, 1e-5)} and {m.eps for m in ours.modules() if isinstance(m, StdConv2d)} == {1e-8}


def test_losses_by_hand() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0], [0.0, 3.0, -2.0]])
    labels = torch.tensor([2, 0])
    softmax = [-math.log(math.exp(row[k]) / sum(map(math.exp, row))) for row, k in zip(logits.tolist(), (2, 0))]  # noqa: B905
    torch.testing.assert_close(classification_loss(logits, labels, "softmax"), torch.tensor(softmax))

    def yes(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    sigmoid = [
        -sum(math.log(yes(x) if c == k else 1 - yes(x)) for c, x in enumerate(row))
        for row, k in ((logits[0].tolist(), 2), (logits[1].tolist(), 0))
    ]
    torch.testing.assert_close(classification_loss(logits, labels, "sigmoid"), torch.tensor(sigmoid))
    several = torch.nn.functional.one_hot(labels, 3)
    assert torch.equal(classification_loss(logits, several, "sigmoid"), classification_loss(logits, labels, "sigmoid"))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_label_that_is_no_class_counts_as_nothing(kind: Any) -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    losses = classification_loss(logits, torch.tensor([1, 3, -1, 10**9]), kind)
    assert float(losses.detach()[0]) > 0 and not bool(losses.detach()[1:].any())
    losses.sum().backward()
    assert logits.grad is not None and bool(logits.grad[0].any()) and not bool(logits.grad[1:].any())


def test_labels_of_several_classes_are_for_the_sigmoid_alone() -> None:
    with pytest.raises(ValueError, match="sigmoid"):
        classification_loss(torch.zeros(2, 3), torch.ones(2, 3), "softmax")


@BOTH
@pytest.mark.parametrize(("loss", "bias"), [("sigmoid", -10.0), ("softmax", 0.0)])
def test_the_head_starts_by_the_published_rules(given: dict[str, Any], loss: str, bias: float) -> None:
    model = make(given, classify_loss=loss)
    assert not bool(model.head.weight.any()) and bool((model.head.bias == bias).all())
    losses = model(example(given))
    start = {"sigmoid": 6 * math.log1p(math.exp(-10.0)) + math.log1p(math.exp(10.0)), "softmax": math.log(7)}
    torch.testing.assert_close(losses, torch.full((4,), start[loss]))


def test_the_head_scale_is_lecuns_at_one_and_the_bias_can_be_set() -> None:
    model = make({**TRANSFORMER, "width": 256, "classes": 400}, head_scale=1.0, head_bias=-3.0)
    assert float(model.head.weight.detach().std()) == pytest.approx(256**-0.5, rel=0.01)
    assert bool((model.head.bias == -3.0).all())
    half = make({**TRANSFORMER, "width": 256, "classes": 400}, head_scale=0.5)
    torch.testing.assert_close(half.head.weight * 2, model.head.weight)


@BOTH
def test_cached_features_have_the_same_losses(given: dict[str, Any]) -> None:
    model = make(given, head_scale=1.0)
    inputs = example(given)
    features = model.features(inputs["images"])
    assert features.shape == (4, model.shape.encoder.width)
    assert torch.equal(model({"features": features, "labels": inputs["labels"]}), model(inputs))


def test_mean_pooling_leaves_the_class_token_out() -> None:
    model = make(TRANSFORMER, pooling="mean")
    assert isinstance(model, TransformerClassifier)
    images = example(TRANSFORMER)["images"]
    torch.testing.assert_close(model.features(images), model.tokens(images)[:, 1:].mean(1))


def test_any_encoder_can_be_classified_with() -> None:
    """ViP's encoder keeps its fixed positions and is pooled by the mean."""
    settings = ModelSettings(family="mae", image_size=32, patch_size=8, width=32, depth=2, heads=4)
    model = build(settings, "classify")
    assert "pos_embed" in dict(model.named_buffers()) and model.shape.pooling == "mean"


@BOTH
def test_weights_depend_on_the_seed_alone(given: dict[str, Any]) -> None:
    torch.manual_seed(1)
    first = make(given).state_dict()
    torch.manual_seed(2)
    second, other = make(given).state_dict(), make(given, init_seed=1).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    name = "body.stages.1.blocks.0.conv2.weight" if "stages" in given else "pos_embed"
    assert not torch.equal(first[name], other[name])


# A head from two sums: no record adds more than 1 to them, and without noise it is ridge regression.


WIDTH, CLASSES, RECORDS = 12, 4, 200
TOY = ModelSettings(family="classifier", image_size=32, patch_size=8, width=32, depth=1, heads=2, classes=CLASSES)


def records() -> tuple[Tensor, Tensor]:
    """Features of very different lengths, which tell their labels."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (RECORDS,), generator=draw)
    features = torch.randn(RECORDS, WIDTH, generator=draw) + 2 * torch.eye(CLASSES, WIDTH)[labels]
    return features * torch.rand(RECORDS, 1, generator=draw).exp(), labels


def shares(head: StatisticsHead, features: Tensor, labels: Tensor) -> Tensor:
    """[B, elements]: what each record adds to the sums, by autograd."""
    found = []
    for row in range(len(features)):
        head.zero_grad()
        head(features[row : row + 1], labels[row : row + 1]).sum().backward()
        assert head.gram.grad is not None and head.cross.grad is not None
        found.append(torch.cat([head.gram.grad.flatten(), head.cross.grad.flatten()]))
    return torch.stack(found)


def after_one_step(head: StatisticsHead, features: Tensor, labels: Tensor) -> StatisticsHead:
    head.zero_grad()
    head(features, labels).mean().backward()
    with torch.no_grad():
        for sums in (head.gram, head.cross):
            assert sums.grad is not None
            sums -= sums.grad
    return head


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_no_record_adds_more_than_1(noise: float) -> None:
    head = StatisticsHead(nn.Linear(WIDTH, CLASSES))
    head.settle(noise)
    features, labels = records()
    features = torch.cat([features[:20], torch.full((1, WIDTH), 1e30), torch.zeros(1, WIDTH), features[:1] * 1e-30])
    labels = torch.cat([labels[:20], torch.tensor([0, 1, CLASSES + 5])])
    found = shares(head, features, labels).norm(dim=1)
    assert bool((found <= 1 + 1e-6).all()) and bool(found.isfinite().all())
    assert float(found[0]) == pytest.approx(1.0, rel=1e-5)
    several = torch.zeros(3, CLASSES)
    several[0, :3], several[1] = 1, torch.tensor([1.0, 0, 0, 0])
    assert bool((shares(head, features[:3], several).norm(dim=1) <= 1 + 1e-6).all())


def test_it_is_ridge_regression() -> None:
    """Against scikit-learn, on sums without noise."""
    features, labels = records()
    ridge = 0.01
    head = StatisticsHead(nn.Linear(WIDTH, CLASSES))
    head.settle(0.0, ridge)
    weight, bias = after_one_step(head, features, labels).solved()
    inputs = features / features.norm(dim=1, keepdim=True)
    theirs = Ridge(alpha=ridge * RECORDS, fit_intercept=False, solver="cholesky")
    theirs.fit(inputs.double().numpy(), np.eye(CLASSES)[labels.numpy()])
    assert torch.allclose(weight, torch.from_numpy(theirs.coef_).float(), atol=1e-5)
    assert not bias.any()


def test_its_answers_are_those_of_the_ordinary_head_it_becomes() -> None:
    model = build(TOY, "classify")
    assert isinstance(model, Classifier)
    assert select(model, "statistics") == ["head.gram", "head.cross"] == select(model, "statistics")
    head = model.head
    assert isinstance(head, StatisticsHead)
    head.settle(0.0, 0.1)
    features = torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    after_one_step(head, features, torch.arange(40) % CLASSES)
    plain = build(TOY, "classify")
    assert isinstance(plain, Classifier)
    assert plain.load_state_dict(merged(model.state_dict()), strict=True)
    assert torch.allclose(plain.head(features), head(features), atol=1e-6)
    assert head(features).argmax(1).tolist() != [0] * 40
    untouched = plain.state_dict()
    assert all(solved_state(untouched)[name] is tensor for name, tensor in untouched.items())
    with torch.no_grad():
        head.cross.mul_(2)
    assert torch.allclose(head(features), 2 * plain.head(features), atol=1e-5), "solved anew once the sums change"


def test_what_noise_hides_of_the_first_sum_tells_its_mean_alone() -> None:
    """Where noise could have made all eigenvalues, the head is that of the classes' means; what stands out stays."""
    features, labels = records()
    head = StatisticsHead(nn.Linear(WIDTH, CLASSES))
    head.settle(1.0)
    weight, _ = after_one_step(head, features, labels).solved()
    unit = features / features.norm(dim=1, keepdim=True)
    sums = torch.eye(CLASSES)[labels].T @ unit / RECORDS
    assert torch.allclose(weight / weight.norm(), sums / sums.norm(), atol=1e-5)
    features[:, 0] += 100  # one direction holds nearly all of X
    head = StatisticsHead(nn.Linear(WIDTH, CLASSES))
    head.settle(0.02)
    weight, _ = after_one_step(head, features, labels).solved()
    unit = features / features.norm(dim=1, keepdim=True)
    values, vectors = torch.linalg.eigh((unit.T @ unit / RECORDS).double())
    assert values[-1] > 0.9 and float(head.solving[1]) > float(values[-2])
    assert float(head.solving[0]) == pytest.approx(0.25 * float(head.solving[1])), "the ridge: a quarter of it"
    expected = values.clone()
    expected[:-1] = values[:-1].mean()
    sums = (torch.eye(CLASSES)[labels].T @ unit / RECORDS).double()
    expected = sums @ (vectors / (expected + float(head.solving[0]))) @ vectors.T
    assert torch.allclose(weight.double(), expected, atol=1e-4)


def test_the_ridge_follows_the_largest_eigenvalue_of_noise_alone() -> None:
    draw, width, deviation = torch.Generator().manual_seed(3), 300, 1e-3
    noise = torch.randn(width, width, generator=draw) * deviation
    largest = float(torch.linalg.eigvalsh((noise + noise.T) / 2).abs().max())
    assert 0.9 * largest < largest_eigenvalue(deviation, width) < 1.15 * largest
