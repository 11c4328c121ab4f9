"""Golden values that a machine's kernels and libraries have a hand in, as text by item."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

from tests.golden import commands
from tests.golden.commands import ROOT
from tests.golden.texts import as_json, digest, normalised, of_file

HERE = Path(__file__).parent
Items = dict[str, str]
TOY = "toy.json"
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0": (2, {"zero_optimization.stage": 0}),
    "zero1": (2, {"zero_optimization.stage": 1}),
    "zero2": (2, {"zero_optimization.stage": 2}),
    "zero3": (2, {"zero_optimization.stage": 3, "zero_optimization.stage3_param_persistence_threshold": 0}),
    "fsdp2": (2, {"run.engine": "fsdp2"}),
    # What else may be chosen, in one process: other noise, clipping, optimizers, products and dropped units.
    "other": (1, {
        "run.noise": "chacha20", "run.precision": "bf16", "run.clip_memory": "fast", "model.depth": 2,
        "model.dropout": 0.1, "model.drop_path": 0.2, "phases.0.optimizer": {"type": "SGD"},
        "phases.1.optimizer": {"type": "LAMB"},
        "phases.1.privacy.clip": {"kind": "flat", "norm": 1.0, "groups": "block"},
        "phases.2.optimizer": {"type": "AdamW", "params": {"ema_decay": 0.9}},
        "phases.2.privacy.clip.adaptive": {"quantile": 0.5},
        "phases.2.mixing": {
            "data": {"source": "shards", "path": "data/held_out", "public": True, "tokenizer": "data/tokenizer.json"},
            "batch": 8,
        },
    }),
}  # fmt: skip
"""Ranks and settings of the runs of the toy config, by name."""
SEED = {"run.debug_seed": 7}


def data(folder: Path) -> Items:
    """The toy's data, which `runs` takes, and synthetic shards."""
    output = demo_data(folder)
    for kind in ("mixed", "shapes"):
        place = str(folder / "synthetic" / kind)
        command = ("synthetic", "--kind", kind, "--records", "24", "--size", "48", "--per-shard", "10", "--out", place)
        output += commands.run("prepare.py", *command, "--workers", "1", folder=folder).output
    found = {"output": normalised(output, folder)}
    for path in sorted([*(folder / "data").rglob("*"), *(folder / "synthetic").rglob("*")]):
        if path.is_file() and "stamp" not in path.name and path.name != "salt.key" and not path.name.startswith("."):
            found[path.relative_to(folder).as_posix()] = of_file(path, folder)
    return found


def demo_data(folder: Path) -> str:
    """`folder`/data, as the toy config names it."""
    options = ("--out", str(folder / "data"), "--private", "120", "--held-out", "16", "--textures", "32")
    output = commands.run("prepare.py", "demo", *options, folder=folder).output
    for salt in (folder / "data").rglob("salt.key"):  # else digests in ledgers would be of chance
        salt.write_bytes(bytes(32))
    return output


def toy_run(folder: Path, name: str) -> Items:
    """A whole run of the toy config with keys from a fixed seed: every byte that it leaves, and exported weights."""
    demo_data(folder)
    shutil.copy(HERE / TOY, folder / TOY)
    ranks, settings = RUNS[name]
    options = [part for key, value in (settings | SEED).items() for part in ("--set", f"{key}={json.dumps(value)}")]
    done = commands.run("train.py", "--config", TOY, *options, folder=folder, ranks=ranks)
    found: Items = {"console": normalised(done.output, folder)}
    run_dir = folder / "runs" / Path(TOY).stem
    files = sorted(path for path in run_dir.rglob("*") if path.is_file())
    for path in files:
        where = path.relative_to(run_dir).as_posix()
        if path.name in ("ledger.jsonl", "manifest.json", "latest"):
            found[where] = path.read_text()
        elif path.suffix in (".json", ".jsonl", ".md", ".html") and path.parent.name != "secret":
            found[where] = normalised(path.read_text(), folder)
        elif path.suffix == ".safetensors":
            found[where] = of_file(path, folder)
    modes = {f"{stat.filemode(path.stat().st_mode)} {path.relative_to(run_dir)}" for path in files}
    found["files"] = normalised("\n".join(sorted(modes)) + "\n", folder)
    verdict = commands.run("account.py", "verify", str(run_dir), "--json", folder=folder)
    found["verify"] = normalised(as_json(json.loads(verdict.output)), folder)
    commands.run("export.py", str(run_dir), str(folder / "export"), folder=folder)
    for path in sorted(folder.glob("export/*.safetensors")):
        found[f"weights {path.stem}"] = _weights(path)
    return found


def _weights(path: Path) -> str:
    from safetensors.torch import load_file

    tensors = sorted(load_file(str(path)).items())
    lines = [f"{name} {list(t.shape)} {t.dtype} {digest(t.contiguous().numpy().tobytes())}\n" for name, t in tensors]
    return "".join(lines)


def account(folder: Path) -> Items:
    """What the accounting and the planner say to a few questions."""
    asked = {
        "epsilon": ("account.py", "epsilon", "--n", "20000", "--batch", "1000", "--sigma", "0.8", "--steps", "50",
                    "--at-epsilon", "4", "--gdp"),
        "epsilon of two phases by RDP": ("account.py", "epsilon", "--n", "20000", "--batch", "1000", "--sigma", "0.9",
                                         "--steps", "50", "--phase", "20000,500,1.1,20", "--accountant", "rdp"),
        "calibrate steps": ("account.py", "calibrate", "--n", "20000", "--batch", "1000", "--sigma", "1", "--epsilon",
                            "3"),
        "explain": ("account.py", "explain", "--epsilon", "2", "--delta", "1e-5"),
        "planner": ("plan.py", "--config", str(ROOT / "ds_configs" / "vip" / "vip_base.json"), "--gpus", "16",
                    "--memory", "80", "--tflops", "150", "--link", "25", "--set",
                    "phases.1.privacy.noise_multiplier=0.5"),
    }  # fmt: skip
    found: Items = {}
    for name, (script, *arguments) in asked.items():
        done = commands.here(script, *arguments)
        found[name] = normalised(f"exit code {done.code}\n{done.output}", folder)
    return found
