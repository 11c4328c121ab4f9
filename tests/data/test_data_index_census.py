"""What indexing leaves out or finds odd is said: a record that nobody misses is missed for ever."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from murmuration.data.index.census import CENSUS, Census, remarks
from murmuration.data.index.folders import build_folder
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import ShardError

ROOT = Path(__file__).resolve().parents[2]
PREPARE = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index"]


@pytest.fixture
def odd(tmp_path: Path, write_members: Callable[..., Path], picture: Callable[..., bytes]) -> Path:
    """A captioned record, one without caption, one of a caption alone, one of a DICOM file; and what is none."""
    folder = tmp_path / "odd"
    names = ["a.jpg", "a.txt", "b.jpg", "b.caption", "c.txt", "d.dcm", "README", ".hidden", "__meta__/x.json", "e/"]
    write_members(folder / "0.tar", [(name, b"" if name.endswith("/") else b"x") for name in names])
    write_members(folder / "1.tar", [])
    write_members(folder / "2.tar", [("NOTES", b"x")])
    (folder / "3.tar.gz").write_bytes(gzip.compress((folder / "0.tar").read_bytes()))
    (folder / "4.dcm").write_bytes(b"x")
    (folder / "5").write_bytes(b"x")
    for companion in ("0.parquet", "0_stats.json", ".hidden"):
        (folder / companion).write_text('{"successes": 4}')
    return folder


SAID = [
    "2 of 3 shards contain no record: 1.tar, 2.tar",
    "of 4 records read, 2 have .jpg, 2 have .txt, 1 have .caption, 1 have .dcm",
    "records without a picture (.jpg .jpeg .png .webp .gif .bmp): 2; where a run needs one they are bad records",
    "records without a caption (.txt): 2; where a run needs one they are bad records",
    "files that belong to no record: 4; members of records are named like 000123.jpg",
    "not used: 3 files (1 .tar.gz, 1 .dcm, 1 5); unpack compressed shards into plain .tar files; "
    "to use .dcm files, name them in a table and run: python launch/prepare.py pack IMAGES --csv TABLE --out SHARDS",
]


def _told(folder: Path, out: Path) -> list[str]:
    said: list[str] = []
    assert build(folder, out, tell=said.append).records == 4
    return said


def test_all_that_is_left_out_is_said(odd: Path, tmp_path: Path) -> None:
    said = _told(odd, tmp_path / "out")
    assert said[:5] == SAID[:5]
    assert said[5].startswith("not used: 3 files (") and said[5].endswith(SAID[5].partition(")")[2])
    assert all(each in said[5] for each in ("1 .tar.gz", "1 .dcm", "1 5")) and len(said) == 6
    done = subprocess.run([*PREPARE, str(odd)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("4 records in 3 shards") and not done.stderr
    assert all(sentence in done.stdout for sentence in said)


def test_what_was_read_before_a_stop_is_said_as_well_and_kept_for_the_owner_alone(
    odd: Path, tmp_path: Path, write_members: Callable[..., Path]
) -> None:
    out = tmp_path / "out"
    damaged = write_members(odd / "6.tar", [("x.jpg", b"x")])
    damaged.write_bytes(damaged.read_bytes()[:600])
    time.sleep(0.1)
    with pytest.raises(ShardError, match=r"6\.tar"):
        _told(odd, out)
    notes = list((out / ".work").iterdir())
    assert len(notes) == 3 and all(note.stat().st_mode & 0o077 == 0 for note in notes)
    damaged.unlink()
    assert _told(odd, out)[:5] == SAID[:5]
    kept = [path for path in out.rglob("*") if path.is_file() and b"caption" in path.read_bytes()]
    assert kept == [out / CENSUS] and kept[0].stat().st_mode & 0o077 == 0
    # Shards that are known are not read again, so of their members nothing is said.
    assert [each.partition(":")[0] for each in _told(odd, out)] == ["2 of 3 shards contain no record", "not used"]


def test_the_fields_of_a_json_are_counted_and_nothing_that_they_hold(
    tmp_path: Path, write_tar: Callable[..., Path], picture: Callable[..., bytes]
) -> None:
    folder = tmp_path / "set"
    texts = [
        b'{"captions": ["a secret", "b"], "patient": "smith"}',
        b'{"patient": "jones"}',
        b"[1]",
        b"{",
        b"[" * 9_000,
    ]
    samples = [{"__key__": f"{n:03d}", "jpg": picture(n), "json": text} for n, text in enumerate(texts)]
    large = {"__key__": "large", "jpg": picture(9), "txt": b"x", "json": b'{"big": "' + b"x" * (2 << 20) + b'"}'}
    write_tar(folder / "0.tar", [*samples, large])
    # Of each shard the first hundred are looked into, and then every second.
    write_tar(folder / "1.tar", [{"__key__": f"{n}", "json": b'{"n": 1}'} for n in range(150)])
    said: list[str] = []
    index = build(folder, tell=said.append)
    assert said[1] == "of 127 .json looked into, 125 have n, 2 have patient, 1 have captions"
    assert any(each.endswith("they are bad records unless their .json lists captions") for each in said)
    assert not any(word in "".join(said) for word in ("secret", "smith", "jones", "big"))
    kept = (index.folder / CENSUS).read_text()
    assert '"patient": 2' in kept and not any(word in kept for word in ("secret", "smith", "jones", "big"))


def test_a_table_beside_images_is_told_with_the_command_that_joins_them(
    tmp_path: Path, picture: Callable[..., bytes]
) -> None:
    folder = tmp_path / "set" / "images"
    folder.mkdir(parents=True)
    for name, content in (("a.jpg", picture(1)), ("../captions.csv", b"x"), ("b.dcm", b"x"), ("../notes.md", b"x")):
        (folder / name).write_bytes(content)
    done = subprocess.run([*PREPARE, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0 and "1 image," in done.stdout
    assert "not used: 1 file (1 .dcm); to use .dcm files, name them in a table" in done.stdout
    assert "captions.csv beside the images: not used; for captions or labels from a table, use: " in done.stdout
    assert f"prepare.py pack {folder} --csv {folder.parent / 'captions.csv'} --out SHARDS" in done.stdout
    (folder / "labels.tsv").write_bytes(b"x")
    done = subprocess.run([*PREPARE, str(folder)], capture_output=True, text=True)
    assert "captions.csv and 1 more tables beside the images" in done.stdout


def test_of_a_set_as_it_should_be_nothing_is_found_odd(small_set: ShardIndex, tmp_path: Path) -> None:
    said: list[str] = []
    build(small_set.folder.parent, tmp_path / "out", tell=said.append)
    assert said == ["of 25 records read, all have .jpg, all have .txt"]


def test_suffixes_are_printed_without_what_a_terminal_obeys_and_not_for_pages() -> None:
    census = Census()
    census.count({"jpg", "\x1b[2J\n\udcff"})
    for number in range(5_000):
        census.count({"jpg", f"x{number}"})
    census.count(set())
    said = "".join(remarks(census))
    assert said.isprintable() and len(said) < 1_000 and "of 5001 records" in said


@pytest.mark.parametrize("magic", ["gz", "bz2", "xz"])
def test_a_compressed_shard_is_told_by_what_it_is(
    tmp_path: Path, write_members: Callable[..., Path], magic: str
) -> None:
    with tarfile.open(tmp_path / "a.tar", f"w:{magic}") as archive:
        for number in range(40):
            path = tmp_path / f"{number}.jpg"
            path.write_bytes(os.urandom(100))
            archive.add(path, path.name)
    with pytest.raises(ShardError, match=r"a\.tar: compressed; .* unpack it"):
        build(tmp_path)


def test_a_folder_without_images_is_told_what_it_holds(tmp_path: Path) -> None:
    for name in ("0.tar.gz", "1.tar.gz", "scans/a.dcm", "scans/b.DCM", "scans/\x1b[2J"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(b"x")
    with pytest.raises(ShardError, match=r"neither .* but 5 files \(2 \.tar\.gz, 2 \.dcm, 1 \\x1b\[2j\); name another"):
        build_folder(tmp_path / "set")


def test_names_that_are_no_text_do_not_end_the_command(tmp_path: Path, picture: Callable[..., bytes]) -> None:
    root = os.path.join(os.fsencode(tmp_path), b"\xff")
    os.mkdir(root)
    for name in (b"a.jpg", b"b.\xfe"):
        with open(os.path.join(root, name), "wb") as file:
            file.write(picture(1))
    done = subprocess.run([*PREPARE, root], capture_output=True, text=True)
    assert done.returncode == 0 and "1 image," in done.stdout and "not used: 1 file (1 .\\udcfe)" in done.stdout
