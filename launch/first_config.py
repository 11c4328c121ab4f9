"""A first config for records of one's own: what their index and the weights to start from say of it.

No record is read. Their number n is public; of the index's census, only names that many records have are told
(record_names.py), and none gets into the config. Batch, steps and rates are those of the recipe that each goal names,
as shares of n.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murmuration.accounting.epsilon.accountant import show_delta
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.escaping import json_text
from murmuration.accounting.make_plan import PlanRequest, make_plan
from murmuration.accounting.unit import SINGLE, noun
from murmuration.data.decode.fields import CAPTIONS
from murmuration.data.index.census import CAPTION
from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.open import open_index, open_units, unit_known
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.index.unit_table import UnitTable
from murmuration.data.store.place import RecordIndex, ShardError, is_url
from murmuration.data.text.built_in import is_built_in
from murmuration.data.text.encoder import TextEncoder
from murmuration.data.text.vocabulary import TokenizerError
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.models.subject import WEIGHT_FILES, Subject
from murmuration.model.named import DECIDED, LIBRARIES, TITLES, Named
from murmuration.model.settings import ModelSettings, NamedPixels, PixelSettings, SettingsError, Shape, read_pixels
from murmuration.model.sizes import TABLES, Family, Stack
from murmuration.train.config.load import load
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.labels import FOLDERS, read_list, require_public_names
from murmuration.train.recipe.record_names import shared_names
from murmuration.train.recipe.weights_at_hand import EXPORTED
from murmuration.train.storage.run_dir import RunDir, run_dir_of

if TYPE_CHECKING:  # what brings PyTorch along is imported where it is used
    from murmuration.evaluation.models.weights import Evaluated

TEMPLATE = Path(__file__).parent / "first_config.json.jinja"
DELTA = "1/(2n)"
CLASSES = "classes.txt"  # beside the shards, where prepare.py pack writes it
CHECKPOINTS = 10
ROWS_OF_A_UNIT = 8
"""In a pass over features, where a record costs little. A constant, because the largest unit is no public fact."""


@dataclass(frozen=True)
class ConfigRequest:
    """The arguments of the command."""

    goal: str
    data: str
    held_out: str | None
    start: Path | None
    epsilon: float
    size: str | None
    image_size: int | None
    pixels: str | None
    label: str | None
    multi_label: bool
    classes: str | None
    classes_public: bool
    unit: str | None
    trainable: str | None
    features: str | None
    tokenizer: str | None
    out: Path


@dataclass(frozen=True)
class Rule:
    """Batch, steps and rate by a recipe. `parts`: the expected batch is this part of n."""

    family: Family
    parts: int
    passes: float
    batch_from: str
    params: dict[str, Any]
    schedule: dict[str, Any]
    rate_from: str
    augment: str

    def batch(self, records: int) -> int:
        return max(1, round(records / self.parts))

    def steps(self, records: int) -> int:
        return math.ceil(self.passes * records / self.batch(records))


_PRETRAINING = {"betas": [0.9, 0.95], "weight_decay": 0.005}
_TOY = "as in benchmarks/learning.md for DP-Cap's nano"
_DEMO = "as in ds_configs/demo.json"
RULES = {
    "classify": Rule(
        "classifier", 50, 5, "as in ds_configs/continual/finetune_cifar10.json", {"weight_decay": 0.0},
        {"peak": 1e-4, "shape": "constant"}, "as there, for weights that were trained before", "none",
    ),
    "caption": Rule(
        "captioner", 20, 2.5, _DEMO, _PRETRAINING, {"peak": 7e-4, "warmup": 8, "shape": "constant"}, _TOY,
        "random_resized_crop",
    ),
    "mae": Rule(
        "mae", 20, 2.5, f"{_DEMO}; ViP makes as many passes", _PRETRAINING,
        {"peak": 1e-3, "warmup": 8, "shape": "constant"}, _TOY, "random_resized_crop",
    ),
}  # fmt: skip


def compose(asked: ConfigRequest) -> tuple[str, str | None]:
    """The file, and why it trains what it does, if that was not asked for."""
    rule = RULES[asked.goal]
    index = _opened(asked.data, "--data")
    if asked.held_out is not None:
        _opened(asked.held_out, "--held-out")
    unit = asked.unit or unit_known(asked.data)
    n = index.records if unit in (None, SINGLE) else _units(index, unit).count
    try:
        pixels = read_pixels(asked.pixels) if asked.pixels is not None else None
    except SettingsError as error:
        raise RecipeError(str(error)) from None
    start = _weights(asked.start, pixels) if asked.start is not None else None
    data, means, outputs = _data(asked, rule, index, start)
    data |= {} if unit is None else {"unit": unit}
    one = "record" if unit in (None, SINGLE) else "unit"
    steps = rule.steps(n)
    try:
        model = _model(asked, rule, start, outputs)
        if pixels is not None:
            model["pixels"] = pixels if isinstance(pixels, str) else pixels.model_dump(mode="json")
        ModelSettings.model_validate(model).resolved()
    except SettingsError as error:
        raise RecipeError(f"--image-size: {str(error).rstrip('.')}") from None
    trainable, why = (asked.trainable or "all", None)
    if start is not None and start.shape.sees_and_writes:
        trainable, why = "lora", 'it trains adapters; write "trainable": "all" for all weights of the model'
    if asked.goal == "classify" and start is not None and asked.trainable is None:
        trainable, why = _what_noise_leaves(asked.epsilon, model, n, f"{n:,} {one}s", rule)
    # What is solved in one pass are features that are kept, of records with one class each.
    solved = trainable == "head" and not asked.multi_label
    if solved and one == "unit":
        data["rows_per_unit"] = ROWS_OF_A_UNIT
    if asked.features is not None and not solved:
        raise RecipeError(
            "--features keeps what a frozen encoder says of records with one class each; add --trainable head, or "
            "leave it out"
        )
    text = json_text(
        TEMPLATE, n=f"{n:,}", noun=one,
        model=model, solved=solved, trainable=trainable,
        features=_path(asked.features, asked.out) if asked.features else None,
        model_from="of the size of the weights" if start else "docs/models.md lists the sizes",
        start=_path(str(_to_start_from(asked.start)), asked.out) if asked.start else None,
        data=data, data_means=means,
        objective="head" if solved else asked.goal, epsilon=asked.epsilon, delta=DELTA, parts=rule.parts,
        batch_from=rule.batch_from, batch=rule.batch(n),
        params=rule.params, schedule=rule.schedule, rate_from=rule.rate_from,
        passes=rule.passes, steps=steps, held_out=_path(asked.held_out, asked.out) if asked.held_out else None,
        every=math.ceil(steps / CHECKPOINTS),
    )  # fmt: skip
    return text, why


def _what_noise_leaves(
    epsilon: float, model: dict[str, Any], n: int, of_whom: str, rule: Rule
) -> tuple[str, str]:  # fmt: skip
    """All weights, if noise on them leaves something to be learned, or else the head; and the sentence that says so."""
    from murmuration.model.build import build
    from murmuration.train.planner.drowned import USEFUL, noise_over_signal

    built = build(ModelSettings.model_validate(model), "classify", device="meta")
    request = PlanRequest(n, rule.batch(n), rule.steps(n), epsilon, DELTA)
    try:
        plan = make_plan(request)
    except AccountingError as error:
        raise RecipeError(f"--epsilon: {error}") from None
    weights = sum(each.numel() for each in built.parameters())
    ratio = noise_over_signal(plan, weights)
    size = f"the noise on all {weights:,} weights is {ratio:.2g} times the most that {of_whom} can teach them"
    if ratio <= USEFUL:
        return "all", f"it trains all weights: {size} (--trainable head or lora: fewer)"
    return "head", f"it trains the head alone: {size} (--trainable lora or all: more)"


def told(asked: ConfigRequest, why: str | None) -> list[str]:
    """What was written comes to, for the console; an error where the dry run would refuse it."""
    from murmuration.train.commands.dry_run import meaning
    from murmuration.train.planner.micro_batch import on_this_machine

    config = load(asked.out, [])
    found = meaning(on_this_machine(config, run_dir_of(config, asked.out))).phases[-1]
    assert found.promise is not None
    phase, plan = found.phase, found.promise.plan
    steps = f"{plan.steps} step{'s' * (plan.steps != 1)}"
    lines = [
        f"{asked.out}: {steps} of {plan.divisor:,.0f} of n = {plan.records:,} {noun(plan.units)}s, "
        f"ε = {asked.epsilon:g} at δ = {show_delta(plan.delta)}, which takes sigma = {plan.noise_multiplier:g}"
    ]
    lines += [why] if why is not None else []
    if asked.image_size not in (None, size := config.model.image_size):
        lines.append(f"its pictures have {size} px: {asked.image_size} is no multiple of the patches")
    if getattr(phase.data, "unit", None) is not None:
        lines.append(f"it protects {plan.unit}")
    if asked.start is None:
        lines.append("it starts from random weights, from which private training learns little: name public ones by "
                     "--start, or put a public phase first as the recipes do (docs/recipes.md)")  # fmt: skip
    named = [name for name, given in (("--held-out", asked.held_out), ("--start", asked.start)) if given]
    if named:
        lines.append(
            f'it says "public": true of {" and ".join(named)}, by your word that nobody\'s privacy depends on them'
        )
    if asked.classes_public:
        lines.append("it says that its list of classes is public, by your word, although it was made of the records")
    elif getattr(phase.data, "classes", None) is not None:
        lines.append("its list of classes must be public knowledge and not made of the private records")
    return [*lines, f"next: deepspeed launch/train.py --config {asked.out} --dry-run"]


def _opened(source: str, option: str) -> RecordIndex:
    try:
        return open_index(source)
    except (ShardError, OSError) as error:
        raise RecipeError(f"{option}: {error}") from None


def _units(index: RecordIndex, by: str) -> UnitTable:
    try:
        return open_units(index, by)
    except ShardError as error:
        raise RecipeError(f"--unit: {error}") from None


def _path(given: str, out: Path) -> str:
    """As the config will read it: relative to its own folder, if it was given relative to the current one."""
    if is_url(given) or os.path.isabs(given):
        return given
    return os.path.relpath(given, out.parent)


def _data(
    asked: ConfigRequest, rule: Rule, index: RecordIndex, start: Evaluated | None
) -> tuple[dict[str, Any], str, int]:
    """The data section, what its comment adds, and the number of outputs (classes or words; 0: neither)."""
    section = {"source": "shards", "path": _path(asked.data, asked.out), "augment": rule.augment}
    if asked.goal == "classify":
        named, outputs = _classes(asked, index)
        section |= {"label": _label(asked, index), **({"multi_label": True} if asked.multi_label else {}), **named}
        means = "; the list of classes must be public knowledge and not made of them" if named else ""
        return section, means, outputs
    if asked.goal == "caption":
        _require_captions(asked, index)
        tokenizer = asked.tokenizer or (start.tokenizer if start is not None else None) or "clip"
        try:
            of_library = start is not None and start.shape.words_of_library
            words = TextEncoder(tokenizer, ModelSettings.model_fields["text_length"].default, of_library).vocabulary
        except TokenizerError as error:
            raise RecipeError(f"--tokenizer: {error}") from None
        named = tokenizer if is_built_in(tokenizer) else _path(tokenizer, asked.out)
        return section | {"tokenizer": named}, "; the tokenizer must not be learnt from them", words
    return section, "", 0


def _label(asked: ConfigRequest, index: RecordIndex) -> str:
    if asked.label is not None:
        return asked.label
    if isinstance(index, FolderIndex):
        if not index.labelled:
            raise RecipeError(f"--data {asked.data} has no class folders; pack its pictures with a table of labels")
        return FOLDERS
    names = shared_names(index) if isinstance(index, ShardIndex) else None
    if names is None or f".{FOLDERS}" in names[0]:
        return FOLDERS
    listed = f"; their .json has {', '.join(map(repr, sorted(names[1])))[:300]}" if names[1] else ""
    raise RecipeError(
        f"--data {asked.data}: no record, or next to none, has a .cls{listed}; name the field of the label with "
        "--label, or pack the pictures with --label COLUMN"
    )


def _require_captions(asked: ConfigRequest, index: RecordIndex) -> None:
    if isinstance(index, FolderIndex):
        raise RecipeError(f"--data {asked.data} has single images, which have no captions; pack them with a table")
    names = shared_names(index) if isinstance(index, ShardIndex) else None
    if names is None or f".{CAPTION}" in names[0] or CAPTIONS in names[1]:
        return
    raise RecipeError(
        f"--data {asked.data}: no record, or next to none, has a .txt or a list `captions` in its .json; pack the "
        "pictures with --caption COLUMN, or choose another goal"
    )


def _classes(asked: ConfigRequest, index: RecordIndex) -> tuple[dict[str, Any], int]:
    """The key that names the list of classes, where there is one, and the number of classes."""
    if asked.classes is not None and asked.classes.isdecimal():
        return {}, int(asked.classes)
    # Named as the data are, if it lies there, so that both paths are relative or both are not.
    places = [Path(asked.classes)] if asked.classes else [Path(asked.data) / CLASSES, index.folder.parent / CLASSES]
    path = next((place for place in places if asked.classes or place.is_file()), None)
    if path is None:
        raise RecipeError(
            f"--classes is missing, and there is no {CLASSES} beside {asked.data}: name a public list of the class "
            "names, or the number of classes if the labels are numbers"
        )
    classes = read_list(path, "--classes")
    if not asked.classes_public:
        require_public_names(classes, path, asked.data, "--classes", "--classes-public")
    word = {"classes_public": True} if asked.classes_public else {}
    return {"classes": _path(str(path), asked.out), **word}, len(classes.names)


def _weights(path: Path, pixels: NamedPixels | PixelSettings | None) -> Evaluated:
    beside = path.is_file() and path.name in WEIGHT_FILES and (path.parent / "config.json").is_file()
    try:
        subject = Subject.at(path.parent if beside else path)
        from murmuration.evaluation.models.weights import Sizes, open_model

        return open_model(subject, Sizes(), pixels, headless=True)
    except EvaluationError as error:
        raise RecipeError(f"--start: {error}") from None


def _to_start_from(path: Path) -> Path:
    """Training takes a folder if it is a run or holds model.safetensors; of another package's, its file of weights."""
    if not path.is_dir() or (path / EXPORTED).is_file() or RunDir(path).checkpoints.is_dir():
        return path
    return next((path / name for name in WEIGHT_FILES if (path / name).is_file()), path)


