"""Decoding, augmentation, text and the order of public data."""

from __future__ import annotations

import io
import resource
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torchvision.transforms import CenterCrop, InterpolationMode, RandomResizedCrop, Resize

from murmuration.data.decode import decode as decode_module
from murmuration.data.decode.augment import KINDS, AugmentKind, ResizeCrop, Uniforms, choose_view, mask_noise
from murmuration.data.decode.decode import BadRecord, decode, decode_scaled
from murmuration.data.decode.record import PictureMaker
from murmuration.data.index.epochs import PublicEpochs
from murmuration.data.text.encoder import TextEncoder, word_tokenizer

ROOT = Path(__file__).resolve().parents[2]
KEY = b"k" * 32
PINNED_UNIFORMS = [0.45818699042314837, 0.4139176168439592]
PINNED_NOISE = [0.4225488305091858, 0.7834647297859192]


def _file(image: Image.Image, form: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def _smooth(width: int, height: int) -> Image.Image:
    """Long waves in every direction: they survive any sound way of shrinking, and betray a shift of a pixel."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    waves = [np.sin(x / 54 + 1.3), np.cos(y / 66), np.sin((x + y) / 90)]
    return Image.fromarray((127 + 100 * np.stack(waves, -1)).astype(np.uint8))


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
    code = "import sys; from murmuration.data.decode.decode import decode; print(decode(sys.stdin.buffer.read()).shape)"
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


def _both(data: bytes, at_least: int | None, patched: pytest.MonkeyPatch) -> tuple[object, object]:
    """What is made of a file, and what Pillow alone makes of it."""

    def told() -> object:
        try:
            found = decode_scaled(data, lambda _width, _height: at_least)
        except BadRecord as bad:
            return str(bad)
        return found.pixels.shape, found.pixels.tobytes(), found.width, found.height, found.shrunk, found.margin

    mine = told()
    with patched.context() as without:
        without.setattr(decode_module, "_ordinary_jpeg", lambda *_: None)
        return mine, told()


_TURNED = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize(("mode", "options", "ordinary"), [
    ("RGB", {"subsampling": 0}, True), ("RGB", {"subsampling": 1}, True), ("RGB", {"subsampling": 2}, True),
    ("RGB", {"progressive": True}, True), ("RGB", {"restart_marker_rows": 1}, True), ("L", {}, True),
    ("RGB", {"icc_profile": b"\xff\xda\xff\xe1" * 9}, True), ("RGB", {"exif": b"Exif\0\0II*\0garbage"}, False),
    ("RGB", {"xmp": _TURNED}, False), ("RGB", {"keep_rgb": True}, False), ("CMYK", {}, False),
])  # fmt: skip
@pytest.mark.parametrize("size", [(64, 48), (131, 97), (1, 9)])
def test_jpegs_have_the_pixels_that_pillow_gives_them(
    mode: str, options: dict[str, Any], ordinary: bool, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _file(_smooth(*size).convert(mode), "JPEG", quality=85, **options)
    assert (decode_module._ordinary_jpeg(data, lambda *_: None) is not None) == ordinary
    for at_least in (None, 1, 6, 12, 24, 48, 400):
        mine, theirs = _both(data, at_least, monkeypatch)
        assert mine == theirs and not isinstance(mine, str)


@given(st.integers(0, 1_200), st.binary(min_size=1, max_size=4), st.integers(1, 900), st.none() | st.integers(1, 13))
@settings(deadline=None, max_examples=300)
def test_damaged_jpegs_are_judged_as_pillow_judges_them(at: int, put: bytes, cut: int, at_least: int | None) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (27, 29, 3), dtype=np.uint8)
    data = _file(Image.fromarray(noise), "JPEG", quality=75, restart_marker_rows=1)
    assert len(data) > 1_200
    data = data[:at] + put + data[at + len(put) :]
    with pytest.MonkeyPatch.context() as patched:
        for candidate in (data, data[:-cut], data[:at] + data[at + len(put) :]):
            mine, theirs = _both(candidate, at_least, patched)
            assert mine == theirs


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_a_picture_of_too_many_pixels_is_not_decoded(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _file(_smooth(64, 48), form)
    monkeypatch.setattr(decode_module, "MAX_PIXELS", 64 * 48)
    assert decode(data, 6).shape[2] == 3
    monkeypatch.setattr(decode_module, "MAX_PIXELS", 64 * 48 - 1)
    with pytest.raises(BadRecord, match="has more than 3071 pixels"):
        decode(data, 6)  # not even shrunk


def test_memory_errors_are_no_bad_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_args: object, **_kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhausted)
    with pytest.raises(MemoryError):
        decode(b"anything")


def augment(pixels: np.ndarray, kind: AugmentKind, size: int, key: bytes, step: int, record: int) -> np.ndarray:
    """The view of a picture that is decoded in full."""
    height, width = pixels.shape[:2]
    return choose_view(kind, width, height, size, key, step, record).render(pixels, size)


@pytest.mark.parametrize("kind", KINDS)
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


def test_sixteen_bit_colour_is_scaled() -> None:
    """A 16-bit RGB PNG by hand, since Pillow writes none: one pixel of (0, 0x80ff, 0xffff)."""
    content = struct.pack(">BHHH", 0, 0, 0x80FF, 0xFFFF)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")
    assert decode(data).tolist() == [[[0, 0x80, 0xFF]]]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_counts(form: str) -> None:
    frames = [Image.new("RGB", (12, 10), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if form == "WEBP" else {}
    pixels = decode(_file(frames[0], form, save_all=True, append_images=frames[1:], duration=50, **options))
    assert pixels.shape == (10, 12, 3) and np.abs(pixels.astype(int) - [255, 0, 0]).max() <= 1


def test_a_palette_with_transparency() -> None:
    image = Image.new("P", (6, 6), 1)
    image.putpalette([10, 20, 30, 200, 100, 50])
    assert decode(_file(image, "PNG")).min() == 50
    assert decode(_file(image, "PNG", transparency=1)).min() == 255, "laid on white"


@pytest.mark.parametrize(("kind", "areas"), [("random_resized_crop", (0.2, 1.0)), ("inception_crop", (0.05, 1.0))])
@pytest.mark.parametrize(("width", "height"), [(300, 200), (100, 400), (64, 64)])
def test_crops_are_distributed_as_torchvisions(
    kind: AugmentKind, areas: tuple[float, float], width: int, height: int
) -> None:
    torch.manual_seed(3)
    picture = torch.zeros(3, height, width)
    theirs = [RandomResizedCrop.get_params(picture, list(areas), [3 / 4, 4 / 3]) for _ in range(4000)]
    ours = [choose_view(kind, width, height, 224, KEY, 1, record).box for record in range(4000)]
    # Where no drawn crop fits, ours is not cut to whole pixels.
    found = np.rint([(top, left, bottom - top, right - left) for left, top, right, bottom in ours])
    expected = np.array(theirs)
    for column in range(4):
        assert stats.ks_2samp(found[:, column], expected[:, column]).pvalue > 1e-3
    area, area_too = (each[:, 2] * each[:, 3] / (width * height) for each in (found, expected))
    assert stats.ks_2samp(area, area_too).pvalue > 1e-3
    # Power: a range of areas that is off by a twentieth would not pass.
    wrong = [RandomResizedCrop.get_params(picture, [areas[0] + 0.05, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
    worst = np.array(wrong)[:, 2] * np.array(wrong)[:, 3] / (width * height)
    assert (width, height) == (100, 400) or stats.ks_2samp(area, worst).pvalue < 1e-3


@pytest.mark.parametrize(("resize", "crop", "size"), [(256, 224, 224), (384, 256, 256), (256, 224, 16), (40, 40, 40)])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize(("width", "height"), [(300, 200), (101, 399), (224, 224), (1030, 1700), (37, 51)])
def test_the_published_evaluation_view_is_torchvisions(
    width: int, height: int, form: str, resize: int, crop: int, size: int
) -> None:
    """Resize to 256 and crop 224 in the middle, or 256 from 384, or the same part for a smaller model: bit for bit."""
    noise = np.random.default_rng(width).integers(0, 255, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    data = _file(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC), form)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    theirs = Resize(size * resize // crop, InterpolationMode.BICUBIC)
    expected = np.asarray(CenterCrop(size)(theirs(image)))
    found = PictureMaker(size, ResizeCrop(resize, crop)).make(data, 0, 0)
    assert np.array_equal(found, expected)
    whole = PictureMaker(size, "center").make(data, 0, 0).astype(int)
    assert resize == crop or np.mean(np.abs(whole - expected.astype(int)) > 1) > 0.3, "another view must not pass"


def test_a_thread_of_a_picture_is_not_resized_as_a_whole() -> None:
    """That would take more than a gigabyte."""
    column = np.random.default_rng(0).integers(0, 255, (80_000, 1, 3), dtype=np.uint8)
    data = _file(Image.fromarray(column), "PNG")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = PictureMaker(64, ResizeCrop()).make(data, 0, 0)
    assert found.shape == (64, 64, 3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000, "kilobytes"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["none", "random_resized_crop"])
def test_large_jpegs_show_the_same_in_less_time(kind: AugmentKind, orientation: int) -> None:
    """Decoded as small as the crop allows, against decoding in full; sideways ones too."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = _file(_smooth(1501, 1003), "JPEG", quality=95, exif=exif)
    whole = decode(data)
    maker = PictureMaker(96, kind, KEY)
    for record in range(8):
        expected = augment(whole, kind, 96, KEY, 2, record)
        assert np.abs(maker.make(data, 2, record).astype(int) - expected).mean() < 0.6


def test_small_crops_keep_their_sharpness() -> None:
    """A small crop is decoded finer than the whole picture would be: waves of 20 pixels keep their height."""
    waves = np.broadcast_to(127 + 100 * np.sin(np.arange(1504) * (2 * np.pi / 20)), (1008, 1504))
    data = _file(Image.fromarray(waves.astype(np.uint8)), "JPEG", quality=95)
    whole, maker = decode(data), PictureMaker(96, "inception_crop", KEY)
    boxes = [choose_view("inception_crop", 1504, 1008, 224, KEY, 0, record).box for record in range(200)]
    small = [record for record, box in enumerate(boxes) if box[2] - box[0] < 480]
    assert len(small) > 5
    for record in small:
        expected = augment(whole, "inception_crop", 96, KEY, 0, record)
        assert maker.make(data, 0, record).std() > 0.9 * expected.std()
