"""The trade-off curve as SVG for use inside a page: false alarms on the x axis, records found on the y axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 74, 34, 40, 62
SMALLEST = 1e-6
BLUE, GREY, ORANGE, INK = "#2563a8", "#8a8f98", "#d9772b", "#1c2530"
MARKED = (1e-3, 1e-2)


def trade_off_svg(proved: Points, by_epsilon_alone: Points) -> str:
    """Points are shares of false alarms and the most records found: only numbers, so nothing has to be escaped."""
    inner = [
        *_axes(),
        _line([(_shares(step), _shares(step)) for step in range(61)], GREY, 'stroke-dasharray="6 4"'),
        _line(by_epsilon_alone, ORANGE, 'stroke-dasharray="2 3"'),
        _line([*proved, (1.0, 1.0)], BLUE, 'stroke-width="2.5"'),
    ]
    for alpha, found in proved:
        if any(math.isclose(alpha, mark) for mark in MARKED):
            inner.append(f'<circle cx="{_x(alpha):.1f}" cy="{_y(found):.1f}" r="4" fill="{BLUE}"/>')
            inner.append(_text(_x(alpha) - 6, _y(found) - 8, f"{math.ceil(1000 * found) / 10:.1f} %", "end", BLUE))
    inner += _legend()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
        "<title>Most records that any test finds, at each share of false alarms</title>" + "".join(inner) + "</svg>"
    )


def _axes() -> Iterable[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for power in range(round(math.log10(SMALLEST)), 1):
        x = _x(10.0**power)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e3e7ec"/>'
        yield _text(x, bottom + 18, f"{10.0 ** (power + 2):.4f}".rstrip("0").rstrip(".") + " %", "middle")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e3e7ec"/>'
        yield _text(LEFT - 8, y + 4, f"{100 * share:.0f} %", "end")
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>'
    yield _text((LEFT + right) / 2, HEIGHT - 14, "false alarms: share of unused records that are accused", "middle")
    middle = (TOP + bottom) / 2
    yield (
        f'<text x="16" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 16 {middle:.1f})">'
        "used records found, at most</text>"
    )


def _legend() -> Iterable[str]:
    for place, (colour, dash, label) in enumerate((
        (BLUE, "", "proved for this run"), (ORANGE, "2 3", "from (ε, δ) alone"),
        (GREY, "6 4", "without the model"),
    )):  # fmt: skip
        x, y = LEFT + 185 * place, TOP - 22
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        yield f'<line x1="{x}" y1="{y}" x2="{x + 28}" y2="{y}" stroke="{colour}" stroke-width="2"{dashed}/>'
        yield _text(x + 35, y + 4, label, "start")


def _line(points: Points, colour: str, style: str) -> str:
    drawn = " ".join(f"{_x(alpha):.1f},{_y(found):.1f}" for alpha, found in points)
    return f'<polyline points="{drawn}" fill="none" stroke="{colour}" {style}/>'


def _text(x: float, y: float, words: str, anchor: str, colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def _shares(step: int) -> float:
    return SMALLEST ** (1 - step / 60)


def _x(share: float) -> float:
    along = 1 - math.log10(max(share, SMALLEST)) / math.log10(SMALLEST)
    return LEFT + along * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
