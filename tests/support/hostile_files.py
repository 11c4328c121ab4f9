"""Image files made to hurt their decoder, and a decoding process that really crashes where no such file is known."""

from __future__ import annotations

import ctypes
import io
import os
import resource
import signal
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from murmuration.data.decode.decode import BadRecord
from murmuration.data.decode.record import PictureMaker, RecordMaker
from murmuration.data.decode.worker import Make, serve


def one_bit_png(side: int) -> bytes:
    """side x side zeros in a few kilobytes, written by hand: Pillow would need a long time to make it."""
    row = bytes(1 + (side + 7) // 8)
    packer = zlib.compressobj(9)
    body = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()

    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(kind + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + kind + content + crc

    size = side.to_bytes(4, "big")
    header = chunk(b"IHDR", size + size + bytes([1, 0, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def endless_jpeg(side: int, scans: int) -> bytes:
    """A valid progressive JPEG whose last refinement is repeated: kilobytes that decode for minutes."""
    out = io.BytesIO()
    Image.new("L", (side, side), 90).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    last = data.rindex(b"\xff\xda")
    end = data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * scans + data[end:]


def _segfault() -> None:
    ctypes.string_at(0)


def _spin() -> None:
    while True:
        pass


# What the test's decoding process does for contents that start like this.
DEEDS = {
    b"SEGV": _segfault,
    b"ABRT": os.abort,
    b"EXIT": lambda: os._exit(3),
    b"SPIN": _spin,
    b"REST": lambda: time.sleep(600),
    b"HOGS": lambda: np.ones(1 << 32, np.uint8),
    b"KILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def crashing_worker() -> None:
    """The real decoding process, but for the deeds above."""

    def adapt(maker: RecordMaker) -> Make:
        def make(members: Mapping[str, bytes], record: int, step: int, key: bytes, into: np.void) -> bool:
            data = members["jpg"]
            into[into.dtype.names[0]] = 77  # whatever happens now, the row holds something
            if data[:4] in DEEDS:
                DEEDS[data[:4]]()
            if data[:4] == b"ONCE":
                if not os.path.exists(data[4:].decode()):
                    open(data[4:].decode(), "w").close()
                    _segfault()
                data = b""
            if data[:4] == b"NAPS":
                time.sleep(0.4)
                data = data[4:]
            if data[:4] == b"STOP":  # in the middle of its work the process gets no more computing time
                os.kill(os.getpid(), signal.SIGSTOP)
                data = data[4:]
            return maker.make({**members, "jpg": data}, record, step, key, into)

        return make

    serve(adapt)


def standing_machine() -> None:
    """A decoding process on a machine where nothing moves."""
    serve(lambda _maker: lambda *_asked: time.sleep(600) or True)


def standing_decoder() -> None:
    """A machine where all moves but the decoder of pictures."""
    PictureMaker.make = lambda *_asked: time.sleep(600) or np.zeros(1)
    serve()


def misjudging_decoder() -> None:
    """Stands still at records, and calls the known picture, which goes by number 0, damaged."""

    def adapt(maker: RecordMaker) -> Make:
        def make(members: Mapping[str, bytes], record: int, step: int, key: bytes, into: np.void) -> bool:
            if record:
                time.sleep(600)
            raise BadRecord("damaged")

        return make

    serve(adapt)


def leaking_worker() -> None:
    """Each image leaves memory behind, and the decoder words the lack of it as if the next image were damaged."""
    kept: list[np.ndarray] = []

    def adapt(maker: RecordMaker) -> Make:
        def make(members: Mapping[str, bytes], record: int, step: int, key: bytes, into: np.void) -> bool:
            if kept:
                raise BadRecord("could not create decoder object")
            kept.append(np.empty(resource.getrlimit(resource.RLIMIT_AS)[0] * 6 // 10, np.uint8))
            return maker.make(members, record, step, key, into)

        return make

    serve(adapt)


def blank_a_picture(shard: Path) -> None:
    """The first JPEG in a shard loses its head; the shard keeps its size."""
    whole = shard.read_bytes()
    at = whole.index(b"\xff\xd8\xff")
    shard.write_bytes(whole[:at] + bytes(64) + whole[at + 64 :])
