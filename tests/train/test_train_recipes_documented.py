"""What docs/recipes.md and the headers of the recipes say of them: every override, and the planned hardware."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from murmuration.model.build import build
from murmuration.train.config.load import load
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.optim.base import policies
from murmuration.train.optim.choose import make_optimizer
from murmuration.train.planner.cluster import Cluster
from murmuration.train.planner.forecast import forecast
from murmuration.train.recipe.ready_phase import resolve_shape
from murmuration.train.run.public_mixing import alpha
from tests.support.shipped_recipes import FILES, PLANS, ROOT, SIGMAS, VARIANTS, private_phase


def tabled(heading: str) -> list[tuple[str, list[str]]]:
    """The base and the overrides of every run that a table of docs/recipes.md describes."""
    section = (ROOT / "docs" / "recipes.md").read_text().partition(heading)[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|")[-1] for line in section.splitlines() if line.startswith("|")][2:]
    found, before = [], list[str]()
    for row in rows:
        fixed = [text for text in re.findall(r"`(\S+=\S+)`", row) if not text.startswith("run.dir")]
        fixed = before + fixed if "the same and" in row else fixed
        base = "".join(re.findall(r"from `(\w+)`:", row))
        listed = re.findall(r"`(\S+=)`((?: [-.\de]+)+)", row)
        found += [(base, [*fixed, key + value]) for key, values in listed for value in values.split()]
        found += [] if listed else [(base, fixed)]
        before = fixed
    return found


def test_every_override_that_is_documented_loads() -> None:
    runs = tabled("## Mehta et al.'s one factor")
    assert len(runs) == 6 + 4 + 1 + 8 + 9 + 1 + 4 + 3 + 1 + 3 + 3 + 4 + 1 + 5 + 8
    for base, overrides in runs:
        load(FILES[base or "transfer_vitb_full"], overrides)
    for path in FILES.values():
        for override in re.findall(r"--set (\S+)", json.loads(path.read_text())["about"]["source"]):
            load(path, [override])


def test_the_non_private_columns_clip_the_mean_gradient_of_every_transfer() -> None:
    columns = [given for _, given in tabled("## Mehta et al.'s one factor") if "phases.1.privacy=null" in given]
    names = [name for name in FILES if re.match(r"transfer_\w+_(full|last)", name)]
    assert len(names) == 12
    for name in names:
        phases = [load(FILES[name], given).phases[1] for given in columns]
        assert [phase.batch for phase in phases] == [2**17, 2**18, 2**19, 2**20]
        assert {(phase.privacy, phase.optimizer.params.gradient_norm) for phase in phases} == {(None, 1.0)}


def test_the_backbones_rate_is_that_of_everything_but_the_head() -> None:
    (rules,) = [over[0] for _, over in tabled("## Mehta et al.'s one factor") if '"learning_rate":0.1' in over[0]]
    for name in ("transfer_vitb_full", "transfer_r50x4_full"):
        config = load(FILES[name], [rules])
        model = build(resolve_shape(config), "classify", device="meta")
        found = policies(config.phases[1].optimizer.params, model.named_parameters())
        assert {name for name, policy in found.items() if policy.learning_rate == 1} == {"head.weight", "head.bias"}
        assert [name for name, policy in found.items() if not policy.trust_ratio] == ["head.bias"]


BASELINES = [(0.0, 1.0), (1 / 33, 1 / 33), (0.0, 1.0), (1.0, 0.0), (0.5, 0.5), None, (1.0, 1.0)]


def test_the_baselines_of_mixing_are_what_their_table_says() -> None:
    runs = tabled("## Bu et al.'s baselines")
    for (_, overrides), expected in zip(runs, BASELINES, strict=True):
        mixing = load(FILES["mixed_base"], overrides).phases[0].mixing
        ends = mixing and tuple(alpha(mixing, step, 4000, 131072.0) for step in (1, 4001))
        assert ends == expected if expected is None else ends == pytest.approx(expected), overrides
    shipped = load(FILES["mixed_base"], []).phases[0].mixing
    assert shipped is not None and alpha(shipped, 2001, 4000, 131072.0) == pytest.approx(1 - math.sqrt(0.5))
    switch = load(FILES["mixed_base"], runs[3][1]).phases[0].mixing
    assert switch is not None and [alpha(switch, step, 4000, 131072.0) for step in (1000, 1001)] == [1.0, 0.0]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("transfer_")])
def test_the_first_step_of_a_transferred_head_is_adams(name: str) -> None:
    shipped = load(FILES[name], []).phases[1].optimizer
    moved = []
    for settings in (shipped, Optimizer.model_validate({"params": {"betas": shipped.params.betas}})):
        head = {"head.weight": torch.zeros(3, 5), "head.bias": torch.full((3,), -10.0)}
        named = [(key, torch.nn.Parameter(value)) for key, value in head.items()]
        optimizer = make_optimizer(settings, named, 0.01)
        for number, (_, parameter) in enumerate(named):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        optimizer.step()
        moved.append([parameter.detach() for _, parameter in named])
    assert all(torch.equal(*pair) for pair in zip(*moved, strict=True))


def test_the_printed_throughput_stands_beside_the_planned_hours() -> None:
    """Mehta et al., Table 8: images per second and core, full and last layer."""
    printed = {"vitb": (170, 900), "vitl": (25, 235), "vith": (12, 100), "r50x4": (25, 225), "r152x4": (3, 90)}
    page = (ROOT / "docs" / "recipes.md").read_text()
    for body, numbers in printed.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {body} | ")]
        planned = [
            re.findall(r"([\d.]+) GPU-hours", load(FILES[f"transfer_{body}_{part}"], []).about.hardware)[0]
            for part in ("full", "last")
        ]
        assert row == f"| {body} | {' | '.join([*map(str, numbers), *planned])} |"


def test_planned_hardware_is_named_and_private_recipes_say_their_epsilon() -> None:
    for name, path in FILES.items():
        about = load(path, []).about
        planned = r"planned, not measured: 8 GPUs of 80 GiB .*, [\d,.]+ GPU-hours"
        assert name == "demo" or re.match(planned, about.hardware)
        if name in SIGMAS:
            base = VARIANTS[name][0] if name in VARIANTS else name
            assert about.expect.startswith(f"epsilon <= {PLANS[base][3]:g}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name != "demo"])
def test_planned_hours_are_the_planners(name: str) -> None:
    config = load(FILES[name], [])
    if name in SIGMAS:
        config = load(FILES[name], [f"phases.{private_phase(config)}.privacy.noise_multiplier={SIGMAS[name]}"])
    cluster = Cluster(8, 80, 150, 25, 4e8)
    hours = sum(phase.gpu_hours(cluster) or math.nan for phase in forecast(config, cluster))
    said = float(re.findall(r"([\d,.]+) GPU-hours", config.about.hardware)[0].replace(",", ""))
    assert abs(hours / said - 1) < 0.05, hours
