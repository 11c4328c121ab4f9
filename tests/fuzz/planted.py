"""A command with every fault that the fuzzer must notice; `python -m tests.fuzz.planted` prints what it noticed."""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.fuzz.engine import Broken, Target, Worker

DEEDS = (
    "nothing", "refuse", "raise", "loop", "sleep", "hog", "crash", "other code", "no word", "printed traceback",
    "escape sequence", "endless message", "lie", "recursion", "lone surrogate", "nothing again",
)  # fmt: skip


class Planted(Target):
    cpu_seconds, idle_seconds, memory_bytes = 1, 6.0, 256 << 20

    def seeds(self) -> list[bytes]:
        return [b"nothing"]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        del data, other
        return chance.choice(DEEDS).encode()

    def act(self, data: bytes) -> int:
        deed = data.decode()
        if deed == "raise":
            raise KeyError("shards")
        if deed == "loop":
            while True:
                pass
        if deed == "sleep":
            time.sleep(600)
        if deed == "hog":
            return len(bytearray(1 << 30)) % 2
        if deed == "crash":
            ctypes.string_at(0)
        if deed == "lie":
            raise Broken("a lie")
        if deed == "recursion":
            return self.act(data)
        if deed == "lone surrogate":
            print("\ud800")
        said = {
            "refuse": "error: no such file; name another",
            "printed traceback": "Traceback (most recent call last):\n …",
            "escape sequence": "error: \x1b[2Kall is well", "endless message": "error: " + "9" * 5000,
            "other code": "error",
        }  # fmt: skip
        print(said.get(deed, ""), file=sys.stderr)
        return 1 if deed == "other code" else 2 if deed in (*said, "no word") else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(Planted(Path(folder)))
        print(json.dumps({deed: worker.run(deed.encode()).fault for deed in DEEDS}))
        worker.close()
