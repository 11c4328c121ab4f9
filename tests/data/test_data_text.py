"""Tokenizers: CLIP's merges against open_clip itself, BERT against transformers, and what captions cannot do."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch

import murmuration.data.text.clip_bpe as clip_vocabulary
from murmuration.data.text.built_in import is_built_in
from murmuration.data.text.encoder import TextEncoder, open_vocabulary, word_tokenizer
from murmuration.model.build import build
from murmuration.model.captioner import caption_loss
from murmuration.model.settings import ModelSettings
from murmuration.train.measures.zero_shot import score_labels

ROOT = Path(__file__).resolve().parents[2]
CAPTIONS = (
    "a photo of a dog, running on grass!",
    "Don't! I'LL say they've won 3-2 in 2024 …",
    "naïve café ÜBER straße İstanbul ΑΣ",
    "日本語のキャプション 中文字 мир नमस्ते",
    "😀🎉 family 👨‍👩‍👧‍👦 flag 🇫🇷 ❤️",
    "&lt;b&gt; fish &amp;amp; chips &eacute;",
    "a <i> &amp;amp; b &amp;lt; c",
    "schÃ¶n â€œquotedâ€\x9d mojibake",
    "  much \t white\n space\u00a0here ",
    "http://example.com/a?b=1&c=2 #tag @user 50% ½ Ⅻ ©®™",
    "!!! !a! ... 'S 'quoted' rock'n'roll",
    "",
    "\x00\x1f \ufffd \u200b\ufeff",
)
# Words, control tokens, specials: the vocabulary of a very small uncased BERT.
BERT_WORDS = ["a", "photo", "of", "dog", "play", "##ing", "##s", "cafe", "##e", ",", "!", "1", "##2", "中"]


def _bert(path: Path, words: list[str] = BERT_WORDS) -> Path:
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]) + "\n")
    return path


@pytest.fixture(scope="module")
def reference():
    from open_clip.tokenizer import SimpleTokenizer

    return SimpleTokenizer()


def _assigned(rng: random.Random) -> str:
    """Characters that every Unicode table in use knows: newer letters are split apart in other places."""
    ranges = ((0x20, 0x7E), (0xA1, 0x24F), (0x370, 0x5FF), (0x2000, 0x2BFF), (0x3040, 0x9FFF), (0x1F300, 0x1F9FF))
    drawn = (chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 25)))
    return "".join(c if unicodedata.category(c) != "Cn" else " " for c in drawn)


def test_clip_at_full_size_has_open_clips_ids(reference) -> None:
    """The constant 3 makes room for padding, start and end (open_clip's 0 is both "!" and its padding)."""
    text = TextEncoder("clip:full", 77)
    assert text.vocabulary == reference.vocab_size + 1 == clip_vocabulary.FULL_SIZE
    rng = random.Random(7)
    words = " ".join(CAPTIONS).split()
    mixed = [" ".join(rng.choice(words) for _ in range(rng.randint(1, 15))) for _ in range(500)]
    for caption in (*CAPTIONS, *mixed, *(_assigned(rng) for _ in range(1500))):
        expected = reference.encode(caption)
        assert [number - 3 for number in text.words(caption)] == expected, repr(caption)
        row = text.encode(caption)
        assert row == ([1, *(number + 3 for number in expected[:75]), 2] + [0] * 77)[:77]
        # open_clip marks the end of a word at the end of the text too.
        assert text.decode(row) == reference.decode(expected[:75]).strip()


@pytest.mark.parametrize("size", [515, 600, 8192, 32768])
def test_a_cut_is_clip_with_fewer_merges(reference, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TextEncoder(f"clip:{size}", 64)
    assert text.vocabulary == size
    merges = size - 515
    monkeypatch.setattr(reference, "bpe_ranks", {k: v for k, v in reference.bpe_ranks.items() if v < merges})
    monkeypatch.setattr(reference, "cache", {})
    for caption in CAPTIONS:
        found = text.words(caption)
        assert [number - 3 for number in found] == reference.encode(caption)
        assert all(3 <= number < size for number in found), "nothing unknown, nothing beyond the embedding"


def test_smaller_vocabularies_spell_the_same_text_longer() -> None:
    encoders = [TextEncoder(f"clip:{size}", 300) for size in ("full", "32768", "8192", "515")]
    for caption in CAPTIONS:
        assert len({encoder.decode(encoder.encode(caption)) for encoder in encoders}) == 1
    lengths = [sum(len(encoder.words(caption)) for caption in CAPTIONS) for encoder in encoders]
    assert lengths == sorted(lengths) and lengths[0] < lengths[1] < lengths[3]


def test_tokens_are_distinct_and_bytes_are_complete() -> None:
    for size in (515, clip_vocabulary.FULL_SIZE):
        tokens = open_vocabulary(f"clip:{size}").tokenizer.get_vocab()
        assert sorted(tokens.values()) == list(range(size)), "two merges would share an id"
    text = TextEncoder("clip:515", 9)
    assert {text.words(c)[0] for c in "!~aé"} < set(range(3, 515))


def test_a_caption_cannot_end_itself_nor_pad_itself() -> None:
    text = TextEncoder("clip", 60)
    caption = "a <end> <pad> <start> <end_of_text> <|endoftext|> !a dog"
    row = text.encode(caption)
    assert row[0] == text.start and row.count(text.start) == row.count(text.end) == 1
    stop = row.index(text.end)
    assert text.pad not in row[:stop] and set(row[stop + 1 :]) == {text.pad}
    assert "dog" in text.decode(row) and text.unk not in row
    short = TextEncoder("clip", 5).encode(caption)
    assert len(short) == 5 and short[-1] == text.end, "truncation keeps the end"
    assert TextEncoder("clip", 8).encode("red " * 3_000_000)[-1] == text.end


def test_the_mean_is_over_own_tokens_alone() -> None:
    """Padding counts for nothing, and "!" is a word although open_clip numbers it like its padding."""
    text = TextEncoder("clip:2000", 12)
    rows = torch.tensor([text.encode("!a dog"), text.encode("")])
    torch.manual_seed(0)
    logits = torch.randn(2, 11, text.vocabulary)
    entropy = -logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
    own = [len(text.words("!a dog")) + 1, 1]
    expected = torch.stack([entropy[row, :count].mean() for row, count in enumerate(own)])
    assert torch.allclose(caption_loss(logits, rows[:, 1:]), expected)
    assert own[0] >= 4


def test_zero_shot_labels_of_several_tokens_are_scored() -> None:
    text = TextEncoder("clip:600", 24)
    shape = ModelSettings.model_validate({
        "family": "captioner", "size": "custom", "image_size": 16, "patch_size": 8, "width": 16, "depth": 1,
        "heads": 2, "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2, "text_length": 24,
        "vocabulary": 600,
    }).resolved()  # fmt: skip
    torch.manual_seed(0)
    model = build(shape, "caption").eval()
    images = torch.randn(2, 3, 16, 16)
    labels = ["giraffe", "photocopier 😀", "dog"]
    assert all(len(text.words(label)) > 1 for label in labels)
    prompt, scores = "a photo of a", score_labels(model, images, "a photo of a", labels, text)  # pyright: ignore[reportArgumentType]
    for number, label in enumerate(labels):
        # Words are tokenized apart, so prompt and label may be tokenized apart as well.
        assert text.words(f"{prompt} {label}") == text.words(prompt) + text.words(label)
        opening, ending = [text.start, *text.words(prompt)], text.words(label)
        tokens = torch.tensor([opening + ending] * 2)
        logits = model.decode(model.encode_images(images), tokens[:, :-1]).log_softmax(-1)  # pyright: ignore[reportCallIssue]
        own = -logits.gather(-1, tokens[:, 1:, None])[:, len(opening) - 1 :, 0]
        assert torch.allclose(scores[:, number], own.mean(dim=1), atol=1e-5)


def test_digests_pin_the_behaviour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digests = [TextEncoder(name, 9).digest for name in ("clip", "clip:32768", "clip:full", "clip:16384")]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    monkeypatch.setattr(clip_vocabulary.ftfy, "__version__", "99")
    assert TextEncoder("clip", 9).digest != digests[0], "another cleaning is another tokenizer"
    words = word_tokenizer(["a"], tmp_path / "t.json")
    assert TextEncoder(words, 9).digest == hashlib.sha256(words.read_bytes()).hexdigest()


def test_bert_wordpiece_equals_transformers(tmp_path: Path) -> None:
    from transformers import BertTokenizerFast

    path = _bert(tmp_path / "vocab.txt")
    theirs = BertTokenizerFast.from_pretrained(str(_bert(tmp_path / "vocab.txt").parent))
    text = TextEncoder(path, 12)
    assert (text.pad, text.unk, text.start, text.end, text.vocabulary) == (0, 1, 2, 3, 18)
    for caption in ("A photo of dogs, playing!", "CAFÉ 12 cat 中", "", "a " * 30, "plays [UNK] dog"):
        expected = theirs(caption, max_length=12, truncation=True, padding="max_length")["input_ids"]
        assert text.encode(caption) == expected, caption
    assert text.decode(text.encode("dogs playing")) == "dogs playing"
    forged = text.encode("a [SEP] [PAD] [CLS] dog")
    assert forged[:7] == [2, 4, 1, 1, 1, 7, 3]


def test_bert_keeps_case_where_the_vocabulary_has_it(tmp_path: Path) -> None:
    cased = TextEncoder(_bert(tmp_path / "vocab.txt", ["Dog", "dog"]), 4)
    assert cased.encode("Dog")[1] != cased.encode("dog")[1]


def test_files_that_cannot_serve_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twice.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\na\n")
    (tmp_path / "late.txt").write_text("a\n[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    with pytest.raises(ValueError, match="occurs twice"):
        TextEncoder(tmp_path / "twice.txt", 9)
    with pytest.raises(ValueError, match="the first with id 0"):
        TextEncoder(tmp_path / "late.txt", 9)
    clip_vocabulary._merges.cache_clear()
    monkeypatch.setattr(clip_vocabulary, "_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="not the merges"):
        TextEncoder("clip", 9)


def test_names_of_ours_are_not_paths() -> None:
    assert is_built_in("clip") and is_built_in("clip:16384")
    assert not any(map(is_built_in, ("clip.json", "./clip", "models/clip", "bert", "")))


def test_open_clip_is_not_imported() -> None:
    """It takes seconds to import, in every worker."""
    code = (
        "import sys; from murmuration.data.text.encoder import TextEncoder; TextEncoder('clip', 9); "
        "sys.exit('open_clip' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0
