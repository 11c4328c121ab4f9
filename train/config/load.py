"""Turns a file and `--set` overrides into a checked Config, or reports one plain sentence per fault."""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from murmuration.accounting.errors import RunError
from murmuration.accounting.escaping import printable
from murmuration.accounting.strict_json import MOST_DEPTH, JsonError, NotJson, parse, require_shallow
from murmuration.data.index.open import unit_known
from murmuration.data.store.place import ShardError, is_url, require_no_access
from murmuration.data.text.built_in import is_built_in
from murmuration.train.config.data import DATA_SECTIONS
from murmuration.train.config.phase import ONE_STEP, PLAIN_DESCENT, STATISTICS
from murmuration.train.config.privacy import ALL
from murmuration.train.config.refused import REFUSED, find_refusals, short
from murmuration.train.config.root import AUTO, GIVEN, WITNESS_URLS, Config

PATH_KEYS = {"path", "tokenizer", "folder", "dir", "classes", "exclude_classes", "class_names", "real"}
NUMBER = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?")
"""Numbers that JSON does not accept, such as `.48` and `1.`"""
UNUSABLE = re.compile("[\0\ud800-\udfff]")
LONGEST_NAME = 255
MOST_SENTENCES = 30
"""That one refusal has: a reader mends those first."""
HEAD = "head"
"""An objective that stands for classify with trainable statistics."""


class ConfigError(RunError, ValueError):
    """The config cannot be used; the message has one line per fault."""


def load(path: Path, overrides: list[str]) -> Config:
    """Paths in the file are relative to the file's folder, paths in overrides (and run.dir) to the current one."""
    try:
        raw = parse_with_comments(path.read_bytes())
    except FileNotFoundError:
        shipped = Path(__file__).resolve().parents[2] / path
        fix = f"copy {shipped}" if shipped.is_file() else "write one by launch/init.py"
        raise ConfigError(printable(f"there is no config file {path}; {fix}")) from None
    except JsonError as error:
        yaml = "; configs are JSON, not YAML" if path.suffix in (".yaml", ".yml") else ""
        raise ConfigError(printable(f"{path} {error}{yaml}")) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as a config: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must contain one JSON object")
    absolute_paths(raw, path.resolve().parent)
    if not any(override.startswith("run.witness=") for override in overrides):
        _refuse_foreign_command(raw, path)
    for override in overrides:
        put_override(raw, override)
    try:
        require_shallow(raw)
    except JsonError as error:
        raise ConfigError(f"{path} with the --set overrides {error}") from None
    _require_text(raw)
    _heads_in_one_pass(raw.get("phases"))
    # A phase that only loads weights needs no objective of its own: it takes that of the next phase that names one.
    phases = raw.get("phases")
    found = [phase for phase in phases if isinstance(phase, dict)] if isinstance(phases, list) else []
    for number, phase in enumerate(found):
        data = phase.get("data")
        if isinstance(data, dict) and data.get("source") == "checkpoint" and "objective" not in phase:
            after = [other["objective"] for other in found[number + 1 :] if "objective" in other]
            phase |= {"objective": after[0]} if after else {}
    _units_of_indexes(raw.get("phases"))
    refused = find_refusals(raw)
    if refused:
        raise ConfigError(_one_a_line(refused))
    # Drops sections that DeepSpeed knows but that are switched off (`"fp16": {"enabled": false}`).
    ours = {field.alias or name for name, field in Config.model_fields.items()}
    raw = {key: value for key, value in raw.items() if key in ours or key not in REFUSED}
    try:
        # As JSON and strict: "8" is not a number, 2.0 is not a count, true is not 1.
        return Config.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        raise ConfigError(_one_a_line([sentence_of(fault) for fault in error.errors()])) from None


def _one_a_line(sentences: list[str]) -> str:
    more = [f"and {len(sentences) - MOST_SENTENCES} more"] * (len(sentences) > MOST_SENTENCES)
    return "\n".join([printable(sentence) for sentence in sentences[:MOST_SENTENCES]] + more)


