"""One picture of the scaling: efficiency by number of ranks, and where the time of a step goes. What is predicted is
hollow and dashed."""

from __future__ import annotations

import itertools
import math
from html import escape
from typing import Any

# of Okabe and Ito, told apart by people who do not tell red from green
COLORS = {
    "weak": "#0072B2",
    "strong": "#D55E00",
    "compute": "#009E73",
    "data wait": "#E69F00",
    "communication": "#CC79A7",
}
SHARES = {"compute": "compute", "data wait": "data", "communication": "communication"}
WIDTH, HEIGHT, TOP, BOTTOM = 980, 430, 70, 64
LEFT = (64, 470)  # of the first panel: where its axis begins, and where it ends
RIGHT = (570, 860)


def plot(report: dict[str, Any], title: str) -> str:
    """An SVG."""
    points = report["points"]
    numbers = sorted({each["ranks"] for each in points})
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
            ' font-size="12" fill="#333">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT[0], 20, title, "start", "font-weight='bold'"),
        text(RIGHT[1] + 110, 20, "solid: measured; hollow and dashed: predicted", "end"),
        *efficiencies(points, numbers),
        *shares([each for each in points if each["mode"] == "weak"]),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def line(x: float, y: float, u: float, v: float, more: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{u:.1f}" y2="{v:.1f}" {more}/>'


def efficiencies(points: list[dict[str, Any]], numbers: list[int]) -> list[str]:
    """Both kinds of scaling, the ranks at equal distances for each doubling; samples/s at the points."""
    span = max(1.0, math.log2(numbers[-1]))
    high = max(1.0, *(each["efficiency"] for each in points)) * 1.05
    inner = (LEFT[0] + 24, LEFT[1] - 60)  # room for the first point and the last one's label

    def place(ranks: int, value: float) -> tuple[float, float]:
        return inner[0] + (inner[1] - inner[0]) * math.log2(ranks) / span, TOP + (HEIGHT - TOP - BOTTOM) * (
            1 - value / high
        )

    parts = [text((LEFT[0] + LEFT[1]) / 2, TOP - 22, "efficiency: samples/s of a rank, in those of one rank alone")]
    for percent in range(0, int(high * 100) + 1, 20):
        y = place(1, percent / 100)[1]
        is_ideal = percent == 100
        parts.append(line(LEFT[0], y, LEFT[1], y, 'stroke="#888" stroke-width="1.5"' if is_ideal else 'stroke="#ddd"'))
        parts.append(text(LEFT[0] - 8, y + 4, f"{percent} %", "end"))
    for ranks in numbers:
        parts.append(text(place(ranks, 0)[0], HEIGHT - BOTTOM + 18, f"{ranks}"))
    parts.append(text((LEFT[0] + LEFT[1]) / 2, HEIGHT - 12, "ranks"))
    ends: list[float] = []
    for mode in ("weak", "strong"):
        mine = sorted((each for each in points if each["mode"] == mode), key=lambda each: each["ranks"])
        color = COLORS[mode]
        for before, after in itertools.pairwise(mine):
            dashes = 'stroke-dasharray="5 4"' if after["is_predicted"] else ""
            ends_at = (*place(before["ranks"], before["efficiency"]), *place(after["ranks"], after["efficiency"]))
            parts.append(line(*ends_at, f'stroke="{color}" stroke-width="2" {dashes}'))
        for each in mine:
            x, y = place(each["ranks"], each["efficiency"])
            fill = "white" if each["is_predicted"] else color
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{color}" stroke-width="2"/>')
            if each["ranks"] > 1 or mode == "weak":
                parts.append(
                    text(
                        x, y + (-10 if mode == "weak" else 19), f"{each['samples_per_s']:,.0f}/s", more='font-size="10"'
                    )
                )
        if mine:
            x, y = place(mine[-1]["ranks"], mine[-1]["efficiency"])
            y = next((end + 16 for end in ends if abs(end - y) < 16), y)
            ends.append(y)
            parts.append(text(x + 32, y + 4, mode, "start", f'style="fill:{color}" font-weight="bold"'))
    return parts


def shares(points: list[dict[str, Any]]) -> list[str]:
    """The milliseconds of the weak step, one bar for each number of ranks."""
    points = sorted(points, key=lambda each: each["ranks"])
    longest = max(each["step_s"] for each in points) * 1000
    tick = nice(longest)
    high, low = HEIGHT - BOTTOM, TOP
    top = tick * math.ceil(longest / tick)
    parts = [text((RIGHT[0] + RIGHT[1]) / 2, TOP - 22, "where the time of a step goes (weak scaling)")]
    for k in range(round(top / tick) + 1):
        y = high - (high - low) * k * tick / top
        parts.append(line(RIGHT[0], y, RIGHT[1], y, 'stroke="#ddd"'))
        parts.append(text(RIGHT[0] - 8, y + 4, f"{k * tick:g}", "end"))
    parts.append(text(RIGHT[0] - 8, TOP - 22, "ms", "end"))
    parts.append(text((RIGHT[0] + RIGHT[1]) / 2, HEIGHT - 12, "ranks"))
    slot = (RIGHT[1] - RIGHT[0]) / len(points)
    labels: dict[str, float] = {}
    for k, each in enumerate(points):
        x, y = RIGHT[0] + slot * (k + 0.5), float(high)
        for name, share in SHARES.items():
            tall = (high - low) * each["step_s"] * 1000 * each[share] / top
            y -= tall
            labels[name] = y + tall / 2
            look = (
                f'fill="{COLORS[name]}"'
                if not each["is_predicted"]
                else f'fill="{COLORS[name]}" fill-opacity="0.15" stroke-dasharray="4 3"'
            )
            parts.append(
                f'<rect x="{x - slot * 0.3:.1f}" y="{y:.1f}" width="{slot * 0.6:.1f}" height="{tall:.1f}" {look}'
                f' stroke="{COLORS[name]}"/>'
            )
        parts.append(text(x, high + 18, f"{each['ranks']}"))
        if each["is_predicted"]:
            parts.append(text(x, high + 30, "predicted", more='font-size="9"'))
    before = math.inf
    for name, y in labels.items():  # upwards, none over another
        before = min(y, before - 16)
        parts.append(text(RIGHT[1] + 6, before + 4, name, "start", f'style="fill:{COLORS[name]}" font-weight="bold"'))
    return parts


def nice(longest: float) -> float:
    """A round distance of ticks, four to ten of them up to `longest`."""
    magnitude = 10.0 ** math.floor(math.log10(longest))
    return next(step for step in (magnitude * k for k in (0.1, 0.2, 0.25, 0.5, 1.0)) if longest / step <= 10)
