"""Moves the block "yours" of config.py, in a merge of a newer template that has it in another place.

    git merge --no-edit template-2       # stops at config.py
    python scripts/lib/move_yours.py
    git add config.py && git commit --no-edit

The block of the newer template gets what the fork has added, changed and deleted in its own block. What the fork has
changed elsewhere in config.py is listed. Standard library only.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "    # ---- yours", "    # ---- end of yours"
OF_EXTRA = re.compile(r"\s*# ---- (extra: \w+|end of \w+) ----\s*$")
RARE = re.compile(r"RARE\.(append|extend)\(")


class Statement(NamedTuple):
    lines: list[str]  # with the comments above it
    code: str  # without comments and layout
    is_yours: bool


def main() -> int:
    base, fork, template = (show(revision) for revision in (merge_base(), "HEAD", "MERGE_HEAD"))
    text, notes = move(base, fork, template)
    (ROOT / "config.py").write_text(text, encoding="utf-8")
    print("config.py: your settings are in the block of the newer template", *notes, sep="\n")
    ended = subprocess.run([sys.executable, "-c", "import config"], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        print(f"It cannot be imported yet: {ended.stderr.strip().splitlines()[-1]}")
    return ended.returncode


def merge_base() -> str:
    """The version of the template that the fork has."""
    ended = subprocess.run(
        ["git", "merge-base", "HEAD", "MERGE_HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        print("no merge is under way; run this after `git merge` has stopped at config.py", file=sys.stderr)
        raise SystemExit(2)
    return ended.stdout.strip()


def show(revision: str) -> str:
    return subprocess.check_output(["git", "show", f"{revision}:./config.py"], cwd=ROOT, text=True)


def move(base: str, fork: str, template: str) -> tuple[str, list[str]]:
    """The config.py of the newer template with the settings of the fork.

    Args:
        base: the config.py of the template that the fork started from.
        fork: that of the fork.
        template: that of the newer template.

    Returns:
        The text, and a line for each change of the fork that is not in it.
    """
    old, own, new = statements(base), statements(fork), statements(template)
    changed = {name: each for name, each in own.items() if name not in old or each.code != old[name].code}
    deleted = {name for name, each in old.items() if each.is_yours and name not in own}
    notes = []
    rare: set[str] = set()
    added: list[str] = []
    block: dict[str, list[str]] = {name: each.lines for name, each in new.items() if each.is_yours}
    for name in deleted:
        block.pop(name, None)
    for name, each in changed.items():
        if not each.is_yours or name.startswith("CONFLICTS"):
            notes.append(f"not moved: {each.code.strip().splitlines()[0]}")
        elif RARE.match(name):
            rare |= set(re.findall(r"\w+", name.partition("(")[2]))
        elif name in block:
            block[name] = each.lines
        else:
            added += each.lines
    kept = [line for lines in block.values() for line in lines]
    lines = [as_rare(line, rare) for line in added + kept]
    before, rest = template.split(BEGIN, 1)
    mark, rest = rest.split("\n", 1)
    return f"{before}{BEGIN}{mark}\n" + "".join(f"{line}\n" for line in lines) + END + rest.split(END, 1)[1], notes


def as_rare(line: str, rare: set[str]) -> str:
    """The line of a setting that only `--help all` shows."""
    match = re.match(r"    (\w+): .*\)$", line)
    return f"{line[:-1]}, rare=True)" if match and match[1] in rare else line


def statements(text: str) -> dict[str, Statement]:
    """The statements of the classes in a config.py, by the name that each defines, or by its text."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(BEGIN))
    end = next(number for number, line in enumerate(lines) if line.startswith(END))
    found = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        first = node.lineno
        for statement in node.body:
            is_yours = begin < statement.lineno - 1 < end
            if is_yours:
                first = max(first, begin + 1)
            last = statement.end_lineno or first
            own = [line for line in lines[first:last] if line.strip() and not OF_EXTRA.match(line)]
            if is_yours or isinstance(statement, ast.AnnAssign):
                found[name_of(statement)] = Statement(own, ast.unparse(statement), is_yours)
            first = last
    return found


def name_of(statement: ast.stmt) -> str:
    if isinstance(statement, ast.AnnAssign):
        return ast.unparse(statement.target)
    return getattr(statement, "name", "") or ast.unparse(statement)


if __name__ == "__main__":
    raise SystemExit(main())
