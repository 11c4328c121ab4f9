"""Learning rates that are transferred across widths: factors of real models written out by hand, and what they do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import select
from murmuration.train.commands.dry_run import as_json, as_text, meaning
from murmuration.train.config.load import ConfigError
from murmuration.train.config.optimizer import Optimizer, OptimizerParams, ParameterRule, WidthTransfer
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.engines.local import start_ranks
from murmuration.train.optim.base import OptimizerError
from murmuration.train.optim.choose import make_optimizer, width_factors
from murmuration.train.optim.width import WidthFactors
from murmuration.train.private import Computation, clipping_engine
from murmuration.train.recipe.ready_phase import prepare
from tests.support.config_base import drop, put

SMALL = {"image_size": 32, "patch_size": 8, "vocabulary": 64, "classes": 10}
# Published sizes: nano is 192 wide and base 768, four times as wide, in encoder and text decoder.
NANO = WidthTransfer(size="nano")


def made(family: str, objective: str, trainable: str = "all", **more: Any) -> nn.Module:
    model = build(ModelSettings(family=family, **{"size": "base", **SMALL, **more}), objective, device="meta")  # pyright: ignore
    select(model, trainable)  # pyright: ignore[reportArgumentType]
    return model


def expected(model: nn.Module, factor: float, *matrices: str) -> dict[str, float]:
    """`factor` for parameters that fit a pattern and 1 for the others."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all(any(fnmatchcase(name, pattern) for name in names) for pattern in matrices)
    return {name: factor if any(fnmatchcase(name, each) for each in matrices) else 1.0 for name in names}


BLOCK = ["attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"]
ENCODER = [f"blocks.*.{name}" for name in BLOCK]
PIXELS = [f"decoder_blocks.*.{name}" for name in BLOCK]
TEXT = ["decoder.layers.*_proj.weight", "decoder.layers.*.c_attn.weight", "decoder.layers.*.linear?.weight"]


def test_a_vision_transformers_matrices_and_head_fall_and_filters_tokens_and_vectors_stay() -> None:
    model = made("classifier", "classify")
    found = width_factors(Optimizer(width_transfer=WidthTransfer(width=192)), model)
    assert found == expected(model, 0.5, *ENCODER, "head.weight")
    assert {found[name] for name in ("cls_token", "pos_embed", "patch_embed.proj.weight", "head.bias")} == {1.0}


def test_a_masked_autoencoders_pixel_decoder_counts_by_its_own_width() -> None:
    model = made("mae", "mae")
    same = width_factors(Optimizer(width_transfer=NANO), model)  # 512 wide in every size
    assert same == expected(model, 0.5, *ENCODER, "decoder_embed.weight")
    narrower = width_factors(Optimizer(width_transfer=WidthTransfer(size="nano", mae_decoder_width=128)), model)
    assert narrower == expected(model, 0.5, *ENCODER, "decoder_embed.weight", *PIXELS, "decoder_pred.weight")


def test_a_captioners_embedding_stays_and_its_prediction_falls() -> None:
    model = made("captioner", "caption")
    found = width_factors(Optimizer(width_transfer=NANO), model)
    outputs = ("decoder_embed.weight", "decoder_pred_text.1.weight")
    assert found == expected(model, 0.5, *ENCODER, *TEXT, *outputs) and found["text_embedding.weight"] == 1.0
    # One width names both parts where the model has one for both, as in a config.
    assert width_factors(Optimizer(width_transfer=WidthTransfer(width=192)), model) == found
    own = width_factors(Optimizer(width_transfer=WidthTransfer(width=192, decoder_width=48)), model)
    assert own == {
        name: factor / 2 if factor < 1 and name.startswith("decoder") and name != "decoder_embed.weight" else factor
        for name, factor in found.items()
    } | {name: 0.5 for name in own if "kv_proj" in name and name.startswith("blocks")}


def test_adapters_a_tied_table_and_convolutions() -> None:
    lora = made("classifier", "classify", "lora")
    found = width_factors(Optimizer(width_transfer=WidthTransfer(width=192)), lora)
    assert found == expected(lora, 0.5, "blocks.*.lora_down", "head.weight")
    texts = build(ModelSettings(family="gpt2", size="small", vocabulary=64), "text", device="meta")
    found = width_factors(Optimizer(width_transfer=WidthTransfer(width=192)), texts)
    matrices = [f"transformer.h.*.{name}.weight" for name in ("c_attn", "c_proj", "c_fc")]
    assert found == expected(texts, 0.5, *matrices, "transformer.wte.weight")
    net = made("classifier", "classify", size="r50x4")
    found = width_factors(Optimizer(width_transfer=WidthTransfer(size="r50x1")), net)
    assert found == expected(
        net, 0.5, "body.stages.*conv?.weight", "body.stages.*.downsample.conv.weight", "head.weight"
    )


