"""The index: agrees with webdataset, and refuses every shard whose record count would be in doubt."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import webdataset

from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.index.open import open_index
from murmuration.data.index.shard_index import ShardIndex, build, expand
from murmuration.data.store.place import ShardError
from murmuration.data.store.tar import parse

LONG = "folder/" + "k" * 300


def _write_tarfile(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def _headers(path: Path) -> list[int]:
    """Start of every header block, by tarfile: extension headers and plain ones."""
    with tarfile.open(path) as archive:
        found = [(member.offset, member.offset_data) for member in archive.getmembers()]
    return sorted({offset for offset, _ in found} | {data - 512 for _, data in found})


def test_agrees_with_webdataset(small_set: ShardIndex) -> None:
    urls = [str(path) for path in expand(small_set.folder.parent)]
    theirs = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))  # pyright: ignore[reportAttributeAccessIssue]
    reader = ShardReader(small_set)
    assert len(theirs) == small_set.records == 25
    for record, sample in enumerate(theirs):
        content = {suffix: value for suffix, value in sample.items() if not suffix.startswith("__")}
        assert reader.read(record) == content


def test_offsets_are_eight_bytes_per_record_and_agree_with_tarfile(small_set: ShardIndex) -> None:
    path, start, _ = small_set.locate(11)
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert start == members[0].offset
    # PAX headers really are there: the file's data does not follow its first header block at once.
    assert members[0].offset_data - members[0].offset > 512
    located = [small_set.locate(record) for record in range(11, 25)]
    assert [start for _, start, _ in located] == [member.offset for member in members if member.name.endswith("jpg")]
    assert all(end == following[1] for (_, _, end), following in pairwise(located))
    stored = np.load(small_set.folder / "offsets.npy")
    assert stored.dtype == np.uint64 and stored.nbytes == 8 * (25 + 3)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_and_foreign_names(tmp_path: Path, form: int) -> None:
    members = [(f"{LONG}{i}.{suffix}", f"{i}{suffix}".encode()) for i in range(3) for suffix in ("jpg", "seg.PNG")]
    # The plain name last: a long name must not stick to the member after it.
    members += [("ünïcode.jpg", b"u"), (f"{LONG}x.jpg", b"x"), ("y.jpg", b"y")]
    _write_tarfile(tmp_path / "a.tar", members, form)
    index = build(tmp_path)
    reader = ShardReader(index)
    assert [reader.read(i) for i in range(6)] == [
        *({"jpg": f"{i}jpg".encode(), "seg.png": f"{i}seg.PNG".encode()} for i in range(3)),
        {"jpg": b"u"},
        {"jpg": b"x"},
        {"jpg": b"y"},
    ]


def test_ustar_prefix_folders_and_members_that_are_no_records(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("README", "p" * 90 + "/" + "q" * 60 + "/a.jpg", "folder", "__meta__/x.json", "b.jpg"):
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name == "folder" else tarfile.REGTYPE
            info.size = 0 if name == "folder" else 3
            archive.addfile(info, io.BytesIO(b"abc"))
    index = build(tmp_path)
    assert index.records == 2
    assert [ShardReader(index).read(i) for i in range(2)] == [{"jpg": b"abc"}] * 2


def test_every_cut_is_refused(small_set: ShardIndex, tmp_path: Path) -> None:
    path, _, end = small_set.locate(10)
    raw = path.read_bytes()
    broken = tmp_path / "cut" / "a.tar"
    broken.parent.mkdir()
    # Up to one zero block after the data: there tarfile and webdataset end without a word.
    for length in {*range(0, end + 1024, 512), *range(1, end, 397), end + 512, end + 1023}:
        broken.write_bytes(raw[:length])
        with pytest.raises(ShardError, match=r"cut|end marker|no record|extension header"):
            build(broken.parent)
    broken.write_bytes(raw[: end + 1024])
    assert build(broken.parent).records == 1


def test_zeroed_holes_are_refused(small_set: ShardIndex, tmp_path: Path) -> None:
    path, _, _ = small_set.locate(20)
    raw = path.read_bytes()
    broken = tmp_path / "hole" / "a.tar"
    broken.parent.mkdir()
    headers = _headers(path)
    assert len(headers) > 50
    silent = 0
    for at in headers:
        broken.write_bytes(raw[:at] + bytes(512) + raw[at + 512 :])
        try:
            with tarfile.open(broken) as archive:
                silent += 0 < len(archive.getmembers()) < 28
        except tarfile.TarError:
            pass
        with pytest.raises(ShardError):
            build(broken.parent)
    assert silent > 10, "this test no longer covers the case in which tarfile ends silently"
    # A hole that reaches the end of the file looks like an end marker, only far too long.
    at = headers[4]
    broken.write_bytes(raw[:at] + bytes(max(len(raw) - at, 70_000)))
    with pytest.raises(ShardError, match="hole"):
        build(broken.parent)


def test_damaged_header_and_links_are_refused(tmp_path: Path) -> None:
    path = _write_tarfile(tmp_path / "a.tar", [("a.jpg", b"1"), ("b.jpg", b"2")])
    raw = bytearray(path.read_bytes())
    raw[1024 + 3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ShardError, match="checksum"):
        build(tmp_path)
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("a.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "b.jpg"
        archive.addfile(info)
    with pytest.raises(ShardError, match="link"):
        build(tmp_path)


@pytest.mark.parametrize(
    "names",
    [["a.jpg", "b.jpg", "a.txt"], ["a.jpg", "a.jpg"], ["a.jpg", "a.JPG"], ["x/a.jpg", "b.jpg", "x/a.jpg"]],
)
def test_a_key_that_occurs_twice_is_refused(tmp_path: Path, names: list[str]) -> None:
    _write_tarfile(tmp_path / "a.tar", [(name, b"1") for name in names])
    with pytest.raises(ShardError, match="occurs twice"):
        build(tmp_path)


def test_a_shard_that_occurs_twice_is_refused(small_set: ShardIndex) -> None:
    folder = small_set.folder.parent
    with pytest.raises(ShardError, match="listed twice"):
        build([folder / "000000.tar", folder / "000000.tar"])
    (folder / "000009.tar").write_bytes((folder / "000001.tar").read_bytes())
    with pytest.raises(ShardError, match=r"000001\.tar and 000009\.tar: the same bytes"):
        build(folder)


def test_img2dataset_counts_are_honoured(small_set: ShardIndex) -> None:
    folder = small_set.folder.parent
    (folder / "000002_stats.json").write_text(json.dumps({"count": 20, "successes": 14}))
    assert build(folder).records == 25
    (folder / "000002_stats.json").write_text(json.dumps({"count": 20, "successes": 15}))
    with pytest.raises(ShardError, match="counts 15"):
        build(folder)


def test_stale_shards_are_named(small_set: ShardIndex) -> None:
    small_set.check_unchanged(contents=True)
    path = small_set.folder.parent / "000002.tar"
    raw = path.read_bytes()
    path.write_bytes(raw + bytes(512))
    with pytest.raises(ShardError, match=r"000002\.tar"):
        small_set.check_unchanged()
    # The same size, other content: sizes cannot tell, hashes can, and a shifted record cannot be parsed.
    path.write_bytes(raw[512:] + bytes(512))
    small_set.check_unchanged()
    with pytest.raises(ShardError, match=r"000002\.tar"):
        small_set.check_unchanged(contents=True)
    with pytest.raises(ShardError, match=r"000002\.tar"):
        ShardReader(small_set, pause=0).read(20)
    path.unlink()
    with pytest.raises(ShardError, match=r"000002\.tar"):
        small_set.check_unchanged()


def test_index_and_manifest_must_belong_together(small_set: ShardIndex) -> None:
    offsets = small_set.folder / "offsets.npy"
    raw = bytearray(offsets.read_bytes())
    raw[-1] ^= 1
    offsets.write_bytes(raw)
    with pytest.raises(ShardError, match="belong together"):
        ShardIndex.open(small_set.folder)
    offsets.unlink()
    with pytest.raises(ShardError, match=r"launch/prepare\.py index"):
        ShardIndex.open(small_set.folder)


def test_manifest_digest_follows_content_not_place(
    small_set: ShardIndex, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("copy")
    for path in expand(small_set.folder.parent):
        (elsewhere / path.name).write_bytes(path.read_bytes())
    index_folder = tmp_path_factory.mktemp("index")
    moved = build(elsewhere / "{000000..000002}.tar", index_folder, workers=2)
    assert (
        moved.manifest_digest
        == small_set.manifest_digest
        == ShardIndex.open(elsewhere.parent / small_set.folder).manifest_digest
    )
    assert ShardReader(ShardIndex.open(index_folder)).read(24) == ShardReader(small_set).read(24)
    assert build([elsewhere / "000001.tar", elsewhere / "000000.tar"], index_folder).records == 11
    assert ShardIndex.open(index_folder).manifest_digest != small_set.manifest_digest


def test_locate_refuses_foreign_ids(small_set: ShardIndex) -> None:
    for record in (-1, 25):
        with pytest.raises(ShardError, match="outside"):
            small_set.locate(record)


def test_a_record_must_be_exactly_one_record(small_set: ShardIndex) -> None:
    path, start, end = small_set.locate(12)
    raw = path.read_bytes()
    two = small_set.locate(13)[2]
    with pytest.raises(ShardError, match="2 keys"):
        parse(raw[start:two], "two")
    for damaged in (raw[start + 512 : end + 512], raw[start : end - 512], raw[start:end] + bytes(512)):
        with pytest.raises(ShardError):
            parse(damaged, "damaged")


def test_expand() -> None:
    assert [str(path) for path in expand("d/{008..011}.tar")] == [
        "d/008.tar",
        "d/009.tar",
        "d/010.tar",
        "d/011.tar",
    ]
    assert [str(path) for path in expand("{a,b}/{0..1}.tar")] == ["a/0.tar", "a/1.tar", "b/0.tar", "b/1.tar"]
    assert [str(path) for path in expand(["x.tar", "{1..2}.tar"])] == ["x.tar", "1.tar", "2.tar"]
    with pytest.raises(ShardError, match="not a range"):
        expand("{5..1}.tar")


def test_missing_and_empty_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"no \*\.tar"):
        build(tmp_path)
    with pytest.raises(ShardError, match="cannot be read"):
        build(tmp_path / "{0..1}.tar")
    _write_tarfile(tmp_path / "a.tar", [])
    with pytest.raises(ShardError, match="no record"):
        build(tmp_path)
    assert not list(tmp_path.rglob("manifest.json")) + list(tmp_path.rglob("offsets.npy"))


def test_a_place_that_cannot_be_written_is_named_with_the_mend(small_set: ShardIndex, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ShardError, match=r"file/index: cannot be written .*--out"):
        build(small_set.folder.parent, tmp_path / "file" / "index")


def test_a_pattern_is_opened_by_the_index_beside_it_if_that_has_these_shards_alone(small_set: ShardIndex) -> None:
    folder = small_set.folder.parent
    for pattern in ("{000000..000002}.tar", "00000{0,1,2}.tar"):
        found = open_index(folder / pattern)
        assert isinstance(found, ShardIndex) and found.records == 25 and found.folder == small_set.folder
    for pattern in ("{000000..000001}.tar", "{000000..000003}.tar", "000001.tar", "{000001..000002}.tar"):
        with pytest.raises(ShardError, match=r"its 3 shards are not the \d that .* names; name the folder"):
            open_index(folder / pattern)
    shutil.rmtree(small_set.folder)
    with pytest.raises(ShardError, match=r"no index here; build it with: python launch/prepare.py index '.*\{000000"):
        open_index(folder / "{000000..000002}.tar")
    assert build(str(folder / "000001.tar")).records == 1
    assert open_index(folder / "000001.tar").records == 1
