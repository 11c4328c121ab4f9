"""The index: agrees with webdataset however shards are written, and refuses those whose record count is in doubt."""

from __future__ import annotations

import json
import random
import shutil
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import webdataset

from murmuration.data.batch.shard_reader import LocalFiles, ShardReader
from murmuration.data.index.format import FILES, SHARDS, digest_of
from murmuration.data.index.open import open_index
from murmuration.data.index.scan import scan
from murmuration.data.index.shard_index import ShardIndex, build, expand, shared_shard
from murmuration.data.store.place import Shard, ShardError
from murmuration.data.store.tar import parse

LONG = "folder/" + "k" * 300


def _headers(path: Path) -> list[int]:
    """Start of every header block, by tarfile: extension headers and plain ones."""
    with tarfile.open(path) as archive:
        found = [(member.offset, member.offset_data) for member in archive.getmembers()]
    return sorted({offset for offset, _ in found} | {data - 512 for _, data in found})


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
def test_long_and_foreign_names(tmp_path: Path, write_members: Callable[..., Path], form: int) -> None:
    members = [(f"{LONG}{i}.{suffix}", f"{i}{suffix}".encode()) for i in range(3) for suffix in ("jpg", "seg.PNG")]
    # The plain name last: a long name must not stick to the member after it.
    members += [("ünïcode.jpg", b"u"), (f"{LONG}x.jpg", b"x"), ("y.jpg", b"y")]
    write_members(tmp_path / "a.tar", members, form)
    index = build(tmp_path)
    reader = ShardReader(index)
    assert [reader.read(i) for i in range(6)] == [
        *({"jpg": f"{i}jpg".encode(), "seg.png": f"{i}seg.PNG".encode()} for i in range(3)),
        {"jpg": b"u"},
        {"jpg": b"x"},
        {"jpg": b"y"},
    ]


def test_ustar_prefix_folders_and_members_that_are_no_records(
    tmp_path: Path, write_members: Callable[..., Path]
) -> None:
    names = ("README", "p" * 90 + "/" + "q" * 60 + "/a.jpg", "folder/", "__meta__/x.json", "b.jpg")
    write_members(tmp_path / "a.tar", [(name, b"abc") for name in names], tarfile.USTAR_FORMAT)
    index = build(tmp_path)
    assert index.records == 2
    assert [ShardReader(index).read(i) for i in range(2)] == [{"jpg": b"abc"}] * 2


def test_damaged_header_and_links_are_refused(tmp_path: Path, write_members: Callable[..., Path]) -> None:
    path = write_members(tmp_path / "a.tar", [("a.jpg", b"1"), ("b.jpg", b"2")])
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
    "names", [["a.jpg", "b.jpg", "a.txt"], ["a.jpg", "a.jpg"], ["a.jpg", "a.JPG"], ["x/a.jpg", "b.jpg", "x/a.jpg"]]
)
def test_a_key_that_occurs_twice_is_refused(
    tmp_path: Path, write_members: Callable[..., Path], names: list[str]
) -> None:
    write_members(tmp_path / "a.tar", [(name, b"1") for name in names])
    with pytest.raises(ShardError, match="occurs twice"):
        build(tmp_path)


def test_a_shard_that_occurs_twice_is_refused(small_set: ShardIndex) -> None:
    folder = small_set.folder.parent
    with pytest.raises(ShardError, match="listed twice"):
        build([folder / "000000.tar", folder / "000000.tar"])
    (folder / "000009.tar").write_bytes((folder / "000001.tar").read_bytes())
    with pytest.raises(ShardError, match=r"000001\.tar and 000009\.tar: the same bytes"):
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
    assert [str(path) for path in expand("d/{008..011}.tar")] == ["d/008.tar", "d/009.tar", "d/010.tar", "d/011.tar"]
    assert [str(path) for path in expand("{a,b}/{0..1}.tar")] == ["a/0.tar", "a/1.tar", "b/0.tar", "b/1.tar"]
    assert [str(path) for path in expand(["x.tar", "{1..2}.tar"])] == ["x.tar", "1.tar", "2.tar"]
    with pytest.raises(ShardError, match="not a range"):
        expand("{5..1}.tar")


