"""Runs a script with a pretended GPU: PyTorch's CUDA build, one device of compute capability 9.0, and no kernels.

On fake tensors, PyTorch then takes its CUDA paths: checks of devices, `is_cuda`, the attention kernels it would choose,
the backward pass on autograd's own device thread. A tensor on the wrong device is an error. What is computed is not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = {"libpretended.so": "pretended_runtime.c", "libcuda.so.1": "pretended_driver.c"}


def why_not() -> str | None:
    """Why this machine cannot pretend; None where it can."""
    import torch

    if torch.version.cuda is None:
        return "this build of PyTorch knows no CUDA"
    if torch.version.cuda < "13":
        return "the pretended driver is one of CUDA 13"
    if _headers() is None:
        return "the CUDA runtime's headers are not installed"
    return None if _compiler() else "there is no C compiler"


def run(script: Path, *arguments: str, timeout: float = 1200) -> subprocess.CompletedProcess[str]:
    built = _built()
    environment = os.environ | {
        "LD_PRELOAD": str(built / "libpretended.so"), "LD_LIBRARY_PATH": str(built), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def _headers() -> Path | None:
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    return next((path.parent for path in sorted(packages.rglob("driver_types.h"))), None)


def _built() -> Path:
    """Compiled once for these sources and headers; of processes that do it at once, each makes its own and one wins."""
    compiler, headers = _compiler(), _headers()
    assert compiler is not None and headers is not None
    content = b"".join((HERE / source).read_bytes() for source in SOURCES.values()) + str(headers).encode()
    target = Path(sys.prefix) / f"pretended-cuda-{hashlib.sha256(content).hexdigest()[:16]}"
    if not target.is_dir():
        made = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=sys.prefix))
        for library, source in SOURCES.items():
            include = [f"-I{HERE}", f"-I{headers}"]
            subprocess.run(
                [compiler, "-w", "-shared", "-fPIC", *include, "-o", made / library, HERE / source], check=True
            )
        try:
            made.rename(target)
        except OSError:
            shutil.rmtree(made)
    return target
