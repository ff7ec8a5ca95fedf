# extra: judge
"""Whether two forks evaluate with the same code: dataset.py, utils, and compute_loss with all that it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from config import UserError

STARTS = ("compute_loss", "loss_counts", "summarize", "*")  # of model.py; *: imports of all that a module has
OTHERS = ("model.py", "config.py", "train.py")  # followed no further: their evaluation is in utils and these functions
REMEDY = "and computes the metric; make it the same, or put both variants behind a flag of one fork and judge configs"


def difference(a: Path, b: Path) -> str:
    """What differs in the code that evaluates in two forks, as a sentence that ends with the fix; "" if nothing does.

    Comments do not count. Raises UserError for a file that is no Python.
    """
    one, other = evaluating(a), evaluating(b)
    differing = [name for name in one | other if one.get(name) != other.get(name)]
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return f"{differing[0]}{more}: is not the same in A and B, {REMEDY}" if differing else ""


def evaluating(fork: Path) -> dict[str, str]:
    """The code that evaluates, by "model.py: FUNCTION" or by file."""
    found: dict[str, str] = {}
    files = {fork / "dataset.py"}
    definitions: dict[str, list[ast.stmt]] = {}
    for statement in parse(fork / "model.py").body:
        for name in bound(statement):
            definitions.setdefault(name, []).append(statement)
    waiting = [*STARTS, *(["predict"] if "summarize" in definitions else [])]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop(0)
        statements = definitions.get(name, []) if name not in seen else []
        seen.add(name)
        for statement in statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                files |= set(imported(fork, statement))
                continue
            found[f"model.py: {name}"] = found.get(f"model.py: {name}", "") + ast.unparse(statement)
            waiting += sorted({node.id for node in ast.walk(statement) if isinstance(node, ast.Name)})
    return found | files_of(fork, files)


def files_of(fork: Path, files: set[Path]) -> dict[str, str]:
    """The code of these files, of the files of the fork that they import, and of utils, by path."""
    found: dict[str, str] = {}
    waiting = [*sorted(files), *sorted(fork.glob("utils/**/*.py"))]
    while waiting:
        path = waiting.pop(0)
        name = path.relative_to(fork).as_posix()
        if name not in found and name not in OTHERS:
            tree = parse(path)
            found[name] = ast.unparse(tree)
            waiting += [each for node in ast.walk(tree) for each in imported(fork, node)]
    return found


def parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{path}: cannot be read as Python ({error}); fix the file") from None


def bound(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return found


def imported(fork: Path, node: ast.AST) -> Iterator[Path]:
    """The files of the fork that an import statement names."""
    modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.module:
        modules = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
    for module in modules:
        place = fork.joinpath(*module.split("."))
        yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())
