"""Delete extras, which are marked in the files of the template (docs/extras.md).

    statement  # extra: NAME        in Python: the whole statement, or the element of a list, that begins or ends here
    line  # extra: NAME             in other files: the line
    # ---- extra: NAME ----         the lines up to `# ---- end of NAME ----`
    # extra: NAME                   alone in one of the first five lines: the file

In Markdown a marker is `<!-- extra: NAME -->`, and `<!-- end of NAME -->` ends a block that begins with one alone on a
line. "a and b" needs both extras, and "a or b" needs one of them. `utils/extras/NAME/` and `tests/extras/NAME/` go as a
whole, and the entries of NAME in utils/extras/settings.py with them. In the pages of the template, commands in ```bash
and rows of tables go too if they are about deleted files or flags. All other text stays as it is, byte for byte. This
module needs only the standard library.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from lib.fork_files import Files, changed_files, emptied_folders, read_files, split_lines, write_files
from lib.fork_readme import README, build_readme, is_edited, list_pictures
from lib.git_tree import SO_THAT, fail, git, require_clean, require_undoable, try_git
from lib.unused_imports import remove_unused_imports

EXTRAS_PAGE, PROJECT_FILE = "docs/extras.md", "pyproject.toml"
FORMER_EXTRAS = {"average", "profiler", "steps", "summarize", "terms", "unsaved"}  # extras of earlier versions
SETTINGS_FILE = "utils/extras/settings.py"  # the list of the settings of extras
UPGRADING_PAGE = "docs/upgrading.md, one-time setup"
NAMES_PATTERN = r"\w+(?: (?:and|or) \w+)*"
MARKER = re.compile(rf"(?:#|<!--) extra: ({NAMES_PATTERN})(?: -->)?$")
LINE_MARKER = re.compile(rf"\s*(?:#|<!--) (?:---- )?extra: ({NAMES_PATTERN})(?: ----| -->)?$")
BLOCK_END = r"\s*(?:#|<!--) (?:---- )?end of {}(?: ----| -->)?$"
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(#[^)]*)?\)")
DELETED_RECORD = re.compile(r"^(\[tool\.extras\].*\n(?:(?!\[).*\n)*?)without = \{.*\}", re.MULTILINE)
TEMPLATE_PAGES = re.compile(r"(docs/.*|AGENTS|CLAUDE|CHANGELOG|CONTRIBUTING)\.md")
Fields = dict[str, dict[str, Any]]  # for each extra, the defaults of its settings by name


def is_deleted(names: str, extras: set[str]) -> bool:
    """Return whether the text that has this marker is deleted."""
    words = names.split(" or ")
    return all(not extras.isdisjoint(alternative.split(" and ")) for alternative in words)


def read_extras(files: Files) -> dict[str, str]:
    """Return the sentence of each extra by its name, from the rows of docs/extras.md."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", files.get(EXTRAS_PAGE, ""), re.MULTILINE)
    return dict(rows)


def list_whole_extras(extras: dict[str, str], deleted: Collection[str]) -> dict[str, str]:
    """Return what each remaining extra buys. Extras that need a deleted one are left out."""
    kept = {}
    for name, sentence in extras.items():
        needed = re.findall(r"needs `(\w+)`", sentence)
        if not {name, *needed} & {*deleted}:
            kept[name] = sentence
    return kept


def delete_from_files(files: Files, extras: set[str]) -> tuple[Files, Fields]:
    """Return what is left of the files, and the fields of the config that are deleted."""
    left: Files = {}
    for name, text in files.items():
        parts = Path(name).parts
        is_in_deleted_folder = (
            len(parts) > 3 and parts[0] in ("utils", "tests") and parts[1] == "extras" and parts[2] in extras
        )
        if name == README:
            left[name] = text  # it is replaced as a whole, or it is the fork's own
        elif not is_in_deleted_folder and not is_whole_file_marked(name, text, extras):
            left[name] = delete_from_text(name, text, extras)
    if SETTINGS_FILE in left:
        left[SETTINGS_FILE] = delete_entries(left[SETTINGS_FILE], extras)
    fields = read_settings(files, extras)
    deleted_fields = {field for extra_fields in fields.values() for field in extra_fields}
    deleted = files.keys() - left.keys()
    deleted |= {f"{Path(path).parent}" for path in deleted} - {f"{Path(path).parent}" for path in left}
    for name in left:
        if TEMPLATE_PAGES.fullmatch(name):
            rows_of = deleted_fields if name != EXTRAS_PAGE else set[str]()  # a row there is about an extra
            text = remove_dead_links(name, left[name], files.keys() - left.keys())
            text = delete_commands(text, deleted, {f"--{field}" for field in deleted_fields})
            text = delete_rows(text, rows_of)
            left[name] = text if text == files[name] else renumber_lists(text)
    return left, fields


