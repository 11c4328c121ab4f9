"""The names by which a captioner is asked for each class: a public file, or else the classes' own names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from murmuration.accounting.errors import RunError
from murmuration.accounting.strict_json import JsonError, parse
from murmuration.data.text.encoder import TextEncoder

ClassNames = tuple[tuple[str, ...], ...]
"""The names of each class, in the order of the classes."""


class ClassNamesError(RunError, ValueError):
    """The names cannot be used; the message names the cause and the fix."""


def read_class_names(path: Path | None, classes: Sequence[str], where: str) -> ClassNames:
    """From a JSON file {class: [name, …]}; without one, each class's own name, with spaces for underscores. `where` is
    the option or key that names the file."""
    if path is None:
        return tuple((name.replace("_", " "),) for name in classes)
    try:
        found = parse(path.read_bytes())
    except (OSError, JsonError) as error:
        raise ClassNamesError(f"{where} {path} cannot be read ({error}); write {{class: [name, …]}} as JSON") from None
    if not isinstance(found, dict):
        raise ClassNamesError(f"{where} {path} has no object; write {{class: [name, …]}} as JSON")
    if lacking := [name for name in classes if name not in found]:
        raise ClassNamesError(f"{where} {path} has nothing for the class {lacking[0]!r}; add it")
    named = []
    for name in classes:
        given = [found[name]] if isinstance(found[name], str) else found[name]
        if not isinstance(given, list) or not given or not all(isinstance(each, str) and each for each in given):
            raise ClassNamesError(f"{where} {path}: the names of {name!r} are no list of texts; write one")
        named.append(tuple(given))
    return tuple(named)


def unknown_words(words: str, text: TextEncoder) -> list[str]:
    """Those that the tokenizer does not know; {} stands for any."""

    def unknown(word: str) -> bool:
        ids = text.words(word)
        return not ids or text.unk in ids

    return [word for word in dict.fromkeys(words.replace("{}", " ").split()) if unknown(word)]


def tokens_of(words: str, text: TextEncoder) -> tuple[int, ...]:
    """Refuses words that the tokenizer does not know: all of them would be the same unknown token, a silent tie."""
    ids = tuple(text.words(words))
    if not ids or text.unk in ids:
        lacking = unknown_words(words, text)
        which = f"{', '.join(map(repr, lacking)) or 'all'} of {words!r}" if lacking != [words] else repr(words)
        raise ClassNamesError(f"the tokenizer does not know {which}; use words of its vocabulary")
    return ids


def require_room(tokens: int, length: int) -> None:
    if tokens > length:
        raise ClassNamesError(f"prompt and name have up to {tokens} tokens, and the model reads {length}; shorten them")
