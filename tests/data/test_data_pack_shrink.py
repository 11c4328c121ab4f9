"""Pictures shrunk while they are packed: the pixels of the reference resize, one size, and hostile files as before."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from murmuration.data.decode.decode import decode
from murmuration.data.decode.pool import DecodePool
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.pack import write
from murmuration.data.pack.write import Shrinking
from murmuration.launch.prepare import main
from tests.data.test_data_pack import left_out, records
from tests.support.hostile_files import one_bit_png

SIDE = 24


def written(image: Image.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def drawn(wide: int, high: int, mode: str = "RGB") -> Image.Image:
    coarse = np.random.default_rng(wide + high).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((wide, high), Image.Resampling.BICUBIC).convert(mode)


def reference(raw: bytes, wide: int, high: int) -> np.ndarray:
    pixels = torch.from_numpy(decode(raw)).permute(2, 0, 1)[None]
    found = torch.nn.functional.interpolate(pixels, (high, wide), mode="bicubic", antialias=True)
    return found[0].permute(1, 2, 0).numpy()


def packed(folder: Path, out: Path, *more: str) -> int:
    return main(["pack", str(folder), "--out", str(out), "--workers", "1", *more])


TURNED = Image.Exif()
TURNED[0x0112] = 6
FILES = {
    "flat.png": (written(drawn(90, 50), "PNG"), (43, 24)),
    "tall.png": (written(drawn(30, 200), "PNG"), (24, 160)),
    "grey.png": (written(drawn(64, 48, "L"), "PNG"), (32, 24)),
    "deep.png": (written(Image.fromarray(np.arange(64 * 48, dtype=np.uint16).reshape(48, 64) * 21), "PNG"), (32, 24)),
    "pale.png": (written(drawn(64, 48).convert("RGBA"), "PNG"), (32, 24)),
    "frames.png": (written(drawn(64, 48), "GIF", save_all=True, append_images=[drawn(64, 48, "L")]), (32, 24)),
    "turned.png": (written(drawn(64, 48), "PNG", exif=TURNED), (24, 32)),
    "photo.jpg": (written(drawn(300, 200), "JPEG", quality=90, exif=TURNED), (24, 36)),
    "web.webp": (written(drawn(64, 48), "WEBP"), (32, 24)),
}  # fmt: skip
SMALL = {
    "small.png": written(drawn(24, 24), "PNG"),
    "thin.jpg": written(drawn(400, 10), "JPEG", exif=TURNED),
    "fits.webp": written(drawn(24, 90), "WEBP"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "pictures"
    made.mkdir()
    for name, content in {**{name: raw for name, (raw, _) in FILES.items()}, **SMALL}.items():
        (made / name).write_bytes(content)
    return made


def test_pixels_are_those_of_the_reference_resize_and_what_is_small_stays_as_it_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert packed(folder, out, "--max-shorter-side", str(SIDE)) == 0
    assert f"more than {SIDE} pixels on their shorter side were shrunk" in capsys.readouterr().out
    found = records(out)
    names = sorted([*FILES, *SMALL])
    assert len(found) == len(names) == 12 and left_out(out) == []
    for name, members in zip(names, found, strict=True):
        ((form, file),) = ((suffix, file) for suffix, file in members.items() if suffix not in ("cls", "txt", "json"))
        if name in SMALL:
            assert file == SMALL[name]
            continue
        raw, (wide, high) = FILES[name]
        assert form == ("jpg" if name in ("photo.jpg", "web.webp") else "png"), "lossless stays lossless"
        with Image.open(io.BytesIO(file)) as image:
            assert image.size == (wide, high) and min(image.size) == SIDE
            assert image.mode == ("L" if name in ("grey.png", "deep.png") else "RGB")
            assert not image.getexif(), "what is stored is upright"
        expected = reference(raw, wide, high)
        if form == "jpg":
            expected = decode(written(Image.fromarray(expected), "JPEG", quality=95))
        apart = np.abs(decode(file).astype(int) - expected.astype(int))
        if form == "png":  # two libraries round differently
            assert apart.max() <= 2 and np.mean(apart > 1) <= 1e-3, name
        else:  # which JPEG makes a few steps of
            assert apart.max() <= 12 and apart.mean() <= 2, name


def test_the_side_is_part_of_what_a_folder_is(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digests = set()
    for name, more in (("whole", []), ("a", ["24"]), ("b", ["30"])):
        asked = ["--max-shorter-side", *more] if more else []
        assert packed(folder, tmp_path / name, *asked) == 0
        assert json.loads((tmp_path / name / "packed.json").read_text()).get("max_shorter_side") == (
            int(more[0]) if more else None
        )
        digests.add(ShardIndex.open(tmp_path / name).manifest_digest)
        assert packed(folder, tmp_path / name, *asked) == 0, "the same command has nothing to do"
    assert len(digests) == 3, "a run names its records by this"
    for asked in ([], ["--max-shorter-side", "30"]):
        assert packed(folder, tmp_path / "a", *asked) == 2
        assert "contains other data" in capsys.readouterr().err


@pytest.mark.parametrize("side", ["0", "-3"])
def test_a_side_has_at_least_one_pixel(
    folder: Path, tmp_path: Path, side: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert packed(folder, tmp_path / "out", "--max-shorter-side", side) == 2
    assert f"--max-shorter-side {side}: name at least 1 pixel" in capsys.readouterr().err


def test_damaged_and_hostile_files_are_left_out_and_listed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "cut.jpg").write_bytes(FILES["photo.jpg"][0][:700])
    (folder / "none.jpg").write_bytes(b"not a picture")
    (folder / "bomb.png").write_bytes(one_bit_png(10_000))
    (folder / "crashing.png").write_bytes(b"SEGV")
    program = "tests.support.hostile_files:crashing_worker"
    monkeypatch.setattr(write, "DecodePool", lambda *given, **more: DecodePool(*given, **more, program=program))
    assert packed(folder, tmp_path / "out", "--max-shorter-side", str(SIDE)) == 0
    assert {(each["image"], each["reason"]) for each in left_out(tmp_path / "out")} == {
        (name, "undecodable image") for name in ("cut.jpg", "none.jpg", "bomb.png", "crashing.png")
    }
    assert len(records(tmp_path / "out")) == 12


def test_memory_is_that_of_the_files_written(picture: Callable[..., bytes]) -> None:
    """A process has room for the largest file that a picture may become, of which nothing exists before it is used."""
    shrinking = Shrinking(SIDE, 1)
    try:
        for number in range(3):
            shrinking.picture(picture(number, side=200))
        (process,) = shrinking._pool._all
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = {line.split()[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith("Rss")}
        assert resident["RssShmem:"] < 1024, "kB"
    finally:
        shrinking.close()
