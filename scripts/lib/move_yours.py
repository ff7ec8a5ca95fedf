"""Move the block "yours" of config.py, in a merge of a newer template that has it in another place.

    git merge --no-edit template-2       # stops at config.py
    python scripts/lib/move_yours.py
    git add config.py && git commit --no-edit

The block of the newer template gets what the fork has added, changed and deleted in its own block. What the fork has
changed elsewhere in config.py is listed, and has to be written again. This script needs only the standard library.
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
EXTRA_MARK = re.compile(r"\s*# ---- (extra: \w+|end of \w+) ----\s*$")
RARE_CALL = re.compile(r"RARE\.(append|extend)\(")
CHECK_PROGRAM = "import config; config.TrainingConfig(); print(*(setting.name for setting in config.SETTINGS))"


class Statement(NamedTuple):
    node: ast.stmt
    lines: list[str]  # the lines of the statement, with the comments above it
    is_yours: bool

    @property
    def code(self) -> str:
        """Return the statement without comments and layout."""
        return ast.unparse(self.node)


class MoveResult(NamedTuple):
    text: str  # the text of the new config.py
    left_out: list[str]  # the changes of the fork that are not in it
    deleted: set[str]  # the names of the settings that the fork has deleted


def main() -> int:
    base, fork, template = (read_config(revision) for revision in (find_merge_base(), "HEAD", "MERGE_HEAD"))
    moved = move_settings(base, fork, template)
    (ROOT / "config.py").write_text(moved.text, encoding="utf-8")
    print("Your settings are now in the block of the newer config.py.")
    for line in moved.left_out:
        print(f"This was not moved. Write it again where it is needed: {line}")
    tried = subprocess.run([sys.executable, "-c", CHECK_PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    if tried.returncode:
        problem = tried.stderr.strip().splitlines()[-1]
        print(f"config.py cannot be used yet ({problem}). Import or define at its top what is missing.")
        return 1
    still_there = moved.deleted.intersection(tried.stdout.split())
    if still_there:
        names = ", ".join(sorted(still_there))
        print(
            f"You had deleted {names}, which are settings of an extra now. Run scripts/remove_extras.sh images to"
            " delete them."
        )
    return 0


def find_merge_base() -> str:
    """Return the version of the template that the fork has."""
    command = ["git", "merge-base", "HEAD", "MERGE_HEAD"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        fail("No merge is under way. Run this script after `git merge` has stopped at config.py.")
    return ended.stdout.strip()


def read_config(revision: str) -> str:
    """Read the config.py of a revision. The fork may be a folder of a larger repository, while the template is not."""
    for path in ("./config.py", "config.py"):
        command = ["git", "show", f"{revision}:{path}"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if ended.returncode == 0:
            return ended.stdout
    return fail(f"git has no config.py in {revision}. Resolve the conflict by hand.")


def fail(sentence: str) -> str:
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


def move_settings(base: str, fork: str, template: str) -> MoveResult:
    """Move the settings of a fork.

    Args:
        base: the config.py of the template that the fork started from.
        fork: the config.py of the fork.
        template: the config.py of the newer template.
    """
    old, forked, new = parse_statements(base), parse_statements(fork), parse_statements(template)
    block = {name: statement.lines for name, statement in new.items() if statement.is_yours}
    deleted = {name for name, statement in old.items() if statement.is_yours and name not in forked}
    changed = {name: stmt for name, stmt in forked.items() if name not in old or stmt.code != old[name].code}
    rare = {name for name, statement in new.items() if "rare=True" in statement.code}
    for name in changed:
        if RARE_CALL.match(name):
            rare.update(re.findall(r"['\"](\w+)['\"]", name))
    added: list[str] = []
    left_out = [f"the deleted {name}" for name, stmt in old.items() if not stmt.is_yours and name not in forked]
    for name, statement in changed.items():
        if RARE_CALL.match(name) and statement.is_yours:
            continue
        if not statement.is_yours or name.startswith("CONFLICTS"):
            left_out.append(name if isinstance(statement.node, ast.FunctionDef) else statement.code)
            continue
        lines = mark_as_rare(statement) if name in rare else statement.lines
        if name in block:
            block[name] = lines
        else:
            added += lines
    block_lines = [line for name, lines in block.items() if name not in deleted for line in lines]
    text = replace_block(template, added + block_lines)
    comments = list_comments(fork) - list_comments(base) - list_comments(text)
    return MoveResult(text, [*left_out, *sorted(comments)], deleted)


def mark_as_rare(statement: Statement) -> list[str]:
    """Return the lines of a setting, changed so that only `--help all` shows it."""
    call = getattr(statement.node, "value", None)
    if not isinstance(call, ast.Call) or "rare=True" in statement.code:
        return statement.lines
    *before, last = statement.lines
    end = call.end_col_offset or len(last)
    head, tail = last[: end - 1], last[end - 1 :]
    if not head.strip():  # the opening parenthesis has a line of its own
        return [*before, f"{head}    rare=True,", last]
    return [*before, f"{head.rstrip().rstrip(',')}, rare=True{tail}"]


def replace_block(template: str, lines: list[str]) -> str:
    """Return the config.py of the template with these lines in its block."""
    before, remainder = template.split(BEGIN, 1)
    mark, remainder = remainder.split("\n", 1)
    block = "".join(f"{line}\n" for line in lines)
    return f"{before}{BEGIN}{mark}\n{block}{END}{remainder.split(END, 1)[1]}"


def list_comments(text: str) -> set[str]:
    """Return the lines of the block that are comments."""
    begin, end = find_marks(text.splitlines())
    lines = (line.strip() for line in text.splitlines()[begin + 1 : end])
    return {line for line in lines if line.startswith("#") and not EXTRA_MARK.match(line)}


def find_marks(lines: list[str]) -> tuple[int, int]:
    """Return the numbers, from 0, of the lines with the two marks."""
    line_numbers = []
    for mark in (BEGIN, END):
        numbers = [number for number, line in enumerate(lines) if line.startswith(mark)]
        if not numbers:
            fail(f"config.py has no line that begins with {mark.strip()!r}. Put the mark back and commit, then merge.")
        line_numbers.append(numbers[0])
    return line_numbers[0], line_numbers[1]


def parse_statements(text: str) -> dict[str, Statement]:
    """Return the statements of a config.py and of its classes, by the name that each defines or by its text."""
    lines = text.splitlines()
    begin, end = find_marks(lines)
    by_name = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            by_name[statement_name(node)] = Statement(node, [], False)
            continue
        first = node.lineno
        for member in node.body:
            is_yours = begin < member.lineno - 1 < end
            if is_yours:
                first = max(first, begin + 1)
            last = member.end_lineno or first
            member_lines = [line for line in lines[first:last] if line.strip() and not EXTRA_MARK.match(line)]
            first = last
            is_docstring = isinstance(member, ast.Expr) and isinstance(member.value, ast.Constant)
            if not is_docstring:
                by_name[statement_name(member)] = Statement(member, member_lines, is_yours)
    return by_name


def statement_name(statement: ast.stmt) -> str:
    if isinstance(statement, ast.AnnAssign):
        return ast.unparse(statement.target)
    if isinstance(statement, ast.Assign):
        return ast.unparse(statement.targets[0])
    return getattr(statement, "name", "") or ast.unparse(statement)


if __name__ == "__main__":
    raise SystemExit(main())
