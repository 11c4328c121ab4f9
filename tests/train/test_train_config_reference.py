"""docs/config-reference.md says what the schema says: every key, with a meaning, under a heading that links find."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, get_args

import hjson
import pytest
from pydantic import BaseModel

from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson
from murmuration.accounting.strict_json import JsonError, NotJson
from murmuration.accounting.unit import Unit
from murmuration.train.config.load import ConfigError, load, parse_with_comments
from murmuration.train.config.reference import Reference
from murmuration.train.config.root import Config, json_schema
from murmuration.train.planner.micro_batch import _drawn
from murmuration.train.recipe.ready_phase import plan_of_phase, unit_of, with_steps
from tests.support.config_base import BASE, drop, put

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
    rows = re.findall(r"^\| (`.+?`) \|.*\| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    keys = [field.alias or name for section in set(sections(Config)) for name, field in section.model_fields.items()]
    assert sorted(key for first, _ in rows for key in re.findall("`([^`]+)`", first)) == sorted(keys)
    assert all(re.fullmatch(r".*\w.*\.", meaning) for _, meaning in rows), "a meaning ends like a sentence"


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


# Comments and trailing commas in a config are left out, and nothing else: what remains is read as strictly as ever.


TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[\[\]{},:]|[^\s\[\]{},:"]+')
BETWEEN = ("", " ", "\n", " // a, \"b\": {}\n", "# it's /* here\n", "/* ] , // \n */", "/***/", "\t//\n")  # fmt: skip


def test_a_config_with_comments_is_the_config_without(tmp_path: Path, loaded: Callable[..., Config]) -> None:
    plain = loaded()
    lines = json.dumps(BASE, indent=2).split("\n")
    (tmp_path / "config.json").write_text("# why\n" + "  // because\n".join(lines).replace("\n}", ",/* the end */\n}"))
    assert load(tmp_path / "config.json", []) == plain
    contents = {"data": "of the test"}
    assert load(tmp_path / "config.json", []).digest(1, contents) == plain.digest(1, contents)


def test_strings_keep_what_looks_like_a_comment() -> None:
    kept = {"path": "s3://bucket/{0..9}.tar", "# key": "a # b", "c": "/* d */", "e": 'f\\" // "g', "h": ["i,]", ",}"]}
    assert parse_with_comments((json.dumps(kept, indent=1) + "// end").encode()) == kept


@pytest.mark.parametrize("seed", range(40))
def test_comments_may_stand_between_any_two_tokens(seed: int) -> None:
    """hjson, which DeepSpeed reads its configs by, finds the same content."""
    chance = Random(seed)
    text = json.dumps({**BASE, "about": {"source": "https://a#b", "cost": "/* 1, ] */ \\"}})
    found = ""
    for token in TOKEN.findall(text):
        trailing = "," if token in "]}" and found.rstrip()[-1:] not in ("[", "{") and chance.random() < 0.3 else ""
        found += trailing + chance.choice(BETWEEN) + token + chance.choice(BETWEEN)
    assert json.loads(json.dumps(hjson.loads(found))) == json.loads(text)
    assert parse_with_comments(found.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": 1, // one\n"a": 2}', "the key 'a' appears twice"), ('{"a": NaN} // b', "NaN is not a number"),
        ('# a\n{"a": ' + "1" * 5000 + "}", "does not fit in 64 bits"), ("//\n" + "[" * 50_000, "levels deep"),
        ('{"a": 1e999,}', "is not a number that can be used"), ('{"a": 1 /* b', "a comment at line 1 that never ends"),
        ('{"a": 1}\n/* b */ /* c', "a comment at line 2 that never ends"),
    ],
)  # fmt: skip
def test_what_was_refused_is_refused_among_comments(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load(path, [])


@pytest.mark.parametrize(
    "text",
    [
        "[,]", "{,}", "[1,,]", '{"a":,}', '{"a": 1 /**/ "b": 2}', "[1/**/2]", '{"a": b}', "{a: 1}", "{'a': 1}",
        '{"a": "b // c\n}', "/", "{} ,", "// nothing", '{"path": shards, "public": true}', '{"a": 1 \\}',
    ],
)  # fmt: skip
def test_nothing_else_is_forgiven(text: str) -> None:
    with pytest.raises(NotJson):
        parse_with_comments(text.encode())


def test_an_error_names_its_line() -> None:
    with pytest.raises(NotJson, match="at line 4"):
        parse_with_comments(b'{ // one\n/* two\nthree */ "a": 1,\n"b" 2,}')


@pytest.mark.parametrize("piece", ['\\"', '"\\', "/*", ",", ", ", "//", "#", ",]", "[ ,", "\\"])
def test_a_long_file_of_nothing_but_pieces_is_answered(piece: str) -> None:
    """In time that grows with its length, not with its square: each of these would else take minutes."""
    with pytest.raises(JsonError):
        parse_with_comments(b'"' + piece.encode() * 300_000)
    with pytest.raises(JsonError):
        parse_with_comments(b"x" + piece.encode() * 300_000)


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
    plan = plan_of_phase(settled, settled.privacy, 500, "phases.0")
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
    plan = plan_of_phase(phase, phase.privacy, 100, "phases.1", table="digest")
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