@pytest.mark.parametrize(
    ("kind", "limited_by", "factor"),
    [("AdamW", "noise", 0.5), ("AdamW", "signal", 0.25), ("SGD", "noise", 0.5), ("LAMB", "noise", 1.0),
     ("LAMB", "signal", 0.5)],
)  # fmt: skip
def test_each_optimizer_has_its_power_of_the_width(kind: Any, limited_by: Any, factor: float) -> None:
    model = made("mae", "mae")
    settings = Optimizer(type=kind, width_transfer=WidthTransfer(size="nano", limited_by=limited_by))
    found = width_factors(settings, model)
    assert found == expected(model, factor, *ENCODER, "decoder_embed.weight")
    other = Optimizer(type=kind, width_transfer=WidthTransfer(width=3072, limited_by=limited_by))
    narrow = width_factors(other, model)
    assert narrow["blocks.0.mlp.fc1.weight"] == 1 / factor, "and rises towards a narrower model"


def test_what_has_no_trust_ratio_takes_adams_power_and_a_zero_head_none() -> None:
    rules = [ParameterRule(parameters="head.*", trust_ratio=False)]
    transfer = WidthTransfer(width=192)
    plain = Optimizer(type="LAMB", width_transfer=transfer)
    with pytest.raises(RecipeError, match=r"no factor for head\.weight, which starts at zero"):
        width_factors(plain, made("classifier", "classify"))
    ruled = Optimizer(type="LAMB", params=OptimizerParams(rules=rules), width_transfer=transfer)
    model = made("classifier", "classify")
    assert width_factors(ruled, model) == expected(model, 0.5, "head.weight")
    assert set(width_factors(plain, made("classifier", "classify", head_scale=1.0)).values()) == {1.0}


# What the factors do to an optimizer.

TOY = {"family": "classifier", "size": "custom", "image_size": 16, "patch_size": 8, "width": 32, "depth": 1, "heads": 2,
       "classes": 4}  # fmt: skip


def after_steps(optimizer: Optimizer, gradient: float = 1.0, steps: int = 3) -> dict[str, Tensor]:
    model = build(ModelSettings(**TOY), "classify")
    widths = WidthFactors.of(optimizer, model)
    flat = make_optimizer(optimizer, model.named_parameters(), 0.0, widths)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = gradient * torch.randn(parameter.shape, generator=draw)
        flat.param_groups[0]["lr"] = 0.01
        flat.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[bool]:
    return [torch.equal(one[name], other[name]) for name in one]


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "LAMB"])
def test_nothing_changes_at_the_width_at_which_the_rate_was_chosen(kind: Any) -> None:
    rules = [ParameterRule(parameters="head.*", trust_ratio=False)]
    params = OptimizerParams(weight_decay=0.3, rules=rules if kind == "LAMB" else [])
    without = after_steps(Optimizer(type=kind, params=params))
    chosen_here, elsewhere = (
        after_steps(Optimizer(type=kind, params=params, width_transfer=WidthTransfer(width=width))) for width in (32, 8)
    )
    assert all(same(chosen_here, without)) and not all(same(elsewhere, without))


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_factor_is_that_of_a_rule_and_multiplies_with_rules(kind: Any) -> None:
    matrices = ["blocks.*.qkv.weight", "blocks.*.proj.weight", "blocks.*.fc?.weight", "head.weight"]
    by_hand = [ParameterRule(parameters=pattern, learning_rate=0.5) for pattern in matrices]
    other = ParameterRule(parameters="head.*", learning_rate=0.1)
    transfer = WidthTransfer(width=8)
    found = after_steps(Optimizer(type=kind, params=OptimizerParams(rules=[other]), width_transfer=transfer))
    assert all(same(found, after_steps(Optimizer(type=kind, params=OptimizerParams(rules=[*by_hand, other])))))


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_steps_decay_is_the_same_at_every_width(kind: Any) -> None:
    params = OptimizerParams(weight_decay=0.3)
    plain, wide = (
        after_steps(Optimizer(type=kind, params=params, width_transfer=each), gradient=0.0)
        for each in (None, WidthTransfer(width=8))
    )
    moved = (1 - 0.01 * 0.3) ** 3 if kind == "AdamW" else None
    start = build(ModelSettings(**TOY), "classify").state_dict()
    for name, weights in plain.items():
        torch.testing.assert_close(wide[name], weights, rtol=1e-6, atol=0)
        if moved is not None:
            torch.testing.assert_close(weights, moved * start[name], rtol=1e-6, atol=0)


def test_every_engine_gets_the_factors_of_its_model_and_none_goes_without() -> None:
    from murmuration.train.clip.rule import ClipRule

    optimizer = Optimizer(width_transfer=WidthTransfer(width=8))
    model = build(ModelSettings(**TOY), "classify")
    built = clipping_engine(
        model, ClipRule("flat", 1.0, 0.0), optimizer, 0.0, EngineSettings(), start_ranks(), Computation()
    )
    rates = {name: policy.learning_rate for name, policy in built.optimizer._policies.items()}
    assert rates == width_factors(optimizer, model) and set(rates.values()) == {1.0, 0.5}
    with pytest.raises(OptimizerError, match="needs the factors of the model's widths"):
        make_optimizer(optimizer, model.named_parameters(), 0.0)