def is_whole_file_marked(name: str, text: str, extras: set[str]) -> bool:
    """Return whether one of the first five lines is a marker, and begins no block."""
    first_lines = split_lines(text)[:5] if "extra: " in text else []
    for number, line in enumerate(first_lines):
        marker = LINE_MARKER.match(line)
        is_whole = (
            marker
            and "----" not in marker[0]
            and is_deleted(marker[1], extras)
            and not _has_end_marker(text, marker[1])
        )
        if is_whole and number in find_comment_lines(name, text):
            return True
    return False


def _has_end_marker(text: str, names: str) -> bool:
    return re.search(BLOCK_END.format(names), text, re.MULTILINE) is not None


def delete_from_text(name: str, text: str, extras: set[str]) -> str:
    """Return the text of a file without what belongs to these extras.

    In Python, imports that only the deleted code used are deleted too.
    """
    if "extra: " not in text or name.endswith(".patch"):  # the lines of a patch are those of other files
        return text
    lines = split_lines(text)
    comment_lines = find_comment_lines(name, text)
    deleted = find_block_lines(lines, extras, comment_lines)
    marked = set()
    for number in comment_lines - deleted:
        marker = MARKER.search(lines[number].rstrip("\n"))
        if marker and is_deleted(marker[1], extras):
            marked.add(number)
    if not deleted and not marked:
        return text
    if not name.endswith(".py"):
        return delete_lines(lines, deleted | marked)
    try:
        deleted |= find_statement_lines(name, text, marked)
        lines, deleted = remove_unused_imports(lines, deleted)
        left = delete_lines(lines, deleted)
        ast.parse(left)
    except (SyntaxError, tokenize.TokenError) as error:
        fail(f"{name} is not valid Python, or would not be without its marked lines ({error}). Move the markers.")
    return left


def find_comment_lines(name: str, text: str) -> set[int]:
    """Return the numbers, from 0, of the lines with a comment of this kind of file.

    Other lines do not count, because a string may quote a marker.
    """
    comment = "<!--" if name.endswith(".md") else "#"
    comment_lines = {number for number, line in enumerate(split_lines(text)) if comment in line}
    if name.endswith(".py"):
        with suppress(SyntaxError, tokenize.TokenError):  # the file may be no Python, and a marker in it is refused
            comment_lines &= find_python_comments(text)
    return comment_lines


def find_block_lines(lines: list[str], extras: set[str], comment_lines: set[int]) -> set[int]:
    """Return the numbers, from 0, of the lines between the two marks of blocks, with the marks."""
    deleted = set()
    open_until = None
    for number, line in enumerate(lines):
        begin = LINE_MARKER.match(line.rstrip("\n")) if number in comment_lines else None
        if (
            not open_until
            and begin
            and is_deleted(begin[1], extras)
            and _has_end_marker("".join(lines[number:]), begin[1])
        ):
            open_until = re.compile(BLOCK_END.format(begin[1]))
        if open_until:
            deleted.add(number)
            if open_until.match(line.rstrip("\n")):
                open_until = None
    return deleted


def find_statement_lines(name: str, text: str, markers: Iterable[int]) -> set[int]:
    """Return the numbers, from 0, of the lines of the statements and elements that have a marker on these lines."""
    lines = split_lines(text)
    spans = find_spans(text)
    deleted = set[int]()
    for number in markers:
        if lines[number].lstrip().startswith("#"):
            deleted.add(number)
            continue
        candidates = [(last - first, first, last) for first, last, ends in spans if number in ends]
        if not candidates:
            fail(f"No statement begins or ends at {name}:{number + 1}. Move the marker.")
        _, first, last = max(candidates)
        deleted |= set(range(first, last + 1))
    return deleted


def delete_lines(lines: list[str], deleted: set[int]) -> str:
    """Return the text without these lines.

    Of the gaps before and after them, the shorter one goes too. No gap ends the file.
    """
    left: list[str] = []
    number = 0
    while number < len(lines):
        if number not in deleted:
            left.append(lines[number])
            number += 1
            continue
        while number in deleted:
            number += 1
        gap_after = 0
        while number + gap_after < len(lines) and not lines[number + gap_after].strip():
            gap_after += 1
        gap_before = 0
        while gap_before < len(left) and not left[-1 - gap_before].strip():
            gap_before += 1
        is_last = number + gap_after == len(lines)
        too_many = gap_before if is_last else min(gap_before, gap_after)
        if too_many:
            del left[-too_many:]
        if is_last or not left:
            number += gap_after
    return "".join(left)


