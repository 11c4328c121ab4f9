"""The config's digest: what shapes a release changes it, and nothing else does."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from murmuration.train.config.load import HABITS, ConfigError, load
from murmuration.train.config.root import OF_NO_RELEASE, Config, json_schema
from murmuration.train.recipe.ready_phase import clip_rule, plan_of_phase
from murmuration.train.storage.run_dir import run_dir_of
from tests.support.config_base import put, refusal
from tests.support.shipped_recipes import FILES

CONTENTS = {"data": "d1", "tokenizer": "t1"}
SHAPES: list[tuple[str, Any]] = [
    ("phases.1.schedule.peak", 2e-3), ("phases.1.schedule.warmup", 3), ("phases.1.schedule.shape", "cosine"),
    ("phases.1.schedule.end", 50), ("phases.1.optimizer.params.betas", [0.9, 0.96]),
    ("phases.1.optimizer.params.weight_decay", 0.1), ("phases.1.optimizer.params.eps", 1e-6),
    ("phases.1.optimizer.params.gradient_norm", 1.0),
    ("phases.1.privacy.noise", {"kind": "banded", "bands": 2}), ("phases.1.privacy.sampling", "allocation"),
    ("phases.1.data.augment", "center"), ("phases.1.data.weight", "score"), ("phases.1.privacy.clip.norm", 2.0),
    ("phases.1.privacy.clip.kind", "automatic"), ("phases.1.privacy.clip.gamma", 0.5),
    ("phases.1.privacy.clip.groups", "block"), ("run.clip_engine", "reference"), ("run.clip_memory", "fast"),
    ("run.compile", "blocks"), ("run.gradient_checkpointing", True),
    ("run.precision", "bf16"), ("phases.1.privacy.views", 2),
    ("phases.1.privacy.expected_batch", 21), ("phases.1.privacy.noise_multiplier", 1.6), ("phases.1.steps", 6),
    ("phases.1.privacy.epsilon", 4.0), ("phases.1.privacy.delta", 1e-5), ("model.width", 32), ("model.init_seed", 1),
    ("model.text_length", 9), ("model.mask_ratio", 0.5), ("model.dropout", 0.1), ("train_micro_batch_size_per_gpu", 16),
    ("phases.1.data.public_fraction", 0.5), ("phases.1.privacy.clip.adaptive", {}),
    ("phases.1.privacy.release", [{"name": "loss", "bound": 1.0, "noise_multiplier": 9.0}]), ("run.noise", "exact"),
    ("phases.1.trainable", "bias"), ("phases.1.trainable", "head"), ("phases.1.schedule.warmup_epochs", 1.0),
]  # fmt: skip
SHAPES_NOT: list[tuple[str, Any]] = [
    ("zero_optimization.stage", 2), ("zero_optimization.reduce_bucket_size", 1000), ("run.checkpoint_every", 3),
    ("run.log_every", 1), ("run.keep_checkpoints", 5), ("run.dir", "/elsewhere"), ("run.keep_key", True),
    ("run.audit", True),
    ("about.cost", "more"), ("phases.1.data.path", "moved"), ("phases.1.data.tokenizer", "moved.json"),
    ("phases.1.evaluation.records", 5), ("steps_per_print", 5), ("run.engine", "fsdp2"),
    ("phases.1.data.expected_records", 77), ("phases.1.data.reading.workers", 0),
]  # fmt: skip
LEFT_OUT = [
    "schema_path",
    "about",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_optimization",
    "model.pixels",
    "data.path",
    "data.tokenizer",
    "data.classes",
    "data.exclude_classes",
    "data.reading",
    "data.expected_records",
    "data.expected_units",
    "mixing.data.path",
    "mixing.data.tokenizer",
    "mixing.data.classes",
    "mixing.data.exclude_classes",
    "mixing.data.reading",
    "mixing.data.expected_records",
    "mixing.data.expected_units",
    "features.folder",
    "monitor",
    "evaluation.path",
    "evaluation.public",
    "evaluation.real",
    "evaluation.zero_shot.class_names",
    "run.engine",
    "run.shard_over",
    "run.cuda_graph",
    "run.dir",
    "run.registry",
    "run.witness",
    "run.log_every",
    "run.private_curves",
    "run.audit",
    "run.keep_key",
    "run.tuned_on_private_data",
    "run.debug_seed",
    "run.checkpoint_every",
    "run.checkpoint_lag",
    "run.keep_checkpoints",
    "run.keep_every",
    "run.keep_best",
    "run.stall_seconds",
    "run.stop_after_minutes",
]


@pytest.mark.parametrize(("key", "value"), SHAPES, ids=[key for key, _ in SHAPES])
def test_what_shapes_a_release_changes_the_digest(loaded: Callable[..., Config], key: str, value: Any) -> None:
    assert loaded(put(key, value)).digest(1, CONTENTS) != loaded().digest(1, CONTENTS)


@pytest.mark.parametrize(("key", "value"), SHAPES_NOT, ids=[key for key, _ in SHAPES_NOT])
def test_what_does_not_shape_a_release_leaves_the_digest(loaded: Callable[..., Config], key: str, value: Any) -> None:
    changed = loaded(put(key, value))
    assert changed != loaded() and changed.digest(1, CONTENTS) == loaded().digest(1, CONTENTS)


def test_the_set_of_what_is_left_out_is_frozen() -> None:
    """A key more in it could be changed between a step and its replay, which would draw the same noise."""

    def leaves(tree: Any, where: tuple[str, ...] = ()) -> list[str]:
        if tree is True:
            return [".".join(where).removeprefix("phases.__all__.")]
        return [leaf for key, inner in tree.items() for leaf in leaves(inner, (*where, key))]

    assert sorted(leaves(OF_NO_RELEASE)) == sorted(LEFT_OUT)


def test_the_digest_holds_contents_in_the_place_of_paths(loaded: Callable[..., Config], tmp_path: Path) -> None:
    config = loaded()
    digests = {config.digest(1, {"data": d, "tokenizer": t}) for d in ("d1", "d2") for t in ("t1", "t2")}
    assert len(digests) == 4 and config.digest(0, CONTENTS) not in digests


def test_a_key_at_its_default_is_not_part_of_the_identity(loaded: Callable[..., Config]) -> None:
    """So a key that a later version adds changes no digest until it is used."""
    zero = loaded(put("model.dropout", 0.0), put("run.noise", "aes"), put("phases.1.optimizer.params.eps", 1e-8))
    assert zero == loaded() and zero.digest(1, CONTENTS) == loaded().digest(1, CONTENTS)
    kept = list[str]()
    real = json.dumps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "dumps", lambda value, **options: kept.append(real(value, **options)) or kept[-1])
        zero.digest(1, CONTENTS)
    assert '"depth"' in kept[0] and not any(name in kept[0] for name in ("drop", '"eps"', '"noise"', '"views"'))


def test_sections_tell_data_features_and_starts_apart(loaded: Callable[..., Config]) -> None:
    def start(raw: dict[str, Any], **more: Any) -> None:
        data = {"source": "checkpoint", "path": "x", "public": True} | more
        raw["phases"].insert(0, {"name": "start", "objective": "caption", "data": data})

    begun = [loaded(lambda raw, more=more: start(raw, **more)) for more in ({}, {"take_head": False})]
    assert begun[0].digest(0, CONTENTS) != begun[1].digest(0, CONTENTS)
    mixing = {"data": {"path": "x", "public": True}, "batch": 4}
    mixed = loaded(put("phases.1.mixing", mixing))
    weighted = loaded(put("phases.1.mixing", {**mixing, "data": {**mixing["data"], "weight": "score"}}))
    made = loaded(put("phases.1.mixing", {**mixing, "data": {"source": "synthetic", "kind": "shapes"}}))
    assert len({each.digest(1, CONTENTS) for each in (loaded(), mixed, weighted, made)}) == 4


def test_an_evaluation_decides_something_only_where_a_phase_may_end_by_it(loaded: Callable[..., Config]) -> None:
    plateau, fewer = put("phases.1.plateau", {}), put("phases.1.evaluation.records", 5)
    assert loaded(fewer).digest(1, CONTENTS) == loaded().digest(1, CONTENTS)
    assert loaded(plateau, fewer).digest(1, CONTENTS) != loaded(plateau).digest(1, CONTENTS)
    moved = loaded(plateau, put("phases.1.evaluation.path", "moved"))
    assert moved.digest(1, CONTENTS) == loaded(plateau).digest(1, CONTENTS) != loaded().digest(1, CONTENTS)


# `--set` and where paths lead, the non-private twin, the schema and the shipped configs.


ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json_schema()
RECIPES = sorted(FILES.values())
SHIPPED = sorted(p for p in (ROOT / "ds_configs").glob("*.json") if p.name != "schema.json")


def test_set_reaches_every_level_and_takes_json_or_text(loaded: Callable[..., Config]) -> None:
    config = loaded(
        overrides=[
            "phases.1.steps=9", "phases.1.privacy.epsilon=.5", "phases.1.optimizer.params.weight_decay=1.",
            "about.expect=.5 or 1.e", "run.keep_key=true", "phases.1.privacy.clip.kind=automatic", "about.cost=a lot",
            "phases.1.optimizer.params.betas=[0.5, 0.6]", 'phases.0.schedule={"peak": 0.5}', "phases.1.steps=10",
        ]
    )  # fmt: skip
    private = config.phases[1]
    assert private.steps == 10 and config.run.keep_key and config.about.cost == "a lot"
    assert private.optimizer.params.weight_decay == 1.0 and config.about.expect == ".5 or 1.e"
    assert private.privacy is not None and private.privacy.epsilon == 0.5 and private.privacy.clip.kind == "automatic"
    assert private.optimizer.params.betas == (0.5, 0.6) and config.phases[0].schedule.peak == 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("phases.1.steps", "--set takes key=value"), ("=3", "--set takes key=value"), ("", "--set takes key=value"),
        ("phases.7.steps=3", "there is no '7' to set anything in"), ("phases.x.steps=3", "there is no 'x'"),
        ("phases.1=3", "only keys of an object can be set"), ("run.dir.x.y=3", ""),
        ("train_micro_batch_size_per_gpu.x=3", "only keys of an object"),
        ("phases.1.step=3", "did you mean 'steps'?"), ("phases.1.steps=many", "phases.1.steps = 'many' is not usable"),
    ],
)  # fmt: skip
def test_an_override_that_cannot_be_meant_is_refused(
    loaded: Callable[..., Config], override: str, message: str
) -> None:
    assert message in refusal(loaded, overrides=[override])


def test_the_non_private_twin_keeps_its_batch(loaded: Callable[..., Config]) -> None:
    twin = loaded(overrides=["phases.1.privacy=null"]).phases[1]
    assert twin.privacy is None and twin.batch == 20 and not twin.data.public
    assert loaded(overrides=["phases.1.privacy=null", "phases.1.batch=7"]).phases[1].batch == 7
    assert "phases.1.batch = 'many' is not usable" in refusal(
        loaded, put("phases.1.privacy.expected_batch", "many"), overrides=["phases.1.privacy=null"]
    )


def test_the_twin_of_a_phase_that_draws_everybody_needs_a_number_and_takes_it(loaded: Callable[..., Config]) -> None:
    everybody, twin = put("phases.1.privacy.expected_batch", "all"), "phases.1.privacy=null"
    assert math.isinf(getattr(loaded(everybody).phases[1].privacy, "expected_batch", 0))
    said = refusal(loaded, everybody, overrides=[twin])
    assert said.startswith("phases.1.batch: ") and "set this to their number" in said and len(said.splitlines()) == 1
    for overrides in ([twin, "phases.1.batch=64"], ["phases.1.batch=64", twin]):
        phase = loaded(everybody, overrides=overrides).phases[1]
        assert phase.privacy is None and phase.batch == 64


def test_paths_follow_the_file_and_overrides_follow_the_shell(
    tmp_path: Path, loaded: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = loaded(put("phases.0.data.path", "/abs/x"), overrides=["phases.1.data.path=mine/{00..01}.tar"])
    assert config.phases[0].data.path == "/abs/x"
    assert config.phases[1].data.path == str(elsewhere / "mine/{00..01}.tar")
    assert config.phases[1].data.tokenizer == str(tmp_path / "tokenizer.json")
    assert config.phases[1].evaluation is not None and config.phases[1].evaluation.path == str(tmp_path / "held")
    assert run_dir_of(config, tmp_path / "config.json") == elsewhere / "runs" / "config"
    assert run_dir_of(loaded(overrides=["run.dir=here"]), tmp_path / "c.json") == elsewhere / "here"


# Shipped files


def test_the_checked_in_schema_is_the_generated_one() -> None:
    assert json.loads((ROOT / "ds_configs" / "schema.json").read_text()) == json_schema()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_an_editor_accepts_every_shipped_config(path: Path) -> None:
    faults = Draft202012Validator(SCHEMA).iter_errors(json.loads(path.read_text()))
    assert [(list(fault.absolute_path), fault.message) for fault in faults] == []


def test_an_editor_wants_an_objective_of_every_phase_that_trains() -> None:
    raw = json.loads(SHIPPED[0].read_text())
    del raw["phases"][-1]["objective"]
    assert "'objective' is a required property" in str(list(Draft202012Validator(SCHEMA).iter_errors(raw)))


@pytest.mark.parametrize("name", sorted(HABITS))
def test_a_name_of_other_trainers_is_answered_with_a_key_that_exists(loaded: Callable[..., Config], name: str) -> None:
    known: list[Any] = [SCHEMA]
    for part in HABITS[name].split("."):
        known = [found for schema in known for found in values_of(schema, part.removesuffix("[]"))]
    assert known, f"no section has the key {HABITS[name]}"
    hint = f"did you mean {HABITS[name]!r}?" if HABITS[name] in SCHEMA["properties"] else f"that is {HABITS[name]} here"
    with pytest.raises(ConfigError, match=re.escape(f"unknown key {name!r}; {hint}")):
        loaded(put(name, 1))


def values_of(schema: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """All that a key of this section may hold, references followed."""
    definitions, found = SCHEMA["$defs"], []
    waiting = [schema["properties"][key]] if key in schema.get("properties", {}) else []
    while waiting:
        field = waiting.pop()
        waiting += [*field.get("anyOf", ()), *field.get("oneOf", ()), *([field["items"]] if "items" in field else ())]
        found.append(definitions[field["$ref"].rpartition("/")[2]] if "$ref" in field else field)
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_loads_and_can_keep_its_promise(path: Path) -> None:
    config = load(path, [])
    assert config.about.command and config.about.cost and config.about.expect
    shape = config.model.resolved()
    assert shape.patches > 0
    for number, phase in enumerate(config.phases):
        if phase.privacy is None:
            continue
        assert phase.data.expected_records is not None, "so that a dry run works without the data"
        quick = phase.privacy.model_copy(update={"noise_multiplier": phase.privacy.noise_multiplier or 1.0})
        plan = plan_of_phase(phase.model_copy(update={"privacy": quick}), phase.data.expected_records, "phases")
        clip_rule(phase.privacy, plan, config.micro_batch)
        twin = load(path, [f"phases.{number}.privacy=null"])
        assert twin.phases[number].batch == round(phase.privacy.expected_batch)
    assert SHIPPED
