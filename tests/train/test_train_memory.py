"""No core dump and, as far as the system allows, no swap holds un-noised sums or keys."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from murmuration.train.clip.sums import ExactSums
from murmuration.train.distributed.process import keep_from_swap

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="prctl and /proc are Linux's")


def told(code: str) -> dict[str, Any]:
    """What a process of its own, which nothing before has changed, finds out about itself."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@LINUX
def test_memory_that_was_freed_serves_the_next_allocation() -> None:
    """By default, the kernel maps and clears its 16,384 pages each time.

    Not from the first time on: a block is cut to its alignment, and glibc's cache of small pieces may take what was
    cut off, which leaves a hole that is a few bytes short for the next. That cache is full after seven of each size.
    """
    found = told(
        "import json, resource, torch\n"
        "from murmuration.train.distributed.process import describe_process\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(2**24)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "given_back = min(faults() for _ in range(8))\n"
        "describe_process()\n"
        "print(json.dumps({'given back': given_back, 'kept': max([faults() for _ in range(40)][20:])}))\n"
    )
    if found["given back"] < 16_000:
        pytest.skip("this system's allocator keeps what was freed by itself")
    assert found["kept"] < 100


@LINUX
def test_a_process_that_was_started_for_training_cannot_be_dumped() -> None:
    """The limit alone is ignored where the kernel pipes core files to a program."""
    found = told(
        "import ctypes, json, os, resource\n"
        "libc = ctypes.CDLL(None)\n"
        "before = libc.prctl(3, 0, 0, 0, 0)\n"
        "from murmuration.train.distributed.process import describe_process\n"
        "describe_process()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(libc.prctl(3, 0, 0, 0, 0))\n"
        "inherited = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "print(json.dumps({'before': before, 'after': libc.prctl(3, 0, 0, 0, 0), 'inherited': inherited,\n"
        "                  'limit': resource.getrlimit(resource.RLIMIT_CORE)}))\n"
    )
    assert found == {"before": 1, "after": 0, "inherited": 0, "limit": [0, 0]}


@LINUX
def test_what_the_trainer_reads_in_proc_can_still_be_read_and_its_memory_cannot() -> None:
    """By another process of the same user, which is nobody in particular where the tests may choose that."""
    found = told(
        "import json, os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from murmuration.train.distributed.process import forbid_dumps\n"
        "if os.getuid() == 0:\n"
        "    os.setgid(65534); os.setuid(65534)\n"
        "read, write = os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    forbid_dumps()\n"
        "    own = [len(Path('/proc/self/statm').read_text()), len(os.listdir('/proc/self/fd'))]\n"
        "    os.write(write, json.dumps(own).encode()); time.sleep(600)\n"
        "own = json.loads(os.read(read, 100))\n"
        "stat, command = (len(Path(f'/proc/{child}/{n}').read_bytes()) for n in ('stat', 'cmdline'))\n"
        "try:\n"
        "    open(f'/proc/{child}/mem', 'rb'); opened = True\n"
        "except OSError:\n"
        "    opened = False\n"
        "os.kill(child, 9)\n"
        "print(json.dumps({'own': all(own), 'seen': bool(stat and command), 'memory': opened}))\n"
    )
    assert found == {"own": True, "seen": True, "memory": False}


@LINUX
def test_totals_and_keys_are_locked_where_that_is_allowed_and_nothing_fails_where_it_is_not() -> None:
    """Read back from the kernel, which counts locked pages; as a user who has no privilege to ignore the limit."""
    code = (
        "import json, os, re, resource\n"
        "from pathlib import Path\n"
        "import torch\n"
        "from murmuration.train.clip.sums import ExactSums\n"
        "from murmuration.train.distributed.process import keep_from_swap\n"
        "locked = lambda: int(re.search(r'VmLck:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]\n"
        "soft = {limit} if most == resource.RLIM_INFINITY else min({limit}, most)\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, most))\n"
        "if os.getuid() == 0:\n"
        "    os.setgid(65534); os.setuid(65534)\n"
        "sums = ExactSums({{'w': torch.Size([{elements}])}}, torch.device('cpu'))\n"
        "said, after = sums.keep_from_swap(), locked()\n"
        "key = os.urandom(32)\n"
        "print(json.dumps({{'totals': said, 'key': keep_from_swap(key), 'kib': after,\n"
        "    'allowed': resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]}}))\n"
    )
    refused = told(code.format(limit=16384, elements=1 << 16))
    assert (refused["totals"], refused["kib"]) == (False, 0)
    found = told(code.format(limit=1 << 20, elements=1 << 13))
    if found["allowed"] < 1 << 18:
        pytest.skip("this machine allows nobody to lock 256 KiB")
    assert found["totals"] and found["key"] and found["kib"] >= 64


def test_what_lies_on_a_device_is_not_swapped() -> None:
    assert keep_from_swap(torch.empty(3, device="meta"))
    assert ExactSums({}, torch.device("cpu")).keep_from_swap(), "nothing is to be kept"