def test_missing_and_empty_are_refused(tmp_path: Path, write_members: Callable[..., Path]) -> None:
    with pytest.raises(ShardError, match=r"no \*\.tar"):
        build(tmp_path)
    with pytest.raises(ShardError, match="cannot be read"):
        build(tmp_path / "{0..1}.tar")
    write_members(tmp_path / "a.tar", [])
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


# Every way in which shards are written, and every way in which they break, by tarfile's writer and by webdataset's.


FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "webdataset": None}
SUFFIXES = ("jpg", "png", "webp", "txt", "json", "cls")


@pytest.fixture(params=FORMS)
def shard(request, tmp_path: Path, write_tar: Callable[..., Path], write_members: Callable[..., Path]) -> Path:
    """Six records in class folders with all suffixes; sizes around the block size, one of them empty."""
    records = [(f"c{i % 2}/{i:05d}", {suffix: bytes([i]) * (i * 256) for suffix in SUFFIXES}) for i in range(6)]
    path = tmp_path / "shards" / "000000.tar"
    form = FORMS[request.param]
    if form is None:
        return write_tar(path, [{"__key__": key, **content} for key, content in records])
    members = [(f"{key}.{suffix}", value) for key, content in records for suffix, value in content.items()]
    return write_members(path, members, form)


def test_records_are_those_of_webdataset(shard: Path) -> None:
    index = build(shard.parent)
    theirs = list(webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False))  # pyright: ignore[reportAttributeAccessIssue]
    reader = ShardReader(index)
    assert index.records == len(theirs) == 6
    for record, sample in enumerate(theirs):
        assert reader.read(record) == {key: value for key, value in sample.items() if not key.startswith("__")}
        assert set(reader.read(record)) == set(SUFFIXES)


def test_cut_anywhere_it_is_refused(shard: Path) -> None:
    raw = shard.read_bytes()
    end = build(shard.parent).locate(5)[2]
    # Up to one zero block after the data: there tarfile and webdataset end without a word.
    for length in {*range(0, end + 1024, 512), *range(1, end, 1_011), end + 512, end + 1023}:
        shard.write_bytes(raw[:length])
        with pytest.raises(ShardError, match=r"cut|end marker|no record|extension header"):
            build(shard.parent)
    shard.write_bytes(raw[: end + 1024])
    assert build(shard.parent).records == 6


def test_an_archive_that_ends_after_an_extension_header_is_refused(
    tmp_path: Path, write_tar: Callable[..., Path]
) -> None:
    """Closed with a proper end marker, so nothing but the header itself tells of the file that is missing."""
    path = write_tar(tmp_path / "a.tar", [{"__key__": key, "jpg": b"1"} for key in "ab"])
    start = build(tmp_path).locate(1)[1]
    path.write_bytes(path.read_bytes()[: start + 1024] + bytes(1024))
    with tarfile.open(path) as archive, pytest.raises(tarfile.TarError):
        archive.getmembers()
    with pytest.raises(ShardError, match="ends after an extension header"):
        build(tmp_path)


def test_a_hole_anywhere_is_refused(shard: Path) -> None:
    """Zeroed blocks in headers. Inside a member's data nobody can tell them from data; the hash pins them."""
    raw = shard.read_bytes()
    index = build(shard.parent)
    headers, silent = _headers(shard), 0
    for at in headers:
        for blocks in (1, 3):
            shard.write_bytes(raw[:at] + bytes(512 * blocks) + raw[at + 512 * blocks :])
            with suppress(tarfile.TarError), tarfile.open(shard) as archive:
                silent += 0 < len(archive.getmembers()) < 36
            with pytest.raises(ShardError):
                build(shard.parent)
    assert silent > 10, "this test no longer covers the case in which tarfile ends silently"
    # A hole that reaches the end of the file looks like an end marker, only far too long.
    shard.write_bytes(raw[: headers[4]] + bytes(max(len(raw) - headers[4], 70_000)))
    with pytest.raises(ShardError, match="hole"):
        build(shard.parent)
    inside = raw.index(bytes([5]) * 512)
    shard.write_bytes(raw[:inside] + bytes(512) + raw[inside + 512 :])
    assert build(shard.parent).manifest_digest != index.manifest_digest


