# extra: template
"""Write the sizes of the files of the reading path into docs/architecture.md: python tests/builtin/reading_path.py"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- reading path: files and their lines -->"
END = "<!-- end of reading path -->"


def count_lines(file: str) -> str:
    """Return the number of lines of a file, rounded to tens."""
    lines = (ROOT / file).read_text(encoding="utf-8").count("\n")
    return f"{round(lines, -1):,}"


def update_sizes(page: str) -> str:
    """Return the page with the second cell of each row of the reading path replaced by the size of its file."""
    before, begin, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    rows = re.sub(r"^\| `(.+?)` \| .*? \|", lambda row: f"| `{row[1]}` | {count_lines(row[1])} |", table, flags=re.M)
    return before + begin + rows + end + after


if __name__ == "__main__":
    PAGE.write_text(update_sizes(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
