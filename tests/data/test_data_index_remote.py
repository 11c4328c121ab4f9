"""Indexing shards behind a URL: the same index as of the files, scanned anew where the ETag changed."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import ShardError


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
