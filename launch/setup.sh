#!/bin/sh
# Checks the machine, then fills .venv from the constraints file. Called by `make setup`; safe to repeat.
set -eu
cd "$(dirname "$0")/.."
python="${1:-}"
missing=""
need() { missing="$missing
  $1: install the package $2 (Debian/Ubuntu: apt-get install $3)"; }

[ -n "$python" ] || { echo "error: no Python 3.11 or newer is on the PATH; install it (Debian/Ubuntu: apt-get install python3 python3-venv python3-dev) or name it: make setup PYTHON=..." >&2; exit 2; }
"$python" -c 'import venv, ensurepip' 2>/dev/null || need "the venv module of $python" python3-venv python3-venv
"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' \
    || need "the headers of $python (Python.h)" python3-dev python3-dev
command -v g++ >/dev/null || need "the C++ compiler g++" g++ g++
command -v make >/dev/null || need make make make
command -v git >/dev/null || need git git git
[ -z "$missing" ] || { echo "error: this machine lacks$missing" >&2; exit 2; }

echo "Setting up .venv: about 6 GB on disk, most of it PyTorch with its GPU libraries."
[ -x .venv/bin/python ] || "$python" -m venv .venv
# A file that is not one of the tested ones is refused. Of pip, constraints do not ask for hashes, so it gets a list.
sed -n '/^uv==/,/[^\\]$/p' constraints.txt > .venv/uv.txt
.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.txt
constraints=constraints.txt
if [ "${CUDA:-13}" = 12 ]; then
    constraints=.venv/constraints.txt
    awk '/^[a-z]/ { other = /^(torch|torchvision|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==/ } !other' constraints.txt \
        | cat - constraints-cu12.txt > "$constraints"
fi
# Compiled here and once: where PYTHONDONTWRITEBYTECODE is set, as in many containers, every start would compile anew.
.venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python -r pyproject.toml --extra dev \
    -c "$constraints" || {
    echo "error: not installed, for the reason above; if a hash differs because PyTorch comes from another index (for" \
        "the CPU alone): UV_NO_VERIFY_HASHES=1 make setup" >&2
    exit 2
}
.venv/bin/python -c 'import torch, deepspeed, timm' 2>/dev/null >/dev/null \
    || { echo "error: the installed packages do not import; remove .venv and run make setup again" >&2; exit 2; }
echo "Ready: .venv/bin/python"
