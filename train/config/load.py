"""Turns a file and `--set` overrides into a checked Config, or reports one plain sentence per fault."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from murmuration.accounting.errors import RunError
from murmuration.accounting.escaping import printable
from murmuration.accounting.strict_json import MOST_DEPTH, JsonError, NotJson, parse, require_shallow
from murmuration.data.store.place import is_url
from murmuration.data.text.built_in import is_built_in
from murmuration.train.config.comments import parse_with_comments
from murmuration.train.config.data import DATA_SECTIONS
from murmuration.train.config.habits import HABITS
from murmuration.train.config.phase import ONE_STEP, PLAIN_DESCENT, STATISTICS
from murmuration.train.config.privacy import ALL
from murmuration.train.config.refused import find_refusals, short, without_harmless
from murmuration.train.config.root import AUTO, GIVEN, Config

PATH_KEYS = {"path", "tokenizer", "folder", "dir", "classes", "exclude_classes", "class_names", "real"}
NUMBER = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?")
"""Numbers that JSON does not accept, such as `.48` and `1.`"""
UNUSABLE = re.compile("[\0\ud800-\udfff]")


HEAD = "head"
"""An objective that stands for classify with trainable statistics."""


class ConfigError(RunError, ValueError):
    """The config cannot be used; the message has one line per fault."""


def load(path: Path, overrides: list[str]) -> Config:
    """Paths in the file are relative to the file's folder, paths in overrides (and run.dir) to the current one."""
    try:
        raw = parse_with_comments(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}; name one of ds_configs/*.json") from None
    except JsonError as error:
        raise ConfigError(printable(f"{path} {error}")) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as a config: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must contain one JSON object")
    _absolute_paths(raw, path.resolve().parent)
    for override in overrides:
        _override(raw, override)
    try:
        require_shallow(raw)
    except JsonError as error:
        raise ConfigError(f"{path} with the --set overrides {error}") from None
    _require_text(raw)
    _heads_in_one_pass(raw.get("phases"))
    _objectives_of_starts(raw.get("phases"))
    refused = find_refusals(raw)
    if refused:
        raise ConfigError("\n".join(printable(sentence) for sentence in refused))
    raw = without_harmless(raw, {field.alias or name for name, field in Config.model_fields.items()})
    try:
        # As JSON and strict: "8" is not a number, 2.0 is not a count, true is not 1.
        return Config.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(printable(_sentence(fault)) for fault in error.errors())) from None


def _require_text(value: Any, where: str = "the config") -> None:
    """Neither a file name nor a page can contain a zero byte or half a character."""
    if isinstance(value, str) and UNUSABLE.search(value):
        raise ConfigError(
            f"{printable(where)} contains {value!r:.60}, with a zero byte or half a character; write plain text"
        )
    if isinstance(value, dict):
        for key, item in value.items():
            _require_text(key, where)
            _require_text(item, key)
    if isinstance(value, list):
        for item in value:
            _require_text(item, where)


def _absolute_paths(value: Any, folder: Path) -> None:
    if isinstance(value, list):
        for item in value:
            _absolute_paths(item, folder)
    elif isinstance(value, dict):
        for key, item in value.items():
            if (key in PATH_KEYS - {"dir"} and _is_path(key, item)) or _names_folder(value, key, item):
                value[key] = str(folder / item)
            else:
                _absolute_paths(item, folder)


def _objectives_of_starts(phases: Any) -> None:
    """A phase that only loads weights needs no objective of its own: it takes that of the next phase that names one."""
    found = [phase for phase in phases if isinstance(phase, dict)] if isinstance(phases, list) else []
    for number, phase in enumerate(found):
        data = phase.get("data")
        if isinstance(data, dict) and data.get("source") == "checkpoint" and "objective" not in phase:
            after = [other["objective"] for other in found[number + 1 :] if "objective" in other]
            phase |= {"objective": after[0]} if after else {}


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
        if not any(name in phase for name in ("steps", "epochs", "until_budget")):
            phase["steps"] = 1
        phase.setdefault("features", {})
        if isinstance(phase.get("privacy"), dict):
            phase["privacy"].setdefault("expected_batch", ALL)


def _names_folder(section: dict[str, Any], key: str, value: Any) -> bool:
    """A model of Hugging Face is named by its folder."""
    return key == "name" and section.get("family") == "hf" and isinstance(value, str)


def _is_path(key: str, value: Any) -> bool:
    return isinstance(value, str) and not is_url(value) and not (key == "tokenizer" and is_built_in(value))


def _override(raw: dict[str, Any], text: str) -> None:
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
    if (parts[-1] in PATH_KEYS and _is_path(parts[-1], new)) or _names_folder(holder, parts[-1], new):
        new = str(Path.cwd() / new)
    if parts[-1] == "privacy" and new is None and isinstance(holder.get("privacy"), dict):
        _keep_batch(holder, holder["privacy"].get("expected_batch"))
    holder[parts[-1]] = new


def _keep_batch(phase: dict[str, Any], expected: Any) -> None:
    """The non-private variant of a recipe keeps its batch size."""
    if phase.get("trainable") != STATISTICS and phase.get("objective") != HEAD:
        phase.setdefault("batch", round(expected) if isinstance(expected, int | float) else expected)


def _sentence(fault: Any) -> str:
    location = [part for part in fault["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    # pydantic puts the name of a choice, such as a source, into the location as if it were a key.
    where = ".".join(str(part) for part in location if part not in DATA_SECTIONS and part not in (AUTO, GIVEN))
    if fault["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
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


def _known_keys(location: list[str | int]) -> list[str]:
    model: Any = Config
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
