# extra: template
"""Write the tables and lists of docs/coming-from.md: python tests/builtin/coming_from_page.py"""

from __future__ import annotations

import functools
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from lib.remove_extras import LINE_MARKER, parse_defaults
from utils.settings.other_trainers import TRAINERS, Trainer, find_flags

PAGE = ROOT / "docs" / "coming-from.md"
BEGIN, END = "<!-- tables: made from utils/settings/other_trainers.py -->", "<!-- end of tables -->"
MAX_CELL_WORDS = 8  # a longer answer is sentences in a list below the table
WIDTH = 120
LIST_TITLE = "These options need a longer answer:"
SPACE_IN_CODE = "\0"  # stands for a space at which no line may be broken


def option(name: str) -> str:
    """The option as it is written on a command line: one dash before a single letter, else two."""
    return f"`-{name}`" if len(name) == 1 else f"`--{name}`"


@functools.cache
def extras_of_flags() -> dict[str, str]:
    """The extra of each flag that is one of an extra."""
    owners: dict[str, str] = {}
    for file in ROOT.glob("utils/extras/*/settings.py"):
        owners |= dict.fromkeys(parse_defaults(file.read_text(encoding="utf-8")), file.parent.name)
    return owners


@functools.cache
def marker_of_file(path: str) -> str:
    """The extras that a file belongs to, as its marker names them, or "" for a file that always stays."""
    for line in (ROOT / path).read_text(encoding="utf-8").splitlines()[:5]:
        if marker := LINE_MARKER.match(line):
            return marker[1]
    return ""


def marker_of(text: str) -> str:
    """The extras that a text needs, for its flags, its files and its links, or "" if it needs none."""
    names = {extras_of_flags().get(flag, "") for flag in find_flags(text)}
    for path in re.findall(r"`((?:scripts|utils|tests)/[\w./]+)", text):
        names |= {*marker_of_file(path).split(" and ")}
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            names |= {*marker_of_file(os.path.normpath(f"docs/{target}")).split(" and ")}
    return " and ".join(sorted(names - {""}))


def mark(line: str, marker: str) -> str:
    return f"{line}<!-- extra: {marker} -->" if marker else line


def marker_of_any(markers: Iterable[str]) -> str:
    """The marker of what goes when all of these have gone, or "" if one of them stays."""
    unique = dict.fromkeys(markers)
    return "" if "" in unique else " or ".join(unique)


def wrap(text: str, marker: str = "", indent: str = "") -> list[str]:
    """The lines of a text, each with the marker. A line never ends within code."""
    text = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", SPACE_IN_CODE), text)
    lines = textwrap.wrap(
        text,
        WIDTH - len(mark("", marker)),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [mark(line.replace(SPACE_IN_CODE, " "), marker) for line in lines]


def sentence(part: str) -> str:
    """A part of an answer as a sentence."""
    if re.fullmatch(r"`[^`]+`", part):
        return f"Give {part}."
    return f"{part[0].upper()}{part[1:]}."


def paragraph(sentences: list[str], indent: str = "") -> list[str]:
    """The lines of a paragraph, in which sentences that need extras have lines of their own."""
    lines: list[str] = []
    pending: list[str] = []
    for text in [*sentences, ""]:
        marker = marker_of(text)
        if (marker or not text) and pending:
            lines += wrap(" ".join(pending), indent=indent)
            pending = []
        if marker:
            lines += wrap(text, marker, indent)
        elif text:
            pending.append(text)
    return lines


def block(lines: list[str], markers: list[str]) -> list[str]:
    """The lines, between two marks if nothing of them is left without some extras."""
    marker = marker_of_any(markers)
    if not marker:
        return lines
    lines = [line.removesuffix(mark("", marker)) for line in lines]
    return [f"<!-- extra: {marker} -->", *lines, f"<!-- end of {marker} -->"]


def table(rows: dict[str, str]) -> list[str]:
    lines = ["| there | here |", "|---|---|"]
    for names, answer in rows.items():
        options = ", ".join(option(name) for name in names.split())
        lines.append(mark(f"| {options} | {answer} |", marker_of(answer)))
    return block(lines, [marker_of(answer) for answer in rows.values()])


def item(names: str, answer: str) -> list[str]:
    """The lines of an item of a list: the options, and the answer in sentences."""
    parts = answer.split("; ")
    options = ", ".join(option(name) for name in names.split())
    first, *others = wrap(f"{options}:", marker_of_any(marker_of(part) for part in parts), "  ")
    return [f"- {first[2:]}", *others, *paragraph([sentence(part) for part in parts], "  ")]


def long_answers(answers: dict[str, str]) -> list[str]:
    lines = [LIST_TITLE, ""]
    markers = []
    for names, answer in answers.items():
        lines += item(names, answer)
        markers.append(marker_of_any(marker_of(part) for part in answer.split("; ")))
    return block(lines, markers)


def is_short(answer: str) -> bool:
    return "; " not in answer and len(answer.split()) <= MAX_CELL_WORDS


def section(trainer: Trainer) -> str:
    """The heading, the introduction, the table and the list of a trainer."""
    parts = [[f"## {trainer.title}"]]
    if trainer.introduction:
        parts.append(paragraph(re.split(r"(?<=\.) (?=[A-Z])", trainer.introduction)))
    short = {names: answer for names, answer in trainer.answers.items() if is_short(answer)}
    long = {names: answer for names, answer in trainer.answers.items() if not is_short(answer)}
    if short:
        parts.append(table(short))
    if long:
        parts.append(long_answers(long))
    return "\n\n".join("\n".join(lines) for lines in parts)


def tables() -> str:
    return "\n\n".join(section(trainer) for trainer in TRAINERS)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
