"""From a config to data and plans: what is opened, what does not fit, and what a plan may promise."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting import make_plan
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson
from murmuration.accounting.unit import Unit
from murmuration.data.text.encoder import word_tokenizer
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.planner.micro_batch import _drawn
from murmuration.train.recipe import ready_phase
from murmuration.train.recipe.ready_phase import (
    RecipeError,
    plan_of_phase,
    planned_epsilon,
    prepare,
    unit_of,
    with_steps,
)
from tests.support.config_base import Change, drop, put
from tests.support.texture_samples import texture_samples


@pytest.fixture
def real(tmp_path: Path, loaded: Callable[..., Config]) -> Callable[..., Config]:
    """The base with real (tiny) shards and a tokenizer."""
    from murmuration.data.index.shard_index import build
    from murmuration.data.synthetic.index import shape_samples, write_shards
    from murmuration.data.synthetic.shapes import GRAMMAR_WORDS

    for name, samples in (
        ("warm", texture_samples(1, 16, 32)), ("private", shape_samples(2, 40, 32)),
        ("held", shape_samples(3, 8, 32, labels=True)),
    ):  # fmt: skip
        write_shards(tmp_path / name, samples, 20)
        build(tmp_path / name)
    word_tokenizer(GRAMMAR_WORDS, tmp_path / "tokenizer.json")
    return lambda *changes: loaded(put("phases.1.data.expected_records", 40), *changes)


def test_phases_open_their_data(real: Callable[..., Config]) -> None:
    warm, private = prepare(real())
    assert (warm.index.records, private.index.records, private.private) == (16, 40, True)
    assert private.text is not None and set(private.contents()) == {"data", "decoder", "pixels", "tokenizer"}
    assert set(warm.contents()) == {"data", "decoder", "pixels"} and warm.held_out is None


def test_another_decoder_is_another_phase(real: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels may differ between two of them, and a step that is made again must not."""
    config = real()
    known = config.digest(1, prepare(config)[1].contents())
    assert known == config.digest(1, prepare(config)[1].contents())
    monkeypatch.setattr(ready_phase, "DECODER", "Pillow 99")
    assert known != config.digest(1, prepare(config)[1].contents())


