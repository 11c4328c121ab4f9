"""What the four papers and their public code print about their runs, and where the recipes differ from that.

A key is a path in the loaded config; `phases.-1` is the phase that a recipe is about, which comes last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from murmuration.train.config.load import load
from tests.support.shipped_recipes import COUNTS, FILES

DIGITS = 5e-3
"""Papers print three digits: a relative difference below this is rounding."""
VIP, VIP_CODE = "ViP, arXiv 2306.08842", "ViP-MAE, PRETRAIN.md and main_pretrain_vip.py"
CAP, CAP_CODE = "DP-Cap, arXiv 2403.02506", "dpcap, run_m3ae_distributed.sh and main_pretrain.py"
CAP_README = "dpcap, README.md"
TAN = "TAN (Sander et al.), facebookresearch/tan, README.md"
BU, BU_CODE = "Bu et al., arXiv 2402.18752", "fastDP, examples/image_classification/CV_TIMM.py"
MEHTA = "Mehta et al., arXiv 2205.02973"


@dataclass(frozen=True)
class Among:
    """The source prints a grid and does not say, or not for this run, which value was best."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Between:
    low: float
    high: float


@dataclass(frozen=True)
class Fact:
    source: str
    recipes: str
    """Shell patterns of names; those after an exclamation mark are left out."""
    key: str
    printed: Any


@dataclass(frozen=True)
class Deviation:
    """Recipes whose value is not the printed one, and the words of docs/recipes.md that say so."""

    recipes: str
    key: str
    heading: str
    """The bold words with which its paragraph under "What differs" begins."""
    told: tuple[str, ...] = ()
    """What must stand in that paragraph: the printed value and the one here, in its words."""


def facts(source: str, recipes: str, **printed: Any) -> list[Fact]:
    """Keyword arguments have `__` for the points of a path; `last__` is the phase that the recipe is about."""
    paths = {name.replace("last__", "phases.-1.").replace("__", "."): value for name, value in printed.items()}
    return [Fact(source, recipes, path, value) for path, value in paths.items()]


VIP_RUNS = "vip_* !vip_finetune"
CAP_RUNS = "dpcap_* !dpcap_finetune"
TRANSFERS = "transfer_*_full* transfer_*_last*"
LAMB_RATES = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0)
SINGLE_STEP_BUDGETS = (0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0)

