"""The shipped recipes, and what each private one is planned to be."""

from __future__ import annotations

from pathlib import Path

from murmuration.train.config.root import Config

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "ds_configs" / "studies").glob("*.json"))
FILES = {
    path.stem: path for path in sorted((ROOT / "ds_configs").rglob("*.json"))
    if path.stem != "schema" and path not in STUDIES
}  # fmt: skip
VIP, CAP, IMAGENET = 233_000_000, 233_804_767, 1_281_167
SIZES = ("nano", "tiny", "small", "base", "large", "huge")
# Recipe -> records, expected batch, steps, epsilon, sigma as PLD calibrates it. Those of the papers agree with
# independent packages to the four digits that were noted there.
PLANS: dict[str, tuple[int, int, int, float, float]] = {
    **{f"vip_{size}": (VIP, 98_304, 6000, 8.0, 0.45651) for size in SIZES},
    **{f"vip_init_{start}": (VIP, 98_304, 6000, 8.0, 0.45651) for start in ("random", "20", "100", "900")},
    "vip_data_2m": (2_330_000, 98_304, 6000, 8.0, 2.36825), "vip_data_23m": (23_300_000, 98_304, 6000, 8.0, 0.64171),
    "vip_data_233m": (VIP, 98_304, 6000, 8.0, 0.45651), "vip_batch_8k": (VIP, 8192, 72_000, 8.0, 0.39361),
    "vip_batch_32k": (VIP, 32_768, 18_000, 8.0, 0.42505), "vip_batch_98k": (VIP, 98_304, 6000, 8.0, 0.45651),
    **{f"dpcap_{size}": (CAP, 1_310_720, 5708, 8.0, 0.70711) for size in SIZES[:5]},
    **{f"dpcap_init_{start}": (CAP, 1_310_720, 5708, 8.0, 0.70711) for start in ("none", "images", "pairs", "public")},
    **{f"vip_init_random_{size}": (VIP, 98_304, 6000, 8.0, 0.45651) for size in ("nano", "tiny", "small", "large")},
    "vip_batch_82k": (VIP, 81_920, 10_000, 8.0, 0.45639), "vip_imagenet": (IMAGENET, 98_304, 6000, 8.0, 4.08218),
    **{f"{paper}_finetune": (IMAGENET, 32_768, 18_000, 8.0, 2.37503) for paper in ("vip", "dpcap")},
    "dpcap_base_eps2": (CAP, 1_310_720, 2854, 2.0, 1.10227), "dpcap_huge": (CAP, 1_310_720, 5708, 8.0, 0.70711),
    "dpcap_data_1pct": (2_338_047, 13_107, 5708, 8.0, 0.66093),
    "dpcap_data_10pct": (23_380_476, 131_072, 5708, 8.0, 0.68482),
    "dpcap_2b": (2_000_000_000, 1_310_720, 5000, 7.0, 0.50905),
    "dpcap_batch_10k": (CAP, 10_000, 5708, 8.0, 0.37013), "dpcap_batch_40k": (CAP, 40_000, 5708, 8.0, 0.41217),
    "dpcap_batch_98k": (CAP, 98_304, 5708, 8.0, 0.44999), "dpcap_batch_200k": (CAP, 200_000, 5708, 8.0, 0.48983),
    "dpcap_batch_400k": (CAP, 400_000, 5708, 8.0, 0.54251), "dpcap_batch_655k": (CAP, 655_360, 5708, 8.0, 0.59423),
    "dpcap_batch_1300k": (CAP, 1_310_720, 5708, 8.0, 0.70711),
    **{name: (12_000_000, 131_072, 3663, 8.0, 0.81296) for name in ("continual_base", "mixed_base")},
    **{f"finetune_cifar{classes}": (50_000, 1000, 250, 8.0, 0.58438) for classes in (10, 100)},
    "finetune_food101": (75_750, 1000, 379, 8.0, 0.55754), "finetune_svhn": (73_257, 1000, 367, 8.0, 0.55965),
    "gpt2_1pct": (5_247_000, 16_384, 3203, 8.0, 0.55234),
    **{f"gpt2_{kind}": (4_770_000, 16_384, 2912, 8.0, 0.55764) for kind in ("10pct", "mixed")},
    "continual_fraction": (10_800_000, 131_072, 3296, 8.0, 0.83206),
    **{
        f"transfer_{body}_{part}": (IMAGENET, 2**20, 13, 10.0, 1.70266)
        for body in ("vitb", "vitl", "vith", "r50x4", "r152x4") for part in ("full", "last")
    },
    **{f"transfer_vith_{part}_384": (IMAGENET, 2**20, 13, 10.0, 1.70266) for part in ("full", "last")},
    "transfer_vith_onestep": (IMAGENET, IMAGENET, 1, 4.0, 1.20511), "demo": (20_000, 1000, 50, 8.0, 0.60742),
}  # fmt: skip
# Variant -> the recipe that it varies, bands of its correlated noise, sigma as PLD calibrates it.
VARIANTS: dict[str, tuple[str, int, float]] = {
    "vip_base_banded": ("vip_base", 256, 0.91591), "continual_base_banded": ("continual_base", 16, 2.11461),
    **{f"dpcap_{size}_banded": (f"dpcap_{size}", 32, 2.07332) for size in ("base", "large")},
}  # fmt: skip
SIGMAS = {name: plan[4] for name, plan in PLANS.items()} | {name: variant[2] for name, variant in VARIANTS.items()}
# Trainable parameters of the private phase (of the only one, in pre-training), as counted from the published code.
COUNTS: dict[str, int] = {
    "vip_nano": 18_590_464, "vip_tiny": 34_792_192, "vip_small": 61_610_752, "vip_base": 99_046_144,
    "vip_large": 316_629_760, "vip_huge": 656_613_964, "continual_base": 94_427_605,
    "vip_init_random_nano": 18_590_464, "vip_init_random_tiny": 34_792_192, "vip_init_random_small": 61_610_752,
    "vip_init_random_large": 316_629_760, "vip_imagenet": 99_046_144, "vip_batch_82k": 99_046_144,
    **{f"gpt2_{kind}": 111_008_256 for kind in ("1pct", "10pct", "mixed")},
    "transfer_vitb_full": 86_859_496, "transfer_vitl_full": 304_715_752, "transfer_vith_full": 632_132_840,
    "transfer_r50x4_full": 383_540_456, "transfer_r152x4_full": 936_533_224, "transfer_vith_last": 1_281_000,
    "transfer_vith_onestep": 1_281_000, "transfer_vith_full_384": 632_651_240, "transfer_vith_last_384": 1_281_000,
}  # fmt: skip


def private_phase(config: Config) -> int:
    (number,) = [number for number, phase in enumerate(config.phases) if phase.privacy is not None]
    return number