def _refuse_foreign_command(raw: dict[str, Any], path: Path) -> None:
    """A witness that is a command runs at each checkpoint, as the user: a stranger's config would be his program. An
    override is the user's own word."""
    run = raw.get("run")
    command = run.get("witness") if isinstance(run, dict) else None
    about = path.stat()
    if (about.st_uid in (0, os.geteuid()) and not about.st_mode & stat.S_IWOTH) or not isinstance(command, str):
        return
    if not command.startswith(WITNESS_URLS):
        raise ConfigError(
            printable(
                f"{path} can be changed by somebody else, and its run.witness would run a command at each checkpoint: "
                f"{command}; copy the config to a file of your own, or repeat the command with --set run.witness=..."
            )
        )


def _require_text(value: Any, where: str = "the config") -> None:
    """Neither a file name nor a page can contain a zero byte or half a character, and no URL may contain a password."""
    if isinstance(value, str) and UNUSABLE.search(value):
        raise ConfigError(
            f"{printable(where)} contains {value!r:.60}, with a zero byte or half a character; write plain text"
        )
    if where in PATH_KEYS and isinstance(value, str) and is_url(value):
        try:
            require_no_access(value)
        except ShardError as error:
            raise ConfigError(printable(f"{where}: {error}")) from None
    elif where in PATH_KEYS and isinstance(value, str) and "{" not in value:  # braces stand for many names
        longest = max((len(os.fsencode(name)) for name in value.split("/")), default=0)
        if longest > LONGEST_NAME:
            raise ConfigError(
                f"{where}: {printable(value[:60])} … has a name of {longest} bytes, and no file can have over "
                f"{LONGEST_NAME}; shorten it"
            )
    if isinstance(value, dict):
        for key, item in value.items():
            _require_text(key, where)
            _require_text(item, key)
    if isinstance(value, list):
        for item in value:
            _require_text(item, where)


def absolute_paths(value: Any, folder: Path) -> None:
    """Makes the paths within `value`, which are relative to `folder`, absolute."""
    if isinstance(value, list):
        for item in value:
            absolute_paths(item, folder)
    elif isinstance(value, dict):
        for key, item in value.items():
            if (key in PATH_KEYS - {"dir"} and is_local(key, item)) or _names_folder(value, key, item):
                value[key] = str(folder / item)
            else:
                absolute_paths(item, folder)


def _units_of_indexes(phases: Any) -> None:
    """Where nobody says what is protected, it is what the index knows: to train on single records, too, takes a word.
    So also where a set is cut, since both parts must be cut alike."""
    for number, phase in enumerate(phases if isinstance(phases, list) else []):
        mixing = phase.get("mixing") if isinstance(phase, dict) else None
        for section in (phase, mixing):
            data = section.get("data") if isinstance(section, dict) else None
            if not isinstance(data, dict) or data.get("source", "shards") != "shards" or data.get("unit") is not None:
                continue
            if data.get("public") is True and data.get("public_fraction") is None:
                continue
            path = data.get("path")
            try:
                by = unit_known(path) if isinstance(path, str) else None
            except ShardError as error:
                raise ConfigError(printable(f"phases.{number}: {error}; or say unit: 'record'")) from None
            data |= {} if by is None else {"unit": by}


def _heads_in_one_pass(phases: Any) -> None:
    """A head that is solved from sums over all records needs no settings of a step, which it takes one of."""
    for phase in phases if isinstance(phases, list) else []:
        if not isinstance(phase, dict):
            continue
        if phase.get("objective") == HEAD:
            phase["objective"] = "classify"
            phase.setdefault("trainable", STATISTICS)
        if phase.get("trainable") != STATISTICS:
            continue
        settings = {"schedule": ONE_STEP, "optimizer": PLAIN_DESCENT}
        for name, value in settings.items():
            phase.setdefault(name, value.model_dump(mode="json", exclude_unset=True))
        if "steps" not in phase and "epochs" not in phase:
            phase["steps"] = 1
        phase.setdefault("features", {})
        if isinstance(phase.get("privacy"), dict):
            phase["privacy"].setdefault("expected_batch", ALL)