PRINTED: list[Fact] = [
    *facts(
        VIP, VIP_RUNS,
        model__family="mae", model__image_size=224, model__mask_ratio=0.75, last__privacy__epsilon=8,
        last__privacy__delta="1/(2n)", last__privacy__clip__kind="flat", last__privacy__clip__norm=0.1,
        last__optimizer__type="AdamW", last__data__augment="random_resized_crop",
    ),
    *facts(
        VIP_CODE, VIP_RUNS,
        last__optimizer__params__betas=[0.9, 0.95], last__optimizer__params__weight_decay=0.005,
        last__schedule__warmup=1000, last__schedule__shape="cosine", last__schedule__shape_from="first-step",
        run__precision="fp32",
    ),
    *facts(f"{VIP}; {CAP}; {BU}", "vip_* dpcap_* continual_*", noise_of_steps="independent"),
    *facts(
        VIP, "vip_* !vip_data_2m !vip_data_23m !vip_batch_* !vip_imagenet !vip_finetune",
        last__data__expected_records=233_000_000, last__privacy__expected_batch=98_304, last__steps=6000,
    ),
    *facts(
        VIP, "vip_* !vip_data_2m !vip_data_23m !vip_batch_* !vip_imagenet !vip_finetune !*_banded",
        last__privacy__noise_multiplier=0.48,
    ),
    *facts(VIP, "vip_data_2m", last__data__expected_records=2_330_000, last__privacy__noise_multiplier=2.5),
    *facts(VIP, "vip_data_23m", last__data__expected_records=23_300_000, last__privacy__noise_multiplier=0.66),
    *facts(VIP, "vip_data_2m vip_data_23m", last__privacy__expected_batch=98_304, last__steps=6000),
    *facts(
        VIP, "vip_batch_8k", last__privacy__expected_batch=8192, last__steps=72_000,
        last__privacy__noise_multiplier=0.41,
    ),
    *facts(
        VIP, "vip_batch_32k", last__privacy__expected_batch=32_768, last__steps=18_000,
        last__privacy__noise_multiplier=0.45,
    ),
    *facts(
        VIP, "vip_batch_98k", last__privacy__expected_batch=98_304, last__steps=6000,
        last__privacy__noise_multiplier=0.48,
    ),
    *facts(VIP, "vip_batch_* !vip_batch_82k", last__data__expected_records=233_000_000),
    *facts(VIP_CODE, "vip_* !vip_batch_8k !vip_batch_32k !vip_batch_82k !vip_finetune", last__schedule__peak=5.76e-3),
    *facts(
        VIP, "vip_batch_82k",
        last__data__expected_records=233_000_000, last__privacy__expected_batch=81_920,
        last__privacy__noise_multiplier=0.5,
    ),
    *facts(VIP_CODE, "vip_batch_82k", last__steps=10_000, last__schedule__peak=4.8e-3),
    *facts(VIP, "vip_imagenet", last__data__expected_records=1_281_167),
    *facts(
        VIP, "vip_finetune",
        last__privacy__epsilon=8, last__privacy__delta=8e-7, last__data__expected_records=1_281_167,
        model__family="classifier", model__size="base", model__classes=1000,
    ),
    *facts(
        TAN, "vip_finetune",
        last__privacy__expected_batch=32_768, last__steps=18_000, last__privacy__noise_multiplier=2.5,
    ),
    *facts(VIP_CODE, "vip_batch_8k", last__schedule__peak=4.8e-4),
    *facts(VIP_CODE, "vip_batch_32k", last__schedule__peak=1.92e-3),
    *facts(
        VIP, "vip_* !vip_init_* !vip_finetune",
        phases__0__data__records=1_050_000, phases__0__data__kind="Shaders21k", synthetic_images=1_600_000_000,
    ),
    *facts(
        VIP_CODE, "vip_* !vip_init_* !vip_finetune",
        phases__0__epochs=400, phases__0__schedule__warmup_epochs=40, phases__0__schedule__shape="cosine",
        phases__0__optimizer__type="AdamW", phases__0__optimizer__params__weight_decay=0.01,
    ),
    *facts(VIP, "vip_init_20", phases__0__epochs=20),
    *facts(VIP, "vip_init_100", phases__0__epochs=100),
    *facts(VIP, "vip_init_900", phases__0__epochs=900),
    *facts(VIP, "vip_nano", millions_of_parameters=18.6),
    *facts(VIP, "vip_base", millions_of_parameters=99.0),
    *facts(VIP, "vip_large", millions_of_parameters=233),
    *facts(
        CAP, CAP_RUNS,
        model__family="captioner", model__image_size=224, last__privacy__delta="1/n", last__privacy__clip__kind="flat",
        last__privacy__clip__norm=1, last__optimizer__type="AdamW",
    ),
    *facts(
        CAP_CODE, CAP_RUNS,
        last__optimizer__params__betas=[0.9, 0.95], last__optimizer__params__weight_decay=0.005,
        last__schedule__shape="cosine", last__schedule__first_step=0, last__data__augment="random_resized_crop",
        last__data__tokenizer="bert-base-uncased", model__vocabulary=30_522, run__precision="fp16",
    ),
    *facts(CAP, f"{CAP_RUNS} !dpcap_base_eps2 !dpcap_2b", last__privacy__epsilon=8, last__steps=5708),
    *facts(CAP, f"{CAP_RUNS} !dpcap_data_* !dpcap_2b", last__data__expected_records=233_804_767),
    *facts(CAP_CODE, f"{CAP_RUNS} !dpcap_2b", model__text_length=40),
    *facts(
        CAP, "dpcap_large dpcap_nano dpcap_tiny dpcap_small dpcap_base dpcap_huge dpcap_init_* dpcap_batch_1300k",
        last__privacy__expected_batch=1_310_720, last__privacy__noise_multiplier=0.728,
    ),
    *facts(CAP, "dpcap_*_banded", last__privacy__expected_batch=1_310_720),
    *facts(
        CAP_CODE, f"{CAP_RUNS} !dpcap_base_eps2 !dpcap_data_1pct !dpcap_2b",
        last__schedule__warmup=2000, last__schedule__end=10_000,
    ),
    *facts(CAP_CODE, f"{CAP_RUNS} !dpcap_data_10pct !dpcap_2b", last__schedule__peak=5.12e-4),
    *facts(
        CAP_CODE, "dpcap_data_1pct",
        last__data__expected_records=2_338_047, last__privacy__expected_batch=13_107,
        last__privacy__noise_multiplier=0.728, last__schedule__warmup=1000, last__schedule__end=10_000,
    ),
    *facts(
        CAP_CODE, "dpcap_data_10pct",
        model__size="small", last__data__expected_records=23_380_476, last__privacy__expected_batch=131_072,
        last__privacy__noise_multiplier=0.728, last__schedule__peak=5.12e-5,
    ),
    *facts(
        CAP_README, "dpcap_2b",
        model__size="base", model__text_length=77, last__privacy__epsilon=7, last__privacy__noise_multiplier=0.527,
        last__steps=5000, last__privacy__expected_batch=1_310_720, last__data__expected_records=2_000_000_000,
    ),
    *facts(CAP_CODE, "dpcap_huge", model__patch_size=14),
    *facts(CAP_CODE, "dpcap_finetune", model__size="base", model__image_size=224, model__qkv_bias=False),
    *facts(CAP_CODE, f"{CAP_RUNS} !dpcap_init_* !dpcap_data_10pct", phases__0__epochs=700),
    *facts(
        CAP, "dpcap_base_eps2",
        last__privacy__epsilon=2, last__privacy__noise_multiplier=1.18, last__steps=2854,
        last__privacy__expected_batch=1_310_720, last__schedule__warmup=600, last__schedule__end=6000,
    ),
    *facts(CAP_CODE, "dpcap_batch_200k", last__privacy__expected_batch=200_000),
    *facts(CAP_CODE, "dpcap_batch_200k", last__privacy__noise_multiplier=0.513),
    *facts(
        BU, "continual_base* continual_fraction mixed_base",
        last__privacy__epsilon=8, last__privacy__clip__kind="automatic", last__privacy__clip__gamma=0.01,
        model__size="base", model__classes=11_221, last__optimizer__type="AdamW",
        last__data__expected_records=12_000_000,
    ),
    *facts(BU, "continual_base*", last__optimizer__carry="second-moment", phases__0__data__expected_records=1_281_167),
    *facts(BU, "continual_fraction", last__optimizer__carry="second-moment", phases__0__data__public_fraction=0.1),
    *facts(BU, "continual_base", millions_of_parameters=94.4),
    *facts(BU, "gpt2_*", model__family="gpt2", last__privacy__clip__kind="automatic", last__privacy__clip__gamma=0.01),
    *facts(BU, "gpt2_1pct", phases__0__data__public_fraction=0.01),
    *facts(BU, "gpt2_10pct", phases__0__data__public_fraction=0.1),
    *facts(
        BU, "fourway_gpt2_large",
        model__family="gpt2", model__size="large", last__schedule__peak=Among((1e-4, 5e-4)), public_set="codeparrot",
    ),
    *facts(
        BU, "fourway_vitl_cifar100",
        model__family="classifier", model__size="large", model__classes=100, last__epochs=5,
        last__schedule__peak=Among((5e-5, 5e-4)), last__data__expected_records=50_000,
    ),
    *facts(
        BU_CODE, "finetune_*",
        last__privacy__epsilon=8, last__privacy__delta="1/n", last__privacy__expected_batch=1000, last__epochs=5,
        last__privacy__clip__kind="automatic", last__privacy__clip__gamma=0.01, last__optimizer__type="Adam",
        last__optimizer__params__weight_decay=0, last__schedule__peak=1e-4, last__schedule__shape="constant",
        last__data__augment="none", model__image_size=224, model__size="base", run__precision="fp32",
    ),
    *facts(BU_CODE, "finetune_cifar10", model__classes=10, last__data__expected_records=50_000),
    *facts(BU_CODE, "finetune_cifar100", model__classes=100, last__data__expected_records=50_000),
    *facts(BU_CODE, "finetune_food101", model__classes=101, last__data__expected_records=75_750),
    *facts(BU_CODE, "finetune_svhn", model__classes=10, last__data__expected_records=73_257),
    *facts(
        MEHTA, TRANSFERS,
        last__privacy__epsilon=10, last__privacy__delta=1e-6, last__privacy__clip__norm=1, last__epochs=10,
        last__schedule__warmup_epochs=0.25, last__schedule__shape="linear", last__optimizer__type="LAMB",
        last__optimizer__params__weight_decay=0, last__privacy__expected_batch=2**20, model__image_size=384,
        last__data__expected_records=1_281_167, last__data__augment="448 to 384", model__classify_loss="sigmoid",
        last__schedule__peak=Among(LAMB_RATES),
    ),
    *facts(
        MEHTA, "transfer_vith_onestep",
        last__privacy__epsilon=Among(SINGLE_STEP_BUDGETS), last__privacy__delta=1e-6,
        last__privacy__expected_batch=1_281_167, last__steps=1, model__image_size=256, model__head_scale=0,
        model__head_bias=-10, last__data__augment="384 to 256", last__schedule__peak=Between(1e-4, 1e-3),
        last__privacy__clip__norm=1, last__optimizer__type="LAMB", last__trainable="head",
    ),
    *facts(
        MEHTA, "pretrain_*",
        phases__0__batch=4096, phases__0__optimizer__type="Adam", phases__0__optimizer__params__betas=[0.9, 0.999],
        phases__0__optimizer__params__weight_decay=0.1, phases__0__optimizer__params__gradient_norm=1,
        phases__0__schedule__warmup=10_000, phases__0__schedule__shape="linear", model__image_size=224,
        model__dropout=0, model__classify_loss="sigmoid", public_set="jft-300m",
    ),
    *facts(MEHTA, "pretrain_vitb", phases__0__schedule__peak=8e-4, phases__0__epochs=7),
    *facts(MEHTA, "pretrain_vitl", phases__0__schedule__peak=4e-4, phases__0__epochs=14),
    *facts(MEHTA, "pretrain_vith", phases__0__schedule__peak=3e-4, phases__0__epochs=14),
    *facts(MEHTA, "pretrain_r50x4", phases__0__schedule__peak=1e-3, phases__0__epochs=7),
    *facts(MEHTA, "pretrain_r152x4", phases__0__schedule__peak=6e-4, phases__0__epochs=7),
]  # fmt: skip

