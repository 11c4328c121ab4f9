"""Comments and trailing commas in a config are left out, and nothing else: the rest is read as strictly as ever."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import hjson
import pytest

from murmuration.accounting.strict_json import JsonError, NotJson
from murmuration.train.config.load import ConfigError, load, parse_with_comments
from murmuration.train.config.root import Config
from tests.support.config_base import BASE

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
