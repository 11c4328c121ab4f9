"""CLIP's byte-level BPE, from the merges file of the installed open_clip_torch wheel, without network or import.

Merges are ranked, so a prefix of them is a smaller vocabulary in its own right: "clip:16384" is CLIP's tokenizer
without its later merges. Words it cannot join are spelt out, down to single bytes; nothing is unknown.

Ids are PAD 0, START 1, END 2, then open_clip's ids plus 3. They are not open_clip's own because its id 0 is both "!"
and the padding, while padding here must never count as a word; its control tokens come last, so every cut would move
them. Cleaning is open_clip's "lower": ftfy, HTML entities unescaped twice, white space joined, lower case.
A caption that spells out a control token gets ordinary tokens for it, where open_clip would obey it.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import re
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path

import ftfy
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from murmuration.data.text.vocabulary import END, NO_UNKNOWN, PAD, START, TokenizerError, Vocabulary

DEFAULT_SIZE = 32_768
FULL_SIZE = 49_409  # 3 control tokens, 512 bytes, 48,894 merges
_CONTROL = (PAD, START, END)
_BYTES = 512  # each byte twice: inside a word and at its end
_END_OF_WORD = "</w>"
_FILE = "bpe_simple_vocab_16e6.txt.gz"
_SHA256 = "924691ac288e54409236115652ad4aa250f48203de50a9e4722a6ecd48d6804a"
# In a numeric character reference no digit beyond these matters: the number is too large already and becomes U+FFFD.
# Python refuses to read thousands of digits.
_LONG_NUMBER = re.compile(r"(&#)0*([0-9]{1,8})[0-9]*")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"


def open_clip_vocabulary(size: int = DEFAULT_SIZE) -> Vocabulary:
    """CLIP's vocabulary cut to `size` ids, control tokens and bytes included."""
    smallest = len(_CONTROL) + _BYTES
    if not smallest <= size <= FULL_SIZE:
        raise TokenizerError(f"CLIP's vocabulary can have {smallest} to {FULL_SIZE} tokens, not {size}")
    symbols = list(_byte_symbols().values())
    tokens = [*_CONTROL, *symbols, *(symbol + _END_OF_WORD for symbol in symbols)]
    merges = _merges()[: size - len(tokens)]
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(
        models.BPE({token: number for number, token in enumerate(tokens)}, merges, end_of_word_suffix=_END_OF_WORD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_WORDS), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # Cleaning shapes the ids as much as the merges do, and ftfy's rules change with its version.
    pinned = f"clip {size} {_SHA256} {_WORDS} lower ftfy {ftfy.__version__}"
    digest = hashlib.sha256(pinned.encode()).hexdigest()
    return Vocabulary(tokenizer, 0, 1, 2, NO_UNKNOWN, digest, clean, partial(_decode, tokens))


def clean(text: str) -> str:
    """open_clip's default cleaning."""
    text = ftfy.fix_text(text)
    for _ in range(2):
        text = html.unescape(_LONG_NUMBER.sub(r"\1\2", text))
    return " ".join(text.split()).lower()


def _decode(tokens: list[str], ids: list[int]) -> str:
    values = {symbol: byte for byte, symbol in _byte_symbols().items()}
    joined = "".join(tokens[number] for number in ids if number < len(tokens))
    # Control tokens and the end-of-word mark are ASCII, whose bytes stand for themselves.
    return bytes(values[symbol] for symbol in joined).decode("utf-8", "replace").replace(_END_OF_WORD, " ").strip()


@lru_cache(maxsize=1)
def _byte_symbols() -> dict[int, str]:
    """A printable character for each byte, in CLIP's order: printable bytes first, then the others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + at) for at, byte in enumerate(others)}


@lru_cache(maxsize=1)
def _merges() -> list[tuple[str, str]]:
    # find_spec does not run a top-level package; running open_clip would take seconds and import its models.
    spec = find_spec("open_clip")
    mend = "install open_clip_torch, or name a local tokenizer.json"
    if spec is None or not spec.submodule_search_locations:
        raise TokenizerError(f"CLIP's merges are not installed; {mend}")
    path = Path(spec.submodule_search_locations[0]) / _FILE
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: CLIP's merges cannot be read ({error.strerror}); {mend}") from error
    if hashlib.sha256(raw).hexdigest() != _SHA256:
        raise TokenizerError(f"{path}: not the merges that CLIP was published with; {mend}")
    # The first line is a comment; after CLIP's own merges come longer ones that it never used.
    lines = gzip.decompress(raw).decode().split("\n")[1 : 1 + FULL_SIZE - len(_CONTROL) - _BYTES]
    return [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