DEVIATIONS: list[Deviation] = [
    Deviation("*_banded", "noise_of_steps", "Variants with correlated noise", ("independent", "banded")),
    Deviation("*", "phases.-1.privacy.noise_multiplier", "Rounded noise", ("σ", "RDP", "PLD")),
    Deviation(VIP_RUNS, "run.precision", "Precision", ("fp32", "bf16")),
    Deviation(CAP_RUNS, "run.precision", "Precision", ("fp16", "bf16")),
    Deviation("vip_*", "phases.0.data.kind", "Shaders21k"),
    Deviation("vip_*", "synthetic_images", "Shaders21k", ("1.6 billion", "420M")),
    Deviation("vip_large", "millions_of_parameters", "ViP's Large", ("233M", "316.6M")),
    Deviation(CAP_RUNS, "model.vocabulary", "DP-Cap's tokenizer", ("30,522", "32,768")),
    Deviation(CAP_RUNS, "phases.-1.data.tokenizer", "DP-Cap's tokenizer", ("bert-base-uncased", "`clip`")),
    Deviation(CAP_RUNS, "phases.0.epochs", "DP-Cap's initial weights", ("epoch 700", "400 epochs")),
    Deviation("vip_finetune", "phases.-1.privacy.delta", "Fine-tuning ViP and DP-Cap", ("8e-7", "1/n")),
    Deviation("finetune_*", "phases.-1.optimizer.type", "Bu et al.'s fine-tuning", ("Adam ", "AdamW")),
    Deviation("finetune_*", "run.precision", "Bu et al.'s fine-tuning", ("fp32", "bf16")),
    Deviation("transfer_*", "phases.-1.privacy.delta", "δ of Mehta et al.", ("1e-6", "1/n")),
    Deviation("transfer_vith_full transfer_vith_last", "model.image_size", "ViT-H", ("384", "256")),
    Deviation(TRANSFERS, "phases.-1.data.augment", "Mehta et al.'s crops", ("384 pixels from 448",)),
    Deviation("transfer_vith_onestep", "phases.-1.data.augment", "Mehta et al.'s crops", ("256 pixels from 384",)),
    Deviation("pretrain_*", "public_set", "JFT", ("ImageNet-21k",)),
    Deviation("pretrain_*", "phases.0.optimizer.type", "Mehta et al.'s Adam", ("AdamW",)),
]


