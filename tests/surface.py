"""What users' configs, scripts and programs rest on, one line for each thing.

At a release: python -m tests.surface > tests/golden/surface.txt
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import murmuration
from murmuration.accounting import errors
from murmuration.train.config.root import json_schema
from tests.golden.freeze import HERE, Golden

ROOT = Path(__file__).resolve().parents[1]
RELEASED = HERE / "surface.txt"


def config_keys() -> Iterator[str]:
    schema = json_schema()

    def walk(path: str, section: dict[str, Any], within: tuple[str, ...]) -> Iterator[str]:
        for key, field in section.get("properties", {}).items():
            required = key in section.get("required", ())
            default = field.get("default")
            said = "required" if required else "object" if isinstance(default, dict) else json.dumps(default)
            yield f"config {path}{key} = {said}"
            yield from (f"config {path}{key} takes {json.dumps(value)}" for value in words(field))
            for name, listed in sections(field):
                if name not in within:
                    yield from walk(f"{path}{key}{'[]' * listed}.", schema["$defs"][name], (*within, name))

    def sections(field: dict[str, Any], listed: bool = False) -> Iterator[tuple[str, bool]]:
        if "$ref" in field:
            yield field["$ref"].rpartition("/")[2], listed
        for choice in field.get("anyOf", field.get("oneOf", [])):
            yield from sections(choice, listed)
        if isinstance(field.get("items"), dict):
            yield from sections(field["items"], True)

    def words(field: dict[str, Any]) -> Iterator[Any]:
        yield from field.get("enum", [field["const"]] if "const" in field else [])
        for inner in (*field.get("anyOf", ()), *field.get("oneOf", ()), field.get("items")):
            if isinstance(inner, dict):
                yield from words(inner)

    return walk("", schema, ())


def options() -> Iterator[str]:
    """From the helps, which test_golden.py holds to what the commands print."""
    for command, text in Golden.read(HERE).texts["help"].items():
        yield f"command {command}"
        for option in sorted(set(re.findall(r"^ +(?:-\w[^,\n]*, )?(--[a-z][\w-]*)", text, re.MULTILINE))):
            yield f"command {command} {option}"


def library() -> Iterator[str]:
    """Of methods and properties those that the library's page names."""
    page = (ROOT / "docs" / "library.md").read_text()
    for name in murmuration.__all__:
        found: Any = getattr(murmuration, name)
        fields: dict[str, Any] = {}
        callables: dict[str, Any] = {} if inspect.isclass(found) and issubclass(found, BaseModel) else {name: found}
        if not callables:
            fields = {
                key: ... if about.is_required() else about.get_default() for key, about in found.model_fields.items()
            }
        elif inspect.isclass(found):
            named = (key for key in vars(found) if not key.startswith("_") and re.search(rf"\b{key}\b\(", page))
            callables |= {f"{name}.{key}": one for key in named if callable(one := getattr(found, key))}
        yield f"library {name}"
        yield from (f"library {name}({key} = {shown(value)})" for key, value in fields.items())
        for called, one in callables.items():
            yield f"library {called}()"
            for parameter in inspect.signature(one).parameters.values():
                default = ... if parameter.default is parameter.empty else parameter.default
                if parameter.name != "self":
                    yield f"library {called}({parameter.name} = {shown(default)})"


def shown(default: object) -> str:
    """A section by its name alone: its fields have lines of their own."""
    if default is ... or inspect.isclass(default):
        return "required" if default is ... else default.__name__
    return type(default).__name__ if isinstance(default, BaseModel) else repr(default)


def exit_codes() -> Iterator[str]:
    return (f"exit {value} {name}" for name, value in vars(errors).items() if name.isupper() and isinstance(value, int))


def forms() -> Iterator[str]:
    for file in sorted(ROOT.glob("*/**/*.py")):
        if file.relative_to(ROOT).parts[0] in ("accounting", "data", "evaluation", "model", "train"):
            yield from (f"form {name}" for name in re.findall(r'(?i:format)"?(?: =|:) "(\S+/\d+)"', file.read_text()))


def surface() -> list[str]:
    return sorted({*config_keys(), *options(), *library(), *exit_codes(), *forms()})


def experimental() -> list[str]:
    """Patterns of lines, from the page that tells users."""
    _, _, rest = (ROOT / "docs" / "stability.md").read_text().partition("## Experimental")
    return re.findall(r"^- `([^`]+)`", rest.partition("\n## ")[0], re.MULTILINE)


def broken(released: list[str], now: list[str]) -> list[str]:
    """What a release promised and the code no longer has. Additions break nothing."""
    return [
        line for line in released
        if line not in now and not any(fnmatchcase(line, pattern.replace("[]", "[[]]")) for pattern in experimental())
    ]  # fmt: skip


if __name__ == "__main__":
    print("\n".join(surface()))
