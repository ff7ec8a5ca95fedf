# extra: template
"""Write the tables of docs/coming-from.md: python tests/builtin/coming_from_page.py"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from utils.settings.other_trainers import TRAINERS, Trainer

PAGE = ROOT / "docs" / "coming-from.md"
BEGIN, END = "<!-- tables: made by tests/builtin/coming_from_page.py -->", "<!-- end of tables -->"


def option(name: str) -> str:
    """The option as it is written on a command line: one dash before a single letter, else two."""
    return f"`-{name}`" if len(name) == 1 else f"`--{name}`"


def row(names: str, answer: str) -> str:
    """A row of a table."""
    options = ", ".join(option(name) for name in names.split())
    return f"| {options} | {answer} |"


def section(trainer: Trainer) -> str:
    """The heading, the introduction and the table of a trainer."""
    lines = [f"## {trainer.title}", ""]
    if trainer.introduction:
        lines += [textwrap.fill(trainer.introduction, 120, break_long_words=False, break_on_hyphens=False), ""]
    lines += ["| there | here |", "|---|---|"]
    lines += [row(names, answer) for names, answer in trainer.answers.items()]
    return "\n".join(lines)


def tables() -> str:
    return "\n\n".join(section(trainer) for trainer in TRAINERS)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
