"""Every shipped recipe: what it resolves to, its epsilon, and its non-private twin. No data are at hand here."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from typing import Any

import pytest
import torch

from murmuration.accounting.banded import best_banded
from murmuration.accounting.cli.main import main as account
from murmuration.accounting.epsilon.accountant import epsilon, epsilon_below
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.event import Event
from murmuration.accounting.plan import parse_delta
from murmuration.accounting.sampling import RATE_DENOMINATOR, Poisson, threshold_for
from murmuration.model.build import build
from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.config.load import load
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.optim.optimizers import make_optimizer, policies
from murmuration.train.recipe.ready_phase import plan_of_phase, planned_epsilon, resolve_shape, with_steps
from murmuration.train.run.public_mixing import alpha
from tests.support.printed_facts import (
    DEVIATIONS,
    PRINTED,
    Deviation,
    differing,
    named,
    value_at,
    values_of,
)
from tests.support.shipped_recipes import COUNTS, FILES, IMAGENET, PLANS, ROOT, SIGMAS, VARIANTS, private_phase

PUBLIC = {f"pretrain_{body}" for body in ("vitb", "vitl", "vith", "r50x4", "r152x4")} | {
    "fourway_gpt2_large", "fourway_vitl_cifar100",
}  # fmt: skip


@functools.cache
def shown(name: str, *overrides: str) -> str:
    return as_text(meaning(load(FILES[name], list(overrides))))


def test_the_table_names_every_shipped_recipe() -> None:
    assert set(FILES) == set(SIGMAS) | PUBLIC


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_says_what_it_is_and_its_command_is_its_own(name: str) -> None:
    about = load(FILES[name], []).about
    assert all((about.command, about.hardware, about.cost, about.expect, about.source))
    if name != "demo":
        assert str(FILES[name].relative_to(ROOT)) in about.command


@pytest.mark.parametrize("name", sorted(PLANS))
def test_its_noise_gives_its_epsilon_and_its_model_the_published_size(name: str) -> None:
    """With the calibrated noise as a number: to calibrate all of them takes two minutes and is the slow test below."""
    records, batch, steps, budget, sigma = PLANS[name]
    number = private_phase(load(FILES[name], []))
    text = shown(name, f"phases.{number}.privacy.noise_multiplier={sigma}").partition(f"phase {number} ")[2]
    found = dict(re.findall(r"^ {2}(\S+) +(\S+)", text, flags=re.MULTILINE))
    assert int(found["n"].replace(",", "")) == records and int(found["T"]) == steps
    assert abs(float(found["q"]) - batch / records) < 1e-8
    assert 0.999 * budget <= float(found["epsilon"]) <= budget
    if name in COUNTS:
        assert int(found["parameters"].replace(",", "")) == COUNTS[name]


@pytest.mark.parametrize("name", ["dpcap_base_eps2", "transfer_vith_onestep"])
def test_the_noise_is_calibrated_to_it(name: str) -> None:
    assert float(re.findall(r"sigma +(\S+) \(calibrated\)", shown(name))[0]) == PLANS[name][4]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SIGMAS))
def test_the_noise_of_every_recipe_is_calibrated_to_it(name: str) -> None:
    assert float(re.findall(r"sigma +(\S+) \(calibrated\)", shown(name))[0]) == SIGMAS[name]


def differing_keys(one: Any, other: Any, where: str = "") -> set[str]:
    """The keys whose values differ, down to the first that one of the two lacks."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return set() if one == other else {where}
    keys = one.keys() | other.keys()
    return set().union(*(differing_keys(one.get(key), other.get(key), f"{where}.{key}".strip(".")) for key in keys))


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_variant_differs_from_its_recipe_in_its_noise_alone(name: str) -> None:
    base, bands, _ = VARIANTS[name]
    ours, theirs = (load(FILES[each], []).model_dump(mode="json", by_alias=True) for each in (name, base))
    for config in (ours, theirs):
        del config["$schema"]  # as the paths below, relative to the file
        for phase in config["phases"]:
            for part in (phase["data"], phase["evaluation"] or {}):
                if "path" in part:
                    part["path"] = os.path.normpath(part["path"])
    number, every = private_phase(load(FILES[name], [])), ours["run"]["checkpoint_every"]
    changed = {key for key in differing_keys(ours, theirs) if not key.startswith("about.")}
    assert changed == {f"phases.{number}.privacy.noise", "run.checkpoint_every"}
    assert ours["phases"][number]["privacy"]["noise"] == {"kind": "banded", "bands": bands, "horizon": None}
    assert every % bands == 0, "no key of an earlier step is kept at a checkpoint"


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_variant_keeps_the_budget_and_adds_up_to_what_is_said(name: str) -> None:
    base, bands, sigma = VARIANTS[name]
    records, batch, steps, budget, independent = PLANS[base]
    number = private_phase(load(FILES[name], []))
    text = shown(name, f"phases.{number}.privacy.noise_multiplier={sigma}").partition(f"phase {number} ")[2]
    found = dict(re.findall(r"^ {2}(\S+) +(\S+)", text, flags=re.MULTILINE))
    assert abs(float(found["q"]) - bands * batch / records) < 1e-8 and int(found["T"]) == steps
    assert 0.999 * budget <= float(found["epsilon"]) <= budget
    matrix = best_banded(bands, steps)
    added_up = sigma * matrix.accumulated(steps) / (independent * math.sqrt((steps + 1) / 2))
    each = sigma * matrix.typical_spread / independent
    assert f" adds up to {added_up:.3f} of {base}'s, a step has {each:.1f} times" in load(FILES[name], []).about.expect
    page = (ROOT / "docs" / "recipes.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert row == f"| `{name}` | {bands} | {sigma} | {added_up:.3f} | {each:.1f} |"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_variant_has_the_noise_that_compare_finds_best(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert account(["compare", "--config", str(FILES[name]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == f"banded, {VARIANTS[name][1]} bands"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({plan: name for name, plan in PLANS.items()}.values()))
def test_both_bounds_of_its_epsilon_are_close(name: str) -> None:
    records, batch, steps, budget, sigma = PLANS[name]
    privacy = load(FILES[name], []).phases[private_phase(load(FILES[name], []))].privacy
    assert privacy is not None
    delta = parse_delta(privacy.delta, records)
    events = [Event(threshold_for(records, batch) / RATE_DENOMINATOR, sigma, steps)]
    above, below = epsilon(events, delta), epsilon_below(events, delta)
    assert below is not None and above - 1e-3 <= below <= above <= budget


# The papers' rounded noise and what PLD makes of it, by packages of others: dp-accounting, and for those of the first
# two lines Opacus's PRV as well.
ROUNDED = [
    ("vip_base", 0.48, 6.8315), ("vip_data_23m", 0.66, 7.2982), ("vip_data_2m", 2.5, 7.4699),
    ("vip_batch_32k", 0.45, 6.6895), ("dpcap_large", 0.728, 7.3370), ("dpcap_base_eps2", 1.18, 1.7768),
    ("vip_batch_82k", 0.5, 5.9787), ("vip_finetune", 2.5, 7.4930), ("dpcap_2b", 0.527, 6.3001),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sigma", "epsilon"), ROUNDED)
def test_the_papers_rounded_noise_is_an_override(name: str, sigma: float, epsilon: float) -> None:
    number = private_phase(load(FILES[name], []))
    text = shown(name, f"phases.{number}.privacy.noise_multiplier={sigma}")
    assert f"{sigma:g} (given)" in text
    assert abs(float(re.findall(r"epsilon +([\d.]+) of", text)[0]) - epsilon) < 1e-3


@pytest.mark.parametrize(
    ("epsilon", "at_a_millionth"),
    [(0.25, 15.4098), (0.5, 8.0576), (1, 4.2247), (2, 2.2305), (4, 1.1935), (6, 0.8359), (8, 0.6529), (10, 0.5411)],
)
def test_one_step_at_eight_budgets(epsilon: float, at_a_millionth: float) -> None:
    """The paper's delta, 1e-6, exceeds 1/n: it is refused, and 1/n = 7.8e-7 asks for slightly more noise."""
    settings = load(FILES["transfer_vith_onestep"], [f"phases.1.privacy.epsilon={float(epsilon)}"]).phases[1]
    assert settings.privacy is not None
    plan = plan_of_phase(with_steps(settings, IMAGENET, "phases.1"), IMAGENET, "phases.1")
    assert abs(calibrate_sigma(Event(1.0, 1.0, 1), float(epsilon), 1e-6) - at_a_millionth) < 6e-5
    assert at_a_millionth < plan.noise_multiplier < 1.015 * at_a_millionth
    assert plan.sampling == Poisson(2**32) and 0.999 * epsilon < planned_epsilon(plan) <= epsilon
    refused = [f"phases.1.privacy.epsilon={float(epsilon)}", "phases.1.privacy.delta=1e-6"]
    with pytest.raises(ValueError, match=r"delta must lie in \(0, 1/n\]"):
        meaning(load(FILES["transfer_vith_onestep"], refused))


@pytest.mark.parametrize(
    ("batch", "steps"), [(2**e, t) for e, t in ((15, 391), (16, 196), (17, 98), (18, 49), (19, 25))]
)
def test_ten_epochs_are_as_many_steps_at_every_batch(batch: int, steps: int) -> None:
    settings = load(FILES["transfer_vitb_full"], [f"phases.1.privacy.expected_batch={float(batch)}"]).phases[1]
    resolved = with_steps(settings, IMAGENET, "phases.1")
    assert resolved.steps == steps and resolved.schedule.warmup == round(0.25 * IMAGENET / batch)


@pytest.mark.parametrize("name", sorted(SIGMAS))
def test_every_recipe_has_a_non_private_twin_with_its_batch(name: str) -> None:
    config = load(FILES[name], [])
    number = private_phase(config)
    before = config.phases[number].privacy
    twin = load(FILES[name], [f"phases.{number}.privacy=null"]).phases[number]
    assert before is not None and twin.privacy is None and twin.batch == round(before.expected_batch)
    text = shown(name, f"phases.{number}.privacy=null")
    assert "the run is NOT PRIVATE" in text and "epsilon" not in text.partition("resolved model")[2]


@pytest.mark.parametrize("name", sorted(SIGMAS))
def test_no_private_phase_trains_blind(name: str) -> None:
    config = load(FILES[name], [])
    number = private_phase(config)
    phase = config.phases[number]
    assert phase.evaluation is not None and phase.evaluation.public and phase.blind is None
    assert load(FILES[name], [f"phases.{number}.evaluation=null"]).phases[number].blind is not None


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_pre_training_is_public_and_promises_nothing(name: str) -> None:
    text, config = shown(name), load(FILES[name], [])
    assert f"on public data; batch {config.phases[-1].batch}" in text and "epsilon  " not in text
    assert config.phases[-1].evaluation is not None


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_recipe_that_pretrains_says_on_what_it_measures(name: str) -> None:
    adapts = ("transfer_", "finetune_", "demo", "vip_finetune", "dpcap_finetune")
    assert name.startswith(adapts) or "; while it trains, " in load(FILES[name], []).about.expect


def test_shipped_files_are_plain_json_that_names_the_schema() -> None:
    for path in FILES.values():
        raw = json.loads(path.read_text())
        assert (path.parent / raw["$schema"]).resolve() == ROOT / "ds_configs" / "schema.json"


# What docs/recipes.md and the headers of the recipes say of them: every override, and the planned hardware.


def tabled(heading: str) -> list[list[str]]:
    """The overrides of every run that a table of docs/recipes.md describes."""
    section = (ROOT / "docs" / "recipes.md").read_text().partition(heading)[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|")[-1] for line in section.splitlines() if line.startswith("|")][2:]
    found = []
    for row in rows:
        fixed = re.findall(r"`(\S+=\S+)`", row)
        listed = re.findall(r"`(\S+=)`((?: [-.\de]+)+)", row)
        found += [[*fixed, key + value] for key, values in listed for value in values.split()]
        found += [] if listed else [fixed]
    return found


def test_every_override_that_is_documented_loads() -> None:
    runs = tabled("## Mehta et al.'s one factor")
    assert len(runs) == 6 + 8 + 9 + 1 + 4 + 4
    for overrides in runs:
        load(FILES["transfer_vitb_full"], overrides)
    for path in FILES.values():
        for override in re.findall(r"--set (\S+)", json.loads(path.read_text())["about"]["source"]):
            load(path, [override])


def test_the_non_private_columns_clip_the_mean_gradient_of_every_transfer() -> None:
    columns = [given for given in tabled("## Mehta et al.'s one factor") if "phases.1.privacy=null" in given]
    names = [name for name in FILES if re.match(r"transfer_\w+_(full|last)", name)]
    assert len(names) == 12
    for name in names:
        phases = [load(FILES[name], given).phases[1] for given in columns]
        assert [phase.batch for phase in phases] == [2**17, 2**18, 2**19, 2**20]
        assert {(phase.privacy, phase.optimizer.params.gradient_norm) for phase in phases} == {(None, 1.0)}


def test_the_backbones_rate_is_that_of_everything_but_the_head() -> None:
    (rules,) = [over[0] for over in tabled("## Mehta et al.'s one factor") if '"learning_rate":0.1' in over[0]]
    for name in ("transfer_vitb_full", "transfer_r50x4_full"):
        config = load(FILES[name], [rules])
        model = build(resolve_shape(config), "classify", device="meta")
        found = policies(config.phases[1].optimizer.params, model.named_parameters())
        assert {name for name, policy in found.items() if policy.learning_rate == 1} == {"head.weight", "head.bias"}
        assert [name for name, policy in found.items() if not policy.trust_ratio] == ["head.bias"]


BASELINES = [(0.0, 1.0), (1 / 33, 1 / 33), (0.0, 1.0), (1.0, 0.0), (0.5, 0.5), None, (1.0, 1.0)]


def test_the_baselines_of_mixing_are_what_their_table_says() -> None:
    runs = tabled("## Bu et al.'s baselines")
    for overrides, expected in zip(runs, BASELINES, strict=True):
        mixing = load(FILES["mixed_base"], overrides).phases[0].mixing
        ends = mixing and tuple(alpha(mixing, step, 4000, 131072.0) for step in (1, 4001))
        assert ends == expected if expected is None else ends == pytest.approx(expected), overrides
    shipped = load(FILES["mixed_base"], []).phases[0].mixing
    assert shipped is not None and alpha(shipped, 2001, 4000, 131072.0) == pytest.approx(1 - math.sqrt(0.5))
    switch = load(FILES["mixed_base"], runs[3]).phases[0].mixing
    assert switch is not None and [alpha(switch, step, 4000, 131072.0) for step in (1000, 1001)] == [1.0, 0.0]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("transfer_")])
def test_the_first_step_of_a_transferred_head_is_adams(name: str) -> None:
    shipped = load(FILES[name], []).phases[1].optimizer
    moved = []
    for settings in (shipped, Optimizer.model_validate({"params": {"betas": shipped.params.betas}})):
        head = {"head.weight": torch.zeros(3, 5), "head.bias": torch.full((3,), -10.0)}
        named = [(key, torch.nn.Parameter(value)) for key, value in head.items()]
        optimizer = make_optimizer(settings, named)
        for number, (_, parameter) in enumerate(named):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        optimizer.step()
        moved.append([parameter.detach() for _, parameter in named])
    assert all(torch.equal(*pair) for pair in zip(*moved, strict=True))


def test_planned_hardware_is_named_and_private_recipes_say_their_epsilon() -> None:
    for name, path in FILES.items():
        about = load(path, []).about
        planned = r"planned, not measured: 8 GPUs of 80 GiB .*, [\d,.]+ GPU-hours"
        assert name == "demo" or re.match(planned, about.hardware)
        if name in SIGMAS:
            base = VARIANTS[name][0] if name in VARIANTS else name
            assert about.expect.startswith(f"epsilon <= {PLANS[base][3]:g}")


# Every shipped recipe against what its paper and its public code print; a difference must stand in docs/recipes.md.


PAPERS = [name for name in FILES if name != "demo"]
SIGMA = "phases.-1.privacy.noise_multiplier"


def paragraphs() -> dict[str, str]:
    """The list under "What differs", by the bold words with which each entry begins."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    section = page.partition("## What differs from the papers, and why")[2].partition("\n## ")[0]
    entries = [" ".join(entry.split()) for entry in re.split(r"^- ", section, flags=re.MULTILINE)[1:]]
    return {entry.split("**")[1].rstrip("."): entry for entry in entries if entry.startswith("**")}


def untold(name: str, *overrides: str) -> set[str]:
    """The keys in which a recipe is not what is printed, and no paragraph says so."""
    listed = {deviation.key for deviation in DEVIATIONS if named(deviation.recipes, name)}
    return differing(name, *overrides) - listed


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_is_what_is_printed_or_the_documents_say_where_it_differs(name: str) -> None:
    assert any(named(fact.recipes, name) for fact in PRINTED), "nothing printed is held against it"
    assert untold(name) == set()


@pytest.mark.parametrize(
    ("name", "override", "key"),
    [
        ("vip_base", "phases.1.steps=5000", "phases.-1.steps"),
        ("vip_batch_8k", "phases.1.schedule.peak=0.0005", "phases.-1.schedule.peak"),
        ("dpcap_large", "phases.1.privacy.clip.norm=0.1", "phases.-1.privacy.clip.norm"),
        ("continual_base", "model.classes=21841", "model.classes"),
        ("transfer_vitl_last", "phases.1.schedule.peak=0.003", "phases.-1.schedule.peak"),
        ("transfer_vitb_full", "model.image_size=256", "model.image_size"),
        ("transfer_vith_onestep", "phases.1.schedule.peak=0.01", "phases.-1.schedule.peak"),
    ],
)
def test_a_value_that_no_paper_prints_is_found(name: str, override: str, key: str) -> None:
    assert untold(name, override) == {key}


@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda deviation: f"{deviation.recipes} {deviation.key}")
def test_a_listed_deviation_exists_and_is_told(deviation: Deviation) -> None:
    paragraph = paragraphs()[deviation.heading.rstrip(".")]
    assert [words for words in deviation.told if words not in paragraph] == []
    names = [name for name in PAPERS if named(deviation.recipes, name)]
    assert any(deviation.key in differing(name) for name in names), "no recipe differs there any more"


@pytest.mark.parametrize("name", [name for name in PAPERS if SIGMA in differing(name)])
def test_the_printed_noise_is_the_override_that_a_recipe_names(name: str) -> None:
    config = load(FILES[name], [])
    path = f"phases.{private_phase(config)}.privacy.noise_multiplier"
    said = re.findall(rf"--set {re.escape(path)}=([\d.]+)", config.about.source)
    (printed,) = {fact.printed for fact in PRINTED if named(fact.recipes, name) and fact.key == SIGMA}
    assert [float(value) for value in said] == [printed]
    assert value_at(values_of(name), SIGMA) is None, "calibrated to its epsilon"
