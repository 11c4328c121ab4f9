"""The benchmark's results as a table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
COLUMNS = (
    ("model", "s"), ("engine", "s"), ("micro_batch", "d"), ("time_ratio", ".2f"), ("time_ratio_min", ".2f"),
    ("time_ratio_max", ".2f"), ("flop_bound", ".2f"), ("memory_ratio", ".2f"), ("memory_per_record_mib", ".1f"),
    ("max_batch", "d"), ("records_per_second", ".1f"), ("error", ".1e"), ("max_contribution", ".6f"),
)  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """Markdown: one line per model and engine, then the whole logical steps."""
    lines = [_environment(results), "", "| " + " | ".join(name for name, _ in COLUMNS) + " | note |"]
    lines.append("|" + "---|" * (len(COLUMNS) + 1))
    for row in (row for result in results for row in result["rows"]):
        cells = [format(row[name], form) if name in row else "" for name, form in COLUMNS]
        lines.append("| " + " | ".join([*cells, row.get("failed") or row.get("note", "")]) + " |")
    for result in results:
        lines += ["", *_costs(result), *_logical(result)]
    return "\n".join(lines)


def _environment(results: Sequence[Result]) -> str:
    return (
        ", ".join(f"{name} {value}" for name, value in results[0]["environment"].items()) if results else "no results"
    )


def _costs(result: Result) -> list[str]:
    gflops = result["gflops_per_record"]
    return [
        f"{result['model']}: {result['about']}. GFLOP per record: forward products F {gflops['forward']:.2f}, "
        f"attention A {gflops['attention']:.2f}, non-private {gflops['nonprivate']:.2f}, Gram K {gflops['gram']:.2f} "
        f"(triangular {gflops['gram_triangular']:.2f})."
    ]


def _logical(result: Result) -> list[str]:
    logical = result.get("logical")
    if not logical:
        return []
    steps = [
        f"{row['logical_batch']} records ({row['micro_batches']} micro-batches): {row['seconds_per_record'] * 1e3:.4g} "
        f"ms per record, {row['time_ratio']:.2f} of non-private"
        for row in logical["measured"]
    ]
    counted = ", ".join(f"{n}: {calls:.3g}" for n, calls in logical["counted_calls_per_record"].items())
    return [
        "Whole logical steps: " + "; ".join(steps) + ".",
        f"Operator calls of the first and the last micro-batch: {logical['calls_first']} and {logical['calls_last']}; "
        f"peak MiB: {logical['peak_first'] / 2**20:.1f} and {logical['peak_last'] / 2**20:.1f}; "
        f"calls per record by logical batch: {counted}.",
    ]


def plot(results: Sequence[Result], path: Path) -> None:
    """Two rows of bars: time and memory as ratios to non-private, with the FLOP bound as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    figure, axes = plt.subplots(2, len(results), figsize=(4.2 * len(results), 6), squeeze=False)
    for column, result in enumerate(results):
        rows = [row for row in result["rows"] if row["micro_batch"] == result["rows"][-1]["micro_batch"]]
        for place, (key, label) in enumerate((("time_ratio", "time"), ("memory_ratio", "peak memory"))):
            axis, shown = axes[place][column], [row for row in rows if key in row]
            colours = ["tab:orange" if row["engine"].startswith("ours") else "tab:gray" for row in shown]
            bars = axis.barh([row["engine"] for row in shown], [row[key] for row in shown], color=colours)
            axis.bar_label(bars, fmt="%.2f", padding=2)
            axis.axvline(1.0, color="black", linewidth=0.8)
            if key == "time_ratio":
                axis.axvline(rows[0]["flop_bound"], color="tab:blue", linestyle=":", label="FLOP bound")
                axis.set_title(result["model"])
            if max((row[key] for row in shown), default=1) > 5:
                axis.set_xscale("log")
                # Of less than two decades, the axis would name numbers between them, one over the other.
                axis.xaxis.set_minor_formatter(NullFormatter())
                axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axis.set_xlim(0.5, 5 * max(row[key] for row in shown))
            else:
                axis.margins(x=0.25)
            axis.set_xlabel(f"{label} / non-private")
    axes[0][0].legend(loc="lower right", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
