# extra: template
"""What the template promises: the rows of docs/guarantees.md. A test carries the keys of its rows in a marker.

python tests/guarantees.py resume      lists the tests of a key
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "fault-tolerance.md"


@dataclass(frozen=True)
class Guarantee:
    section: str
    key: str
    subject: str  # what the promise is about; for faults, what happens
    promise: str
    marker: str = ""  # of the extra that makes it


def read_guarantees() -> list[Guarantee]:
    rows, section, header = [], "", ""
    for line in (ROOT / "docs/guarantees.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif not line.startswith("|"):
            header = ""
        elif not header:
            header = line
        elif line.startswith("| ") and header.startswith("| key |"):
            row, *marker = re.split("(?=<!-- extra: )", line)
            rows.append(Guarantee(section, *(cell.strip() for cell in row.strip("|").split(" | ")), *marker))
    return rows


GUARANTEES = read_guarantees()


def marked(items: list) -> list[tuple[str, ...]]:
    """(key, "default" or "slow", node id) of each test that carries a key."""
    marks = set()
    for item in items:
        kind = "slow" if item.get_closest_marker("slow") else "default"
        for mark in item.iter_markers("guarantee"):
            marks |= {(key, kind, item.nodeid) for key in mark.args or ["(none)"]}
    return sorted(marks)


def pytest_collection_finish(session) -> None:
    """pytest calls this only if it is told to use this file as a plugin."""
    print(*(" ".join(("marker", *words)) for words in marked(session.items)), sep="\n")


def collect() -> list[tuple[str, ...]]:
    """What `marked` finds in the whole tree, as another process collects it."""
    words = "-m pytest --all --collect-only -qq -p no:cacheprovider -p no:xdist -p guarantees".split()
    ended = subprocess.run([sys.executable, *words], cwd=ROOT / "tests", capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [tuple(line.split(maxsplit=3)[1:]) for line in ended.stdout.splitlines() if line.startswith("marker ")]


def read_failures(page: str) -> dict[str, tuple[str, str]]:
    """Return, for each key in the table of docs/fault-tolerance.md, the section that its row links to and its marker.

    Raises:
        KeyError: if there is no such section.
        ValueError: if a key has two rows.
    """
    headings = re.split(r"^(#+ .+)$", page, flags=re.MULTILINE)[1:]
    sections = {}
    for heading, text in zip(headings[::2], headings[1::2], strict=True):
        title = heading.lstrip("# ").lower()
        sections[re.sub(r"[^\w\- ]", "", title).replace(" ", "-")] = text
    failures = {}
    rows = re.findall(r"^\| \[[^]]+\]\(#([\w-]+)\) \|.*\| `([\w-]+)` \|(.*)$", page, re.MULTILINE)
    for anchor, key, marker in rows:
        if key in failures:
            raise ValueError(f"{key} has two rows")
        failures[key] = sections[anchor], marker
    return failures


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python tests/guarantees.py KEY ...")
    if wrong := {*sys.argv[1:]} - {row.key for row in GUARANTEES}:
        sys.exit(f"{min(wrong)}: not a key of docs/guarantees.md; choose one of its first column")
    print(*(f"{kind} {name}" for key, kind, name in collect() if key in sys.argv[1:]), sep="\n")
