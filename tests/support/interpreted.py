"""Kernels in Triton's interpreter, which a process must be told of before it imports Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def results_of(worker: Path) -> Any:
    """What the script prints behind RESULTS, as JSON."""
    done = subprocess.run(
        [sys.executable, str(worker)], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=1800,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULTS ")), None)
    assert line is not None, done.stdout + done.stderr
    return json.loads(line.removeprefix("RESULTS "))


def patch_once() -> None:
    """For the script: Triton's language is patched as a kernel begins, and not anew in each function that it calls,
    which took two fifths of the interpreter's time."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain, whole = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda _: plain(whole)
    interpreter.InterpretedFunction.__call__ = lambda self, *given, **named: self.rewrite()(*given, **named)
