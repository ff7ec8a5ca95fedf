"""The one plotter of scripts/: lines over titled axes, as the text of an SVG."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

# Okabe and Ito's palette, which colour-blind people can tell apart
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
LEFT, RIGHT, BOTTOM, HEIGHT, WIDTH = 68, 20, 50, 330, 760  # HEIGHT: of the plot area alone


def svg_file(text: str) -> Path:
    """The value of --plot, checked before anything is measured. Raises argparse.ArgumentTypeError."""
    path = Path(text)
    if path.suffix != ".svg" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text}: cannot be written; give a name that ends in .svg in a folder that exists"
        )
    return path


@dataclass(frozen=True)
class Series:
    """One line. An empty name keeps it out of the legend."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = COLORS[0]
    is_dashed: bool = False
    has_markers: bool = True
    width: float = 2.0
    opacity: float = 1.0


def line_plot(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    y_range: tuple[float, float] | None = None,
    x_ticks: Sequence[tuple[float, str]] = (),
    marks: Sequence[tuple[float, str, str]] = (),
) -> str:
    """All series over one pair of axes, from x = 0 on. x_ticks: (x, text); by default round values.

    `marks` are vertical lines: (x, text, color).
    """
    points = [point for each in series for point in each.points]
    legend = [each for each in series if each.name]
    top = 36 + 20 * bool(title) + 18 * len(legend)
    height, bottom = top + HEIGHT + BOTTOM, top + HEIGHT
    low, high = y_range or (min(y for _, y in points), max(y for _, y in points))
    last = max(x for x, _ in points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / last, bottom - HEIGHT * (y - low) / ((high - low) or 1.0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
        ' font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 20, title, "start", 'font-weight="bold"'),
        _text((LEFT + WIDTH - RIGHT) / 2, height - 10, x_label),
        _text(16, top + HEIGHT / 2, y_label, "middle", f'transform="rotate(-90 16 {top + HEIGHT / 2})"'),
    ]
    for value in (low + (high - low) * k / 5 for k in range(6)):
        y = place(points[0][0], value)[1]
        parts += [_line(LEFT, y, WIDTH - RIGHT, y, 'stroke="#ddd"'), _text(LEFT - 8, y + 4, f"{value:.3g}", "end")]
    for value, words in x_ticks or _ticks(last):
        parts.append(_text(place(value, low)[0], bottom + 18, words))
    for x, words, color in marks:
        x = place(x, low)[0]
        parts += [
            _line(x, top, x, bottom, f'stroke="{color}" stroke-dasharray="1 3"'),
            _text(x, top - 4, words, "middle", f'style="fill:{color}"'),
        ]
    for each in series:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in each.points))
        look = f'stroke="{each.color}" stroke-width="{each.width}" opacity="{each.opacity:g}" fill="none"'
        dashes = ' stroke-dasharray="4 3"' if each.is_dashed else ""
        parts.append(f'<polyline points="{path}" {look}{dashes}/>')
        for x, y in (place(*point) for point in each.points if each.has_markers):
            fill = "white" if each.is_dashed else each.color
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{each.color}"/>')
    for k, each in enumerate(legend):
        y = 20 + 20 * bool(title) + 18 * k
        dashes = ' stroke-dasharray="4 3"' if each.is_dashed else ""
        parts.append(_line(LEFT, y, LEFT + 24, y, f'stroke="{each.color}" stroke-width="2"{dashes}'))
        parts.append(_text(LEFT + 30, y + 4, each.name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, look: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" {look}/>'


def _ticks(last: float) -> list[tuple[float, str]]:
    """Round values from 0 to `last`, four to ten of them."""
    magnitude = 10.0 ** math.floor(math.log10(last))
    step = next(magnitude * k for k in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if last / (magnitude * k) <= 10)
    return [(step * k, f"{step * k:,g}") for k in range(int(last / step) + 1)]