def _model(asked: ConfigRequest, rule: Rule, start: Evaluated | None, outputs: int) -> dict[str, Any]:
    if start is not None and asked.size is not None:
        raise RecipeError("--size is that of the weights that --start names; leave it out")
    if start is not None and start.shape.named is not None:
        section = _of_library(asked, rule, start, start.shape.named)
    elif start is not None:
        section = _of_shape(rule.family, start.shape, asked.image_size)
    else:
        image_size = asked.image_size or ModelSettings.model_fields["image_size"].default
        section = {"family": rule.family, **_of_size(rule.family, asked.size or "small", image_size)}
    if asked.goal == "classify":
        section |= {"classes": outputs, **({"classify_loss": "sigmoid"} if asked.multi_label else {})}
    elif outputs and not (start is not None and start.shape.words_of_library):
        section["vocabulary"] = max(outputs, start.shape.vocabulary if start and start.objective == "caption" else 0)
    return section


def _of_library(asked: ConfigRequest, rule: Rule, start: Evaluated, named: Named) -> dict[str, Any]:
    """An encoder by name: the library knows its sizes, and its own files how pixels are normalised."""
    if rule.family == "mae":
        raise RecipeError(f"--start: {named} is trained by classify or caption; choose one of them")
    if named.library not in LIBRARIES:
        trained = " and ".join(TITLES[library] for library in LIBRARIES)
        raise RecipeError(f"--start: {named} can be evaluated, but only encoders of {trained} are trained; name one")
    from murmuration.model.body import facts_of
    from murmuration.train.recipe.pixels import NAMED

    assert asked.start is not None
    folder = asked.start if asked.start.is_dir() else asked.start.parent
    section: dict[str, Any] = {"family": named.library, "name": named.name}
    section |= {"name": str(folder.resolve())} if named.library == "hf" else {}
    own = {key: value for key, value in named.arguments.items() if key not in DECIDED}
    section |= {"model_args": own} if own and named.library == "timm" else {}
    pixels = next((name for name, known in NAMED.items() if known == start.pixels), None)
    section |= {"pixels": pixels or {"mean": list(start.pixels.mean), "std": list(start.pixels.std)}}
    section |= {"image_size": start.shape.image_size}
    if asked.image_size is not None:
        written = ModelSettings.model_validate(section).resolved().named
        assert written is not None
        section["image_size"] = _whole(asked.image_size, facts_of(written, start.shape.image_size).patch)
    return section


