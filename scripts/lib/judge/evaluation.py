# extra: judge
"""Whether two forks evaluate with the same code: dataset.py, utils, and compute_loss with all that it uses.

The notes name other code that a person has to read, since it may change what is evaluated, or learn from it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from utils.settings.errors import UserError

EVALUATION = ("compute_loss", "loss_counts", "summarize", "*")  # names in model.py; * is that of `import *`
NOT_FOLLOWED = ("model.py", "config.py", "train.py")  # what evaluates there is in utils and in EVALUATION
LOOP = ("train.py", "config.py", "ddp_utils.py")
DATA = {"create_dataset", "load_data", "create_evaluation_dataloader", "data_dir"}
HIDING = {"exec", "eval", "__import__", "importlib", "mock", "meta_path", "atexit", "weakref", "globals"}
HIDING |= {"_getframe", "currentframe", "f_back", "tb_frame", "settrace", "__code__", "__torch_function__"}
REMEDY = "and computes the metric; make it the same, or put both variants behind a flag of one fork and judge configs"


def difference(a: Path, b: Path) -> str:
    """What differs in the code that evaluates in two forks, as a sentence that ends with the fix; "" if nothing does.

    Comments do not count. Raises UserError for a file that is no Python.
    """
    code_a = evaluating(a)
    code_b = evaluating(b)
    differing = [name for name in code_a | code_b if code_a.get(name) != code_b.get(name)]
    if not differing:
        return ""
    and_more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return f"{differing[0]}{and_more}: is not the same in A and B, {REMEDY}"


def evaluating(fork: Path) -> dict[str, str]:
    """The code that evaluates, by "model.py: FUNCTION" or by file."""
    sources: dict[str, str] = {}
    files = {fork / "dataset.py"}
    definitions: dict[str, list[ast.stmt]] = {}
    for statement in parse(fork / "model.py").body:
        for name in bound(statement):
            definitions.setdefault(name, []).append(statement)
    waiting = [*EVALUATION]
    if "summarize" in definitions:
        waiting.append("predict")
    while waiting:
        name = waiting.pop(0)
        for statement in definitions.pop(name, []):  # removed, so that it is read once
            if isinstance(statement, ast.Import | ast.ImportFrom):
                files |= set(imported(fork, fork / "model.py", statement))
                continue
            key = f"model.py: {name}"
            sources[key] = sources.get(key, "") + ast.unparse(statement)
            waiting += sorted({node.id for node in ast.walk(statement) if isinstance(node, ast.Name)})
    return sources | files_of(fork, files)


def notes_on(a: Path, b: Path) -> list[str]:
    """What a person has to find out about the code of two forks, which may be one."""
    sides: dict[str, list[str]] = {}  # that a question is about
    for name, fork in (("A", a), ("B", b)):
        for question in to_read(fork):
            sides.setdefault(question, []).append(name)
    notes = [f"{' and '.join(names)}, {question}" for question, names in sides.items()]
    for name in LOOP:
        if without_fields(a / name) != without_fields(b / name):
            notes.append(f"{name}: is not the same in A and B; do both train alike, and record what they did?")
    return notes


def without_fields(path: Path) -> str:
    """The code of a file, without the annotated fields of classes, such as those of the config."""
    tree = parse(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [statement for statement in node.body if not isinstance(statement, ast.AnnAssign)]
    return ast.dump(tree)


def to_read(fork: Path) -> list[str]:
    """Questions about code of model.py, of config.py, and of the files that they import."""
    questions: list[str] = []
    waiting = [fork / "model.py", fork / "config.py"]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop(0)
        file = path.relative_to(fork).as_posix()
        if path in seen or file.startswith("utils/") or file in ("dataset.py", "ddp_utils.py", "train.py"):
            continue
        seen.add(path)
        tree = parse(path)
        questions += questions_on(tree, file)
        for node in ast.walk(tree):
            waiting += imported(fork, path, node)
    for path in fork.glob("*.py"):
        if path.stem in sys.stdlib_module_names:
            questions.append(f"{path.name}: has the name of a module of Python; is it meant to replace that?")
    return list(dict.fromkeys(questions))


def questions_on(tree: ast.Module, file: str) -> list[str]:
    """Questions about the code of one file."""
    questions: list[str] = []
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {name for node in imports for name in bound(node)}
    for statement in tree.body:
        location = f"{file}: {min(bound(statement), default='')}".removesuffix(": ")
        if acts(statement):
            questions.append(f"{file}: `{shown(statement)}` acts on import; does it change what is evaluated?")
            continue
        for node in ast.walk(statement):
            words = words_of(node)
            if (location, words) == (
                "model.py: create_model",
                {"data_dir"},
            ):  # a vocabulary, or another part of a network
                continue
            if changed_by(node) & modules:
                questions.append(f"{location}: `{shown(node)}` changes a module; does it change what is evaluated?")
            elif words & DATA or gives_data(node):
                questions.append(f"{location}: `{shown(node)}` leads to data; does it learn from held-out samples?")
            elif words & HIDING:
                questions.append(f"{location}: `{shown(node)}` may do anything; does it change what is evaluated?")
    return questions


def words_of(node: ast.AST) -> set[str]:
    """The names in an expression, an import or the head of a function, without those of its parts."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr} - {"eval"}  # model.eval()
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    words: list[str] = []
    if isinstance(node, ast.Import | ast.ImportFrom):
        words = [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        words.append(node.module or "")
    return {part for word in words for part in word.split(".")}


def gives_data(node: ast.AST) -> bool:
    """Whether this imports dataset.py, or more than constants of it."""
    if isinstance(node, ast.ImportFrom) and node.module == "dataset":
        return not all(name.name.isupper() for name in node.names)
    return isinstance(node, ast.Import) and any(name.name == "dataset" for name in node.names)


def acts(statement: ast.stmt) -> bool:
    """Whether a statement of a module runs code, as a call or a loop does, and not only if the file is a script."""
    if isinstance(statement, ast.If | ast.Try):
        parts = [*statement.body, *statement.orelse]
        return not shown(statement).startswith("if __name__") and any(map(acts, parts))
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)  # a docstring
    return isinstance(statement, ast.For | ast.While | ast.With)


def changed_by(node: ast.AST) -> set[str]:
    """The names of modules, classes or functions that get another attribute here, or are bound to something else."""
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


def shown(node: ast.AST) -> str:
    """The first line of the code of a node, without decorators."""
    return next(line for line in ast.unparse(node).splitlines() if not line.startswith("@"))


def files_of(fork: Path, files: set[Path]) -> dict[str, str]:
    """The code of these files, of the files of the fork that they import, and of utils, by path."""
    sources: dict[str, str] = {}
    waiting = [*sorted(files), *sorted(fork.glob("utils/**/*.py"))]
    while waiting:
        path = waiting.pop(0)
        name = path.relative_to(fork).as_posix()
        if name not in sources and name not in NOT_FOLLOWED:
            tree = parse(path)
            sources[name] = ast.unparse(tree)
            for node in ast.walk(tree):
                waiting += imported(fork, path, node)
    return sources


def parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{path}: cannot be read as Python ({error}); fix the file") from None


def bound(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module defines."""
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


def imported(fork: Path, file: Path, node: ast.AST) -> Iterator[Path]:
    """The files of the fork that an import statement of a file names, with those of the packages around them."""
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