# Refusals, each in one sentence, and what is said of a transfer that is possible.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "r50x1"}, 'family "captioner" has no size "r50x1"; choose nano, tiny'),
        ({"size": "nano"}, '"nano" has 12 blocks and the model 1, and rates are transferred across widths alone'),
        ({"width": 6}, "6 is not a multiple of 4"),
        ({"mae_decoder_width": 8}, "the phase trains no such decoder"),
    ],
)
def test_widths_that_the_model_cannot_have_are_refused_before_anything_is_read(
    loaded: Callable[..., Config], given: dict[str, Any], message: str
) -> None:
    config = loaded(lambda raw: raw["phases"].pop(0), put("phases.0.optimizer.width_transfer", given))
    for act in (prepare, meaning):
        with pytest.raises((RecipeError, ConfigError)) as refused:
            act(config)
        assert str(refused.value).startswith("phases.0.optimizer.width_transfer") and message in str(refused.value)
        assert str(refused.value).count(";") <= 1 and "\n" not in str(refused.value)


def test_models_of_other_libraries_and_of_ones_own_are_refused() -> None:
    optimizer = Optimizer(width_transfer=WidthTransfer(width=8))
    named = build(ModelSettings(family="timm", name="vit_tiny_patch16_224", image_size=32), "classify", device="meta")
    for model in (named, nn.Linear(3, 2)):
        with pytest.raises(RecipeError, match="is of none of them; leave it out, and give factors in"):
            width_factors(optimizer, model)


def test_a_dry_run_tells_factors_and_how_long_noise_is(loaded: Callable[..., Config]) -> None:
    config = loaded(put("phases.1.optimizer.width_transfer", {"width": 4}), drop("phases.1.evaluation"))
    found = meaning(config)
    text, told = as_text(found), json.loads(as_json(found))["phases"]
    rates = told[1]["rates"]
    assert [group["factor"] for group in rates] == [1.0, 0.5] and "rates" not in told[0]
    assert "decoder_pred_text.1.weight" in rates[1]["parameters"] and "text_embedding.weight" in rates[0]["parameters"]
    assert f"× 0.5 for {len(rates[1]['parameters'])} tensors, such as blocks.0.attn.qkv.weight" in text
    assert "(limited by noise)" in text
    ratio = 1.5 * math.sqrt(told[1]["parameters"]) / 20
    assert f"step's noise  {ratio:.3g} times as long as the mean clipped gradient can be\n" in text and ratio > 1
    assert _hint(loaded, limited_by="signal") == '; consider limited_by "noise"'
    assert _hint(loaded, batch=4000) == '; consider limited_by "signal"'
    assert _hint(loaded, limited_by="signal", batch=4000) == ""
    assert "rates  " not in as_text(meaning(loaded(drop("phases.1.evaluation"))))


def _hint(loaded: Callable[..., Config], limited_by: str = "noise", batch: int = 20) -> str:
    config = loaded(
        put("phases.1.optimizer.width_transfer", {"width": 4, "limited_by": limited_by}), drop("phases.1.evaluation"),
        put("phases.1.privacy.expected_batch", batch), put("phases.1.data.expected_records", 40_000),
    )  # fmt: skip
    line = next(line for line in as_text(meaning(config)).splitlines() if "step's noise" in line)
    return line.partition("can be")[2]


# The coordinate check under noise, as a test: what noise moves does not grow with width, and would without the
# factors. Widths, pictures and keys are fixed, and slopes are far from both bounds on any processor.


WIDTHS, BASE = (32, 64, 128, 256), 64
FLAT, GROWS = 0.15, 0.35
"""Bounds on slopes that should be 0 and 1/2."""
NOISE = ("hidden noise features", "output noise logits")
RATES = {"AdamW": 3e-3, "SGD": 1e-2}


@pytest.fixture
def slopes(benchmark: Callable[[str], ModuleType]) -> Callable[..., dict[str, float]]:
    checks = benchmark("width_coordinates")

    def measured(kind: Any, transfer: WidthTransfer | None) -> dict[str, float]:
        params = OptimizerParams() if kind == "SGD" else OptimizerParams(betas=(0.9, 0.95))
        optimizer = Optimizer(type=kind, params=params, width_transfer=transfer)
        check = checks.Check(rate=RATES[kind])
        told = [[checks.changes(width, optimizer, check, 0)] for width in WIDTHS]
        return {name: each["slope"] for name, each in checks.summary(WIDTHS, told).items()}

    return measured


@pytest.mark.parametrize("kind", list(RATES))
def test_what_noise_moves_stays_the_same_and_grows_without_the_factors(
    slopes: Callable[..., dict[str, float]], kind: Any
) -> None:
    off, on = slopes(kind, None), slopes(kind, WidthTransfer(width=BASE))
    for name in NOISE:
        assert abs(on[name]) < FLAT and off[name] > GROWS, (name, on[name], off[name])
    # Tokens, biases and norms need no factor, and have none.
    assert abs(on["vectors noise features"]) < FLAT and abs(off["vectors noise features"]) < FLAT
    # What signal does to the output through the matrices neither grows nor vanishes as features do.
    assert off["hidden signal logits"] - on["hidden signal logits"] > 0.5
