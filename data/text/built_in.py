"""The vocabularies that a config names instead of a file. Apart from them, so that reading a config is quick."""

from __future__ import annotations

import re

BUILT_IN = re.compile(r"clip(?::(\w+))?")


def is_built_in(source: str) -> bool:
    """Whether a config's `tokenizer` names a built-in vocabulary rather than a file."""
    return BUILT_IN.fullmatch(source) is not None