@functools.cache  # the list of all extras asks for each file once per extra
def find_python_comments(text: str) -> frozenset[int]:
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    return frozenset(token.start[0] - 1 for token in tokens if token.type == tokenize.COMMENT)


def find_spans(text: str) -> list[tuple[int, int, set[int]]]:
    """Return the first and the last line of each statement and each element of a list, and the lines of its marker.

    Lines count from 0. The last line of a compound statement is that of another statement, and has its marker.
    """
    return [
        (first - 1, last - 1, {line - 1 for line in ends})
        for node in ast.walk(ast.parse(text))
        for first, last, ends in _find_node_spans(node)
    ]


def _find_node_spans(node: ast.AST) -> Iterator[tuple[int, int, set[int]]]:
    if isinstance(node, ast.stmt):
        decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
        first, last = min([node.lineno, *decorators]), node.end_lineno or node.lineno
        yield first, last, {first, node.lineno} | (set() if hasattr(node, "body") else {last})
    elements: list = []
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        elements = [(element, element) for element in node.elts]
    elif isinstance(node, ast.Dict):
        elements = [(key or value, value) for key, value in zip(node.keys, node.values, strict=True)]
    elif isinstance(node, ast.Call):
        elements = [(argument, argument) for argument in (*node.args, *node.keywords)]
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        defaults = [None] * (len(positional) - len(node.defaults)) + [*node.defaults] + [*node.kw_defaults]
        elements = [
            (parameter, end or parameter)
            for parameter, end in zip([*positional, *node.kwonlyargs], defaults, strict=True)
        ]
    elif isinstance(node, ast.ImportFrom):
        elements = [(alias, alias) for alias in node.names]
    yield from ((first.lineno, last.end_lineno, {first.lineno, last.end_lineno}) for first, last in elements)


def read_settings(files: Files, extras: set[str]) -> Fields:
    """Return the settings of these extras, with their defaults."""
    return {name: parse_defaults(files.get(f"utils/extras/{name}/settings.py", "")) for name in sorted(extras)}


def parse_defaults(settings: str) -> dict[str, Any]:
    """Return the default of each setting that this file declares."""
    defaults = {}
    for node in ast.walk(ast.parse(settings)):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Call):
            continue
        function = ast.unparse(node.value.func)
        if function in ("setting", "yours"):
            default = node.value.args[1 if function == "setting" else 0]  # `setting` begins with the group
            defaults[ast.unparse(node.target)] = ast.literal_eval(default)
    return defaults


def delete_entries(text: str, extras: set[str]) -> str:
    """Return the list of the settings of extras without what it imports of these extras."""
    lines = split_lines(text)
    names: set[str] = set()
    deleted: set[int] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and re.match(rf"utils\.extras\.({'|'.join(extras)})\.", node.module or ""):
            names |= {alias.asname or alias.name for alias in node.names}
            deleted |= set(range(node.lineno - 1, node.end_lineno or node.lineno))
    for number, line in enumerate(lines):
        if names.intersection(re.findall(r"\w+", line)):
            deleted.add(number)
    return delete_lines(lines, deleted)


def remove_dead_links(page: str, text: str, deleted: set[str]) -> str:
    """Return the page with the texts of links in place of links to files that are gone."""

    def replace_link(link: re.Match) -> str:
        target = os.path.normpath(Path(page).parent / link[2]) if link[2] and "://" not in link[2] else page
        is_gone = target in deleted or (
            any(path.startswith(f"{target}/") for path in deleted) and not (ROOT / target).exists()
        )
        return link[1] if is_gone else link[0]

    return LINK.sub(replace_link, text)


def delete_commands(text: str, deleted: set[str], flags: set[str]) -> str:
    """Return the page without the commands and rows of tables that are about these files, folders or flags."""
    lines = split_lines(text)
    gone = set()
    for number, line in enumerate(lines):
        if line == "```bash\n":
            gone |= find_command_lines(lines, number, deleted | flags)
        names = re.findall(r"`([^`]+)`", line.split(" | ")[0]) if line.startswith("| `") else []
        if names and deleted.issuperset(names):
            gone.add(number)
    return delete_lines(lines, gone)


