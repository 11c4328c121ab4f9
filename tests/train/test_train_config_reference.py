"""docs/config-reference.md says what the schema says: every key, with a meaning, under a heading that links find."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from murmuration.train.config.reference import Reference
from murmuration.train.config.root import Config, json_schema

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "config-reference.md"


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every section that a value of this type can hold, by the types alone and not by the schema."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    for inner in get_args(annotation):
        yield from sections(inner)


def test_the_page_is_what_the_schema_gives() -> None:
    remedy = "run: python -m murmuration.train.config.reference > docs/config-reference.md"
    assert PAGE.read_text() == Reference(json_schema()).markdown(), remedy


def test_every_key_of_every_section_has_one_row_and_a_meaning() -> None:
    rows = re.findall(r"^- ((?:`[^`]+`(?:, )?)+): (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    keys = [field.alias or name for section in set(sections(Config)) for name, field in section.model_fields.items()]
    assert sorted(key for first, _ in rows for key in re.findall("`([^`]+)`", first)) == sorted(keys)
    meanings = ["as above." if told == "as above." else told.partition(". ")[2] for _, told in rows]
    assert all(re.fullmatch(r".*\w.*\.", meaning) for meaning in meanings), "a meaning ends like a sentence"


def test_the_schema_says_of_every_key_what_it_is_and_what_holds_without_it() -> None:
    """Editors show both, and find the keys of a data section by the source that it names."""
    schema = json_schema()
    for name, section in {"": schema, **schema["$defs"]}.items():
        required = {*section.get("required", ()), *section.get("else", {}).get("required", ())}
        for key, field in section["properties"].items():
            assert field["description"], f"{name}.{key}"
            assert "default" in field or key in required, f"{name}.{key}"
    for name in ("Phase", "Mixing"):
        found = schema["$defs"][name]["properties"]["data"]
        choices = {choice["$ref"] for choice in found.get("oneOf", found.get("anyOf"))}
        mapping = found["discriminator"]["mapping"]
        assert set(mapping.values()) == choices
        for source, reference in mapping.items():
            assert schema["$defs"][reference.rpartition("/")[2]]["properties"]["source"]["const"] == source


def test_links_and_words_of_the_page_show_as_written() -> None:
    text = PAGE.read_text()
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert len(anchors) == len(headings), "two headings have the same anchor"
    assert set(re.findall(r"\(#([^)]+)\)", text)) <= anchors
    outside_code = re.sub(r"`[^`\n]+`|^    .*$", "", text, flags=re.MULTILINE)
    assert not re.search(r"[*<]", outside_code), "markup would swallow it; put it into backticks"
