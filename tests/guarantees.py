"""What the template promises, and which test checks each promise: the rows of docs/guarantees.md.

`python tests/guarantees.py` renews the tables of README.md that repeat some of them. A row without a default test, a
test that does not exist and one that the default run leaves out make tests/builtin/test_guarantees.py fail.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


@dataclass(frozen=True)
class Guarantee:
    section: str
    key: str
    subject: str  # what it is about; among the faults, what happens
    promise: str
    tests: list[str]  # node ids, of the default run
    slow: list[str]  # that --all adds


def read_guarantees() -> list[Guarantee]:
    found, section = [], ""
    for line in (ROOT / "docs/guarantees.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| key |"):
            *texts, tests, slow = (cell.strip() for cell in line.strip("|").split(" | "))
            ids = ([f"tests/{name}" for name in re.findall(r"`([^`]+)`", cell)] for cell in (tests, slow))
            found.append(Guarantee(section, *texts, *ids))
    return found


GUARANTEES = read_guarantees()


def tables() -> dict[str, str]:
    """What stands between the marks of README.md, by the name in the mark."""
    survived = ["| what happens | what follows |", "|---|---|"]
    promised, latest = ["| | what | promise |", "|---|---|---|"], ""
    for each in GUARANTEES:
        if each.section == "What a run survives":
            survived.append(f"| {each.subject} | {each.promise} |")
        elif each.section in ("Bit for bit", "Up to rounding", "What ends or changes a guarantee"):
            title = f"**{each.section}**" if each.section != latest else ""
            promised.append(f"| {title} | {each.subject} | {each.promise} |")
            latest = each.section
    return {"what a run survives": "\n".join(survived), "guarantees": "\n".join(promised)}


def written(text: str) -> str:
    """A file's text with each table renewed between its two marks."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: made by tests/guarantees.py -->", f"<!-- end of {name} -->"
        before, mark, rest = text.partition(begin)
        if mark:
            text = f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