def find_command_lines(lines: list[str], fence: int, names: set[str]) -> set[int]:
    """Return the numbers of the lines of commands with one of these words, after a fence.

    If no command is left, they are the numbers of all lines.
    """
    gone = set[int]()
    begin = number = fence + 1
    while number < len(lines) and lines[number].rstrip("\n") != "```":
        if not lines[number].endswith("\\\n"):
            command = "".join(lines[begin : number + 1])
            if not names.isdisjoint(re.split(r'[\s"=]+', command.partition(" #")[0])):
                gone |= set(range(begin, number + 1))
            begin = number + 1
        number += 1
    is_empty = not any(lines[inside].strip() for inside in range(fence + 1, number) if inside not in gone)
    return set(range(fence, number + 1)) if gone and is_empty else gone


def delete_rows(text: str, fields: set[str]) -> str:
    """Return the page without rows of tables that are about these fields, and without tables that have no other row."""
    lines = split_lines(text)
    cells = [re.match(r"\| *`(?:--)?(\w+)[^`]*`", line) for line in lines]
    gone = {number for number, cell in enumerate(cells) if cell and cell[1] in fields}
    for number in sorted(gone):
        first = number
        while first and lines[first - 1].startswith("|"):
            first -= 1
        last = number
        while last + 1 < len(lines) and lines[last + 1].startswith("|"):
            last += 1
        has_heading = first > 1 and lines[first - 2].startswith("#") and not lines[first - 1].strip()
        if has_heading and gone.issuperset(range(first + 2, last + 1)):
            gone |= set(range(first - 2, last + 1))
    return delete_lines(lines, gone)


def renumber_lists(text: str) -> str:
    """Return the page with its numbered lists counting from 1. A list ends at a line that is not indented."""
    lines = split_lines(text)
    count = 0
    is_code = False
    for number, line in enumerate(lines):
        if line.startswith("```"):
            is_code = not is_code
        item = re.match(r"\d+(?=\. )", line)
        if item and not is_code:
            count += 1
            lines[number] = f"{count}{line[item.end() :]}"
        elif line.strip() and not line.startswith((" ", "<!--")):
            count = 0
    return "".join(lines)


def read_deleted(text: str) -> Fields:
    """Return the extras that are deleted by pyproject.toml, with their settings."""
    return tomllib.loads(text).get("tool", {}).get("extras", {}).get("without", {})


def replace_record(text: str, fields: Fields) -> str:
    tables = {name: [f"{field} = {json.dumps(value)}" for field, value in fields[name].items()] for name in fields}
    pairs = ", ".join(f"{name} = {{{', '.join(tables[name])}}}" for name in sorted(tables))
    if not DELETED_RECORD.search(text):
        fail(
            f'{PROJECT_FILE} has no line "without = {{}}" in [tool.extras], which names deleted extras. Add it and'
            " commit."
        )
    return DELETED_RECORD.sub(lambda record: f"{record[1]}without = {{{pairs}}}", text)


def find_dangling_imports(files: Files, remaining: Files) -> list[str]:
    """Return what is left that imports modules, or names of modules, which were there and are gone."""
    roots = ["", "scripts/", *sorted({f"{Path(name).parent}/" for name in files if name.startswith("tests/")})]
    ends = (".py", "/__init__.py")
    deleted_names = find_deleted_names(files, remaining)
    problems = []
    for importer, text in remaining.items():
        for module, name in list_imports(importer, text):
            paths = [f"{root}{module.replace('.', '/')}{end}" for root in roots for end in ends]
            existing = [path for path in paths if path in files]
            if existing and remaining.keys().isdisjoint(existing):
                problems.append(f"{importer} imports {existing[0]}")
            elif existing and name in deleted_names.get(existing[0], ()):
                problems.append(f"{importer} imports {name} of {existing[0]}")
    return problems


