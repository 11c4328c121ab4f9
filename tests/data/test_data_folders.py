"""Folders of images as records: those that torchvision sees, in an order that is frozen, none counted twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.index.folders import FolderIndex, build_folder
from murmuration.data.index.open import is_image_folder, open_index
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import ShardError

ROOT = Path(__file__).resolve().parents[2]
Picture = Callable[..., bytes]

LAYOUTS = {
    "imagenet": [f"n0{c}440764/n0{c}_{i}.JPEG" for c in (3, 1, 2) for i in range(4)],
    "inaturalist": [f"0000{c}_Animalia_x y_z/{i}f.jpg" for c in range(3) for i in range(3)],
    "mixed suffixes": [f"{c}/{i}{suffix}" for c in "ba" for i, suffix in enumerate((".png", ".webp", ".jpeg", ".JPG"))],
    "nested below the class": ["cat/a/1.jpg", "cat/b/1.jpg", "cat/2.jpg", "dog/1.jpg"],
    "order of names": ["a b/1.jpg", "a/1.jpg", "ä/1.jpg", "A/1.jpg", "a-b/1.jpg"],
}
FORMS = {".png": "PNG", ".webp": "WEBP"}


@pytest.fixture
def fill(tmp_path: Path, picture: Picture) -> Callable[[list[str]], Path]:
    def write(names: list[str], folder: str = "set") -> Path:
        for number, name in enumerate(names):
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(number, 30 + number, FORMS.get(path.suffix, "JPEG")))
        return tmp_path / folder

    return write


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_and_classes_are_those_of_torchvision(layout: str, fill: Callable[..., Path]) -> None:
    root = fill(LAYOUTS[layout])
    theirs = ImageFolder(str(root))
    index = build_folder(root)
    assert index.records == len(theirs) == len(LAYOUTS[layout]) and list(index.classes) == theirs.classes
    labels = {Path(path): label for path, label in theirs.samples}
    reader = ShardReader(index)
    seen = []
    for record in range(index.records):
        place, start, end = index.locate(record)
        path = Path(place).resolve()
        members = reader.read(record)
        assert (start, end) == (0, path.stat().st_size)
        assert members == {path.suffix[1:].lower(): path.read_bytes(), "cls": str(labels[path]).encode()}
        seen.append((labels[path], os.fsencode(path)))
    assert seen == sorted(seen), "classes, and files within them, come in order"


def test_places_are_recognised_by_their_letters(fill: Callable[..., Path]) -> None:
    root = fill(["a/airfield/1.jpg", "a/apartment_building/outdoor/1.jpg", "a/alcove/1.jpg", "b/bow/2.jpg"])
    index = build_folder(root)
    assert index.classes == ("a/airfield", "a/alcove", "a/apartment_building/outdoor", "b/bow")
    assert [ShardReader(index).read(record)["cls"] for record in range(4)] == [b"0", b"1", b"2", b"3"]
    assert build_folder(root, rule="top").classes == ("a", "b")
    # Single letters alone are a usual ImageFolder (characters, say).
    assert build_folder(fill(["a/1.jpg", "b/1.jpg"], "letters")).classes == ("a", "b")


def test_a_folder_without_classes(fill: Callable[..., Path]) -> None:
    root = fill([f"{i}.jpg" for i in range(5)])
    index = build_folder(root)
    assert index.classes == () and index.records == 5 and set(ShardReader(index).read(3)) == {"jpg"}
    fill(["sub/1.jpg"])
    with pytest.raises(ShardError, match=r"0\.jpg: an image beside the class folders"):
        build_folder(root)
    assert build_folder(root, rule="none").records == 6


def test_batches_read_it_unchanged(fill: Callable[..., Path]) -> None:
    index = build_folder(fill(LAYOUTS["imagenet"]))
    batch = BatchReader(index, DataSpec(16)).read(np.array([0, 11, -1, 5]), 0)
    assert batch.present.tolist() == [True, True, False, True] and not batch.inputs["images"][2].any()
    assert batch.inputs["images"][:2].flatten(1).std(1).min() > 0


def test_the_list_is_frozen(fill: Callable[..., Path]) -> None:
    root = fill(LAYOUTS["imagenet"])
    index = build_folder(root)
    before = [index.locate(record) for record in range(12)]
    (root / "n01440764" / "n01_0a.JPEG").write_bytes(b"new")
    again = open_index(root)
    assert [again.locate(record) for record in range(12)] == before and again.records == 12
    again.check_unchanged()
    assert again.manifest_digest == index.manifest_digest != build_folder(root).manifest_digest


def test_files_that_changed_stop_the_run_and_their_names_stay_private(fill: Callable[..., Path]) -> None:
    root = fill(LAYOUTS["imagenet"])
    index = build_folder(root)
    path = Path(index.locate(0)[0])
    raw = path.read_bytes()
    for changed in (raw[:-1], raw + b"x"):
        path.write_bytes(changed)
        with pytest.raises(ShardError, match=path.name):
            index.check_unchanged()
    for wrong in (raw[:-1], raw + b"x", b""):
        with pytest.raises(ShardError, match="n01440764"):
            index.members(0, wrong)
    path.write_bytes(raw[:-1])
    reader = ShardReader(index, pause=0)
    with pytest.raises(ShardError, match="n01440764") as caught:
        reader.read(0)
    assert path.name not in str(caught.value), "which record was drawn is private"
    path.unlink()
    with pytest.raises(ShardError, match="n01440764") as caught:
        ShardReader(index, pause=0).read(0)
    assert path.name not in str(caught.value)
    with pytest.raises(ShardError, match="gone"):
        index.check_unchanged()
    # A rebuild counts one record less: nothing is put in its place.
    assert build_folder(root).records == 11


def test_contents_are_pinned_on_request(fill: Callable[..., Path]) -> None:
    root = fill(LAYOUTS["imagenet"])
    loose = build_folder(root)
    pinned = build_folder(root, root.with_name("pinned"), contents=True)
    assert loose.manifest_digest != pinned.manifest_digest
    path = Path(pinned.locate(7)[0])
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    loose.check_unchanged()
    pinned.check_unchanged()
    with pytest.raises(ShardError, match="changed"):
        pinned.check_unchanged(contents=True)
    assert set(ShardReader(loose).read(7)) == {"jpeg", "cls"}
    with pytest.raises(ShardError, match="changed since it was indexed"):
        ShardReader(pinned, pause=0).read(7)
    assert build_folder(root, root.with_name("again"), contents=True).manifest_digest != pinned.manifest_digest


def test_equal_contents_are_refused_on_request(fill: Callable[..., Path]) -> None:
    root = fill(LAYOUTS["imagenet"])
    assert build_folder(root, refuse_twins=True).records == 12
    shutil.copy(root / "n01440764" / "n01_0.JPEG", root / "n03440764" / "copy.JPEG")
    assert build_folder(root).records == 13
    with pytest.raises(ShardError, match=r"n01_0\.JPEG and .*copy\.JPEG: the same content, one of 1 such"):
        build_folder(root, refuse_twins=True)


@pytest.mark.parametrize("kind", ["loop", "folder twice", "file twice", "hard link", "dangling"])
def test_nothing_is_counted_twice_through_links(kind: str, fill: Callable[..., Path]) -> None:
    root = fill(LAYOUTS["imagenet"])
    first = root / "n01440764"
    if kind == "loop":
        (first / "up").symlink_to(root)
    elif kind == "folder twice":
        (root / "n09").symlink_to(first)
    elif kind == "file twice":
        (root / "n02440764" / "same.JPEG").symlink_to(first / "n01_0.JPEG")
    elif kind == "hard link":
        os.link(first / "n01_0.JPEG", root / "n02440764" / "same.JPEG")
    else:
        (first / "gone.JPEG").symlink_to(root / "nowhere")
    with pytest.raises(ShardError, match="No such file" if kind == "dangling" else "through a link"):
        build_folder(root)


def test_links_that_lead_elsewhere_are_followed(fill: Callable[..., Path]) -> None:
    far = fill(["x/1.jpg", "x/2.jpg"], "far")
    root = fill(["y/1.jpg"])
    (root / "x").symlink_to(far / "x")
    assert build_folder(root).records == 3


def test_folders_that_hold_something_else_are_refused(fill: Callable[..., Path], tmp_path: Path) -> None:
    splits = fill(["train/a/1.jpg", "val/a/1.jpg"], "splits")
    with pytest.raises(ShardError, match=r"contains splits \(train, val\)"):
        build_folder(splits)
    empty = fill(["a/1.jpg", "c/1.jpg"], "empty")
    (empty / "b").mkdir()
    with pytest.raises(ShardError, match=r"empty/b: no image in this class folder"):
        build_folder(empty)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("x")
    with pytest.raises(ShardError, match="neither tar shards nor images"):
        build_folder(tmp_path / "texts")


def test_hidden_files_and_names_that_are_no_text(fill: Callable[..., Path]) -> None:
    root = fill(["a/1.jpg", "a/.2.jpg", ".thumbs/3.jpg"])
    strange = os.path.join(os.fsencode(root), b"a", b"\xff\xfe.jpg")
    with open(strange, "wb") as file:
        file.write(b"not decoded here")
    index = build_folder(root)
    assert index.records == 2 and ShardReader(index).read(1)["jpg"] == b"not decoded here"


def test_damaged_index_files_are_refused(fill: Callable[..., Path]) -> None:
    root = fill(LAYOUTS["imagenet"])
    index = build_folder(root, contents=True)
    for name in ("names.bin", "files.npy", "digests.npy", "manifest.json"):
        path = index.folder / name
        right = path.read_bytes()
        raw = bytearray(right)
        raw[-9] ^= 1
        path.write_bytes(raw)
        with pytest.raises(ShardError, match=r"index|manifest"):
            FolderIndex.open(root).locate(11)
        path.write_bytes(right[:-8])
        with pytest.raises(ShardError, match=r"index|manifest"):
            FolderIndex.open(root).locate(11)
        path.write_bytes(right)
    assert FolderIndex.open(root).locate(11)
    for record in (-1, 12):
        with pytest.raises(ShardError, match="outside"):
            index.locate(record)


def test_the_command_recognises_what_it_is_given(fill: Callable[..., Path], small_set: ShardIndex) -> None:
    root = fill([*LAYOUTS["imagenet"], "n01440764/LICENSE.txt"])
    prepare = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index"]
    done = subprocess.run([*prepare, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "12 images, 3 classes" in done.stdout and "not used: 1 file (1 .txt)" in done.stdout
    index = open_index(root)
    assert isinstance(index, FolderIndex) and index.manifest_digest in done.stdout
    assert json.loads((index.folder / "manifest.json").read_bytes())["folder"] == "../set"
    shards = small_set.folder.parent
    assert not is_image_folder(str(shards)) and is_image_folder(str(root))
    assert isinstance(open_index(shards), ShardIndex)
    for opened, wrong in ((ShardIndex, root), (FolderIndex, shards)):
        with pytest.raises(ShardError, match="name another folder"):
            opened.open(wrong)
