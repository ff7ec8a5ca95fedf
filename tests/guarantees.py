"""What the template promises, and which test checks each promise: the rows of docs/guarantees.md.

`python tests/guarantees.py` renews the table of docs/fault-tolerance.md. A row without a default test, a
test that does not exist and one that the default run leaves out make tests/builtin/test_guarantees.py fail.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "fault-tolerance.md"
BEGIN, END = "<!-- what a run survives: made by tests/guarantees.py -->", "<!-- end of what a run survives -->"


@dataclass(frozen=True)
class Guarantee:
    section: str
    key: str
    subject: str  # what the promise is about; for faults, what happens
    promise: str
    tests: list[str]  # node ids in the default run
    slow: list[str]  # node ids that --all adds


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


def table() -> str:
    """The rows of the section "What a run survives", without their tests."""
    rows = [f"| {each.subject} | {each.promise} |" for each in GUARANTEES if each.section == "What a run survives"]
    return "\n".join(["| what happens | what follows |", "|---|---|", *rows])


def written(text: str) -> str:
    """The text of the page with a renewed table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
