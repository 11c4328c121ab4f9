"""The config: refusals with their reasons, shipped files, and a digest that sees what shapes a release."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.text import word_tokenizer
from train import recipe
from train.config import Config, json_schema, run_dir_of
from train.loading import ConfigError, load
from train.recipe import RecipeError, clip_rule, make_plan, prepare
from train.refusals import PHASE_REFUSED, REFUSED

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(p for p in (ROOT / "ds_configs").glob("*.json") if p.name != "schema.json")

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "model": {
        "family": "captioner", "image_size": 32, "patch_size": 8, "width": 16, "depth": 1, "heads": 2,
        "decoder_depth": 1, "text_length": 8, "vocabulary": 64,
    },
    "phases": [
        {
            "name": "warm", "data": {"path": "warm", "public": True}, "objective": "mae", "batch": 16,
            "schedule": {"peak": 1e-3}, "steps": 2,
        },
        {
            "name": "private",
            "data": {"path": "private", "tokenizer": "tokenizer.json", "expected_records": 400},
            "objective": "caption",
            "privacy": {"epsilon": 8.0, "expected_batch": 20, "noise_multiplier": 1.5, "clip": {"norm": 1.0}},
            "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}},
            "schedule": {"peak": 1e-3, "shape": "constant"},
            "steps": 5,
            "evaluation": {"path": "held", "zero_shot": {"axes": {"colour": ["red", "blue"]}}},
        },
    ],
    "run": {"checkpoint_every": 2},
}  # fmt: skip

Change = Callable[[dict[str, Any]], None]


def put(dotted: str, value: Any) -> Change:
    def change(raw: dict[str, Any]) -> None:
        holder: Any = raw
        *way, last = dotted.split(".")
        for part in way:
            holder = holder[int(part)] if isinstance(holder, list) else holder.setdefault(part, {})
        holder[last] = value

    return change


def drop(dotted: str) -> Change:
    def change(raw: dict[str, Any]) -> None:
        holder: Any = raw
        *way, last = dotted.split(".")
        for part in way:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        del holder[last]

    return change


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Config]:
    def read(*changes: Change, overrides: list[str] | None = None) -> Config:
        raw = copy.deepcopy(BASE)
        for change in changes:
            change(raw)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(raw))
        return load(path, overrides or [])

    return read


def refusal(read: Callable[..., Config], *changes: Change, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        read(*changes, overrides=overrides)
    return str(refused.value)


def test_the_base_of_these_tests_loads(loaded: Callable[..., Config]) -> None:
    config = loaded()
    assert config.phases[1].privacy is not None and config.phases[1].optimizer.params.betas == (0.9, 0.95)


# Keys that would break privacy

# A value that would do harm, for every key that is refused; the test fails for a key without one.
HARMFUL: dict[str, Any] = {
    "gradient_clipping": 1.0, "gradient_accumulation_steps": 4, "train_batch_size": 1024, "fp16": {"enabled": True},
    "bf16": {"enabled": True}, "amp": {"enabled": True}, "torch_autocast": {"enabled": True},
    "data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bf16", "optimizer": {"type": "Adam"},
    "scheduler": {"type": "WarmupLR"}, "prescale_gradients": True, "gradient_predivide_factor": 2.0,
    "gradient_allreduce_op": "mean", "managed_gradient_accumulation": True, "sparse_gradients": True,
    "tensorboard": {"enabled": True}, "wandb": {"enabled": True}, "comet": {"enabled": True},
    "csv_monitor": {"enabled": True}, "dump_state": True, "data_efficiency": {"enabled": True},
    "curriculum_learning": {"enabled": True}, "compression_training": {"weight_quantization": {}},
    "elasticity": {"enabled": True}, "zenflow": {}, "zero_optimization.overlap_comm": True,
    "zero_optimization.round_robin_gradients": True, "zero_optimization.stage": 4,
    "zero_optimization.offload_optimizer.ratio": 0.5, "zero_optimization.offload_param": {"device": "cpu"},
    "zero_optimization.zero_quantized_gradients": True,
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_would_break_privacy_is_refused_with_its_reason(loaded: Callable[..., Config], key: str) -> None:
    message = refusal(loaded, put(key, HARMFUL[key]))
    assert message.startswith(f"{key} = ") and REFUSED[key][1] in message
    assert len(message.splitlines()) == 1
    assert key in refusal(loaded, overrides=[f"{key}={json.dumps(HARMFUL[key])}"]), "by --set as well"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gradient_clipping", 0.001), ("gradient_clipping", -1), ("gradient_clipping", False),
        ("gradient_clipping", None), ("gradient_accumulation_steps", True), ("gradient_accumulation_steps", "auto"),
        ("zero_optimization.stage", "1"), ("zero_optimization.stage", True), ("zero_optimization.stage", -1),
        ("zero_optimization.overlap_comm", 0), ("zero_optimization.overlap_comm", None),
        ("fp16", {}), ("fp16", {"enabled": "auto"}), ("fp16", True), ("bf16", {"enabled": 1}),
        ("communication_data_type", "fp16"), ("prescale_gradients", False),
    ],
)  # fmt: skip
def test_disguised_forms_are_refused_too(loaded: Callable[..., Config], key: str, value: Any) -> None:
    assert refusal(loaded, put(key, value)).startswith(f"{key} = {value!r} is refused: ")


@pytest.mark.parametrize("section", ["", "data.", "privacy."])
@pytest.mark.parametrize("key", PHASE_REFUSED)
def test_samplers_mixing_and_seeds_are_refused_in_a_phase(
    loaded: Callable[..., Config], section: str, key: str
) -> None:
    message = refusal(loaded, put(f"phases.1.{section}{key}", 1))
    assert message == f"phases.1.{section}{key} is refused: {PHASE_REFUSED[key]}"


def test_every_fault_is_reported_at_once(loaded: Callable[..., Config]) -> None:
    message = refusal(loaded, put("gradient_clipping", 1), put("fp16", True), put("phases.0.mixup", 0.8))
    assert len(message.splitlines()) == 3


# Unknown, missing and impossible


@pytest.mark.parametrize(
    ("dotted", "meant"),
    [
        ("modle", "model"), ("train_micro_batch_size_per_gpus", "train_micro_batch_size_per_gpu"),
        ("about.comand", "command"), ("zero_optimization.stge", "stage"), ("model.widht", "width"),
        ("phases.1.privcy", "privacy"), ("phases.1.data.tokeniser", "tokenizer"),
        ("phases.1.privacy.epsilonn", "epsilon"), ("phases.1.privacy.noise_multiplyer", "noise_multiplier"),
        ("phases.1.privacy.clip.nrom", "norm"), ("phases.1.optimizer.tpye", "type"),
        ("phases.1.optimizer.params.beta", "betas"), ("phases.1.schedule.warm_up", "warmup"),
        ("phases.1.evaluation.record", "records"), ("phases.1.evaluation.zero_shot.axis", "axes"),
        ("run.checkpoint_evry", "checkpoint_every"),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_refused_at_every_level(loaded: Callable[..., Config], dotted: str, meant: str) -> None:
    message = refusal(loaded, put(dotted, 1))
    assert f"unknown key {dotted!r}; did you mean {meant!r}?" in message
    assert f"unknown key {dotted!r}" in refusal(loaded, overrides=[f"{dotted}=1"])


def test_a_key_like_no_other_gets_the_known_ones(loaded: Callable[..., Config]) -> None:
    message = refusal(loaded, put("phases.1.privacy.clip.zzz", 1))
    assert "unknown key 'phases.1.privacy.clip.zzz'; known here: adaptive, gamma, groups, kind, norm" in message


FAULTS: list[tuple[str, Any, str]] = [
    ("phases.1.privacy.epsilon", -1, "greater than 0"),
    ("phases.1.privacy.epsilon", "8", "valid number"),
    ("phases.1.privacy.epsilon", None, "valid number"),
    ("phases.1.privacy.expected_batch", 0, "greater than 0"),
    ("phases.1.privacy.noise_multiplier", 0, "greater than or equal to 0.1"),
    ("phases.1.privacy.clip.norm", 0, "greater than 0"),
    ("phases.1.privacy.clip.gamma", -1, "greater than or equal to 0"),
    ("phases.1.privacy.clip.kind", "per-layer", "'flat' or 'automatic'"),
    ("phases.1.steps", -1, "greater than or equal to 0"),
    ("phases.1.steps", 1.5, "integer"),
    ("phases.1.steps", "5", "integer"),
    ("phases.1.steps", True, "integer"),
    ("phases.1.trainable", "some", "'all'"),
    ("phases.1.objective", "clip", "'mae', 'caption' or 'classify'"),
    ("phases.1.name", "My Phase", "match pattern"),
    ("phases.1.data.source", "web", "'shards'"),
    ("phases.1.data.augment", "mixup", "'none', 'center', 'random_resized_crop' or 'inception_crop'"),
    ("phases.0.data.public", "yes", "boolean"),
    ("phases.0.data.public", 1, "boolean"),
    ("phases.0.batch", 0, "greater than 0"),
    ("phases.1.optimizer.type", "Adagrad", "'AdamW'"),
    ("phases.1.optimizer.params.betas", [0.9, 1.0], "both betas must lie in [0, 1)"),
    ("phases.1.optimizer.params.betas", [0.9], ""),
    ("phases.1.optimizer.params.eps", 0, "greater than 0"),
    ("phases.1.optimizer.params.weight_decay", -1, "greater than or equal to 0"),
    ("phases.1.schedule.peak", 0, "greater than 0"),
    ("phases.1.schedule.warmup", -1, "greater than or equal to 0"),
    ("phases.1.schedule.shape", "step", "'cosine' or 'inverse-sqrt'"),
    ("phases.1.evaluation.zero_shot.axes", {}, "at least 1"),
    ("phases", [], "at least 1"),
    ("phases", {}, "array"),
    ("model", 3, ""),
    ("model.width", -16, "greater than 0"),
    ("model.mask_ratio", 1.0, "less than 1"),
    ("train_micro_batch_size_per_gpu", "auto", "integer"),
    ("train_micro_batch_size_per_gpu", 0, "greater than 0"),
    ("run.engine", "fsdp", "'deepspeed'"),
    ("run.clip_engine", "ghost", ""),
    ("run.checkpoint_every", 0, "greater than 0"),
    ("run.debug_seed", "7", "integer"),
]


@pytest.mark.parametrize(("key", "value", "message"), FAULTS, ids=[f"{k}={v!r}"[:60] for k, v, _ in FAULTS])
def test_an_impossible_value_is_refused_and_named(
    loaded: Callable[..., Config], key: str, value: Any, message: str
) -> None:
    found = refusal(loaded, put(key, value))
    assert key in found and message in found
    assert "\n  " not in found and "pydantic" not in found, "one plain sentence"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("key", ["phases.1.privacy.epsilon", "phases.1.privacy.clip.norm", "phases.1.schedule.peak"])
def test_numbers_that_are_none_are_refused(loaded: Callable[..., Config], key: str, literal: str) -> None:
    assert refusal(loaded, put(key, float(literal.replace("Infinity", "inf")))) != ""
    assert refusal(loaded, overrides=[f"{key}={literal}"]) != ""


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model", "model is missing"), ("phases", "phases is missing"), ("model.family", "model.family is missing"),
        ("train_micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu is missing"),
        ("phases.1.steps", "phase 'private' has no end; give one of steps, epochs and until_budget"),
        ("phases.1.schedule", "phase 'private' needs `schedule`, its learning rates"),
        ("phases.1.objective", "phases.1.objective is missing"),
        ("phases.1.data.path", "phases.1.data.path is missing"),
        ("phases.1.privacy.epsilon", "phases.1.privacy.epsilon is missing"),
        ("phases.1.privacy.expected_batch", "phases.1.privacy.expected_batch is missing"),
        ("phases.0.batch", "phase 'warm' is non-private and needs `batch`"),
        ("phases.1.privacy", "phase 'private' is non-private and needs `batch`"),
        ("phases.1.data.tokenizer", "phase 'private' trains on captions and needs data.tokenizer"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(loaded: Callable[..., Config], key: str, message: str) -> None:
    assert message in refusal(loaded, drop(key))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([put("phases.1.batch", 20)], "has both `batch` and `privacy.expected_batch`"),
        ([put("phases.1.data.public", True)], "has `privacy`, but its data are declared public; drop one of them"),
        ([put("phases.1.name", "warm")], "two phases have the same name"),
        (
            [put("zero_optimization.stage", 3), put("run.clip_engine", "reference")],
            "needs whole weights on every rank, which ZeRO-3 and FSDP2 have not",
        ),
        (
            [put("run.engine", "fsdp2"), put("run.clip_engine", "reference")],
            "needs whole weights on every rank, which ZeRO-3 and FSDP2 have not",
        ),
        (
            [put("run.engine", "fsdp2"), put("zero_optimization.offload_optimizer", {"device": "cpu"})],
            "FSDP2 keeps optimizer state on the device",
        ),
        (
            [put("phases.0.evaluation", {"path": "x", "zero_shot": {"axes": {"a": ["b"]}}})],
            "phase 'warm' writes no captions, so it cannot be asked for zero-shot labels",
        ),
    ],
)  # fmt: skip
def test_sections_that_contradict_each_other_are_refused(
    loaded: Callable[..., Config], changes: list[Change], message: str
) -> None:
    assert message in refusal(loaded, *changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"), ("[]", "must hold one JSON object"), ("3", "must hold one JSON object"),
        ('{"run": {}, "run": {}}', "the key 'run' stands twice in one object"),
        ('{"phases": [{"privacy": {"epsilon": 8, "epsilon": 1}}]}', "the key 'epsilon' stands twice"),
        ('{"a": NaN}', "NaN is not a number"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path, [])


def test_a_path_that_is_no_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no config file"):
        load(tmp_path / "none.json", [])
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "binary.json"):
        with pytest.raises(ConfigError):
            load(path, [])


# --set


def test_set_reaches_every_level_and_takes_json_or_text(loaded: Callable[..., Config]) -> None:
    config = loaded(
        overrides=[
            "phases.1.steps=9", "run.keep_key=true", "phases.1.privacy.clip.kind=automatic", "about.cost=a lot",
            "phases.1.optimizer.params.betas=[0.5, 0.6]", 'phases.0.schedule={"peak": 0.5}', "phases.1.steps=10",
        ]
    )  # fmt: skip
    private = config.phases[1]
    assert private.steps == 10 and config.run.keep_key and config.about.cost == "a lot"
    assert private.privacy is not None and private.privacy.clip.kind == "automatic"
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
        plan = make_plan(phase, quick, phase.data.expected_records, "phases")
        clip_rule(phase.privacy, plan, config.train_micro_batch_size_per_gpu)
        twin = load(path, [f"phases.{number}.privacy=null"])
        assert twin.phases[number].batch == round(phase.privacy.expected_batch)
    assert SHIPPED


# The digest


CONTENTS = {"data": "d1", "tokenizer": "t1"}
SHAPES: list[tuple[str, Any]] = [
    ("phases.1.schedule.peak", 2e-3), ("phases.1.schedule.warmup", 3), ("phases.1.schedule.shape", "cosine"),
    ("phases.1.schedule.end", 50), ("phases.1.optimizer.params.betas", [0.9, 0.96]),
    ("phases.1.optimizer.params.weight_decay", 0.1), ("phases.1.optimizer.params.eps", 1e-6),
    ("phases.1.data.augment", "center"), ("phases.1.privacy.clip.norm", 2.0),
    ("phases.1.privacy.clip.kind", "automatic"), ("phases.1.privacy.clip.gamma", 0.5),
    ("phases.1.privacy.clip.groups", "block"), ("run.clip_engine", "reference"), ("run.clip_memory", "fast"),
    ("run.precision", "bf16"),
    ("phases.1.privacy.expected_batch", 21), ("phases.1.privacy.noise_multiplier", 1.6), ("phases.1.steps", 6),
    ("phases.1.privacy.epsilon", 4.0), ("phases.1.privacy.delta", 1e-5), ("model.width", 32), ("model.init_seed", 1),
    ("model.text_length", 9), ("model.mask_ratio", 0.5), ("model.dropout", 0.1), ("train_micro_batch_size_per_gpu", 16),
]  # fmt: skip
SHAPES_NOT: list[tuple[str, Any]] = [
    ("zero_optimization.stage", 2), ("zero_optimization.reduce_bucket_size", 1000), ("run.checkpoint_every", 3),
    ("run.log_every", 1), ("run.keep_checkpoints", 5), ("run.dir", "/elsewhere"), ("run.keep_key", True),
    ("about.cost", "more"), ("phases.1.data.path", "moved"), ("phases.1.data.tokenizer", "moved.json"),
    ("phases.1.evaluation.records", 5), ("steps_per_print", 5), ("run.engine", "fsdp2"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), SHAPES, ids=[key for key, _ in SHAPES])
def test_what_shapes_a_release_changes_the_digest(loaded: Callable[..., Config], key: str, value: Any) -> None:
    assert loaded(put(key, value)).digest(1, CONTENTS) != loaded().digest(1, CONTENTS)


@pytest.mark.parametrize(("key", "value"), SHAPES_NOT, ids=[key for key, _ in SHAPES_NOT])
def test_what_does_not_shape_a_release_leaves_the_digest(loaded: Callable[..., Config], key: str, value: Any) -> None:
    changed = loaded(put(key, value))
    assert changed != loaded() and changed.digest(1, CONTENTS) == loaded().digest(1, CONTENTS)


def test_a_run_from_before_there_were_drops_goes_on(loaded: Callable[..., Config]) -> None:
    """Its digest knows of no rates, and so must ours while they are 0."""
    zero, deep = loaded(put("model.dropout", 0.0), put("model.drop_path", 0)), put("model.depth", 2)
    assert zero.digest(1, CONTENTS) == loaded().digest(1, CONTENTS)
    rates = [loaded(deep, put("model.drop_path", rate)).digest(1, CONTENTS) for rate in (0, 0.1, 0.2)]
    assert len(set(rates)) == 3 and rates[0] == loaded(deep).digest(1, CONTENTS)
    kept: list[str] = []
    real = json.dumps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "dumps", lambda value, **options: kept.append(real(value, **options)) or kept[-1])
        zero.digest(1, CONTENTS)
    assert "mask_ratio" in kept[0] and "drop" not in kept[0]


def test_features_of_a_body_that_drops_are_refused(loaded: Callable[..., Config]) -> None:
    head = [put("model.family", "classifier"), put("phases.1.objective", "classify"), put("phases.1.trainable", "head"),
            put("phases.1.data.label", "cls"), put("phases.1.features", {}), drop("phases.1.evaluation")]  # fmt: skip
    assert loaded(*head).phases[1].features is not None
    message = refusal(loaded, *head, put("model.dropout", 0.1))
    assert "keeps features, which would be others at each step with model.drop_path or model.dropout" in message


def test_the_digest_holds_contents_in_the_place_of_paths(loaded: Callable[..., Config], tmp_path: Path) -> None:
    config = loaded()
    digests = {config.digest(1, {"data": d, "tokenizer": t}) for d in ("d1", "d2") for t in ("t1", "t2")}
    assert len(digests) == 4 and config.digest(0, CONTENTS) not in digests


# Data, dry run and exit codes, as a user meets them


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    script = [sys.executable, str(ROOT / "launch" / "train.py"), *arguments]
    return subprocess.run(script, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_a_dry_run_says_what_the_config_means_without_launcher_or_data(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE))
    done = command("--config", str(path), "--dry-run", "--set", "phases.1.privacy.noise_multiplier=null",
        "--set", "run.clip_engine=reference", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in (
        "n             400 (expected_records; the data are not at hand)", "q             0.05 = 214748365/2^32",
        "sigma", "(calibrated)", "C             1 (flat)", "T             5", "epsilon", "of 8 (PLD)",
        "delta         0.00125", "parameters", "memory/rank", "fp64 sums", '"expected_batch": 20.0',
        "non-private   on public data; batch 16, 2 steps",
    ):  # fmt: skip
        assert word in done.stdout, word
    spent = float(done.stdout.split("epsilon       ")[1].split(" of")[0])
    assert 7.9 < spent <= 8.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"], "nothing is written"


def test_missing_data_are_bad_input_in_one_sentence_with_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE))
    done = command("--config", str(path), cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: phases.0.data.path: ")
    assert str(tmp_path / "warm") in lines[0] and "index" in lines[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]
    refused = command("--config", str(path), "--set", "gradient_clipping=1", cwd=tmp_path)
    assert refused.returncode == 2 and "gradient_clipping = 1 is refused" in refused.stderr


@pytest.fixture
def real(tmp_path: Path, loaded: Callable[..., Config]) -> Callable[..., Config]:
    """The base with real (tiny) shards and a tokenizer."""
    from data.index import build
    from data.shapes import GRAMMAR_WORDS
    from data.synthetic import shape_samples, texture_samples, write_shards

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
    assert private.text is not None and set(private.contents()) == {"data", "tokenizer"}
    assert set(warm.contents()) == {"data"} and warm.held_out is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([put("phases.1.data.expected_records", 400)], "is 400, but the index holds 40 records, more than 1 % off"),
        ([put("phases.1.data.tokenizer", "nothing.json")], r"phases.1.data.tokenizer: .*no tokenizer here"),
        ([put("model.vocabulary", 8)], r"more than model.vocabulary = 8; set model.vocabulary to at least"),
        ([put("phases.1.evaluation.path", "private")], r"phases.1.evaluation.path: .* belongs to the private records"),
        ([put("phases.0.evaluation", {"path": "private"})], r"0.evaluation.path: .* belongs to the private records"),
        ([put("phases.0.data.path", "private")], r"phases.0.data.path: .* belongs to the private records of phase"),
        ([put("phases.0.batch", 17)], "phases.0.batch = 17 exceeds the 16 records"),
        ([put("model.image_size", 33)], "model.image_size 33 does not divide"),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_are_refused(real: Callable[..., Config], changes: list[Change], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        prepare(real(*changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([put("phases.1.privacy.expected_batch", 41)], r"expected_batch must lie in \(0, 40\]"),
        ([put("phases.1.privacy.delta", 0.5)], r"delta must lie in \(0, 1/n\]"),
        ([put("phases.1.privacy.delta", "1/m")], "delta must be a number, '1/n' or"),
        ([put("phases.1.privacy.delta", "nan")], "delta must lie in"),
    ],
)  # fmt: skip
def test_plans_that_promise_nothing_are_refused(
    real: Callable[..., Config], changes: list[Change], message: str
) -> None:
    phase = real(*changes).phases[1]
    assert phase.privacy is not None
    with pytest.raises(RecipeError, match=message):
        make_plan(phase, phase.privacy, 40, "phases.1")


def test_a_resumed_plan_takes_its_sigma_from_the_ledger_unless_something_changed(
    loaded: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "calibrate_sigma", lambda *_: 7.5)
    phase = loaded(put("phases.1.privacy.noise_multiplier", None)).phases[1]
    assert phase.privacy is not None
    first = make_plan(phase, phase.privacy, 40, "phases.1")
    assert first.noise_multiplier == 7.5 and first.delta == 1 / 80 and first.divisor == pytest.approx(20)
    known = dataclasses.replace(first, noise_multiplier=8.5)
    assert make_plan(phase, phase.privacy, 40, "p", known).noise_multiplier == 8.5
    longer = phase.model_copy(update={"steps": 6})
    assert make_plan(longer, phase.privacy, 40, "p", known).noise_multiplier == 7.5


def test_captions_are_not_looked_for_in_single_images(loaded: Callable[..., Config], tmp_path: Path) -> None:
    from PIL import Image

    from data.folders import build_folder

    (tmp_path / "images" / "class").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(tmp_path / "images" / "class" / f"{number}.png")
    build_folder(tmp_path / "images")
    change = [put("phases.0.data.path", str(tmp_path / "images")), put("phases.0.batch", 2)]
    change.append(put("phases.1.data.expected_records", 3))
    config = loaded(*change, put("phases.1.data.path", str(tmp_path / "images")))
    with pytest.raises(RecipeError, match=r"phases.1.data.path holds single images, which have no captions"):
        prepare(config)
