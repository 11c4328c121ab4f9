"""Shards behind a real HTTP server on loopback that fails, stalls, resets and truncates; and the local cache."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from murmuration.data.batch.loader import Loader
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions, ShardReader, open_source
from murmuration.data.draw.poisson import LANES, PoissonSampler
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import ShardError, UnreadableError
from murmuration.data.store.remote import ChangedShardError, Stores, open_shard
from murmuration.data.store.retry import Patience
from tests.support.hostile_files import one_bit_png
from tests.support.range_server import Fault, RangeServer, serving

ROOT = Path(__file__).resolve().parents[2]
KEY = b"k" * 32
SPEC = DataSpec(24, augment="random_resized_crop")
TRANSIENT: list[Fault] = ["500", "503", "404", "reset", "truncate", "stall"]
Pictures = Callable[..., bytes]


def _failing(fault: Fault, first: int) -> Callable[[str, int], Fault]:
    """The first so many answers per shard fail."""
    return lambda _path, attempt: fault if attempt <= first else "ok"


def _batch(index: ShardIndex, **reading) -> BatchReader:
    return BatchReader(index, SPEC, augment_key=KEY, reading=ReadOptions(**reading))


def test_the_same_records_as_from_disk(small_set: ShardIndex, remote: ShardIndex, server: RangeServer) -> None:
    assert remote.records == small_set.records and remote.manifest_digest == small_set.manifest_digest
    ids = np.arange(25)
    expected = _batch(small_set).read(ids, 3)
    sent = server.bytes_sent
    for workers, in_flight in ((0, 1), (0, 16), (2, 16)):
        got = _batch(remote, workers=workers, in_flight=in_flight).read(ids, 3)
        assert got.present.all() and torch.equal(got.inputs["images"], expected.inputs["images"])
    lengths = sum(end - start for _, start, end in map(small_set.locate, range(25)))
    assert server.bytes_sent - sent == 3 * lengths, "the records' bytes and nothing around them"


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_failure_that_passes(
    fault: Fault, small_set: ShardIndex, remote: ShardIndex, server: RangeServer, no_pauses: None
) -> None:
    server.requests.clear()
    server.fault = _failing(fault, 1)
    reader = ShardReader(remote, open_source(remote, ReadOptions(timeout_seconds=2.0)))
    assert [reader.read(i) for i in (0, 10, 24)] == [ShardReader(small_set).read(i) for i in (0, 10, 24)]
    assert min(server.requests[f"{name:06d}.tar"] for name in range(3)) >= 2


@pytest.mark.parametrize("fault", [*TRANSIENT, "no-range"])
def test_a_failure_that_stays_stops_the_run(
    fault: Fault, remote: ShardIndex, server: RangeServer, no_pauses: None
) -> None:
    server.fault = _failing(fault, 10**9)
    reader = _batch(remote, timeout_seconds=0.4)
    with pytest.raises(UnreadableError, match=r"000001\.tar.*restore access") as caught:
        reader.read(np.array([10]), 0)
    assert reader.bad_records == [], "trouble on the way must never pass for a bad record"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("etags", [True, False])
def test_another_shard_under_the_same_name(
    etags: bool, remote: ShardIndex, server: RangeServer, tmp_path: Path, write_tar: Callable[..., Path],
    picture: Pictures,
) -> None:  # fmt: skip
    server.etags = etags
    reader = _batch(remote)
    first = remote.locate(10)[1:]
    samples = [{"__key__": f"{n}", "jpg": picture(10, 40), "txt": b"a red 10" + b"0" * n} for n in range(3)]
    write_tar(tmp_path / "000001.tar", samples)
    assert ShardIndex.open(tmp_path).locate(10)[1:] == first
    before = server.requests["000001.tar"]
    with pytest.raises(ChangedShardError, match=r"000001\.tar: changed since it was indexed.*prepare\.py"):
        reader.read(np.array([10]), 0)
    assert reader.bad_records == [] and server.requests["000001.tar"] == before + 1, "trying again cannot help"
    assert reader.read(np.array([3]), 0).present.all()


def test_a_shard_rewritten_with_equal_size_is_told_by_its_etag(
    remote: ShardIndex, server: RangeServer, tmp_path: Path
) -> None:
    path = tmp_path / "000000.tar"
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))
    with pytest.raises(ChangedShardError, match="ETag"):
        _batch(remote).read(np.array([0]), 0)
    server.etags = False
    assert _batch(remote).read(np.array([0]), 0).present.all(), "without an ETag the size alone can be compared"


@pytest.fixture
def damaged(tmp_path: Path, write_tar: Callable[..., Path], picture: Pictures) -> tuple[Path, int]:
    """A shard with a good record at each even id, and one of DATAPLANE's bad ones at each odd id."""
    whole = picture(1)
    flipped = bytearray(picture(2, 200))
    flipped[len(flipped) // 2] ^= 0x55
    bad = [b"", whole[: len(whole) // 2], b"<!DOCTYPE html><html>404</html>", one_bit_png(14_000), one_bit_png(9_800)]
    samples = []
    for number, content in enumerate(bad):
        samples.append({"__key__": f"{2 * number:03d}", "jpg": picture(number), "txt": b"fine"})
        samples.append({"__key__": f"{2 * number + 1:03d}", "jpg": content, "txt": b"bad"})
    # Damage in the middle of a scan decodes to other pixels; no decoder we use notices. The record stays good.
    samples.append({"__key__": "900", "jpg": bytes(flipped), "txt": b"fine"})
    samples.append({"__key__": "901", "txt": b"no image at all"})
    write_tar(tmp_path / "damaged" / "a.tar", samples)
    return tmp_path / "damaged", len(samples)


def test_bad_contents_through_a_bad_server(damaged: tuple[Path, int], no_pauses: None) -> None:
    """Content is bad, transport is tried again: both at once, and the result is that of the disk."""
    folder, count = damaged
    local = _batch(build(folder))
    expected = local.read(np.arange(count), 2)
    assert local.bad_records == list(range(1, count, 2))
    rotation: list[Fault] = ["ok", "reset", "500", "truncate"]
    with serving(RangeServer(folder)) as server:
        index = build([f"{server.url}/a.tar"], folder / "remote")
        server.fault = lambda _path, attempt: rotation[attempt % 4]
        for workers in (0, 2):
            reader = _batch(index, workers=workers, in_flight=1)
            for _ in range(2):
                got = reader.read(np.arange(count), 2)
            assert torch.equal(got.present, expected.present)
            assert torch.equal(got.inputs["images"], expected.inputs["images"])
            assert reader.bad_records == local.bad_records and reader.bad_reasons == local.bad_reasons
            reader.close()


def test_sixty_four_are_in_flight(remote: ShardIndex, server: RangeServer) -> None:
    source = open_source(remote, ReadOptions())
    server.gather = 60
    with ThreadPoolExecutor(64) as threads:
        list(threads.map(lambda i: ShardReader(remote, source).read(i % 25), range(128)))
    assert server.most_in_flight >= 60


def test_small_micro_batches_do_not_lower_it(remote: ShardIndex, server: RangeServer) -> None:
    server.gather = 18
    loader = Loader(_batch(remote, in_flight=20), PoissonSampler(KEY, KEY, 25, LANES), 0, 1, 2, last=1)
    assert sum(int(batch.present.sum()) for batch in loader.step(1)[1]) == 25
    loader.close()
    assert server.most_in_flight >= 18


def test_a_reader_that_is_closed_between_two_records_says_that_it_was_cancelled(remote: ShardIndex) -> None:
    reader = _batch(remote, in_flight=4)

    class ClosesInBetween(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0
            reader.close()
            yield 1

    with pytest.raises(CancelledError):
        list(reader._made(ClosesInBetween([0, 1]), [0, 1], 0, None))  # pyright: ignore


def test_closing_does_not_wait_for_a_stalled_server(remote: ShardIndex, server: RangeServer) -> None:
    server.fault = _failing("stall", 10**9)
    reader = _batch(remote, in_flight=4, timeout_seconds=1.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(reader.read, np.arange(8), 0)
        while not server.in_flight:
            time.sleep(0.01)
        reader.close()
        # One time-out, and none of the pauses and tries that would follow it (more than 6 s).
        with pytest.raises((ShardError, CancelledError)):
            waiting.result(30)


def test_a_shard_as_a_stream(server: RangeServer, tmp_path: Path, no_pauses: None, monkeypatch) -> None:
    monkeypatch.setattr("murmuration.data.store.remote._STREAM_CHUNK", 10_000)
    path = tmp_path / "000002.tar"
    whole = path.read_bytes()
    for fault in ("ok", *TRANSIENT[1:]):
        server.requests.clear()
        server.fault = _failing(fault, 2)
        with open_shard(f"{server.url}/{path.name}", timeout_seconds=1.0) as stream:
            assert stream.size == len(whole) and stream.etag
            assert b"".join(iter(lambda: stream.read(777), b"")) == whole
    server.fault, before = _failing("ok", 0), server.bytes_sent
    with open_shard(f"{server.url}/{path.name}") as stream:
        assert stream.read() == whole and stream.read() == b""
    assert server.bytes_sent - before == len(whole), "each byte once"
    server.fault = _failing("500", 10**9)
    with (
        pytest.raises(ShardError, match=r"500.*check the URL"),
        open_shard(f"{server.url}/{path.name}", patience=Patience(2, 0)) as stream,
    ):
        stream.read()


def test_a_stream_that_changes_on_the_way(server: RangeServer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("murmuration.data.store.remote._STREAM_CHUNK", 512)
    path = tmp_path / "000002.tar"
    with open_shard(f"{server.url}/{path.name}") as stream:
        stream.read(100)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ShardError, match="changed while it was read"):
            stream.read()


def test_s3(server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The S3 client of obstore, pointed at the loopback server as one points it at MinIO."""
    settings = {"ENDPOINT_URL": server.url, "SKIP_SIGNATURE": "true", "REGION": "us-east-1", "ALLOW_HTTP": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a b.tar").write_bytes((tmp_path / "000000.tar").read_bytes())
    index = build(["s3://bucket/a b.tar"], tmp_path / "s3-index")
    assert index.records == 10
    assert ShardReader(index, open_source(index, ReadOptions())).read(4)["txt"] == b"a red 4"


def test_urls_that_cannot_be_read() -> None:
    with pytest.raises(ShardError, match="ftp:// is not supported; use one of http"):
        Stores().fetch("ftp://host/a.tar", 0, 1)
    with pytest.raises(ShardError) as caught:
        Stores().fetch("https://host/a.tar?X-Signature=secret", 0, 1)
    assert "secret" not in str(caught.value), "a signed URL is a credential"


# Indexing shards behind a URL: the same index as of the files, scanned anew where the ETag changed.


class Quiet(SimpleHTTPRequestHandler):
    """Serves ranges, an ETag that follows the content, and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        raw = Path(self.translate_path(self.path)).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), min(int(asked[2]), len(raw) - 1)) if asked else (0, len(raw) - 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(last - first + 1))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(raw)}")
        self.send_header("ETag", f'"{hash(raw):x}"')
        self.send_header("Last-Modified", self.date_time_string(0))
        self.end_headers()
        if body:
            self.wfile.write(raw[first : last + 1])


def test_remote_shards_give_the_same_index(small_set: ShardIndex, tmp_path: Path) -> None:
    folder = small_set.folder.parent
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        root = f"http://127.0.0.1:{server.server_port}"
        pattern = root + "/{000000..000002}.tar"
        out = tmp_path / "remote"
        with pytest.raises(ShardError, match="--out"):
            build(pattern)
        index = build(pattern, out, workers=1)
        assert index.manifest_digest == small_set.manifest_digest
        assert index.locate(24) == (f"{root}/000002.tar", *small_set.locate(24)[1:])
        assert index.root == json.loads((out / "manifest.json").read_bytes())["folder"] == root
        assert all(shard.etag for shard in index.shards)
        reports: list[tuple[int, int]] = []
        build(pattern, out, workers=1, progress=lambda *report: reports.append(report))
        assert reports == [(3, 3)], "all of them were known"
        raw = (folder / "000001.tar").read_bytes()
        (folder / "000001.tar").write_bytes(raw[:-1] + b"\1")
        with pytest.raises(ShardError, match="000001"):
            build(pattern, out, workers=1)
        (folder / "000001.tar").write_bytes(raw[:512])
        with pytest.raises(ShardError, match=r"000001\.tar: .*(cut off|extension header)"):
            build(pattern, out, workers=1)
    finally:
        server.shutdown()
        server.server_close()
