"""Pages from Jinja templates, which lie beside the modules that fill them in.

Everything that a template prints is escaped for the page's language, because names come from anyone's files. Values
that are markup themselves, such as a drawing, are marked as such in the template (`| safe`).
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from murmuration.accounting.escaping import markdown_text


def html_page(template: Path, **values: Any) -> str:
    # Escaped by the standard library: Jinja writes quotation marks as other entities.
    return _filled(template, values, lambda text: html.escape(text))


def markdown_page(template: Path, **values: Any) -> str:
    return _filled(template, values, markdown_text)


def json_text(template: Path, **values: Any) -> str:
    """Every value is printed as JSON."""
    return _filled(template, values, json.dumps, str_first=False)


def _filled(
    template: Path, values: dict[str, Any], escape: Callable[[Any], str], str_first: bool = True
) -> str:  # fmt: skip
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not above: few commands write a page
    from markupsafe import Markup

    def printed(value: Any) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape(str(value) if str_first else value))

    pages = Environment(
        autoescape=True, finalize=printed, undefined=StrictUndefined, loader=FileSystemLoader(template.parent),
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return pages.get_template(template.name).render(values)
