"""The config: what would break privacy, cannot be meant or is no config at all is refused with its reason."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.model.sizes import ResNet
from murmuration.train.commands.train import main
from murmuration.train.config.load import ConfigError, load
from murmuration.train.config.refused import PHASE_REFUSED, REFUSED
from murmuration.train.config.root import Config
from murmuration.train.core import Computation
from tests.support.config_base import BASE, Change, drop, put, refusal


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
    "run.report_to": "wandb", "curriculum_learning": {"enabled": True},
    "compression_training": {"weight_quantization": {}},
    "elasticity": {"enabled": True}, "zenflow": {}, "zero_optimization.overlap_comm": True,
    "zero_optimization.round_robin_gradients": True, "zero_optimization.stage": 4,
    "zero_optimization.offload_optimizer.ratio": 0.5, "zero_optimization.offload_param": {"device": "cpu"},
    "zero_optimization.zero_quantized_gradients": True,
}  # fmt: skip


def first_alone(raw: dict[str, Any]) -> None:
    del raw["phases"][1:]


RESNET = {"family": "timm", "name": "resnet18", "image_size": 32, "classes": 5}
OF_CLASSES = [put("phases.0.objective", "classify"), put("phases.0.data.label", "cls")]


def test_a_resnet_of_any_stages_can_be_written_in_a_config(loaded: Callable[..., Config]) -> None:
    model = {"family": "classifier", "image_size": 16, "width": 8, "stages": [1, 2], "classes": 3}
    phase = [put("phases.0.objective", "classify"), put("phases.0.data.label", "cls"), first_alone]
    config = loaded(put("model", model), *phase)
    assert config.model.stages == (1, 2) and config.model.resolved().resnet == ResNet(8, (1, 2))
    assert loaded(put("model", model), *phase, overrides=["model.stages=[2, 1]"]).model.stages == (2, 1)
    for wrong in ("[1.0]", '["1"]', "[]", "2"):
        assert "model.stages" in refusal(loaded, put("model", model), *phase, overrides=[f"model.stages={wrong}"])


def test_no_refusal_was_taken_away() -> None:
    """The tests below go through the refusals that there are."""
    assert set(REFUSED) == set(HARMFUL) and set(PHASE_REFUSED) == {"sampler", "shuffle", "mixup", "cutmix", "seed"}


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
    ("phases.1.objective", "clip", "'mae', 'caption', 'classify' or 'text'"),
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
    ("train_micro_batch_size_per_gpu", "all", "integer"),
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
        ("phases.1.steps", "phase 'private' has no end; give steps or epochs"),
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


# What does not go together, by what it is about: changes that all of its rows share, then a row and the words for it.

PATH = {"path": "x", "public": True}


def all_private(raw: dict[str, Any]) -> None:
    del raw["phases"][0]


BANDED = put("phases.1.privacy.noise", {"kind": "banded", "bands": 2})
ALLOCATED = put("phases.1.privacy.sampling", "allocation")
WHOLE_WEIGHTS = "needs whole weights on every rank, and ZeRO-3 and FSDP2 shard them"
UNIT = [drop("phases.1.data.expected_records"), put("phases.1.data.unit", "patient_id")]
CLASSIFY = [
    put("model.family", "classifier"), put("model.classify_loss", "sigmoid"), put("phases.1.objective", "classify"),
    put("phases.1.data.label", "kind"), drop("phases.1.data.tokenizer"), drop("phases.1.evaluation.zero_shot"),
]  # fmt: skip
FEATURES = [
    *CLASSIFY, drop("phases.1.evaluation"), put("phases.1.trainable", "head"), put("phases.1.features", {}),
    put("phases.1.data.augment", "center"),
]  # fmt: skip
HEAD = {
    "name": "head", "data": {"path": "records", "label": "cls", "classes": "classes.txt"}, "objective": "head",
    "privacy": {"epsilon": 1.0},
}  # fmt: skip
START = {"name": "start", "data": {"source": "checkpoint", "path": "weights", "public": True}}


def first(phase: dict[str, Any]) -> Change:
    return lambda raw: raw["phases"].insert(0, copy.deepcopy(phase))


def mixed(**data: Any) -> Change:
    return put("phases.1.mixing", {"data": PATH | data, "batch": 2})


def synthetic(**data: Any) -> Change:
    return put("phases.0.data", {"source": "synthetic", **data})


def stream(**data: Any) -> Change:
    return put("phases.1.data", {"source": "webdataset", "path": "/nowhere", "tokenizer": "t", **data})


def head(**changes: Any) -> list[Change]:
    return [put("phases", [HEAD | changes]), put("model.classes", 4)]


TOGETHER: dict[str, tuple[list[Change], list[tuple[list[Change], str]]]] = {
    "phases": ([], [
        ([put("phases.1.batch", 20)], "has both `batch` and `privacy.expected_batch`"),
        ([put("phases.1.data.public", True)], "has `privacy`, but its data are declared public; drop one of them"),
        ([put("phases.1.name", "warm")], "two phases have the same name"),
        ([put("phases.0.evaluation", PATH | {"zero_shot": {"axes": {"a": ["b"]}}})],
         "phase 'warm' writes no captions, so it has no zero-shot labels to score"),
        ([first(START | {"steps": 3})], "phase 'start' trains nothing, so steps would have no effect"),
        ([put("phases.1.data", START["data"])], "trains nothing, so"),
        ([put("phases.0.epochs", 2.0)], "has steps and epochs; give steps or epochs"),
        ([put("phases.0.plateau", {})], "phase 'warm' ends at a plateau of the public loss and needs `evaluation`"),
        ([put("phases.1.optimizer.carry", "all")], "no phase before it trained the same weights"),
        ([put("phases.1.objective", "mae"), drop("phases.1.evaluation"), put("phases.1.optimizer.carry", "all"),
          put("phases.1.optimizer.params.ema_decay", 0.9)], "give ema_decay to both, or to none"),
        ([put("phases.0.optimizer", {"type": "SGD", "carry": "second-moment"})], "SGD has no second moment"),
        ([put("phases.1.mixing", {"data": {"path": "x"}, "batch": 4})], "not declared public"),
        ([put("phases.0.objective", "classify")], "needs data.label"),
        ([put("phases.1.data.public_fraction", 1.5)], "less than 1"),
        ([put("phases.1.trainable", "heads")], "'all', 'head', 'bias', 'lora', 'statistics' or 'whitened'"),
        ([put("phases.1.schedule.warmup_epochs", 1.0), put("phases.1.schedule.warmup", 3)], "both warmup and"),
        ([put("phases.0.data", {"path": "x", "public": True, "classes": "c.txt"})],
         "does not train on labels, so data.classes would have no effect"),
    ]),
    "sizes": ([], [([put("model.image_size", 33)], "model.image_size 33 is not divisible")]),
    "engines": ([], [
        ([put("zero_optimization.stage", 3), put("run.clip_engine", "reference")], WHOLE_WEIGHTS),
        ([put("run.engine", "fsdp2"), put("run.clip_engine", "reference")], WHOLE_WEIGHTS),
        ([put("run.engine", "fsdp2"), put("zero_optimization.offload_optimizer", {"device": "cpu"})],
         "FSDP2 keeps optimizer state on the device"),
        ([put("run.shard_over", 8)], 'run.shard_over is for run.engine = "fsdp2", not "deepspeed"'),
        ([put("run.engine", "fsdp2"), put("run.shard_over", 1)], "greater than or equal to 2"),
    ]),
    "compiled blocks": ([put("run.compile", "blocks")], [
        ([all_private, put("run.clip_engine", "reference")], "another clip engine than book-keeping"),
        ([put("zero_optimization.stage", 3)], "in phases without privacy, ZeRO-3"),
        ([put("model.drop_path", 0.1)], "model.drop_path"), ([put("model.dropout", 0.1)], "model.dropout"),
    ]),
    "checkpointed blocks": ([put("run.gradient_checkpointing", True)], [
        ([put("run.compile", "blocks")], "computes again what compiled blocks (run.compile) keep"),
        ([put("run.clip_engine", "opacus")], 'run.clip_engine = "opacus" cannot see into checkpointed blocks'),
    ]),
    "an encoder by name": ([put("model", RESNET), *OF_CLASSES, first_alone, first(START)], [
        ([lambda raw: raw["phases"].pop(0) and None], "normalises by stored statistics (bn1), which only trained"),
    ]),
    "correlated noise": ([BANDED], [
        ([put("run.keep_key", True)], "(privacy.noise) and run.keep_key do not go together"),
        ([put("run.audit", True)], "(privacy.noise) and run.audit do not go together"),
        ([put("phases.1.monitor", PATH)], "(privacy.noise) and monitor do not go together"),
    ]),
    "random allocation": ([ALLOCATED], [
        ([BANDED], "(privacy.sampling) and correlated noise (privacy.noise) do not"),
        ([put("run.keep_key", True)], "(privacy.sampling) and run.keep_key do not go together"),
        ([put("run.audit", True)], "(privacy.sampling) and run.audit do not go together"),
        ([put("phases.1.monitor", PATH)], "the latter's advice is for Poisson samples"),
    ]),
    "an audit": ([put("run.audit", True)], [
        ([put("phases.1.privacy", None), put("phases.1.batch", 20)], "run.audit tests a claim, and no phase has"),
        ([put("phases.1.privacy.clip.adaptive", {})], "and run.audit do not go together"),
    ]),
    "features": ([], [
        ([*FEATURES, put("phases.1.data.augment", "random_resized_crop")], "keeps features and augments its pictures"),
        ([*FEATURES, put("phases.1.data.augment", "inception_crop")], "keeps features and augments its pictures"),
        ([*FEATURES, put("phases.1.monitor", PATH)], "features that are kept and monitor do not go together"),
        ([*FEATURES, put("phases.1.data.reading", {"node_shards": "{rank}"})], "features, for which every rank reads"),
        ([*FEATURES, mixed()], "features that are kept and mixing do not go together"),
        ([*FEATURES, put("model.dropout", 0.1)],
         "keeps features, which would change at each step with model.drop_path or model.dropout"),
        ([*FEATURES, put("phases.1.data.weight", "score")], "has data.weight, but no record weights are stored"),
        ([put("phases.1.features", {})], "keeps features, which stay the same only with objective 'classify'"),
    ]),
    "lists of classes": ([*CLASSIFY, put("phases.1.data.multi_label", True)], [
        ([put("model.classify_loss", "softmax")], "set model.classify_loss to 'sigmoid'"),
        ([put("phases.1.data.label", "cls")], "a .cls names one class; name a field of the .json"),
        ([put("phases.1.data.label", None)], "needs data.label"),
        ([put("phases.1.evaluation.real", "right.json")], "leave evaluation.real out"),
        ([put("phases.1.trainable", "head"), put("phases.1.features", {}), drop("phases.1.evaluation")],
         "one class per record is stored"),
        ([put("phases.1.privacy.release",
              [{"name": "accuracy", "share": 0.1, "noise_multiplier": 10.0, "bound": 1.0}])],
         "releases an accuracy, which needs one class per record"),
        ([mixed(multi_label=True)], "leave it out of mixing.data"),
        ([mixed(exclude_classes="x", label="findings", classes="y")], "drop exclude_classes"),
    ]),
    "a list without classes": ([put("phases.1.data.multi_label", True)], [([], "would have no effect")]),
    "units": ([], [
        ([put("phases.1.data.rows_per_unit", 2)], "rows_per_unit needs `unit`"),
        ([put("phases.1.data.unit_reduce", "mean")], "unit_reduce needs `unit`"),
        ([put("phases.1.data.expected_units", 2)], "expected_units needs `unit`"),
        ([put("phases.1.data.unit", "patient_id")], "as expected_units, not expected_records"),
        ([*UNIT, put("phases.1.data.unit", "key:")], "is no name"),
        ([*UNIT, put("phases.1.data.rows_per_unit", 0)], "greater than 0"),
        ([put("phases.0.data.unit", "patient_id")], "public records need none"),
        ([*UNIT, *CLASSIFY,
          put("phases.1.privacy.release", [{"name": "accuracy", "noise_multiplier": 6.0, "share": 0.1}])],
         "measures single records"),
        ([mixed(public_fraction=0.1, unit="person", rows_per_unit=2)], "single records are mixed in"),
    ]),
    "a head in one pass": ([], [
        (head(steps=2), "one pass over all records; leave steps"),
        (head(optimizer={"type": "AdamW"}), "one pass over all records; leave steps"),
        (head(schedule={"peak": 0.5}), "one pass over all records; leave steps"),
        (head(privacy={"epsilon": 1.0, "expected_batch": 20}), "leave privacy.expected_batch out"),
        (head(privacy={"epsilon": 1.0, "clip": {"norm": 2.0}}), "leave privacy.clip out"),
        (head(privacy={"epsilon": 1.0, "release": [{"name": "loss", "noise_multiplier": 5.0}]}), "privacy.release"),
        (head(privacy={"epsilon": 1.0, "noise": {"kind": "banded", "bands": 2}}), "(privacy.noise) do not go together"),
        (head(privacy={"epsilon": 1.0, "sampling": "allocation"}), "(privacy.sampling) do not go together"),
        (head(head={"ridge": 0.0}), "head.ridge = 0.0 is not usable"), (head(head={"rigde": 1.0}), "unknown key"),
        (head(privacy={"epsilon": 1.0, "expected_batch": "most"}), "expected_batch = 'most' is not usable"),
        (head(objective="mae", trainable="statistics"), "needs objective 'classify'"),
        (head(data={"path": "records", "label": "cls", "augment": "random_resized_crop"}), "augments its pictures"),
        (head(objective="classify", trainable="head", head={"ridge": 1.0}, steps=1, schedule={"peak": 1.0},
              privacy={"epsilon": 1.0, "expected_batch": 20}), "use trainable 'statistics'"),
        (head(objective="classify", trainable="whitened", steps=1, schedule={"peak": 1.0},
              privacy={"epsilon": 1.0, "expected_batch": 20}), "the sums of the phase before, which has none"),
    ]),
    "sources": ([], [
        ([synthetic(kind="noise")], "phases.0.data.kind = 'noise' is not usable"),
        ([synthetic(path="x")], "unknown key 'phases.0.data.path'; "),
        ([synthetic(recrods=5)], "unknown key 'phases.0.data.recrods'; did you mean 'records'"),
        ([put("phases.0.data", {"source": "web"})],
         "phases.0.data.source = 'web' is not usable: choose one of 'shards', 'synthetic'"),
        ([put("phases.0.data", {"source": "shards", "public": True})], "phases.0.data.path is missing"),
        ([synthetic(tokenizer="clip")], "mixed have no captions"),
        ([synthetic(records=0)], "phases.0.data.records = 0"),
        ([synthetic(), drop("phases.0.batch"), put("phases.0.privacy", {"epsilon": 8, "expected_batch": 10})],
         "its data are declared public"),
        ([stream()], "a stream is shuffled, and the accounting holds only for Poisson samples"),
        ([stream(), drop("phases.1.privacy"), put("phases.1.batch", 4), drop("phases.1.steps"),
          put("phases.1.epochs", 2.0)], "the number of records in a stream is not"),
        ([stream(reading={"cache_dir": "/x"}), drop("phases.1.privacy"), put("phases.1.batch", 4)],
         "a stream has no index"),
        ([stream(reading={"node_shards": "/x"}), drop("phases.1.privacy"), put("phases.1.batch", 4)],
         "a stream has no index"),
        ([put("phases.1.data.public_fraction", 0.5), put("phases.1.data.reading", {"node_shards": "/x"})],
         "public_fraction takes records of all shards"),
    ]),
}  # fmt: skip
ROWS = [
    pytest.param([*shared, *changes], message, id=f"{about}: {message[:50]}")
    for about, (shared, rows) in TOGETHER.items() for changes, message in rows
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), ROWS)
def test_what_does_not_go_together_is_refused_in_one_sentence(
    loaded: Callable[..., Config], changes: list[Change], message: str
) -> None:
    said = refusal(loaded, *changes)
    assert message in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize(
    "about", [about for about, (shared, _) in TOGETHER.items() if shared and "without" not in about]
)
def test_what_the_rows_above_share_is_no_reason(loaded: Callable[..., Config], about: str) -> None:
    """Or else a row would be refused for another reason than its own."""
    loaded(*TOGETHER[about][0])


def test_what_the_rows_above_begin_with_is_no_reason_either(loaded: Callable[..., Config]) -> None:
    for changes in (UNIT, FEATURES, head(), [synthetic()]):
        loaded(*changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"), ("[]", "must contain one JSON object"), ("3", "must contain one JSON object"),
        ('{"run": {}, "run": {}}', "the key 'run' appears twice in one object"),
        ('{"phases": [{"privacy": {"epsilon": 8, "epsilon": 1}}]}', "the key 'epsilon' appears twice"),
        ('{"a": NaN}', "NaN is not a number"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path, [])


def test_a_path_that_is_no_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no config file .*; write one by"):
        load(tmp_path / "none.json", [])
    (tmp_path / "c.yaml").write_text("model:\n  family: mae\n")
    with pytest.raises(ConfigError, match="configs are JSON, not YAML"):
        load(tmp_path / "c.yaml", [])
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "binary.json"):
        with pytest.raises(ConfigError):
            load(path, [])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"a": ' + b"1" * 5000 + b"}", "does not fit in 64 bits"), (b"[" * 50_000, "levels deep"),
        (b'{"phases": ' * 50_000, "levels deep"), (b'{"a": 1e999}', "is not a number that can be used"),
        (b"\xff\xfe{", "is not UTF-8"), (b'{"about": {"source": "\\ud800"}}', "half a character"),
        (b'{"run": {"dir": "a\\u0000b"}}', "a zero byte"),
        (b'{"phases": [{"data": {"classes": "' + b"9" * 256 + b'"}}]}', "a name of 256 bytes, .* over 255; shorten"),
    ],
)  # fmt: skip
def test_a_hostile_config_ends_in_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "c\x1b[2J.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(path, [])
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "override",
    [
        "phases.0.steps=" + "1" * 5000, "a=" + "[" * 50_000, ".".join("a" * 50_000) + "=1", "phases.0.batch=1e999",
        "phases.0.batch=1." + "0" * 5000 + "e999", "a\x1b[2J=1", "phases.0.name=a\nb", "run.dir=a\0b",
        "phases.9\n.steps=1", "model.depth=1000000000000", "phases.0.steps=9000000000000000000",
    ],
)  # fmt: skip
def test_a_hostile_override_ends_in_sentences(loaded: Callable[..., Config], override: str) -> None:
    told = refusal(loaded, overrides=[override])
    assert all(line.isprintable() for line in told.split("\n")) and len(told) < 2000


@pytest.mark.parametrize("override", ["phases.1.privacy.delta=1e-308", "phases.1.privacy.noise_multiplier=1e308"])
def test_numbers_that_no_accountant_can_use_end_in_one_sentence(tmp_path: Path, capsys, override: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(json.dumps(BASE))
    assert main(["--config", str(path), "--dry-run", "--set", override]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("foreign", "mode", "witness", "overrides", "refused"),
    [
        (1, 0o644, "touch /tmp/x", [], True),
        (0, 0o646, "touch /tmp/x", [], True),
        (1, 0o644, "touch /tmp/x", ["run.witnesses=x"], True),
        (0, 0o644, "touch /tmp/x", [], False),
        (1, 0o644, "https://log.example", [], False),
        (1, 0o644, "touch /tmp/x", ["run.witness=touch /tmp/x"], False),
        (1, 0o644, "touch /tmp/x", ["run.witness=null"], False),
    ],
)
def test_a_command_of_somebody_elses_config_is_not_run(
    loaded: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, foreign: int, mode: int,
    witness: str, overrides: list[str], refused: bool,
) -> None:  # fmt: skip
    loaded(put("run.witness", witness))
    path = tmp_path / "config.json"
    path.chmod(mode)
    if os.getuid() == 0:  # whose files may be trusted
        os.chown(path, 1234, -1)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + foreign)
    code = main(["--config", str(path), "--dry-run", *(f"--set={each}" for each in overrides)])
    said = "can be changed by somebody else, and its run.witness would run a command at each checkpoint: touch /tmp/x;"
    assert (said in capsys.readouterr().err) == refused and (code == 2) >= refused


def test_a_witness_without_a_name_is_refused(loaded: Callable[..., Config]) -> None:
    for empty in ("", " "):
        assert "run.witness is empty" in refusal(loaded, put("run.witness", empty))


# Compiled blocks


def test_blocks_are_compiled_only_where_something_runs_compiled(loaded: Callable[..., Config]) -> None:
    compiled, sharded = put("run.compile", "blocks"), [all_private, put("zero_optimization.stage", 3)]
    fsdp2 = [put("run.engine", "fsdp2"), put("zero_optimization.stage", 3)]
    for changes, private in (
        ([], "blocks"), (sharded, "blocks"), (fsdp2, "blocks"), ([put("run.clip_engine", "reference")], "off")
    ):  # fmt: skip
        config = loaded(compiled, *changes)
        assert (config.run.compile, Computation.of(config.run).compile) == ("blocks", private)
    dropping = loaded(compiled, put("model.dropout", 0.1), all_private)
    assert Computation.of(dropping.run).compile == "blocks", "masks are given to compiled code, so blocks share it"
