"""Find the imports of a Python file that nothing uses any more once some of its lines are deleted.

An import goes only if its name was used in this file before, and is not used after. So an import for its side effects
stays. A re-export stays too: `import x as x`, `# noqa: F401` or a name in `__all__`. So does an import in a `try` that
asks whether a module is there. Names in quoted annotations and in type comments count as used. So do names of
parameters, because a parameter of a test asks for the fixture of that name. This module needs only the standard
library.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
NOQA = re.compile(r"# noqa\b(?!:)|# noqa:.*\bF401\b", re.IGNORECASE)
GENERIC = re.compile(r"[A-Z]|(?:list|dict|tuple|set|frozenset|type)$")  # subscripts of these names hold types
# These calls take names of the file in strings, which are types, expressions and fixtures.
CALLS_WITH_NAMES = {"cast", "TypeVar", "NewType", "ForwardRef", "NamedTuple", "TypedDict", "eval", "exec"}
CALLS_WITH_NAMES |= {"usefixtures", "getfixturevalue"}
TYPE_COMMENT = re.compile(r"#\s*type:(?!\s*ignore\b)([^#]*)")
WORD = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True)
class ImportedName:
    """One name of an import statement, and the function or module in which it can be used."""

    statement: ast.Import | ast.ImportFrom
    alias: ast.alias
    scope: ast.AST

    @property
    def name(self) -> str:
        return self.alias.asname or self.alias.name.partition(".")[0]


def remove_unused_imports(lines: list[str], deleted: set[int]) -> tuple[list[str], set[int]]:
    """Delete the imports that nothing uses once other lines are deleted.

    Args:
        lines: the lines of the file, with their line ends.
        deleted: the numbers, from 0, of the lines that go in any case.

    Returns:
        The lines, some of which are rewritten, and the numbers of all lines that go. A block that would be empty
        has a `pass`, and an `if TYPE_CHECKING:` with nothing in it goes.
    """
    tree = ast.parse("".join(lines))
    lines = list(lines)
    deleted = set(deleted)
    unused = {name.alias for name in imported_names(tree, lines) if name.alias.lineno - 1 in deleted}
    uses: dict[ast.AST, dict[str, set[int]]] = {}
    candidates = [name for name in imported_names(tree, lines) if is_removable(name, lines)]
    number_before = -1
    while number_before != len(deleted) + len(unused):  # deleting an `if TYPE_CHECKING:` deletes a use
        number_before = len(deleted) + len(unused)
        for name in candidates:
            if name.scope not in uses:
                uses[name.scope] = lines_of_uses(name.scope, lines)
            lines_of_name = uses[name.scope][name.name]
            if lines_of_name and lines_of_name <= deleted:
                unused.add(name.alias)
        for statement in import_statements(tree):
            if unused.issuperset(statement.names):
                deleted |= lines_of_node(statement)
        deleted |= lines_of_empty_type_checking(tree, deleted)
    for statement in import_statements(tree):
        if statement.lineno - 1 not in deleted:
            deleted |= remove_names(lines, statement, [alias for alias in statement.names if alias in unused])
    return lines, deleted - fill_empty_blocks(tree, lines, deleted)


def import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


def imported_names(tree: ast.AST, lines: list[str]) -> list[ImportedName]:
    """Return the names that imports bind in functions and in the module, without those that a `try` asks for."""
    names: list[ImportedName] = []

    def visit(node: ast.AST, scope: ast.AST | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                if scope is not None:
                    names.extend(ImportedName(child, alias, scope) for alias in child.names)
            elif isinstance(child, FUNCTION):
                visit(child, child)
            elif isinstance(child, ast.ClassDef) or catches_import_error(child):
                visit(child, None)  # it is an attribute of a class, or asks whether a module is there
            else:
                visit(child, scope)

    visit(tree, tree)
    return names


def catches_import_error(node: ast.AST) -> bool:
    if not isinstance(node, (ast.Try, ast.TryStar)):
        return False
    for handler in node.handlers:
        caught = ast.unparse(handler.type) if handler.type else "Exception"
        if any(name in IMPORT_ERRORS for name in re.findall(r"\w+", caught)):
            return True
    return False


def is_removable(name: ImportedName, lines: list[str]) -> bool:
    """Return whether an import only binds a name for this file, and stands alone on its lines."""
    statement = name.statement
    text = "".join(lines[statement.lineno - 1 : statement.end_lineno])
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return False
    if name.alias.name == "*" or name.alias.asname == name.alias.name or NOQA.search(text):
        return False
    before = lines[statement.lineno - 1].encode()[: statement.col_offset]
    after = lines[(statement.end_lineno or 0) - 1].encode()[statement.end_col_offset :]
    is_alone = not before.strip() and re.match(rb"\s*(#|\Z)", after)
    return bool(is_alone) and "\\\n" not in text


def lines_of_uses(scope: ast.AST, lines: list[str]) -> dict[str, set[int]]:
    """Return the numbers, from 0, of the lines on which each name stands in a function or module, without imports."""
    uses: dict[str, set[int]] = defaultdict(set)
    for node in ast.walk(scope):
        if isinstance(node, ast.Name):
            uses[node.id].add(node.lineno - 1)
        elif isinstance(node, ast.arg):
            uses[node.arg].add(node.lineno - 1)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            for name in node.names:
                uses[name].add(node.lineno - 1)
        for text, number in strings_with_names(node):
            for name in WORD.findall(text):
                uses[name].add(number)
    for number in lines_of_node(scope) if isinstance(scope, FUNCTION) else range(len(lines)):
        comment = TYPE_COMMENT.search(lines[number])
        for name in WORD.findall(comment[1]) if comment else ():
            uses[name].add(number)
    return uses


def strings_with_names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the strings at a node in which names of the file stand, with their lines.

    They are types, fixtures and elements of `__all__`.
    """
    parts: list[ast.AST | None] = []
    if isinstance(node, (ast.arg, ast.AnnAssign)):
        parts.append(node.annotation)
    if isinstance(node, FUNCTION):
        parts.append(node.returns)
    if isinstance(node, ast.Subscript) and GENERIC.match(last_name(node.value)):
        parts.append(node.slice)
    if isinstance(node, ast.Call):
        is_export = isinstance(node.func, ast.Attribute) and last_name(node.func.value) == "__all__"
        if is_export or last_name(node.func) in CALLS_WITH_NAMES:
            parts.append(node)
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if "__all__" in map(last_name, targets):
            parts.append(node.value)
    for part in filter(None, parts):
        for inner in ast.walk(part):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                yield inner.value, inner.lineno - 1


