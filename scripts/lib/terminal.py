# extra: reports
"""Draw the first 20 lines of a command's output as a terminal window, in SVG:

COMMAND | python scripts/lib/terminal.py "COMMAND" > FILE.svg
"""

import itertools
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.lib.svg import COLORS

ROWS, COLUMNS, LINE_HEIGHT, LETTER_WIDTH, MARGIN = 20, 112, 18, 7.3, 16  # sizes in pixels, but for the first two


def draw_terminal(command: str, output: Iterable[str]) -> str:
    """Return an SVG of a window with a prompt and the first lines of the output. Long lines are cut."""
    lines = [f"$ {command}", *(line.rstrip() for line in itertools.islice(output, ROWS))]
    width, height = int(COLUMNS * LETTER_WIDTH) + 2 * MARGIN, (len(lines) + 2) * LINE_HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="monospace" font-size="12">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#1e1e1e"/>',
        *(f'<circle cx="{MARGIN + 18 * k}" cy="16" r="5" fill="{COLORS[c]}"/>' for k, c in enumerate((1, 4, 2))),
    ]
    for number, line in enumerate(lines):
        text = line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"
        geometry = (
            f'x="{MARGIN}" y="{(number + 2) * LINE_HEIGHT + MARGIN / 2:g}" textLength="{len(text) * LETTER_WIDTH:.1f}"'
        )
        color = "#ddd" if number else COLORS[5]
        parts.append(f'<text {geometry} fill="{color}" xml:space="preserve">{escape(text)}</text>' if text else "")
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(draw_terminal(sys.argv[1], sys.stdin), end="")
