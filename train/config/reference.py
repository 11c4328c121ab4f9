"""Writes docs/config-reference.md from the schema: key, type, default and meaning of every key of the config.

    python -m murmuration.train.config.reference > docs/config-reference.md

With `--schema` it writes ds_configs/schema.json, by which editors complete keys.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from murmuration.train.config.root import json_schema

HEADER = """\
# Config reference

Every key of a config with its type, default and meaning; [config.md](config.md) explains the file. Where no default is
given, it is `null`. `> 0` goes without saying. Don't edit this page: the schema generates it.

    python -m murmuration.train.config.reference > docs/config-reference.md
    python -m murmuration.train.config.reference --schema > ds_configs/schema.json
"""
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "boolean"}
LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
LARGE = 10_000  # an upper limit from here on only keeps nonsense out, as "> 0" does: both stand in the schema alone
Node = dict[str, Any]


class Reference:
    """One list for each section of the schema, in the order in which a reader of a config meets them."""

    def __init__(self, schema: Node) -> None:
        self._schema = schema
        self._titles: dict[str, str] = {}
        self._told = set[tuple[str, str]]()
        self._name_sections("", schema)

    def markdown(self) -> str:
        parts = [HEADER, *self._section("Top level", self._schema)]
        for name, title in self._titles.items():
            parts += self._section(title, self._schema["$defs"][name])
        return "\n".join(parts)

    def _name_sections(self, path: str, section: Node) -> None:
        """Names each section by the path of the first key that contains it."""
        for key, field in section["properties"].items():
            for name, listed in self._sections_in(field):
                if name in self._titles:
                    continue
                place = f"{path}{key}" + ("[]" if listed else "")
                source = self._schema["$defs"][name]["properties"].get("source", {}).get("const")
                self._titles[name] = f'{place}, source "{source}"' if source else place
                self._name_sections(f"{place}.", self._schema["$defs"][name])

    def _sections_in(self, field: Node, listed: bool = False) -> Iterator[tuple[str, bool]]:
        if "$ref" in field:
            yield field["$ref"].rpartition("/")[2], listed
        for choice in field.get("anyOf", field.get("oneOf", [])):
            yield from self._sections_in(choice, listed)
        if field.get("type") == "array" and isinstance(field.get("items"), dict):
            yield from self._sections_in(field["items"], True)

    def _section(self, title: str, section: Node) -> list[str]:
        required = {*section.get("required", ()), *section.get("else", {}).get("required", ())}
        rows, told = list[str](), list[str]()
        for key, field in section["properties"].items():
            # Kinds of data share keys, which are explained once.
            if (known := (key, field["description"])) in self._told and field["description"].count(" ") > 2:
                told.append(f"`{key}`")
                continue
            self._told.add(known)
            kind = self._type(field)
            rows.append(f"- `{key}`: {kind}{_default(field, key in required, kind)}. {field['description']}")
        rows += [f"- {', '.join(told)}: as above."] if told else []
        about = [" ".join(section["description"].split()), ""] if "description" in section else []
        return [f"## {title}", "", *about, *rows, ""]

    def _type(self, field: Node) -> str:
        if "$ref" in field:
            title = self._titles[field["$ref"].rpartition("/")[2]]
            # The anchor that GitHub derives from a heading.
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            return f"[{title.rpartition(', ')[2]}](#{anchor})"
        if "const" in field or "enum" in field:
            return ", ".join(f"`{json.dumps(value)}`" for value in field.get("enum", [field.get("const")]))
        if choices := field.get("anyOf", field.get("oneOf")):
            types = " or ".join(self._type(choice) for choice in choices if choice.get("type") != "null")
            return types + (" or `null`" if {"type": "null"} in choices and field.get("default", 0) is not None else "")
        if field["type"] == "object":
            inner = field.get("additionalProperties")
            return f"object of {self._type(inner)}" if isinstance(inner, dict) else "object"
        if field["type"] == "array":
            return self._list(field)
        # The type of a number or text, with its limits.
        if field.get("minimum") is not None and field.get("minimum") == field.get("maximum"):
            return f"`{field['minimum']}`"
        given = [(sign, field[limit]) for limit, sign in LIMITS.items() if limit in field]
        nonsense = [(">", 0), *(("≤", value) for _, value in given if value >= LARGE)]
        limits = ", ".join(f"{sign} {_number(value)}" for sign, value in given if (sign, value) not in nonsense)
        words = [TYPES[field["type"]], *([f"`{limits}`"] if limits else [])]
        words += [f"like `{field['pattern']}`"] if "pattern" in field else []
        return " ".join(words) + (", not empty" if field.get("minLength") else "")

    def _list(self, field: Node) -> str:
        """A list of fixed length has a type for each position."""
        if "prefixItems" in field:
            return f"[{', '.join(self._type(item) for item in field['prefixItems'])}]"
        least, most = field.get("minItems", 0), field.get("maxItems")
        count = f" ({least} to {most})" if most else " (not empty)" if least else ""
        return f"list{count} of {self._type(field['items'])}"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value}"


def _default(field: Node, required: bool, kind: str) -> str:
    if required:
        return ", required"
    if field["default"] is None:
        return ""
    if isinstance(field["default"], dict):
        return " (defaults)"  # made of those of its keys, which have a table of their own
    said = f"`{json.dumps(field['default'])}`"
    return "" if said == kind else f" ({said})"


def main() -> None:
    if sys.argv[1:] == ["--schema"]:
        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    else:
        print(Reference(json_schema()).markdown(), end="")


if __name__ == "__main__":
    main()