def list_imports(file: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the modules that a file imports, and those that an imported name may be, each with that name or ""."""
    try:
        nodes = [*ast.walk(ast.parse(text))] if file.endswith(".py") else []
    except (SyntaxError, ValueError):  # a file of the fork may be no Python 3
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.module, alias.name
                yield f"{node.module}.{alias.name}", ""


def find_deleted_names(files: Files, remaining: Files) -> dict[str, set[str]]:
    """Return the names that remaining modules have bound, and bind no more, by file."""
    names = {}
    for file in changed_files(files, remaining):
        if file.endswith(".py"):
            names[file] = list_bound_names(ast.parse(files[file])) - list_bound_names(ast.parse(remaining[file]))
    return names


def list_bound_names(module: ast.Module) -> set[str]:
    """Return the names that a module binds outside of its functions and classes."""
    names = set()
    inside: list[ast.AST] = [module]
    while inside:
        for node in ast.iter_child_nodes(inside.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
                continue
            if isinstance(node, ast.alias):
                names.add(node.asname or node.name.partition(".")[0])
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            inside.append(node)
    return names


def count_lines(files: Files) -> Counter[str]:
    """Count the lines of Python and shell by part of the template."""
    line_counts = Counter[str]()
    for name, text in files.items():
        if name.endswith((".py", ".sh", ".sbatch", ".yaml", ".css")):
            top = name.split("/")[0] if "/" in name else "core"
            line_counts[{"utils": "core"}.get(top, top)] += len(text.splitlines())
    return Counter({name: line_counts[name] for name in ("core", "scripts", "tests")})


def read_promises(files: Files) -> dict[str, str]:
    rows = re.findall(r"^\| ([\w-]+) \| ([^|]*) \| ([^|]*) \|", files.get("docs/guarantees.md", ""), re.MULTILINE)
    return {key: f"{subject}: {promise}" for key, subject, promise in rows}


def delete_from_folder(root: Path, extras: set[str], is_fork: bool = True) -> tuple[Files, Files]:
    """Delete these extras from the files in a folder, and return the files before and after.

    Args:
        root: the folder.
        extras: the names of the extras.
        is_fork: whether the folder is a user's, where git has to be able to undo the deletion.
    """
    files = read_files(root)
    before = read_deleted(files[PROJECT_FILE])
    left, fields = delete_from_files(files, extras | before.keys())
    if problems := find_dangling_imports(files, left):
        fail(f"{problems[0]}, which would be deleted. Keep the extra of the imported file, or delete both extras.")
    still_extras = read_extras(files)  # in a newer version some of them are part of the kernel
    record = {name: table for name, table in (fields | before).items() if name in still_extras}
    left[PROJECT_FILE] = replace_record(left[PROJECT_FILE], record)
    if not is_fork:
        left.pop(README, None)  # a fork keeps its own README, without the pictures of the template's
    elif not is_edited(files.get(README, "")):
        kept_extras = list_whole_extras(still_extras, record.keys())
        commit = git("rev-parse", "--short", "HEAD", root=root)
        left[README] = build_readme(root.name, left, kept_extras, replaced=files[README], commit=commit)
    for picture in list_pictures(files) - list_pictures(left):
        left.pop(picture, None)
    changed = changed_files(files, left)
    for name in changed:
        if "\r" in files[name]:
            fail(f"{name} has line ends of two kinds. Give it one kind and commit that, {SO_THAT}.")
    if is_fork:
        deleted = files.keys() - left.keys()
        require_undoable(root, names={*changed, *deleted}, folders=emptied_folders(files, left))
    write_files(root, files, left)
    return files, read_files(root)


def print_extras(files: Files) -> None:
    gone = read_deleted(files[PROJECT_FILE])
    print(f"{'lines of':12}  core scripts tests  what it buys")
    for name, sentence in read_extras(files).items():
        if name in gone:
            print(f"{name:12} deleted             {sentence}")
            continue
        less = count_lines(files) - count_lines(delete_from_files(files, {name})[0])
        print(f"{name:12} {less['core']:5} {less['scripts']:7} {less['tests']:5}  {sentence}")


def delete_extras(names: set[str]) -> None:
    before, left = delete_from_folder(ROOT, names)
    print(f"These extras were deleted: {', '.join(sorted(names))}. Lines before and after:")
    for part, number in count_lines(before).items():
        print(f"  {part:8} {number:6,} -> {count_lines(left)[part]:6,}")
    if README in left and is_edited(left[README]):
        print(f"{README} stays as it is, since it is not the template's. It may name what was deleted.")
    lost = [promise for key, promise in read_promises(before).items() if key not in read_promises(left)]
    if lost:
        print("This fork no longer promises:", *(f"  - {promise}" for promise in lost), sep="\n")
    print(f"This command undoes it: git restore --source=HEAD --staged --worktree {shlex.quote(str(ROOT))}")


def merge_template(ref: str) -> None:
    """Merge a newer template.

    The merge brings the changes between the old template and the new one, both without the deleted extras.
    """
    require_clean(ROOT, ":/")
    old, new = find_versions(ref)
    if old == new:
        print(f"{ref} is already merged.")
        return
    deleted_extras = set(read_deleted((ROOT / PROJECT_FILE).read_text(encoding="utf-8")))
    message = "{} without " + ", ".join(sorted(deleted_extras))
    old_commit = git("commit-tree", delete_from_commit(old, deleted_extras), "-m", message.format(old), root=ROOT)
    new_commit = git(
        "commit-tree", delete_from_commit(new, deleted_extras), "-p", old_commit, "-m", message.format(new), root=ROOT
    )
    command = ["git", "merge-recursive"]
    if folder_in_repository := git("rev-parse", "--show-prefix", root=ROOT):
        command.append(f"--subtree={folder_in_repository}")  # the template's files are not in a folder
    command += [old_commit, "--", "HEAD", new_commit]
    ended = subprocess.run(command, cwd=ROOT, check=False)
    if ended.returncode > 1:
        fail("git merge-recursive failed. Undo it with git reset --merge.")
    folder = Path(git("rev-parse", "--absolute-git-dir", root=ROOT))
    (folder / "MERGE_HEAD").write_text(f"{new}\n")
    (folder / "MERGE_MSG").write_text(f"Merge {ref} of the template\n")
    if ended.returncode:
        fail(
            "The merge has the conflicts above. Resolve them, git add the files, then git commit (git merge --abort"
            " undoes the merge)."
        )
    remedy = "The merge is staged. Complete it with git commit, or undo it with git merge --abort."
    git("commit", "--no-edit", "--quiet", root=ROOT, remedy=remedy)
    print(f"{ref} was merged.")


def find_versions(ref: str) -> tuple[str, str]:
    """Return the commit of the template that this fork has, and the commit that is to be merged."""
    new = try_git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", root=ROOT).stdout.strip()
    if not new:
        fail(
            f"--merge must name a tag, branch or commit, but git does not know {ref}. Run git fetch --tags template"
            f" first ({UPGRADING_PAGE})."
        )
    old = try_git("merge-base", "HEAD", new, root=ROOT).stdout.strip()
    if not old and git("rev-parse", "--is-shallow-repository", root=ROOT) == "true":
        fail(
            f"HEAD and {ref} share no history in this shallow clone. Run git fetch --unshallow origin (or template)"
            " first."
        )
    if not old:
        fail(f"HEAD and {ref} share no history. Record once which version this fork started from ({UPGRADING_PAGE}).")
    return old, new


def delete_from_commit(commit: str, extras: set[str]) -> str:
    """Return the tree, in git's sense, of a commit without these extras. It is made in a temporary folder."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary, "tree")
        no_hooks = f"core.hooksPath={os.devnull}"  # the hooks of the fork are about its own checkouts
        try:
            git("-c", no_hooks, "worktree", "add", "--quiet", "--detach", str(tree), commit, root=ROOT)
            if extras:
                delete_from_folder(tree, extras, is_fork=False)
            git("add", "--all", root=tree)
            return git("write-tree", root=tree)
        finally:
            if tree.exists():
                git("worktree", "remove", "--force", str(tree), root=ROOT)


def main(argv: list[str]) -> None:
    files = read_files(ROOT)
    if PROJECT_FILE not in files or EXTRAS_PAGE not in files:
        fail(f"git has no {PROJECT_FILE} or no {EXTRAS_PAGE} here. Restore them, add and commit all files, {SO_THAT}.")
    extras = read_extras(files)
    if argv[:1] == ["--list"]:
        print_extras(files)
    elif argv[:1] == ["--merge"] and len(argv) == 2:
        merge_template(argv[1])
    elif argv:
        names = set(argv) - {"--all-but"}
        if names & FORMER_EXTRAS:
            name = min(names & FORMER_EXTRAS)
            fail(f"{name} is no longer an extra, and costs nothing if unused. Leave out this name ({EXTRAS_PAGE}).")
        if wrong := names - extras.keys():
            fail(f"{min(wrong)} is not an extra. Give some of {', '.join(extras)}.")
        require_clean(ROOT, ".")
        gone = read_deleted(files[PROJECT_FILE]).keys()
        names = (extras.keys() - names if argv[0] == "--all-but" else names) - gone
        if names:
            delete_extras(names)
        else:
            print("These extras are already deleted.")
    else:
        fail("Give the names of extras to delete, or --list to see them (docs/extras.md).")


if __name__ == "__main__":
    main(sys.argv[1:])