def _names_folder(section: dict[str, Any], key: str, value: Any) -> bool:
    """A model of Hugging Face is named by its folder."""
    return key == "name" and section.get("family") == "hf" and isinstance(value, str)


def is_local(key: str, value: Any) -> bool:
    """Whether a key's value is the path of a file here."""
    return isinstance(value, str) and not is_url(value) and not (key == "tokenizer" and is_built_in(value))


def put_override(raw: dict[str, Any], text: str) -> None:
    """`a.b.0.c=value`; the value is JSON, a number like .48, or a plain string."""
    dotted, separator, literal = text.partition("=")
    if not separator or not dotted:
        raise ConfigError(f"--set takes key=value, for example phases.1.steps=10, but was given {text!r}")
    parts = dotted.split(".")
    if len(parts) > MOST_DEPTH:
        raise ConfigError(f"--set {printable(dotted[:40])}... goes {len(parts)} levels deep; no section is there")
    try:
        new: Any = parse(literal)
    except NotJson:
        new = float(literal) if NUMBER.fullmatch(literal) else literal
    except JsonError as error:
        raise ConfigError(printable(f"the value of --set {dotted} {error}")) from None
    holder: Any = raw
    for part in parts[:-1]:
        try:
            holder = holder[int(part)] if isinstance(holder, list) else holder.setdefault(part, {})
        except (IndexError, ValueError, AttributeError):
            raise ConfigError(f"--set {printable(dotted)}: there is no {part!r} to set anything in") from None
    if not isinstance(holder, dict):
        raise ConfigError(f"--set {printable(dotted)}: only keys of an object can be set")
    if (parts[-1] in PATH_KEYS and is_local(parts[-1], new)) or _names_folder(holder, parts[-1], new):
        new = str(Path.cwd() / new)
    made_public = parts[-1] == "privacy" and new is None and isinstance(holder.get("privacy"), dict)
    if made_public and holder.get("trainable") != STATISTICS and holder.get("objective") != HEAD:
        # The non-private variant of a recipe keeps its batch size.
        expected = holder["privacy"].get("expected_batch")
        holder.setdefault("batch", round(expected) if isinstance(expected, int | float) else expected)
    holder[parts[-1]] = new


# Comments and trailing commas in a config: users of DeepSpeed, which reads its configs by hjson, are used to both.
#
# hjson itself is not used here. It takes text without quotes for a string up to the end of its line, so that
# `"path": shards, "public": true` would be one long path, and what was meant to be said of the data would be gone
# without a word. Comments and trailing commas are blanked out instead, and the strict parser reads what is left.

_LINE = r"[^\r\n\u2028\u2029]*"  # all that editors show as the end of a line
_STRING = r'"(?:\\.|[^"\\])*+"?'  # an open one goes on to the end, where the parser will find it
_COMMENTS = re.compile(rf"({_STRING})|//{_LINE}|\#{_LINE}|/\*.*?\*/|(?P<open>/\*)", re.DOTALL)
# A comma that follows no value stays, so that it is refused.
_COMMAS = re.compile(rf"({_STRING}|[\[{{,:]\s*+,)|,(?=\s*+[\]}}])", re.DOTALL)
_VISIBLE = re.compile(r"[^\n]")


def parse_with_comments(content: bytes) -> object:
    """As `strict_json.parse`, but `//`, `#` and `/* */` begin comments, and a comma may follow the last entry."""
    try:
        return parse(content)
    except NotJson:
        text = content.decode()
        plain = _COMMAS.sub(_blank, _COMMENTS.sub(_blank, text))
        if plain == text:
            raise
    return parse(plain)


def _blank(found: re.Match[str]) -> str:
    """Spaces in place of what is left out, so that an error names the right line; strings stay as they are."""
    if found[1] is not None:
        return found[1]
    if "open" in found.re.groupindex and found["open"]:
        line = found.string.count("\n", 0, found.start()) + 1
        raise JsonError(f"begins a comment at line {line} that never ends; close it with */")
    return _VISIBLE.sub(" ", found[0])


