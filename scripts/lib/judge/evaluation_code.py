# extra: judge
"""Check that two forks evaluate with the same code.

This code is dataset.py, utils, and compute_loss with all that it uses. The notes name other code that a person has to
read, since it may change what is evaluated, or learn from it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from utils.settings.errors import UserError

EVALUATION_NAMES = ("compute_loss", "loss_counts", "summarize", "*")  # names in model.py (* is that of `import *`)
FILES_NOT_FOLLOWED = ("model.py", "config.py", "train.py")  # their evaluation is in utils and in EVALUATION_NAMES
LOOP_FILES = ("train.py", "config.py", "ddp_utils.py")
DATA_NAMES = {"create_dataset", "load_data", "create_evaluation_dataloader", "data_dir"}
HIDING_NAMES = {"exec", "eval", "__import__", "importlib", "mock", "meta_path", "atexit", "weakref", "globals"}
HIDING_NAMES |= {"_getframe", "currentframe", "f_back", "tb_frame", "settrace", "__code__", "__torch_function__"}
REMEDY = "Make it the same, or put both variants behind a flag of one fork and judge configs."


def explain_difference(a: Path, b: Path) -> str:
    """Explain what differs in the code with which two forks evaluate. Comments do not count.

    Returns:
        A text that ends with the fix, or "" if nothing differs.

    Raises:
        UserError: if a file is no Python.
    """
    code_a = read_evaluation_code(a)
    code_b = read_evaluation_code(b)
    differing = [name for name in code_a | code_b if code_a.get(name) != code_b.get(name)]
    if not differing:
        return ""
    and_more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return f"{differing[0]}{and_more} computes the metric, but is not the same in A and B. {REMEDY}"


def read_evaluation_code(fork: Path) -> dict[str, str]:
    """Return the code that evaluates, by "model.py: FUNCTION" or by file."""
    sources: dict[str, str] = {}
    files = {fork / "dataset.py"}
    definitions: dict[str, list[ast.stmt]] = {}
    for statement in parse_file(fork / "model.py").body:
        for name in list_bound_names(statement):
            definitions.setdefault(name, []).append(statement)
    waiting = [*EVALUATION_NAMES]
    if "summarize" in definitions:
        waiting.append("predict")
    while waiting:
        name = waiting.pop(0)
        for statement in definitions.pop(name, []):  # each definition is read only once
            if isinstance(statement, ast.Import | ast.ImportFrom):
                files |= set(find_imported_files(fork, fork / "model.py", statement))
                continue
            key = f"model.py: {name}"
            sources[key] = sources.get(key, "") + ast.unparse(statement)
            waiting += sorted({node.id for node in ast.walk(statement) if isinstance(node, ast.Name)})
    return sources | read_imported_files(fork, files)


def list_notes(a: Path, b: Path) -> list[str]:
    """Return what a person has to find out about the code of two forks, which may be the same fork."""
    sides: dict[str, list[str]] = {}  # the sides that each question is about
    for name, fork in (("A", a), ("B", b)):
        for question in list_questions(fork):
            sides.setdefault(question, []).append(name)
    notes = [f"In {' and '.join(names)}, {question}" for question, names in sides.items()]
    for name in LOOP_FILES:
        if dump_without_fields(a / name) != dump_without_fields(b / name):
            notes.append(f"{name} is not the same in A and B. Do both train alike, and record what they did?")
    return notes


def dump_without_fields(path: Path) -> str:
    """Return the code of a file without the annotated fields of classes, such as those of the config."""
    tree = parse_file(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [statement for statement in node.body if not isinstance(statement, ast.AnnAssign)]
    return ast.dump(tree)


def list_questions(fork: Path) -> list[str]:
    """Return questions about code of model.py, of config.py, and of the files that they import."""
    questions: list[str] = []
    waiting = [fork / "model.py", fork / "config.py"]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop(0)
        file = path.relative_to(fork).as_posix()
        if path in seen or file.startswith("utils/") or file in ("dataset.py", "ddp_utils.py", "train.py"):
            continue
        seen.add(path)
        tree = parse_file(path)
        questions += list_file_questions(tree, file)
        for node in ast.walk(tree):
            waiting += find_imported_files(fork, path, node)
    for path in fork.glob("*.py"):
        if path.stem in sys.stdlib_module_names:
            questions.append(f"{path.name} has the name of a module of Python. Is it meant to replace that module?")
    return list(dict.fromkeys(questions))


def list_file_questions(tree: ast.Module, file: str) -> list[str]:
    """Return questions about the code of one file."""
    questions: list[str] = []
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {name for node in imports for name in list_bound_names(node)}
    for statement in tree.body:
        location = f"{file}: {min(list_bound_names(statement), default='')}".removesuffix(": ")
        if has_side_effects(statement):
            questions.append(
                f"`{format_first_line(statement)}` ({file}) runs on import. Does it change what is evaluated?"
            )
            continue
        for node in ast.walk(statement):
            words = list_names(node)
            # create_model may read a vocabulary, or another part of a network
            if (location, words) == ("model.py: create_model", {"data_dir"}):
                continue
            if find_changed_names(node) & modules:
                questions.append(
                    f"`{format_first_line(node)}` ({location}) changes a module. Does it change what is evaluated?"
                )
            elif words & DATA_NAMES or is_data_import(node):
                questions.append(
                    f"`{format_first_line(node)}` ({location}) leads to data. Does it learn from held-out samples?"
                )
            elif words & HIDING_NAMES:
                questions.append(
                    f"`{format_first_line(node)}` ({location}) may do anything. Does it change what is evaluated?"
                )
    return questions


def list_names(node: ast.AST) -> set[str]:
    """Return the names in an expression, an import or the head of a function, without those of its parts."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr} - {"eval"}  # the call model.eval() evaluates nothing
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    words: list[str] = []
    if isinstance(node, ast.Import | ast.ImportFrom):
        words = [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        words.append(node.module or "")
    return {part for word in words for part in word.split(".")}


def is_data_import(node: ast.AST) -> bool:
    """Return whether this imports dataset.py, or more than constants of it."""
    if isinstance(node, ast.ImportFrom) and node.module == "dataset":
        return not all(name.name.isupper() for name in node.names)
    return isinstance(node, ast.Import) and any(name.name == "dataset" for name in node.names)


def has_side_effects(statement: ast.stmt) -> bool:
    """Return whether a statement of a module runs code, as a call or a loop does.

    Code that runs only if the file is a script does not count.
    """
    if isinstance(statement, ast.If | ast.Try):
        parts = [*statement.body, *statement.orelse]
        return not format_first_line(statement).startswith("if __name__") and any(map(has_side_effects, parts))
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)  # a constant is a docstring
    return isinstance(statement, ast.For | ast.While | ast.With)


