"""Comments and trailing commas in a config: users of DeepSpeed, which reads its configs by hjson, are used to both.

hjson itself is not used here. It takes text without quotes for a string up to the end of its line, so that `"path":
shards, "public": true` would be one long path, and what was meant to be said of the data would be gone without a word.
Comments and trailing commas are blanked out instead, and the strict parser reads what is left.
"""

from __future__ import annotations

import re

from murmuration.accounting.strict_json import JsonError, NotJson, parse

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