# Names of other trainers for keys of this config; the message for one names ours.
_NAMES = {
    "phases[].schedule.peak": "lr learning_rate base_lr blr peak_lr max_lr warmup_max_lr",
    "phases[].schedule.warmup": "warmup_steps num_warmup_steps warmup_num_steps warmup_ratio",
    "phases[].schedule.start": "warmup_min_lr warmup_lr warmup_init_lr",
    "phases[].schedule.floor": "min_lr lr_min final_lr",
    "phases[].schedule.warmup_epochs": "warmup_epochs",
    "phases[].schedule.shape": "lr_scheduler_type lr_scheduler sched",
    "phases[].privacy.expected_batch": "batch_size logical_batch_size effective_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size micro_batch_size micro_batch physical_batch_size",
    "phases[].epochs": "epochs num_epochs num_train_epochs max_epochs",
    "phases[].steps": "steps max_steps num_steps num_training_steps total_num_steps",
    "phases[].optimizer.params.weight_decay": "weight_decay wd",
    "phases[].optimizer.params.betas": "betas adam_betas",
    "phases[].optimizer.params.momentum": "momentum",
    "phases[].optimizer.params.eps": "adam_epsilon",
    "phases[].optimizer.type": "optim opt",
    "phases[].privacy.clip.norm": "max_grad_norm max_per_sample_grad_norm clip_norm clipping_norm l2_norm_clip",
    "phases[].privacy.noise_multiplier": "noise_multiplier sigma noise_scale",
    "phases[].privacy.epsilon": "epsilon target_epsilon",
    "phases[].privacy.delta": "delta target_delta",
    "model.image_size": "image_size img_size input_size resolution",
    "model.classes": "num_classes n_classes num_labels nb_classes",
    "phases[].data.path": "dataset data_path data_dir train_data train_data_dir",
    "phases[].data.reading.workers": "num_workers dataloader_num_workers workers",
    "run.precision": "precision mixed_precision dtype torch_dtype",
    "run.log_every": "logging_steps log_steps log_interval",
    "model.vocabulary": "vocab_size",
    "model.text_length": "max_length max_seq_length context_length",
    "run.dir": "output_dir save_dir log_dir checkpoint_dir",
    "run.checkpoint_every": "save_steps save_every save_freq checkpoint_freq",
    "run.keep_checkpoints": "save_total_limit",
}

HABITS = {name: key for key, names in _NAMES.items() for name in names.split()}
"""Their name, or one of ours at the wrong place -> our key, from the top of the config."""


def sentence_of(fault: Any, root: type[BaseModel] = Config) -> str:
    """What pydantic found wrong in a file whose sections begin with `root`, and what to write instead."""
    location = [part for part in fault["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    # pydantic puts the name of a choice, such as a source, into the location as if it were a key.
    where = ".".join(str(part) for part in location if part not in DATA_SECTIONS and part not in (AUTO, GIVEN))
    if fault["type"] == "extra_forbidden":
        known = _known_keys(location[:-1], root)
        return f"unknown key {where!r}; {_hint(str(location[-1]), known)}"
    if fault["type"] == "missing":
        return f"{where} is missing; give it a value"
    if fault["type"] == "union_tag_invalid":
        return f"{where}.source = {fault['ctx']['tag']!r} is not usable: choose one of {fault['ctx']['expected_tags']}"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where} = {short(fault['input'])} is not usable: {message[:1].lower()}{message[1:]}"


def _hint(name: str, known: list[str]) -> str:
    habit = HABITS.get(name, "")
    if habit and habit.rpartition(".")[2] not in known:
        return f"that is {habit} here"
    close = [habit.rpartition(".")[2]] if habit else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(known))}"


def _known_keys(location: list[str | int], root: type[BaseModel]) -> list[str]:
    model: Any = root
    for part in location:
        if isinstance(part, int):
            continue
        if part in DATA_SECTIONS:
            model = DATA_SECTIONS[part]
            continue
        fields = model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else {}
        model = _section_in(fields[part].annotation) if part in fields else None
    fields = model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else {}
    return [field.alias or name for name, field in fields.items()]


def _section_in(annotation: Any) -> Any:
    """The section inside `Section`, `Section | None` or `list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section_in(inner)
        if found is not None:
            return found
    return None