def find_changed_names(node: ast.AST) -> set[str]:
    """Return the names of modules, classes or functions that get another attribute here, or another value."""
    changed: ast.AST | None = None
    if isinstance(node, ast.Global):
        return {*node.names}
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        changed = node
    elif isinstance(node, ast.Call) and node.args and getattr(node.func, "id", "") in ("setattr", "delattr"):
        changed = node.args[0]
    while isinstance(changed, ast.Attribute | ast.Subscript):
        changed = changed.value
    return {changed.id} if isinstance(changed, ast.Name) else set()


def format_first_line(node: ast.AST) -> str:
    """Return the first line of the code of a node, without decorators."""
    return next(line for line in ast.unparse(node).splitlines() if not line.startswith("@"))


def read_imported_files(fork: Path, files: set[Path]) -> dict[str, str]:
    """Return the code of these files, of the files of the fork that they import, and of utils, by path."""
    sources: dict[str, str] = {}
    waiting = [*sorted(files), *sorted(fork.glob("utils/**/*.py"))]
    while waiting:
        path = waiting.pop(0)
        name = path.relative_to(fork).as_posix()
        if name not in sources and name not in FILES_NOT_FOLLOWED:
            tree = parse_file(path)
            sources[name] = ast.unparse(tree)
            for node in ast.walk(tree):
                waiting += find_imported_files(fork, path, node)
    return sources


def parse_file(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{path} cannot be read as Python ({error}). Fix the file.") from None


def list_bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    return names


def find_imported_files(fork: Path, file: Path, node: ast.AST) -> Iterator[Path]:
    """Yield the files of the fork that an import statement of a file names, with those of the packages around them."""
    modules: list[str] = []
    base = fork
    if isinstance(node, ast.Import):
        modules = [name.name for name in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [f"{node.module or ''}.{name.name}" for name in node.names]
        if node.level:
            base = file.parents[node.level - 1]
    for module in modules:
        module_path = base
        for part in module.strip(".").split("."):
            module_path = module_path / part
            for path in (module_path.with_suffix(".py"), module_path / "__init__.py"):
                if path.is_file():
                    yield path
