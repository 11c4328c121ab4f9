"""Makes names and other texts from files harmless wherever people read them.

The name of a run, a phase or an axis may contain anything: a line feed and an escape sequence could write a forged
verdict on the screen, and Markdown or HTML could write one into a certificate.
"""

from __future__ import annotations

import html
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Entities where a backslash helps in some dialects of Markdown only; the rest is escaped as all dialects do.
ENTITY = {each: f"&#{ord(each)};" for each in "|~$@:."} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
INLINE = re.compile(r"[\\`*\[\]&<>|~$@]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.", re.IGNORECASE)
LONGEST = 1000
AT_START = re.compile(r"^(\d*)([#+=-]|[.)](?=\s|$))")


def escape_output() -> None:
    """At the start of a command: letters that the output lacks, as Latin-1 lacks ε, and names that are no text are
    printed as codes such as \\u03b5, in place of an exception."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    """One line without control characters, changes of the writing direction or lone surrogates."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """The same for a text that keeps its own line feeds."""
    return "\n".join(printable(line) for line in text.split("\n"))


def sentence(error: object) -> str:
    """An error as it is printed: one line, and short enough to be read whatever value or name it quotes."""
    text = printable(str(error))
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def first_line(error: BaseException, most: int | None = 200) -> str:
    """The first line of what a library says, for the brackets of a sentence of ours; its class if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def printable_leaves(value: Any) -> Any:
    """A JSON value with every text in it, keys included, made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_leaves(each) for each in value]
    if isinstance(value, dict):
        return {printable(str(key)): printable_leaves(each) for key, each in value.items()}
    return value


def markdown_text(text: str) -> str:
    """Markdown that shows exactly this line of text: no markup, no link, no HTML, no further table cell."""
    marked = INLINE.sub(lambda found: ENTITY.get(found[0], f"\\{found[0]}"), printable(text).strip())
    return AT_START.sub(r"\1\\\2", marked)


# Pages from Jinja templates, which lie beside the modules that fill them in.
#
# Everything that a template prints is escaped for the page's language, because names come from anyone's files. Values
# that are markup themselves, such as a drawing, are marked as such in the template (`| safe`).


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