def test_no_flipped_bit_changes_the_number_of_records(shard: Path) -> None:
    raw = shard.read_bytes()
    whole = scan(shard)
    chance = random.Random(1)
    refused = 0
    for _ in range(1_000):
        flipped = bytearray(raw)
        flipped[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        shard.write_bytes(flipped)
        try:
            again = scan(shard)
        except ShardError:
            refused += 1
        else:
            assert again.sha256 != whole.sha256 and again.offsets_sha256 == whole.offsets_sha256
    assert refused > 100, "too few flips met a header to prove anything"


def test_a_shard_that_changes_after_opening_never_gives_another_record(
    shard: Path, write_tar: Callable[..., Path]
) -> None:
    index = build(shard.parent)
    reader = ShardReader(index, LocalFiles(), pause=0, tries=2)
    first = reader.read(2)
    raw = shard.read_bytes()
    # In place: the open descriptor sees it.
    with shard.open("r+b") as file:
        file.write(raw[512:] + bytes(512))
    for record in range(6):
        with pytest.raises(ShardError, match=r"000000\.tar"):
            reader.read(record)
    shard.write_bytes(raw)
    assert reader.read(2) == first
    # Replaced by a file with other records: a reader that opens it later finds no record there, or not one.
    write_tar(shard.with_name("other"), [{"__key__": f"k{i}", "jpg": b"z" * 3_333} for i in range(30)])
    shard.with_name("other").replace(shard)
    fresh = ShardReader(index, LocalFiles(), pause=0, tries=2)
    for record in range(1, 6):
        with pytest.raises(ShardError, match=r"000000\.tar"):
            fresh.read(record)
    with pytest.raises(ShardError, match="changed since it was indexed"):
        index.check_unchanged()


def test_img2dataset_layout(tmp_path: Path, write_tar: Callable[..., Path]) -> None:
    """Shards with their .parquet and _stats.json; failed downloads stand in the stats, not in the tar."""
    for number in range(2):
        records = [{"__key__": f"{number:05d}{i:04d}", "jpg": bytes([i]), "json": b"{}", "txt": b"x"} for i in range(8)]
        write_tar(tmp_path / f"{number:05d}.tar", [record for i, record in enumerate(records) if i != 3])
        stats = {"count": 8, "successes": 7, "failed_to_download": 1, "failed_to_resize": 0}
        (tmp_path / f"{number:05d}_stats.json").write_text(json.dumps(stats))
        (tmp_path / f"{number:05d}.parquet").write_bytes(b"PAR1")
    index = build(tmp_path)
    assert index.records == 14
    # An archive that was closed too early: complete by itself, and short of what was downloaded.
    write_tar(tmp_path / "00001.tar", records[:5])
    with pytest.raises(ShardError, match=r"00001\.tar: 5 records, but 00001_stats\.json counts 7"):
        build(tmp_path)


def test_shared_shards_are_found_whatever_their_name(
    small_set: ShardIndex, tmp_path: Path, write_tar: Callable[..., Path]
) -> None:
    other = tmp_path / "public"
    write_tar(other / "a.tar", [{"__key__": "x", "jpg": b"1"}])
    assert shared_shard(small_set.shards, build(other).shards) is None
    (other / "b.tar").write_bytes((small_set.folder.parent / "000001.tar").read_bytes())
    found = shared_shard(small_set.shards, build(other).shards)
    assert found is not None and found.name == "b.tar"


def test_the_digest_covers_everything_but_the_etag() -> None:
    shard = Shard("a.tar", 3, 10_240, "1" * 64, "2" * 64, "etag")
    other = {"name": "b.tar", "records": 4, "bytes": 20_480, "sha256": "", "offsets_sha256": "3" * 64}
    digests = {digest_of(SHARDS, [replace(shard, **{field: value})]) for field, value in other.items()}
    digests |= {digest_of(kind, shards) for kind in (SHARDS, FILES) for shards in ([shard], [shard, shard])}
    assert len(digests) == len(other) + 4
    assert digest_of(SHARDS, [replace(shard, etag="")]) == digest_of(SHARDS, [shard])


def test_an_index_of_another_format_is_refused_and_replaced(small_set: ShardIndex) -> None:
    path = small_set.folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for number, said in (
        (2, r"was written by a version before 0\.3\.0; build it"),
        (3, "index format 3, 1 is needed; build it"),
    ):
        path.write_text(json.dumps({**manifest, "format": number}))
        with pytest.raises(ShardError, match=rf"{said} with: python launch/prepare\.py"):
            ShardIndex.open(small_set.folder)
    assert build(small_set.folder.parent).manifest_digest == small_set.manifest_digest