def named(patterns: str, name: str) -> bool:
    words = patterns.split()
    taken = any(fnmatch(name, word) for word in words if not word.startswith("!"))
    return taken and not any(fnmatch(name, word[1:]) for word in words if word.startswith("!"))


def values_of(name: str, *overrides: str) -> dict[str, Any]:
    """A recipe as plain values, with those that follow from several keys beside its sections."""
    config: dict[str, Any] = load(FILES[name], list(overrides)).model_dump(mode="json", by_alias=True)
    first = config["phases"][0]
    if first["data"]["source"] == "synthetic":
        config["synthetic_images"] = first["data"]["records"] * first["epochs"]
    config["public_set"] = first["data"]["path"].rpartition("/")[2] if first["data"].get("public") else None
    config["noise_of_steps"] = ((config["phases"][-1]["privacy"] or {}).get("noise") or {}).get("kind", "independent")
    config["millions_of_parameters"] = COUNTS.get(name, 0) / 1e6
    return config


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[int(part)] if isinstance(config, list) else config[part]
    return config


def agrees(printed: Any, here: Any) -> bool:
    if isinstance(printed, Among):
        return any(agrees(value, here) for value in printed.values)
    if isinstance(printed, Between):
        return printed.low <= here <= printed.high
    if isinstance(printed, str) or here is None or isinstance(here, str | bool):
        return printed == here
    if isinstance(printed, list):
        return len(printed) == len(here) and all(map(agrees, printed, here))
    return math.isclose(printed, here, rel_tol=DIGITS)


def differing(name: str, *overrides: str) -> set[str]:
    """The keys in which a recipe is not what is printed."""
    config = values_of(name, *overrides)
    mine = [fact for fact in PRINTED if named(fact.recipes, name)]
    return {fact.key for fact in mine if not agrees(fact.printed, value_at(config, fact.key))}