@pytest.mark.rest
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([put("phases.1.data.expected_records", 400)], "is 400, but the index has 40 records, more than 1 % off"),
        ([put("phases.1.data.tokenizer", "nothing.json")], r"phases.1.data.tokenizer: .*no tokenizer here"),
        ([put("model.vocabulary", 8)], r"more than model.vocabulary = 8; set model.vocabulary to at least"),
        ([put("phases.1.evaluation.path", "private")], r"phases.1.evaluation.path: .* belongs to the private records"),
        ([put("phases.0.evaluation", {"path": "private", "public": True})],
         r"0.evaluation.path: .* belongs to the private records"),
        ([put("phases.0.data.path", "private")], r"phases.0.data.path: .* belongs to the private records of phase"),
        ([drop("phases.1.privacy"), put("phases.1.batch", 4), put("phases.1.evaluation.path", "private")],
         "belongs to the records of phase 'private', which are not declared public"),
        ([drop("phases.1.privacy"), put("phases.1.batch", 4),
          put("phases.1.monitor", {"path": "private", "public": True})],
         r"phases.1.monitor.path: .* which are not declared public"),
        ([put("phases.0.batch", 17)], "phases.0.batch = 17 exceeds the 16 records"),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_are_refused(real: Callable[..., Config], changes: list[Change], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        prepare(real(*changes))


def test_a_resumed_plan_takes_its_sigma_from_the_ledger_unless_something_changed(
    loaded: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_plan, "calibrate_sigma", lambda *_, **__: 7.5)
    phase = loaded(put("phases.1.privacy.noise_multiplier", None)).phases[1]
    assert phase.privacy is not None
    first = plan_of_phase(phase, 40, "phases.1")
    assert first.noise_multiplier == 7.5 and first.delta == 1 / 80 and first.divisor == pytest.approx(20)
    known = dataclasses.replace(first, noise_multiplier=8.5)
    assert plan_of_phase(phase, 40, "p", known=known).noise_multiplier == 8.5
    longer = phase.model_copy(update={"steps": 6})
    assert plan_of_phase(longer, 40, "p", known=known).noise_multiplier == 7.5


def test_exact_noise_has_as_much_more_as_its_grid_takes(loaded: Callable[..., Config]) -> None:
    phase = loaded(put("phases.1.privacy.noise_multiplier", None)).phases[1]
    assert phase.privacy is not None
    plain, exact = (plan_of_phase(phase, 40, "phases.1", kind) for kind in ("aes", "exact"))
    assert (plain.noise.growth, exact.noise.growth) == (0.0, 1e-6)
    assert 0 < exact.noise_multiplier - plain.noise_multiplier < 2.1e-5
    assert planned_epsilon(exact) <= exact.epsilon_budget


def test_captions_are_not_looked_for_in_single_images(loaded: Callable[..., Config], single_images: Path) -> None:
    change = [put("phases.0.data.path", str(single_images)), put("phases.0.batch", 2)]
    change.append(put("phases.1.data.expected_records", 3))
    config = loaded(*change, put("phases.1.data.path", str(single_images)))
    with pytest.raises(RecipeError, match=r"phases.1.data.path has single images, which have no captions"):
        prepare(config)


# What a config says of a head from one pass, what is filled in, and what is refused.


PHASE: dict[str, Any] = {
    "name": "head", "data": {"path": "records", "label": "cls", "classes": "classes.txt"}, "objective": "head",
    "privacy": {"epsilon": 1.0},
}  # fmt: skip
MODEL = {"family": "classifier", "image_size": 32, "patch_size": 8, "width": 32, "depth": 1, "heads": 2, "classes": 4}


def given(folder: Path, changes: dict[str, Any], *overrides: str) -> Config:
    config = {"train_micro_batch_size_per_gpu": 8, "model": MODEL, "phases": [PHASE | changes], "run": {}}
    (folder / "c.json").write_text(json.dumps(config))
    return load(folder / "c.json", list(overrides))


def test_it_is_one_step_over_all_records(tmp_path: Path) -> None:
    (phase,) = given(tmp_path, {}).phases
    assert (phase.objective, phase.trainable, phase.steps) == ("classify", "statistics", 1)
    assert phase.features is not None and phase.privacy is not None and math.isinf(phase.privacy.expected_batch)
    settled = with_steps(phase, 500, "phases.0")
    assert settled.privacy is not None
    plan = plan_of_phase(settled, 500, "phases.0")
    assert plan.sampling == Poisson(2**32) and plan.steps == 1 and plan.divisor == 500.0
    same = given(tmp_path, {"objective": "classify", "trainable": "statistics"})
    assert same.digest(0, {}) == given(tmp_path, {}).digest(0, {})
    assert given(tmp_path, {"head": {"ridge": 0.1}}).digest(0, {}) != same.digest(0, {})


def test_all_stands_for_n_in_any_phase_and_is_written_as_it_was(tmp_path: Path) -> None:
    changes = {
        "objective": "classify", "trainable": "head", "privacy": {"epsilon": 1.0, "expected_batch": "all"},
        "steps": 3, "schedule": {"peak": 0.1}, "features": {},
    }  # fmt: skip
    config = given(tmp_path, changes)
    assert json.loads(config.model_dump_json())["phases"][0]["privacy"]["expected_batch"] == "all"
    settled = with_steps(config.phases[0], 77, "phases.0")
    assert settled.privacy is not None and settled.privacy.expected_batch == 77.0


def test_its_twin_without_privacy_takes_all_records(tmp_path: Path) -> None:
    (phase,) = given(tmp_path, {}, "phases.0.privacy=null").phases
    assert phase.privacy is None and with_steps(phase, 500, "phases.0").batch == 500


def test_a_micro_batch_is_settled_before_all_records_are_counted(tmp_path: Path) -> None:
    """The word "auto" asks for the batch before there is an index."""
    drawn = _drawn(given(tmp_path, {}).phases[0], "phases.0")
    assert math.isfinite(drawn.mean) and drawn.even(2, 8) == 8


# `data.unit`: what a config may ask for, what the plan makes of it, and that nothing changes where none is named.


Make = Callable[..., Config]
DATA = "phases.1.data"
UNIT = (drop(f"{DATA}.expected_records"), put(f"{DATA}.unit", "patient_id"))


def test_the_plan_names_the_unit_and_n_is_what_it_is_given(loaded: Make) -> None:
    config = loaded(*UNIT, put(f"{DATA}.rows_per_unit", 3), put(f"{DATA}.unit_reduce", "sum"))
    phase = config.phases[1]
    assert phase.privacy is not None and unit_of(phase) == Unit("patient_id", 3, "sum") and phase.rows_of_a_slot == 3
    plan = plan_of_phase(phase, 100, "phases.1", table="digest")
    assert plan.units == Unit("patient_id", 3, "sum", "digest") and "'patient_id'" in plan.unit
    assert (plan.records, plan.delta, plan.divisor) == (100, 1 / 200, pytest.approx(20))
    assert PrivacyPlan(**plan.as_dict()) == plan  # pyright: ignore[reportArgumentType]
    twin = loaded(*UNIT, put(f"{DATA}.rows_per_unit", 3), put("phases.1.privacy", None), put("phases.1.batch", 4))
    assert twin.phases[1].rows_of_a_slot == 3


def test_a_config_without_units_keeps_its_digest_and_each_setting_changes_it(loaded: Make) -> None:
    contents = {"data": "0" * 64}
    plain = loaded().digest(1, contents)
    # As the version before there were units computed it.
    assert plain == loaded(put(f"{DATA}.unit", None), put(f"{DATA}.rows_per_unit", None)).digest(1, contents)
    seen = {plain}
    for changes in ((), (put(f"{DATA}.unit", "person"),), (put(f"{DATA}.rows_per_unit", 2),),
                    (put(f"{DATA}.unit_reduce", "sum"),)):  # fmt: skip
        seen.add(loaded(*UNIT, *changes).digest(1, contents))
    assert len(seen) == 5
    counted = loaded(*UNIT, put(f"{DATA}.expected_units", 90)).digest(1, contents)
    assert counted in seen, "what stands in for n shapes no release"