def last_name(node: ast.AST) -> str:
    """`c` for `c` and for `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def lines_of_node(node: ast.stmt) -> set[int]:
    return set(range(node.lineno - 1, node.end_lineno or node.lineno))


def lines_of_empty_type_checking(tree: ast.AST, deleted: set[int]) -> set[int]:
    """Return the lines of each `if TYPE_CHECKING:` whose statements are all deleted."""
    empty: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or last_name(node.test) != "TYPE_CHECKING" or node.orelse:
            continue
        if all(lines_of_node(statement) <= deleted for statement in node.body):
            empty |= lines_of_node(node)
    return empty


def remove_names(lines: list[str], statement: ast.stmt, aliases: list[ast.alias]) -> set[int]:
    """Rewrite the lines of an import without these names. Returns the numbers of lines on which nothing is left."""
    kept_names = [alias for alias in getattr(statement, "names", []) if alias not in aliases]
    empty: set[int] = set()
    for number in {alias.lineno - 1 for alias in aliases}:
        line = lines[number].encode()
        line_aliases = [alias for alias in (*aliases, *kept_names) if alias.lineno - 1 == number]
        begin = min(alias.col_offset for alias in line_aliases)
        end = max(alias.end_col_offset or 0 for alias in line_aliases)
        kept = [line[alias.col_offset : alias.end_col_offset] for alias in kept_names if alias in line_aliases]
        remainder = line[end:] if kept else re.sub(rb"^\s*,", b"", line[end:])
        if not kept and not line[:begin].strip() and re.match(rb"\s*(#|\Z)", remainder):
            empty.add(number)
        else:
            lines[number] = (line[:begin] + b", ".join(kept) + remainder).decode()
    return empty


def fill_empty_blocks(tree: ast.AST, lines: list[str], deleted: set[int]) -> set[int]:
    """Write `pass` into each block whose statements are all deleted. Returns the numbers of these lines."""
    filled: set[int] = set()
    for node in ast.walk(tree):
        is_left = isinstance(node, (ast.stmt, ast.ExceptHandler)) and node.lineno - 1 not in deleted
        if not is_left and not isinstance(node, ast.match_case):
            continue
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not block or not isinstance(block, list) or block[0].lineno - 1 == getattr(node, "lineno", 0) - 1:
                continue
            first = block[0].lineno - 1
            indent = re.match(r"\s*", lines[first])
            is_elif = lines[first].lstrip().startswith("elif")
            if indent and not is_elif and all(lines_of_node(statement) <= deleted for statement in block):
                lines[first] = f"{indent[0]}pass\n"
                filled.add(first)
    return filled
