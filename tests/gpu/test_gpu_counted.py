"""What one micro-batch costs on a GPU, counted without one, against what was committed: a count that rises names its
place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import pretended
from tests.gpu.count import CASES, COUNTED

WHY_NOT = pretended.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
# Kernels are whole numbers; bytes and memory are rounded, and other versions of PyTorch may choose otherwise.
ROOM = 1.001
# Python's garbage collector decides when cycles go.
PEAK_ROOM = 1.02
QUICK = ("mae/base", "captioner/base")


def count(*names: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    script = Path(pretended.__file__).with_name("count.py")
    done = pretended.run(script, "json", "--inside", *(word for name in names for word in ("--model", name)), *options)
    line = next((line for line in done.stdout.splitlines() if line.startswith("COUNTED ")), None)
    assert line is not None, done.stdout + done.stderr
    return json.loads(line.removeprefix("COUNTED "))


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    """By one process, most of whose time goes into imports."""
    return count(*QUICK)


def risen(known: dict[str, float], found: dict[str, float]) -> list[str]:
    """Places with more than before, the worst first."""
    more = {place: value - known.get(place, 0) for place, value in found.items() if value > ROOM * known.get(place, 0)}
    return [f"{place}: {known.get(place, 0)} -> {found[place]}" for place in sorted(more, key=lambda p: -more[p])[:5]]


@pytest.mark.parametrize("name", QUICK)
def test_no_count_rises(quick: dict[str, Any], name: str) -> None:
    require_no_rise(name, quick[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nor_do_those_of_compiled_blocks(name: str) -> None:
    found = count(name, options=("--compiled",))[name]
    assert found.keys() == json.loads(COUNTED.read_text())[name].keys()
    require_no_rise(name, found)


def require_no_rise(name: str, found: dict[str, Any]) -> None:
    known = json.loads(COUNTED.read_text())[name]
    for kind, now in found.items():
        before = known[kind]
        for total, places in (("kernels", "kernels_at"), ("megabytes", "megabytes_at")):
            worse = f"{name}, {kind}: {total} {before[total]} -> {now[total]}, at {risen(before[places], now[places])}"
            assert now[total] <= ROOM * before[total], worse
        assert now["peak_mib"] <= PEAK_ROOM * before["peak_mib"], (kind, before["peak_mib"], now["peak_mib"])
        for work, amount in now["gigaflops"].items():
            assert amount <= ROOM * before["gigaflops"].get(work, 0), (kind, work)
        assert not now["fed"] or kind == "plain", f"{name}: a CUDA graph would not see what comes from {now['fed']}"
        new = {place: times for place, times in now["syncs"].items() if times > before["syncs"].get(place, 0)}
        assert not new, f"{name}, {kind}: the host waits for the device at {new}"


def test_the_counter_sees_a_kernel_and_an_answer_that_are_planted(tmp_path: Path) -> None:
    """A counter that saw nothing would find nothing risen. And a tensor on the wrong device is an error."""
    script = tmp_path / "planted.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import torch\nfrom tests.gpu.count import GPU, Count, on_a_gpu\n"
        "with on_a_gpu():\n"
        "    a, b = torch.empty(64, 32, device=GPU), torch.empty(32, 16, device=GPU)\n"
        "    count = Count()\n"
        "    with count:\n"
        "        c = a @ b\n"
        "        if bool((c > 0).any()): raise SystemExit('answered')\n"
        "        c.view(-1); c.sum().cpu()\n"
        "        torch.ones(3).to(GPU)\n"
        "    found = count.found\n"
        "counts = found.syncs, found.fed\n"
        "print(found.kernels, found.flops['product fp32'], *(sum(each.values()) for each in counts), found.peak)\n"
        "with on_a_gpu():\n    torch.empty(3, 3, device=GPU) @ torch.empty(3, 3)\n"
    )
    done = pretended.run(script)
    assert done.returncode == 1 and "device" in done.stderr.splitlines()[-1], done.stdout + done.stderr
    kernels, flops, syncs, fed, peak = map(int, done.stdout.split())
    # The product, the comparison, any, sum and two copies; the answer to `any` and the copy to the host; the other one.
    assert (kernels, flops, syncs, fed) == (6, 2 * 64 * 32 * 16, 2, 1) and peak >= 4 * 64 * 16
