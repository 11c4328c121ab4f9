"""The report of what was measured: Markdown, one JSON, and a plot of the ratio that matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_cases import Found

ORDER = ("probe", "truth", "micro", "kernels", "step", "feed")


def write(folder: Path) -> str:
    """Writes report.md, report.json and ratio.png; returns the Markdown."""
    parts: Found = {
        part: json.loads((folder / f"{part}.json").read_text()) for part in ORDER if (folder / f"{part}.json").exists()
    }
    if not parts:
        return f"{folder} has no results yet; run the parts first"
    text = "\n\n".join([_head(parts), *(_section(part, parts[part]["cases"]) for part in parts)]) + "\n"
    (folder / "report.md").write_text(text)
    (folder / "report.json").write_text(json.dumps(parts, indent=1) + "\n")
    if "micro" in parts:
        _plot(parts["micro"]["cases"], folder / "ratio.png")
    return text


def _head(parts: Found) -> str:
    environments = [each["environment"] for each in parts.values()]
    lines = [f"- {name}: {value}" for name, value in environments[0].items()]
    mixed = "" if all(each == environments[0] for each in environments) else "\nThe parts come from different devices."
    return "# Measured by `python benchmarks/gpu.py`\n\n" + "\n".join(lines) + mixed


def _section(part: str, cases: Found) -> str:
    if part == "kernels":
        return "\n\n".join(["## kernels", *(_kernels(name, found) for name, found in cases.items())])
    rows = {name: _flat(found) for name, found in cases.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [f"## {part}", "", "| case | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(_shown(row.get(column)) for column in columns) + " |")
    return "\n".join(lines)


def _kernels(name: str, found: Found) -> str:
    """One line for each kernel: launches and milliseconds, plain and private."""
    if "kernels" not in found:
        return f"### {name}\n\n{found}"
    lines = [f"### {name}: {found['plain_ms']:.2f} ms plain, {found['private_ms']:.2f} ms private", ""]
    lines += ["| kernel | plain | ms | private | ms |", "|---|---|---|---|---|"]
    for kernel, plain, plain_ms, private, private_ms in found["kernels"]:
        shown = kernel[:120].replace("|", "/")
        lines.append(f"| `{shown}` | {plain} | {plain_ms:.3f} | {private} | {private_ms:.3f} |")
    return "\n".join(lines)


def _flat(found: Found, before: str = "") -> Found:
    """Nested results as columns of their own."""
    flat: Found = {}
    for name, value in found.items():
        flat |= _flat(value, f"{before}{name} ") if isinstance(value, dict) else {before + name: value}
    return flat


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plot(cases: Found, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ways = {"graph_over_plain": ("o", "as a run does it"), "private_over_plain": ("x", "kernel by kernel")}
    figure, axes = plt.subplots(figsize=(9, 4))
    for number, model in enumerate(dict.fromkeys(name.rsplit(" ", 1)[0] for name in cases)):
        for ratio, (marker, way) in ways.items():
            points = sorted(
                (int(name.rsplit(" ", 1)[1]), found[ratio])
                for name, found in cases.items()
                if name.rsplit(" ", 1)[0] == model and ratio in found
            )
            if points:
                style = "-" if marker == "o" else ":"
                axes.plot(*zip(*points, strict=True), style, marker=marker, color=f"C{number}", label=f"{model}, {way}")
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlabel="records in the micro-batch", ylabel="private speed / plain speed, both eager")
    axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def counted_table(counted: Found) -> str:
    """What tests/gpu/count.py counted for the shipped recipes without a GPU."""
    lines = ["| model | kernels, plain → private | GB | waits for the device | peak GiB |", "|---|---|---|---|---|"]
    for model, each in counted.items():
        plain, private = each["plain"], each["private"]
        waits = [sum(kind["syncs"].values()) for kind in (plain, private)]
        lines.append(
            f"| {model} | {plain['kernels']:,} → {private['kernels']:,} | "
            f"{plain['megabytes'] / 1e3:.1f} → {private['megabytes'] / 1e3:.1f} | {waits[0]} → {waits[1]} | "
            f"{plain['peak_mib'] / 1024:.1f} → {private['peak_mib'] / 1024:.1f} |"
        )
    return "\n".join(lines)
