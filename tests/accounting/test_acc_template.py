"""What a template prints is text, unless the template itself says that it is markup; and wheels hold the templates."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from murmuration.accounting.escaping import html_page, markdown_page

ROOT = Path(__file__).resolve().parents[2]
NAME = "<b>it's</b> | *a* {{ 1 }}"


def test_names_are_escaped_without_being_asked(tmp_path: Path) -> None:
    page = tmp_path / "page.jinja"
    page.write_text("{{ name }}, {{ name | safe }}")
    assert html_page(page, name=NAME) == f"&lt;b&gt;it&#x27;s&lt;/b&gt; | *a* {{{{ 1 }}}}, {NAME}"
    assert markdown_page(page, name=NAME) == f"&lt;b&gt;it's&lt;/b&gt; &#124; \\*a\\* {{{{ 1 }}}}, {NAME}"


def test_a_forgotten_value_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.jinja"
    page.write_text("{{ name }}")
    with pytest.raises(UndefinedError, match="'name' is undefined"):
        html_page(page)


def test_wheels_hold_every_template() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    folders = ("accounting", "data", "evaluation", "launch", "model", "train")
    templates = [path for folder in folders for path in (ROOT / folder).rglob("*.jinja")]
    assert len(templates) >= 3
    for path in templates:
        assert any(fnmatch(path.name, pattern) for pattern in patterns), path
        assert (path.parent / "__init__.py").exists(), f"{path}: setuptools takes data of packages alone"