def _whole(size: int, patch: int) -> int:
    """In whole patches: pixels at the edge would be in none."""
    return max(patch, size // patch * patch)


def _of_size(family: Family, size: str, image_size: int) -> dict[str, Any]:
    """Patches are as published, or smaller where a picture would have fewer than 8 x 8 of them."""
    preset = TABLES["mae"][size]
    patch_size = max(1, min(preset.patch_size, image_size // 8))
    pixels = {"image_size": image_size, "patch_size": patch_size}
    if size in TABLES[family]:
        return {"size": size, **pixels}
    return {"size": "custom", **pixels, **_stack("", preset.encoder)}


def _stack(prefix: str, stack: Stack) -> dict[str, int]:
    return {f"{prefix}width": stack.width, f"{prefix}depth": stack.depth, f"{prefix}heads": stack.heads}


def _of_shape(family: Family, shape: Shape, image_size: int | None) -> dict[str, Any]:
    """The model section that gives an encoder of this shape, and its decoder where the family is the same."""
    section: dict[str, Any] = {"family": family, "size": "custom", "image_size": image_size or shape.image_size}
    if shape.resnet is not None:
        kind = {"size": "wrn16x4"} if shape.resnet.small_images else {}
        return section | kind | {"width": shape.resnet.width, "stages": list(shape.resnet.stages)}
    section["image_size"] = _whole(section["image_size"], shape.patch_size)
    section |= {"patch_size": shape.patch_size, **_stack("", shape.encoder)}
    if family == shape.family == "captioner":
        section |= _stack("decoder_", shape.text) | {"text_length": shape.text_length}
    if family == shape.family == "mae":
        section |= _stack("mae_decoder_", shape.pixels)
    plain = ModelSettings.model_validate(section).resolved()
    # Only a classifier trains positions; elsewhere those of the weights are a table that stays as it is.
    kept = ["qkv_bias", *(["positions", "pooling"] if family == "classifier" else [])]
    kept += ["decoder_bias", "decoder_activation"] if family == shape.family == "captioner" else []
    return section | {name: getattr(shape, name) for name in kept if getattr(shape, name) != getattr(plain, name)}
