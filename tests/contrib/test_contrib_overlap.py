"""Perceptual hashes, the search among them, and the directions that are refused."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.fft
from PIL import Image
from webdataset.writer import TarWriter

from murmuration.accounting.errors import InputError
from murmuration.contrib.overlap.__main__ import main
from murmuration.contrib.overlap.exclude import FOLDER, Hashes, LeakError, exclude_overlaps, hash_index, overlapping
from murmuration.contrib.overlap.phash import WINDOWS, hamming, window_hashes
from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.decode.record import PictureMaker
from murmuration.data.index.exclusions import FACTS, IDS
from murmuration.data.index.open import open_units
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import ShardError
from murmuration.data.synthetic.textures import textures
from murmuration.launch import prepare
from murmuration.train.storage.sibling_runs import RunLog
from tests.data.test_data_index_hostile import DEEP, WRONG_NPY

ROOT = Path(__file__).resolve().parents[2]
SIDE = 160
TarMaker = Callable[..., Path]


def _silent(_what: str) -> Callable[[int, int], None]:
    return lambda done, total: None


def _nobody(_folder: Path) -> list[str]:
    return []


def _file(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


@pytest.fixture(scope="module")
def originals() -> list[Image.Image]:
    return [Image.fromarray(each) for each in textures("mixed", 5, range(40), SIDE).numpy()]


@pytest.fixture(scope="module")
def strangers() -> list[Image.Image]:
    return [Image.fromarray(each) for each in textures("mixed", 6, range(40), SIDE).numpy()]


def _copies(image: Image.Image, number: int) -> dict[str, bytes]:
    """What happens to a picture on its way through the web."""
    turned = Image.Exif()
    turned[0x0112] = 6
    larger, smaller = (image.resize((side, side), Image.Resampling.LANCZOS) for side in (3 * SIDE, 2 * SIDE // 3))
    return {
        "quality": _file(image, quality=35 + number),
        "larger": _file(larger, quality=85),
        "smaller": _file(smaller, quality=80),
        "png": _file(image, "PNG"),
        "webp": _file(image, "WEBP", quality=70),
        "turned": _file(image.transpose(Image.Transpose.ROTATE_90), exif=turned, quality=92),
        "stretched": _file(image.resize((SIDE, SIDE * 3 // 4)), quality=90),
    }


def _hash(*files: bytes) -> np.ndarray:
    maker = PictureMaker(64)
    return window_hashes(np.stack([maker.make(file, 0, 0) for file in files]))[:, 0]


def _set(folder: Path, write_tar: TarMaker, files: list[bytes], per_shard: int = 50, suffix: str = "jpg") -> Path:
    for start in range(0, len(files), per_shard):
        part = enumerate(files[start : start + per_shard], start=start)
        write_tar(folder / f"{start // per_shard:06d}.tar", [{"__key__": f"{n:06d}", suffix: file} for n, file in part])
    build(folder)
    return folder


def test_the_first_window_is_the_whole_picture_as_scipys_cosine_transform_gives_it() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (200, 64, 64, 3), dtype=np.uint8)
    windows = window_hashes(pixels)
    assert windows.shape == (200, WINDOWS)
    luma = 0.299 * pixels[..., 0] + 0.587 * pixels[..., 1] + 0.114 * pixels[..., 2]
    small = luma.reshape(200, 32, 2, 32, 2).mean(axis=(2, 4))
    low = scipy.fft.dctn(small, type=2, axes=(1, 2))[:, :8, :8].reshape(200, 64)
    for number in range(200):
        bits = "".join("01"[int(value)] for value in low[number] > np.median(low[number]))
        assert int(windows[number, 0]) == int(bits, 2)


def test_flat_pictures_hash_alike_on_every_machine() -> None:
    flat = np.stack([np.full((64, 64, 3), grey, dtype=np.uint8) for grey in (1, 77, 130, 255)])
    assert np.array_equal(window_hashes(flat), np.full((4, WINDOWS), 1 << 63, dtype=np.uint64))


def test_copies_are_near_and_others_are_far(originals: list[Image.Image], strangers: list[Image.Image]) -> None:
    base = _hash(*(_file(image, quality=95) for image in originals))
    far: list[tuple[str, int]] = []
    for number, image in enumerate(originals):
        for kind, file in _copies(image, number).items():
            distance = int(hamming(_hash(file), base[number : number + 1])[0])
            far += [(kind, distance)] if distance > 4 else []
    assert len(far) <= 2 and all(distance <= 6 for _, distance in far), far  # of 280
    others = _hash(*(_file(image, quality=95) for image in strangers))
    between = hamming(base[:, None], others[None, :])
    assert between.min() > 4 and abs(float(between.mean()) - 32) < 3


@pytest.mark.parametrize("distance", [0, 1, 3, 4, 7, 8])
def test_the_search_finds_what_brute_force_finds(distance: int) -> None:
    """Hashes at every distance from 0 to 12 of some public one, and far ones."""
    rng = np.random.default_rng(distance)
    public = rng.integers(0, 1 << 63, 20_000, dtype=np.uint64) << np.uint64(1)
    private = rng.integers(0, 1 << 63, 3000, dtype=np.uint64) << np.uint64(1)
    for row in range(2600):
        flips = rng.choice(64, row % 13, replace=False).astype(np.uint64)
        private[row] = public[rng.integers(len(public))] ^ np.bitwise_or.reduce(np.uint64(1) << flips, initial=0)
    valid = rng.random(3000) < 0.95
    known = [Hashes(each[:, None], np.ones(len(each), dtype=bool)) for each in np.array_split(public, 2)]
    found = overlapping(Hashes(private[:, None], valid), known, distance, crops=False)
    nearest = np.array([int(hamming(np.uint64(one), public).min()) for one in private])
    expected = np.flatnonzero(valid & (nearest <= distance))
    assert len(expected) > 150 and found.dtype == np.uint64
    assert found.tolist() == expected.tolist()


def test_nothing_to_compare_with_excludes_nobody() -> None:
    one = Hashes(np.array([[5, 9]], dtype=np.uint64), np.array([True]))
    none = Hashes(one.windows, np.array([False]))
    assert len(overlapping(one, [], 4)) == len(overlapping(one, [none], 4)) == len(overlapping(none, [one], 4)) == 0
    assert overlapping(one, [one], 4).tolist() == [0]


@pytest.mark.parametrize("crops", [True, False])
def test_windows_of_either_picture_are_compared_with_the_whole_of_the_other(crops: bool) -> None:
    rng = np.random.default_rng(7)
    public = rng.integers(0, 1 << 63, (300, 5), dtype=np.uint64)
    private = rng.integers(0, 1 << 63, (90, 5), dtype=np.uint64)
    private[:30, 0] = public[:30, 3]  # the private picture is a crop
    private[30:60, 2] = public[30:60, 0] ^ np.uint64(5)  # the public one is
    private[60:90, 2] = public[60:90, 2]  # both are, of a third
    found = overlapping(Hashes(private, np.ones(90, dtype=bool)), [Hashes(public, np.ones(300, dtype=bool))], 2, crops)
    assert found.tolist() == (list(range(60)) if crops else [])


def _crop(image: Image.Image, wide: float, high: float, right: float, down: float) -> bytes:
    """A JPEG of the part with these shares of the sides, at this share of what is left over."""
    width, height = round(image.width * wide), round(image.height * high)
    left, top = round((image.width - width) * right), round((image.height - height) * down)
    return _file(image.crop((left, top, left + width, top + height)), quality=80)


def test_crops_of_ten_per_cent_are_found_wherever_they_are_and_strangers_are_not(
    tmp_path: Path, write_tar: TarMaker, originals: list[Image.Image], strangers: list[Image.Image]
) -> None:
    """Through the command: private crops of public pictures, public crops of private ones, at any place, as JPEG."""
    places = np.random.default_rng(11).random((40, 2))
    shapes = [(0.9, 0.9), (0.9, 1.0), (1.0, 0.9), (0.95, 0.92)]
    crops = [_crop(image, *shapes[n % 4], *places[n]) for n, image in enumerate(originals)]
    whole = [_file(image, quality=95) for image in originals]
    others = [_file(image, quality=95) for image in strangers]
    public = _set(tmp_path / "public", write_tar, [*whole[:20], *crops[20:]])
    private = _set(tmp_path / "private", write_tar, [*crops[:20], *whole[20:], *others], per_shard=100)
    command = ["--private", str(private), "--against", str(public), "--workers", "1"]
    assert main([*command, "--no-crops"]) == 0
    without = len(np.load(private / "index" / IDS))
    assert main(command) == 0
    found = np.load(private / "index" / IDS)
    assert len(found) >= 38 and found.max() < 40, "strangers begin at 40"
    assert without < 15


def test_private_copies_of_public_pictures_are_left_out(
    tmp_path: Path, write_tar: TarMaker, originals: list[Image.Image], strangers: list[Image.Image]
) -> None:
    """Through the command, on shards: all copies go, every other record stays, bad ones included."""
    public = _set(tmp_path / "public", write_tar, [_file(image, quality=95) for image in originals[:20]])
    held_out = _set(tmp_path / "held_out", write_tar, [_file(image, quality=95) for image in originals[20:30]])
    files: list[bytes] = []
    twins: list[int] = []
    for number in range(40):
        files.append(_file(strangers[number], quality=90))
        if number < 30:
            copies = list(_copies(originals[number], number).values())
            twins.append(len(files))
            files.append(copies[number % len(copies)])
    files += [b"no picture", b""]
    private = _set(tmp_path / "private", write_tar, files, suffix="png")
    whole = ShardIndex.open(private)
    command = [sys.executable, "-m", "murmuration.contrib.overlap", "--private", str(private), "--against",
               str(public), str(held_out), "--workers", "1"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "30 of 72 records look like public ones" in done.stdout and "n stays 72" in done.stdout
    left = ShardIndex.open(private, excluded="skipped")
    assert left.records == 42 and left.manifest_digest == whole.manifest_digest
    assert [n for n in range(72) if ShardIndex.open(private).left_out(n)] == np.load(private / "index" / IDS).tolist()
    listed = np.load(private / "index" / IDS)
    assert listed.tolist() == twins
    facts = json.loads((private / "index" / FACTS).read_bytes())
    assert facts["manifest_digest"] == whole.manifest_digest and facts["distance"] == 4
    assert [name.split()[0] for name in facts["against"]] == ["public", "held_out"]
    everybody, kept = ShardReader(whole), ShardReader(left)
    expected = [record for record in range(len(files)) if record not in twins]
    assert [kept.read(n)["png"] for n in range(42)] == [everybody.read(n)["png"] for n in expected]
    # Private: hashes describe pictures, ids name records.
    for name in (IDS, FACTS, FOLDER):
        assert (private / "index" / name).stat().st_mode & 0o077 == 0
    # Given again, it finds its hashes and comes to the same list.
    assert main(command[3:]) == 0 and np.load(private / "index" / IDS).tolist() == twins


@pytest.fixture
def two_sets(tmp_path: Path, write_tar: TarMaker, originals: list[Image.Image]) -> tuple[Path, Path]:
    files = [_file(image, quality=90) for image in originals[:12]]
    return _set(tmp_path / "private", write_tar, files[:8]), _set(tmp_path / "public", write_tar, files[6:])


def test_directions_that_leak_are_refused_with_the_reason(two_sets: tuple[Path, Path]) -> None:
    private, public = two_sets

    def attempt(one: Path, other: Path, runs: Callable[[Path], list[str]] = _nobody) -> None:
        exclude_overlaps(one, [other], 4, 1, _silent, runs)

    with pytest.raises(LeakError, match="deduplicating a private set within itself"):
        attempt(private, private)
    with pytest.raises(LeakError, match=r"run 'secret' trained on them.*would reveal who is among them"):
        attempt(public, private, lambda folder: ["secret"] if folder == private / "index" else [])
    assert not list(private.glob(f"index/{FOLDER}")), "refused before anything is computed"
    attempt(private, public)
    with pytest.raises(LeakError, match="was itself filtered as a private set"):
        attempt(public, private)
    assert not (public / "index" / FACTS).exists()


def test_a_set_that_shares_one_shard_is_the_set_itself(two_sets: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = two_sets
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "a.tar").write_bytes((private / "000000.tar").read_bytes())
    (mixed / "b.tar").write_bytes((public / "000000.tar").read_bytes())
    build(mixed)
    with pytest.raises(LeakError, match="contains the private records themselves"):
        exclude_overlaps(private, [mixed], 4, 1, _silent, _nobody)


def test_records_of_a_run_may_be_filtered_later_and_others_by_them_may_not(
    two_sets: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the log that real runs write. n stays, so only a resume has to declare the change, and is told so."""
    private, public = two_sets
    assert RunLog.beside(private / "index").register("id", "private", "my-run", 8.0, 1e-5) is None
    assert main(["--private", str(private), "--against", str(public), "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "n stays 8" in said and "run 'my-run' began with another list" in said and "--new-segment" in said
    assert ShardIndex.open(private).records == 8 and ShardIndex.open(private).left_out(6)
    assert main(["--private", str(public), "--against", str(private)]) == 2
    assert "would reveal who is among them" in capsys.readouterr().err


def test_everybody_excluded_is_an_error_and_writes_nothing(two_sets: tuple[Path, Path]) -> None:
    private, public = two_sets
    twin = _twin(public)
    with pytest.raises(ShardError, match="nothing left"):
        exclude_overlaps(public, [private, twin], 4, 1, _silent, _nobody)
    assert not (public / "index" / FACTS).exists()
    with pytest.raises(ValueError, match="--distance 17"):
        exclude_overlaps(private, [public], 17, 1, _silent, _nobody)


def _twin(public: Path) -> Path:
    """The same pictures in other bytes: no shard in common, every picture a copy."""
    reader = ShardReader(ShardIndex.open(public))
    folder = public.parent / "twin"
    folder.mkdir()
    with TarWriter(str(folder / "000000.tar"), encoder=False) as writer:
        for number in range(reader.index.records):
            picture = Image.open(io.BytesIO(reader.read(number)["jpg"]))
            writer.write({"__key__": f"x{number}", "png": _file(picture, "PNG")})
    build(folder)
    return folder


_HASHER = """
import sys, time
from murmuration.contrib.overlap.exclude import hash_index
from murmuration.data.index.shard_index import ShardIndex
def show(done, total):
    print(done, flush=True)
hash_index(ShardIndex.open(sys.argv[1], excluded="ignored"), 1, show)
"""


def test_hashing_goes_on_after_a_kill(tmp_path: Path, write_tar: TarMaker, strangers: list[Image.Image]) -> None:
    files = [_file(image, quality=60) for image in strangers] * 40
    private = _set(tmp_path / "set", write_tar, files, per_shard=2000)
    process = subprocess.Popen(
        [sys.executable, "-c", _HASHER, str(private)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    reached = 0
    while reached < 300:
        reached = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    first: list[int] = []
    hashes = hash_index(ShardIndex.open(private), 1, lambda done, total: first.append(done))
    assert 300 <= first[0] < 1600, "what was done is not done again, and the kill came in time"
    assert hashes.valid.all() and np.array_equal(hashes.values, np.tile(_hash(*files[:40]), 40))
    # A changed set is hashed anew.
    (private / "000000.tar").unlink()
    _set(private, write_tar, files[1:50])
    start: list[int] = []
    assert len(hash_index(ShardIndex.open(private), 1, lambda done, total: start.append(done)).values) == 49
    assert start[0] == 0


def test_units_are_excluded_whole(two_sets: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Records 6 and 7 look like public ones; 4 to 7 are one unit, the others one each."""
    private, public = two_sets
    unit = "key:00000(?=[4567])"
    command = ["--private", str(private), "--against", str(public), "--workers", "1"]
    assert main([*command, "--by-unit"]) == 2 and "knows no units" in capsys.readouterr().err
    assert prepare.main(["index", str(private), "--unit", unit, "--unit-missing", "own"]) == 0
    assert open_units(ShardIndex.open(private), unit).count == 5
    assert main(command) == 0
    index = ShardIndex.open(private)
    assert index.excluded_by == "" and [index.left_out(n) for n in range(8)] == [False] * 6 + [True] * 2
    assert main([*command, "--by-unit"]) == 0
    index = ShardIndex.open(private)
    assert index.excluded_by == unit and [index.left_out(n) for n in range(8)] == [False] * 4 + [True] * 4
    assert open_units(index, unit).count == 5, "n stays"


@pytest.mark.parametrize(
    "name, wrong",
    [("hashes.npy", "empty"), ("states.npy", "far too many"), ("hashes.npy", "broken archive"), ("about.json", "deep")],
)
def test_damaged_hashes_are_made_anew(
    tmp_path: Path, write_tar: Callable[..., Path], picture: Callable[..., bytes], name: str, wrong: str
) -> None:
    write_tar(tmp_path / "a.tar", [{"__key__": "a", "jpg": picture(1)}])
    index = build(tmp_path)
    whole = hash_index(index, 1, lambda done, total: None)
    (index.folder / "phash" / name).write_bytes(DEEP if name == "about.json" else WRONG_NPY[wrong])
    again = hash_index(index, 1, lambda done, total: None)
    assert again.values.tolist() == whole.values.tolist() and again.valid.tolist() == [True]


@pytest.mark.parametrize(
    ("options", "said"),
    [("--workers 0", "--workers 0: at least 1 process"), ("--distance 65", "--distance 65: choose 0")],
)
def test_bad_input_is_one_sentence(
    two_sets: tuple[Path, Path], options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = two_sets
    assert main(["--private", str(private), "--against", str(public), *options.split()]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint and complaint.count("\n") == 1


def test_without_faiss_the_fix_is_named(two_sets: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"murmuration\[overlap\]"):
        exclude_overlaps(two_sets[0], [two_sets[1]], 4, 1, _silent, _nobody)
