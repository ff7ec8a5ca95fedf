# extra: reports
"""Draw line plots with titled axes, as SVG text, for all of scripts/."""

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

# this is the Okabe-Ito palette, which is safe for colour-blind readers
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
ROUNDING = 1e-9  # error of a quotient that should be an integer
MAX_DIGITS = 6  # digits after the point of a tick's text (smaller numbers have an exponent)
LEFT, RIGHT, BOTTOM, HEIGHT, WIDTH = 68, 20, 50, 330, 760  # HEIGHT is that of the plot area only


def parse_output_path(text: str, suffix: str = ".svg") -> Path:
    """Parse the value of --plot, before anything is measured. Raises argparse.ArgumentTypeError."""
    path = Path(text)
    if path.suffix != suffix or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written. Give a name that ends in {suffix} in an existing folder."
        )
    return path


@dataclass(frozen=True)
class Series:
    """One line, with a gap where a y is None. An empty name keeps it out of the legend."""

    name: str
    points: Sequence[tuple[float, float | None]]
    color: str = COLORS[0]
    is_dashed: bool = False
    has_markers: bool = True
    width: float = 2.0
    opacity: float = 1.0
    tooltip: str = ""  # the tooltip of its points, if the plot has tooltips


def draw_line_plot(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    y_range: tuple[float, float] | None = None,
    marks: Sequence[tuple[float, str, str]] = (),
    has_tooltips: bool = False,
) -> str:
    """Plot all series on one pair of axes that starts at x = 0, with round numbers on both axes.

    Args:
        series: the lines.
        x_label, y_label: the titles of the axes.
        title: the title of the plot.
        y_range: the values that the y axis covers (None: those of the lines).
        marks: vertical lines, each with x, text and color.
        has_tooltips: whether the plot is for an HTML page. Its points then have tooltips, and its y axis is logarithmic
            if it covers more than two decades.
    """
    points = [(x, y) for curve in series for x, y in curve.points if y is not None]
    legend = [curve for curve in series if curve.name]
    title_height = 20 if title else 0
    top = 36 + title_height + 18 * len(legend)
    height, bottom = top + HEIGHT + BOTTOM, top + HEIGHT
    low, high = y_range or (min(y for _, y in points), max(y for _, y in points))
    is_log = has_tooltips and 0 < 100 * low < high and high > 1
    if is_log:
        low, high, y_label = math.log10(low), math.log10(high), f"{y_label} (log scale)"
        y_ticks = [(10.0**k, f"{10.0**k:,g}") for k in range(math.ceil(low), math.floor(high) + 1)]
    else:
        y_ticks = choose_ticks(low, high)
        low, high = y_ticks[0][0], y_ticks[-1][0]
    last = max(x for x, _ in points) or 1.0

    def scale_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / last

    def scale_y(y: float) -> float:
        return bottom - HEIGHT * ((math.log10(y) if is_log else y) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
        ' font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _draw_text(LEFT, 20, title, "start", 'font-weight="bold"'),
        _draw_text((LEFT + WIDTH - RIGHT) / 2, height - 10, x_label),
        _draw_text(16, top + HEIGHT / 2, y_label, "middle", f'transform="rotate(-90 16 {top + HEIGHT / 2})"'),
    ]
    for value, words in y_ticks:
        at = scale_y(value)
        parts += [
            _draw_line(LEFT, at, WIDTH - RIGHT, at, 'stroke="#ddd"'),
            _draw_text(LEFT - 8, at + 4, words, "end"),
        ]
    for value, words in choose_ticks(0, last):
        if value <= last:
            parts.append(_draw_text(scale_x(value), bottom + 18, words))
    ends = -math.inf
    for step, words, color in sorted(marks):
        left, half = scale_x(step), 3.3 * len(words)  # about half of the text's width
        is_raised = left - half < ends  # it would overlap the text before
        text_y = top - 4
        if is_raised:
            text_y -= 13
        else:
            ends = left + half
        parts.append(_draw_line(left, top, left, bottom, f'stroke="{color}" stroke-dasharray="1 3"'))
        parts.append(_draw_text(left, text_y, words, "middle", f'style="fill:{color}"'))
    for curve in series:
        look = f'stroke="{curve.color}" stroke-width="{curve.width}" opacity="{curve.opacity:g}" fill="none"'
        dashes = ' stroke-dasharray="4 3"' if curve.is_dashed else ""
        stretches = itertools.groupby(curve.points, lambda point: point[1] is not None)
        for stretch in (group for is_number, group in stretches if is_number):
            path = " ".join(f"{scale_x(x):.1f},{scale_y(y):.1f}" for x, y in stretch if y is not None)
            parts.append(f'<polyline points="{path}" {look}{dashes}/>')
        for x, y in curve.points if curve.has_markers or has_tooltips else []:
            if y is not None:
                fill = "white" if curve.is_dashed else curve.color
                look = f'r="3.5" fill="{fill}" stroke="{curve.color}"' if curve.has_markers else 'r="5" opacity="0"'
                tip = (
                    f"<title>{escape(curve.tooltip)}, {escape(x_label)} {x:,g}: {y:.5g}</title>" if has_tooltips else ""
                )
                parts.append(f'<circle cx="{scale_x(x):.1f}" cy="{scale_y(y):.1f}" {look}>{tip}</circle>')
    for k, curve in enumerate(legend):
        y = 20 + title_height + 18 * k
        dashes = ' stroke-dasharray="4 3"' if curve.is_dashed else ""
        look = f'stroke="{curve.color}" stroke-width="{curve.width}" opacity="{curve.opacity:g}"{dashes}'
        parts.append(_draw_line(LEFT, y, LEFT + 24, y, look))
        parts.append(_draw_text(LEFT + 30, y + 4, curve.name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def choose_color(number: int, count: int) -> str:
    """Return a distinct color for each of `count` series.

    The colors come from the palette. If it is too small, they are evenly spaced hues.
    """
    return COLORS[number] if count <= len(COLORS) else f"hsl({360 * number // count} 75% 42%)"


def _draw_text(x: float, y: float, text: str, anchor: str = "middle", attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {attributes}>{escape(text)}</text>'


def _draw_line(x: float, y: float, to_x: float, to_y: float, attributes: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" {attributes}/>'


def choose_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return round values from `low` or below it to `high` or above it, with their texts.

    The step between them is 1, 2 or 5 times a power of ten, such that there are three to ten of them.
    """
    if low == high:
        half = abs(low) / 2 or 0.5
        low, high = low - half, high + half
    span = high - low
    magnitude = 10.0 ** math.floor(math.log10(span))
    step = next(magnitude * factor for factor in (0.2, 0.5, 1.0, 2.0) if span / (magnitude * factor) <= 8)
    first = math.floor(low / step + ROUNDING)
    last = math.ceil(high / step - ROUNDING)
    digits = max(0, -math.floor(math.log10(step) + ROUNDING))
    ticks = []
    for k in range(first, last + 1):
        value = round(k * step, digits)
        words = f"{value:,.{digits}f}" if digits <= MAX_DIGITS else f"{value:g}"
        ticks.append((value, words))
    return ticks
