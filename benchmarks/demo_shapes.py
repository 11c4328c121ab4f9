"""Can the demo learn shapes as well as colours in the same time? Three public warm starts in the place of its textures.

    python benchmarks/demo_shapes.py --work WORK

The public pictures are shapes of the demo's kind in grey, and their captions name the shape truly and the colour at
random: they teach shapes and grammar, and colours remain to be learned in private. `words` takes 150 steps of 128
pictures, then the demo's private phase; `small_patch` and `steps` only see how far the public phase alone gets with
patches of 4 pixels (250 steps of 64) and with more steps at a higher rate (600 of 64), and stop after one private step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runs import ADAMW, train  # noqa: E402

from murmuration.data.index.shard_index import build as build_index  # noqa: E402
from murmuration.data.synthetic.index import Sample, generator, jpeg, shape_samples, write_shards  # noqa: E402
from murmuration.data.synthetic.shapes import COLOURS, GRAMMAR_WORDS, caption, draw_scene, render  # noqa: E402
from murmuration.data.text.encoder import word_tokenizer  # noqa: E402

SIDE, PRIVATE, HELD_OUT, PUBLIC = 32, 20_000, 2_000, 10_000
SEEDS = {"private": 101, "held_out": 202, "public": 404}
VARIANTS: dict[str, dict[str, Any]] = {
    "words": {"steps": 150, "batch": 128, "peak": 1e-3, "patch_size": 8, "private_steps": 50},
    "small_patch": {"steps": 250, "batch": 64, "peak": 2e-3, "patch_size": 4, "private_steps": 1},
    "steps": {"steps": 600, "batch": 64, "peak": 2e-3, "patch_size": 8, "private_steps": 1},
}


def grey_shapes(seed: int, count: int) -> Iterator[Sample]:
    for number in range(count):
        draws = generator(seed, number)
        scene = draw_scene(draws)
        grey = render(scene, SIDE, draws).mean(axis=2, keepdims=True).repeat(3, axis=2).astype(np.uint8)
        said = replace(scene, colour=int(draws.integers(len(COLOURS))))
        yield Sample(f"{number:08d}", jpeg(grey), caption(said, draws))


def prepare(folder: Path, small: bool) -> None:
    counts = {"private": PRIVATE, "held_out": HELD_OUT, "public": PUBLIC}
    for name, count in counts.items():
        count, seed = min(count, 600) if small else count, SEEDS[name]
        if not (folder / name / "index").is_dir():
            coloured = shape_samples(seed, count, SIDE, labels=name == "held_out")
            build_index(write_shards(folder / name, grey_shapes(seed, count) if name == "public" else coloured, 1000))
    word_tokenizer(GRAMMAR_WORDS, folder / "tokenizer.json")


def config(data: Path, variant: dict[str, Any], run_dir: Path, small: bool) -> dict[str, Any]:
    """The demo's, with another public phase."""
    found = json.loads((ROOT / "ds_configs" / "demo.json").read_text())
    del found["$schema"], found["zero_optimization"]
    found["model"]["patch_size"] = variant["patch_size"]
    private = found["phases"][1]
    tokenizer = str(data / "tokenizer.json")
    private["data"] |= {"path": str(data / "private"), "tokenizer": tokenizer, "reading": {"workers": 0}}
    private["evaluation"]["path"] = str(data / "held_out")
    private["steps"] = variant["private_steps"]
    public = {
        "name": "warm-start", "objective": "caption", "batch": variant["batch"], "steps": variant["steps"],
        "data": {"source": "shards", "path": str(data / "public"), "public": True, "tokenizer": tokenizer,
                 "reading": {"workers": 0}},
        "optimizer": ADAMW,
        "schedule": {"peak": variant["peak"], "warmup": 20, "shape": "cosine"},
    }  # fmt: skip
    if small:
        public |= {"steps": 2, "batch": 16, "schedule": {"peak": variant["peak"]}}
        private["data"].pop("expected_records")
        private["privacy"]["expected_batch"], private["steps"], private["schedule"] = 30, 1, {"peak": 1e-3}
    found["phases"] = [public, private]
    found["run"] = {"engine": "local", "checkpoint_every": 25, "log_every": 1, "dir": str(run_dir)}
    return found


def row(name: str, run_dir: Path) -> str:
    """Zero-shot accuracies before the private phase and after its last step."""
    lines = map(json.loads, (run_dir / "logs" / "public.jsonl").read_text().splitlines())
    measured = [line for line in lines if "zero_shot_shape" in line]
    cells = [f"{line[f'zero_shot_{what}']:.3f}" for what in ("colour", "shape") for line in (measured[0], measured[-1])]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="keep data and runs here, and reuse what is there")
    parser.add_argument("--smoke", action="store_true", help="toy sizes: only shows that the program runs")
    asked = parser.parse_args()
    data, runs = asked.work.resolve() / "data", asked.work.resolve() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    prepare(data, asked.smoke)
    print("| warm start | colour before | colour after | shape before | shape after |\n|---|---|---|---|---|")
    for name, variant in VARIANTS.items():
        run_dir = train(runs, name, config(data, variant, runs / name, asked.smoke))
        print(row(name, run_dir), flush=True)


if __name__ == "__main__":
    main()
