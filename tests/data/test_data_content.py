"""Decoding, augmentation, text and the order of public data."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from data.augment import Uniforms, augment, mask_noise
from data.decode import BadRecord, decode
from data.public import PublicEpochs
from data.text import TextEncoder, word_tokenizer

ROOT = Path(__file__).resolve().parents[2]
KEY = b"k" * 32
PINNED_UNIFORMS = [0.45818699042314837, 0.4139176168439592]
PINNED_NOISE = [0.4225488305091858, 0.7834647297859192]


def _file(image: Image.Image, form: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def test_sixteen_bit_grey_is_scaled_not_saturated() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    pixels = decode(_file(Image.fromarray(ramp), "PNG"))
    assert pixels.shape == (16, 16, 3) and pixels.dtype == np.uint8
    assert np.abs(pixels[..., 0].ravel().astype(int) - np.arange(256)).max() <= 1
    assert np.array_equal(pixels[..., 0], pixels[..., 2])


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "LA", "RGBA"])
@pytest.mark.parametrize("level", [0, 255])
def test_every_mode_becomes_rgb(mode: str, level: int) -> None:
    image = Image.new("RGB", (9, 7), (level, level, level)).convert(mode)
    pixels = decode(_file(image, "JPEG" if mode == "CMYK" else "PNG"))
    assert pixels.shape == (7, 9, 3) and np.abs(pixels.astype(int) - level).max() <= 2


def test_transparent_is_laid_on_white() -> None:
    assert decode(_file(Image.new("RGBA", (4, 4), (200, 0, 0, 0)), "PNG")).min() == 255


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int) -> None:
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255
    turns = [
        lambda a: a, lambda a: a[:, ::-1], lambda a: a[::-1, ::-1], lambda a: a[::-1],
        lambda a: a.transpose(1, 0, 2), lambda a: np.rot90(a, 1), lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        lambda a: np.rot90(a, -1),
    ]  # fmt: skip
    stored = Image.fromarray(np.ascontiguousarray(turns[orientation - 1](upright)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode(_file(stored, "PNG", exif=exif))
    assert np.array_equal(pixels, upright)


def test_broken_exif_does_not_matter() -> None:
    data = _file(Image.new("RGB", (8, 8)), "JPEG", exif=b"Exif\0\0II*\0garbage")
    # In a fresh process, because pytest replaces the warning filters: nothing about a private record may
    # reach the console, which is public.
    code = "import sys; from data.decode import decode; print(decode(sys.stdin.buffer.read()).shape)"
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, cwd=ROOT, check=True)
    assert (done.stdout.strip(), done.stderr) == (b"(8, 8, 3)", b"")


def test_large_jpegs_are_decoded_small() -> None:
    data = _file(Image.new("RGB", (1600, 1200), "red"), "JPEG")
    assert decode(data, at_least=64).shape == (150, 200, 3)
    assert decode(data).shape == (1200, 1600, 3)
    assert decode(_file(Image.new("RGB", (70, 60)), "JPEG"), at_least=64).shape == (60, 70, 3)


@given(st.binary(max_size=200), st.integers(0, 400), st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP"]))
@settings(deadline=None, max_examples=150)
def test_hostile_bytes_raise_only_bad_record(junk: bytes, at: int, form: str) -> None:
    data = _file(Image.effect_noise((13, 11), 50), form)
    for candidate in (junk, data[:at], data[:at] + junk + data[at + len(junk) :]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                pixels = decode(candidate)
            except BadRecord:
                continue
        assert pixels.ndim == 3 and pixels.shape[2] == 3


def test_memory_errors_are_no_bad_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_args: object, **_kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhausted)
    with pytest.raises(MemoryError):
        decode(b"anything")


@pytest.mark.parametrize("kind", ["none", "center", "random_resized_crop"])
@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (24, 24), (1, 300), (300, 1), (1, 1), (7, 6)])
def test_augment_gives_the_size(kind, shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    for record in range(20):
        assert augment(pixels, kind, 24, KEY, 1, record).shape == (24, 24, 3)


def test_none_and_center_keep_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    assert np.array_equal(augment(pixels[:, :24], "none", 24, KEY, 0, 0), pixels[:, :24])
    assert np.array_equal(augment(pixels, "center", 24, KEY, 0, 0), pixels[:, 8:32])


def test_crops_are_keyed_by_step_and_record() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8)

    def crop(key: bytes, step: int, record: int) -> bytes:
        return augment(pixels, "random_resized_crop", 24, key, step, record).tobytes()

    assert crop(KEY, 3, 4) == crop(KEY, 3, 4)
    assert len({crop(KEY, 3, 4), crop(KEY, 4, 3), crop(KEY, 3, 5), crop(b"x" * 32, 3, 4)}) == 4


def test_flips_and_positions_are_fair() -> None:
    ramp = np.broadcast_to(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (64, 64, 3))
    outs = [augment(np.ascontiguousarray(ramp), "random_resized_crop", 16, KEY, 0, i) for i in range(2000)]
    flipped = sum(int(out[8, 0, 0]) > int(out[8, -1, 0]) for out in outs)
    assert abs(flipped - 1000) < 4 * np.sqrt(500)
    assert abs(np.mean([out.mean() for out in outs]) - ramp.mean()) < 3


def test_uniforms_are_uniform_and_stable() -> None:
    stream = Uniforms(KEY, 1, 2)
    assert stats.kstest([stream.next() for _ in range(4000)], "uniform").pvalue > 0.01
    noise = mask_noise(KEY, 1, 2, 4000)
    assert noise.dtype == np.float32 and noise.min() >= 0 and noise.max() < 1
    assert stats.kstest(noise, "uniform").pvalue > 0.01
    assert np.array_equal(noise[:10], mask_noise(KEY, 1, 2, 10))
    assert not np.array_equal(noise[:10], mask_noise(KEY, 2, 1, 10))
    # Pinned: another value here means that running experiments would change their crops and masks on upgrade.
    assert [Uniforms(KEY, s, r).next() for s, r in ((0, 0), (1, 2))] == PINNED_UNIFORMS
    assert mask_noise(KEY, 1, 2, 2).tolist() == PINNED_NOISE


@pytest.fixture
def text(tmp_path: Path) -> TextEncoder:
    return TextEncoder(word_tokenizer(["a", "red", "circle", "Photo", "of"], tmp_path / "tokenizer.json"), 6)


def test_encode(text: TextEncoder) -> None:
    assert (text.pad, text.start, text.end, text.unk) == (0, 1, 2, 3) and text.vocabulary == 9
    row = text.encode("A red circle")
    assert len(row) == 6 and row[0] == text.start and row[4:] == [text.end, text.pad]
    assert text.decode(row) == "a red circle"
    assert text.encode("") == [text.start, text.end, 0, 0, 0, 0]
    long = text.encode("a photo of a red circle " * 3)
    assert len(long) == 6 and long[-1] == text.end and text.decode(long) == "a photo of a"
    assert text.encode("a huge circle")[2] == text.unk
    assert text.words("red circle") == row[2:4]


def test_captions_cannot_forge_control_tokens(text: TextEncoder) -> None:
    row = text.encode("a <end> <pad> <start>")
    assert row == [text.start, row[1], text.unk, text.unk, text.unk, text.end]
    assert text.encode("red " * 10_000_000)[-1] == text.end


def test_tokenizer_files(text: TextEncoder, tmp_path: Path) -> None:
    again = word_tokenizer(["of", "circle", "photo", "red", "a", "a"], tmp_path / "again.json")
    assert TextEncoder(again, 6).digest == text.digest, "the file depends on the set of words only"
    with pytest.raises(ValueError, match="no tokenizer here"):
        TextEncoder(tmp_path / "missing.json", 6)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        TextEncoder(tmp_path / "other.json", 6)
    with pytest.raises(ValueError, match="no room"):
        TextEncoder(again, 2)


@pytest.mark.parametrize(("records", "batch"), [(10, 3), (7, 7), (12, 5), (5, 12), (1, 4), (1000, 64)])
def test_public_epochs_are_exact(records: int, batch: int) -> None:
    """The stream of batches is one permutation after the other, cut anywhere."""
    epochs = PublicEpochs(records, batch, KEY)
    steps = [epochs.ids(step) for step in range(-(-4 * records // batch) + 1)]
    assert all(len(ids) == batch and np.all(np.diff(ids) >= 0) for ids in steps)
    counts = np.zeros(records, dtype=int)
    for step, ids in enumerate(steps):
        np.add.at(counts, ids, 1)
        done = (step + 1) * batch
        assert counts.min() >= done // records and counts.max() <= -(-done // records)
    # A pure function of the step: any order, any instance.
    for step in reversed(range(len(steps))):
        assert np.array_equal(PublicEpochs(records, batch, KEY).ids(step), steps[step])
        assert np.array_equal(epochs.ids(step), steps[step])


def test_public_epochs_are_shuffled_anew() -> None:
    epochs = PublicEpochs(1000, 100, KEY)
    first, second = epochs.ids(0), epochs.ids(10)
    assert 2 < len(np.intersect1d(first, second)) < 30
    assert abs(float(first.mean()) - 500) < 150 and not np.array_equal(first, np.arange(100))
    assert not np.array_equal(first, PublicEpochs(1000, 100, b"other").ids(0))
    with pytest.raises(ValueError, match="at least 1"):
        PublicEpochs(0, 1, KEY)
