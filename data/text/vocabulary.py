"""Tokenizers: words to ids and back, control tokens, cleaning, and a digest of all of it.

Every vocabulary comes from a file that is already on the local disk. A vocabulary learnt from private captions is an
unaccounted release of them; nothing in this package can learn one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from murmuration.accounting.durable import atomic
from murmuration.accounting.errors import RunError

PAD, START, END, UNK = "<pad>", "<start>", "<end>", "<unk>"
SPECIAL = (PAD, START, END, UNK)
CONFIG, CONTROL = "tokenizer_config.json", ("bos_token", "eos_token")
BERT_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
NO_PADDING = -1  # the id of padding where no token is set aside for it
NO_UNKNOWN = -1  # the id of the unknown token where every text can be spelt; no real id equals it


class TokenizerError(RunError, ValueError):
    """No usable tokenizer; the message names the file or the built-in vocabulary, and the fix."""


@dataclass(frozen=True)
class Vocabulary:
    """`clean` runs before the tokenizer, `decode` turns word ids back into text; `digest` pins both."""

    tokenizer: Tokenizer
    pad: int
    start: int
    end: int
    unk: int
    digest: str
    clean: Callable[[str], str]
    decode: Callable[[list[int]], str]

    @property
    def size(self) -> int:
        """The number of rows an embedding needs: the largest id plus one."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def open_json(path: str | os.PathLike[str]) -> Vocabulary:
    """A local `tokenizer.json`; the only cleaning is its own normalizer."""
    raw = _read(path, "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"{path}: not a tokenizer.json ({error})") from error
    return _with_control_tokens(tokenizer, raw, path)


def open_of_language_model(path: str | os.PathLike[str]) -> Vocabulary:
    """A folder of transformers, or the `tokenizer.json` in it, with the beginning and the end that
    `tokenizer_config.json` names. Texts that spell a control token get its letters."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    raw, told = _read(folder / "tokenizer.json", "tokenizer.json"), _read(folder / CONFIG, CONFIG)
    try:
        tokenizer = Tokenizer.from_buffer(raw)
        named = json.loads(told)
        words = {key: found["content"] if isinstance(found := named.get(key), dict) else found for key in CONTROL}
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"{folder}: not a tokenizer of transformers ({error})") from error
    start, end = (tokenizer.token_to_id(found) if isinstance(found, str) else None for found in words.values())
    if end is None:
        raise TokenizerError(f"{folder / CONFIG}: eos_token names no token of the tokenizer.json; set it")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    digest = hashlib.sha256(raw + f"{start} {end}".encode()).hexdigest()
    start = end if start is None else start
    return Vocabulary(tokenizer, NO_PADDING, start, end, NO_UNKNOWN, digest, str, decode)


def open_bert(path: str | os.PathLike[str]) -> Vocabulary:
    """BERT's WordPiece over a local `vocab.txt`, one token per line.

    A vocabulary with capital letters in its words is cased; without any, text is lower-cased and stripped of accents,
    as in bert-base-uncased.
    """
    raw = _read(path, "vocab.txt")
    lines = raw.decode("utf-8", "replace").removesuffix("\n").split("\n")
    tokens = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    if len(tokens) != len(lines):
        raise TokenizerError(f"{path}: a token occurs twice; this is not BERT's vocab.txt with one token per line")
    lower = not any(token != token.lower() for token in tokens if not (token.startswith("[") and token.endswith("]")))
    tokenizer = Tokenizer(models.WordPiece(tokens, unk_token=BERT_SPECIAL[3], max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.WordPiece()  # pyright: ignore[reportAttributeAccessIssue]
    # Only those that are present: an added token would get an id beyond the file.
    tokenizer.add_special_tokens([token for token in BERT_SPECIAL if token in tokens])
    return _with_control_tokens(tokenizer, raw, path)


def _read(path: str | os.PathLike[str], what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TokenizerError(f'{path}: no tokenizer here ({error.strerror}); name a {what}, or "clip"') from error


def _with_control_tokens(tokenizer: Tokenizer, raw: bytes, path: str | os.PathLike[str]) -> Vocabulary:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for names in (SPECIAL, BERT_SPECIAL):
        ids = [number for token in names if (number := tokenizer.token_to_id(token)) is not None]
        # The model takes id 0 for padding, so it must not also be a word.
        if len(ids) == len(names) and ids[0] == 0:
            decode = partial(tokenizer.decode, skip_special_tokens=False)
            return Vocabulary(tokenizer, ids[0], ids[1], ids[2], ids[3], hashlib.sha256(raw).hexdigest(), str, decode)
    raise TokenizerError(
        f"{path}: must contain the tokens {' '.join(SPECIAL)} or {' '.join(BERT_SPECIAL)}, the first with id 0"
    )


def word_tokenizer(words: Iterable[str], path: str | os.PathLike[str]) -> Path:
    """Write a word-level, lower-casing `tokenizer.json` over a PUBLIC word list.

    The list must be public by construction, such as the words of a grammar. Never collect it from private
    captions: which words occur in them is itself private information.
    """
    vocabulary = {token: number for number, token in enumerate(SPECIAL)}
    for word in sorted({word.lower() for word in words}):
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(SPECIAL))
    with atomic(Path(path)) as file:
        file.write(tokenizer.to_str(pretty=True).encode())
    return Path(path)
