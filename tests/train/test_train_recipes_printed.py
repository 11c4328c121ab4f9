"""Every shipped recipe against what its paper and its public code print; a difference must stand in docs/recipes.md."""

from __future__ import annotations

import re

import pytest

from murmuration.train.config.load import load
from tests.support.printed_facts import (
    DEVIATIONS,
    LAMB_RATES,
    MOMENTUM_RATES,
    PRINTED,
    SINGLE_STEP_BUDGETS,
    Deviation,
    agrees,
    differing,
    named,
    value_at,
    values_of,
)
from tests.support.shipped_recipes import FILES, ROOT, private_phase

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


def test_every_printed_fact_is_held_against_a_recipe() -> None:
    for fact in PRINTED:
        assert any(named(fact.recipes, name) for name in PAPERS), (fact.source, fact.recipes, fact.key)


def test_the_tabled_grids_are_those_of_the_paper() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    for row, printed in (
        ("LAMB's rates", LAMB_RATES), ("its rates", MOMENTUM_RATES), ("one step, eight budgets", SINGLE_STEP_BUDGETS),
    ):  # fmt: skip
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {row} |")]
        listed = re.findall(r"=`((?: [-.\de]+)+)", line)[-1].split()
        assert agrees(list(printed), [float(value) for value in listed]), row
