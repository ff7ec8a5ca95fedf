"""Deletes extras, which are marked in the files of the template (docs/extras.md). Standard library only.

    statement  # extra: NAME        in Python: the whole statement, or the element of a list, that begins or ends here
    line  # extra: NAME             in other files: the line
    # ---- extra: NAME ----         the lines up to `# ---- end of NAME ----`
    # extra: NAME                   alone in one of the first five lines: the file

In Markdown a marker is `<!-- extra: NAME -->`, and `<!-- end of NAME -->` ends a block that begins with one alone on a
line. "a and b" needs both extras, "a or b" one of them. `utils/extras/NAME/` and `tests/extras/NAME/` go as a whole.
So do, in Markdown, commands in ```bash and rows of tables that are about deleted files or flags.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE, PROJECT = "docs/extras.md", "pyproject.toml"
NAMES = r"\w+(?: (?:and|or) \w+)*"
MARKER = re.compile(rf"(?:#|<!--) extra: ({NAMES})(?: -->)?$")
ALONE = re.compile(rf"\s*(?:#|<!--) (?:---- )?extra: ({NAMES})(?: ----| -->)?$")
END = r"\s*(?:#|<!--) (?:---- )?end of {}(?: ----| -->)?$"
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(#[^)]*)?\)")
RECORD = re.compile(r"^without = \{.*\}$", re.MULTILINE)
Files = dict[str, str]  # text by path
Fields = dict[str, dict[str, Any]]  # default by name, by extra


def fail(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


def is_cut(names: str, cut: set[str]) -> bool:
    """Whether what this marker stands at is deleted."""
    words = names.split(" or ")
    return all(not cut.isdisjoint(each.split(" and ")) for each in words)


def git(*words: str, root: Path = ROOT) -> str:
    ended = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if ended.returncode:
        remedy = "; git init, then add and commit all files" if "not a git" in ended.stderr else ""
        fail(f"git {' '.join(words)}: {ended.stderr.strip()}{remedy}")
    return ended.stdout.strip()


def read_files(root: Path) -> Files:
    """The text files that git tracks."""
    listed = git("ls-files", "-z", root=root)
    found = {}
    for name in filter(None, listed.split("\0")):
        path = root / name
        if path.is_file() and not path.is_symlink():
            try:
                found[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                found[name] = ""
    return found


def extras_of(files: Files) -> dict[str, str]:
    """The sentence of each extra, by name: the rows of docs/extras.md."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", files.get(PAGE, ""), re.MULTILINE)
    return dict(rows)


def without(files: Files, cut: set[str]) -> tuple[Files, Fields]:
    """What is left of the files, and the fields of the config that are deleted."""
    left: Files = {}
    for name, text in files.items():
        parts = Path(name).parts
        is_of_cut = len(parts) > 3 and parts[1] == "extras" and parts[2] in cut
        alone = [found[1] for found in map(ALONE.match, text.splitlines()[:5]) if found and "----" not in found[0]]
        if not is_of_cut and not any(is_cut(each, cut) for each in alone if not _ends(text, each)):
            left[name] = cut_text(name, text, cut)
    fields = fields_of(files.get("config.py", ""), cut)
    gone = {field for each in fields.values() for field in each}
    deleted = files.keys() - left.keys()
    deleted |= {f"{Path(each).parent}" for each in deleted} - {f"{Path(each).parent}" for each in left}
    for name in left:
        if name.endswith(".md"):
            rows_of = gone if name != PAGE else set[str]()  # a row there is about an extra
            text = unlinked(name, left[name], files.keys() - left.keys())
            left[name] = without_rows(without_commands(text, deleted, {f"--{field}" for field in gone}), rows_of)
    return left, fields


def _ends(text: str, names: str) -> bool:
    return re.search(END.format(names), text, re.MULTILINE) is not None


def cut_text(name: str, text: str, cut: set[str]) -> str:
    lines, gone = text.splitlines(keepends=True), set[int]()
    if "extra: " not in text or name.endswith(".patch"):  # whose lines are those of other files
        return text
    open_until = None
    for number, line in enumerate(lines):  # blocks
        begin = ALONE.match(line.rstrip("\n"))
        if not open_until and begin and is_cut(begin[1], cut) and _ends("".join(lines[number:]), begin[1]):
            open_until = re.compile(END.format(begin[1]))
        if open_until:
            gone.add(number)
            if open_until.match(line.rstrip("\n")):
                open_until = None
    marked = {number: found[1] for number, line in enumerate(lines) if (found := MARKER.search(line.rstrip("\n")))}
    marked = {number: names for number, names in marked.items() if is_cut(names, cut) and number not in gone}
    if name.endswith(".py") and marked:
        spans, comments = spans_of(text), comments_of(text)
        for number in marked:
            if number not in comments:  # in a string
                continue
            if lines[number].lstrip().startswith("#"):
                gone.add(number)
                continue
            here = [(last - first, first, last) for first, last, ends in spans if number in ends]
            if not here:
                fail(f"{name}:{number + 1}: no statement begins or ends here; move the marker")
            _, first, last = max(here)
            gone |= set(range(first, last + 1))
    else:
        gone |= marked.keys()
    kept = [line for number, line in enumerate(lines) if number not in gone]
    if gone and not name.endswith(".py"):  # what stood between two blank lines leaves one
        kept = re.sub(r"\n{3,}", "\n\n", "".join(kept)).splitlines(keepends=True)
    return "".join(kept)


def comments_of(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    return {token.start[0] - 1 for token in tokens if token.type == tokenize.COMMENT}


def spans_of(text: str) -> list[tuple[int, int, set[int]]]:
    """Of each statement and each element of a list the first and the last line, and those that may have its marker.

    Lines count from 0. The last line of a compound statement is that of another one, and has the marker of that.
    """
    return [
        (first - 1, last - 1, {line - 1 for line in ends})
        for node in ast.walk(ast.parse(text))
        for first, last, ends in _spans(node)
    ]


def _spans(node: ast.AST) -> Iterator[tuple[int, int, set[int]]]:
    if isinstance(node, ast.stmt):
        decorators = [each.lineno for each in getattr(node, "decorator_list", [])]
        first, last = min([node.lineno, *decorators]), node.end_lineno or node.lineno
        yield first, last, {first, node.lineno} | (set() if hasattr(node, "body") else {last})
    elements: list = []
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        elements = [(each, each) for each in node.elts]
    elif isinstance(node, ast.Dict):
        elements = [(key or value, value) for key, value in zip(node.keys, node.values, strict=True)]
    elif isinstance(node, ast.Call):
        elements = [(each, each) for each in (*node.args, *node.keywords)]
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        defaults = [None] * (len(positional) - len(node.defaults)) + [*node.defaults] + [*node.kw_defaults]
        elements = [(each, end or each) for each, end in zip([*positional, *node.kwonlyargs], defaults, strict=True)]
    elif isinstance(node, ast.ImportFrom):
        elements = [(each, each) for each in node.names]
    yield from ((first.lineno, last.end_lineno, {first.lineno, last.end_lineno}) for first, last in elements)


def fields_of(config: str, cut: set[str]) -> Fields:
    """The fields in the blocks of these extras in config.py, with their defaults."""
    found: Fields = {name: {} for name in sorted(cut)}
    blocks: dict[int, str] = {}  # the extra by line
    inside = ""
    for number, line in enumerate(config.splitlines(), 1):
        if begin := ALONE.match(line):
            inside = begin[1]
        elif re.match(END.format(r"\w+"), line):
            inside = ""
        blocks[number] = inside
    for node in ast.walk(ast.parse(config)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and blocks[node.lineno] in cut:
            is_setting = ast.unparse(node.value.func) == "setting"  # whose first argument is the group
            default = ast.literal_eval(node.value.args[1 if is_setting else 0])
            found[blocks[node.lineno]][ast.unparse(node.target)] = default
    return found


def unlinked(page: str, text: str, gone: set[str]) -> str:
    """The page with the texts of links to files that are gone."""

    def shown(link: re.Match) -> str:
        target = os.path.normpath(Path(page).parent / link[2]) if link[2] and "://" not in link[2] else page
        is_gone = target in gone or (
            any(each.startswith(f"{target}/") for each in gone) and not (ROOT / target).exists()
        )
        return link[1] if is_gone else link[0]

    return LINK.sub(shown, text)


def without_commands(text: str, deleted: set[str], flags: set[str]) -> str:
    """The page without the commands, and the rows of tables, that are about these files and folders, or flags."""

    def names_one(command: str) -> bool:
        return not (deleted | flags).isdisjoint(re.split(r'[\s"=]+', command.partition(" #")[0]))

    def kept(fence: re.Match) -> str:
        commands = re.findall(r"(?:.*\\\n)*.*\n", fence[1])
        rest = "".join(each for each in commands if not names_one(each))
        return f"```bash\n{rest}```\n" if rest.strip() else ""

    found = re.sub(r"^```bash\n(.*?)^```\n", kept, text, flags=re.DOTALL | re.MULTILINE)
    lines = found.splitlines(keepends=True)
    cells = [re.findall(r"`([^`]+)`", line.split(" | ")[0]) if line.startswith("| `") else [] for line in lines]
    found = "".join(line for line, cell in zip(lines, cells, strict=True) if not cell or not deleted.issuperset(cell))
    return re.sub(r"\n{3,}", "\n\n", found) if found != text else text


def without_rows(text: str, fields: set[str]) -> str:
    """The page without the rows of tables that are about these fields."""
    lines = text.splitlines(keepends=True)
    cells = [re.match(r"\| *`(?:--)?(\w+)[^`]*`", line) for line in lines]
    found = "".join(line for line, cell in zip(lines, cells, strict=True) if not (cell and cell[1] in fields))
    return re.sub(r"^#+ .*\n\n\|.*\n\|[-|]+\n(\n|\Z)", "", found, flags=re.MULTILINE)  # headings of tables without rows


def recorded(text: str) -> Fields:
    """What pyproject.toml says is deleted."""
    return tomllib.loads(text).get("tool", {}).get("extras", {}).get("without", {})


def with_record(text: str, fields: Fields) -> str:
    tables = {name: [f"{field} = {json.dumps(value)}" for field, value in fields[name].items()] for name in fields}
    pairs = ", ".join(f"{name} = {{{', '.join(tables[name])}}}" for name in sorted(tables))
    return RECORD.sub(lambda _: f"without = {{{pairs}}}", text)


def dangling(files: Files, left: Files) -> list[str]:
    """What is left that imports modules which were there and are gone."""
    roots = ["", "scripts/", *sorted({f"{Path(name).parent}/" for name in files if name.startswith("tests/")})]
    ends = (".py", "/__init__.py")
    found = []
    for name, text in left.items():
        try:
            nodes = [*ast.walk(ast.parse(text))] if name.endswith(".py") else []
        except SyntaxError:  # a file of the fork that is no Python 3
            continue
        for node in nodes:
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            for module in modules:
                paths = [f"{root}{module.replace('.', '/')}{end}" for root in roots for end in ends]
                there = [path for path in paths if path in files]
                found += [f"{name} imports {there[0]}" for _ in there[:1] if left.keys().isdisjoint(there)]
    return found


def sizes(files: Files) -> Counter[str]:
    """Lines of Python and shell by part of the template."""
    found = Counter[str]()
    for name, text in files.items():
        if name.endswith((".py", ".sh", ".sbatch", ".yaml", ".css")):
            top = name.split("/")[0] if "/" in name else "core"
            found[{"utils": "core"}.get(top, top)] += len(text.splitlines())
    return Counter({name: found[name] for name in ("core", "scripts", "tests")})


def promises(files: Files) -> dict[str, str]:
    rows = re.findall(r"^\| ([\w-]+) \| ([^|]*) \| ([^|]*) \|", files.get("docs/guarantees.md", ""), re.MULTILINE)
    return {key: f"{subject}: {promise}" for key, subject, promise in rows}


def write(root: Path, before: Files, left: Files) -> None:
    for name in before.keys() - left.keys():
        (root / name).unlink()
        for folder in list((root / name).parents)[: len(Path(name).parts) - 1]:
            if folder.is_dir() and not any(each for each in folder.iterdir() if each.name != "__pycache__"):
                subprocess.run(["rm", "-rf", folder], check=True)
    for name, text in left.items():
        if text != before[name]:
            (root / name).write_text(text, encoding="utf-8")
    for words in (["check", "--fix", "--select", "F401,I", "."], ["format", "."]):  # where ruff is installed
        subprocess.run([sys.executable, "-m", "ruff", *words], cwd=root, capture_output=True, check=False)


def cut_tree(root: Path, cut: set[str]) -> tuple[Files, Files]:
    """Delete these extras from the files in a folder. Returns the files before and after."""
    files = read_files(root)
    before = recorded(files[PROJECT])
    left, fields = without(files, cut | before.keys())
    if problems := dangling(files, left):
        fail(f"{problems[0]}; keep the extra of that file, or delete that of this one too")
    left[PROJECT] = with_record(left[PROJECT], fields | before)
    write(root, files, left)
    return files, read_files_again(root, left)


def read_files_again(root: Path, left: Files) -> Files:
    return {name: (root / name).read_text(encoding="utf-8") if text else "" for name, text in left.items()}


def require_clean() -> None:
    if git("status", "--porcelain", "--untracked-files=no"):
        fail("the working tree has changes; commit or stash them first, so that this can be undone")


def show_list(files: Files) -> None:
    gone = recorded(files[PROJECT])
    print(f"{'lines of':12}  core scripts tests  what it buys")
    for name, sentence in extras_of(files).items():
        if name in gone:
            print(f"{name:12} deleted             {sentence}")
            continue
        less = sizes(files) - sizes(without(files, {name})[0])
        print(f"{name:12} {less['core']:5} {less['scripts']:7} {less['tests']:5}  {sentence}")


def delete(names: set[str]) -> None:
    before, left = cut_tree(ROOT, names)
    print(f"deleted {', '.join(sorted(names))}; lines before and after:")
    for part, number in sizes(before).items():
        print(f"  {part:8} {number:6,} -> {sizes(left)[part]:6,}")
    lost = [promise for key, promise in promises(before).items() if key not in promises(left)]
    print(*(["this fork no longer promises:"] if lost else []), *(f"  - {promise}" for promise in lost), sep="\n")
    print("to undo this: git restore --source=HEAD --staged --worktree .")


def merge(ref: str) -> None:
    """Merge a newer template: between the old one and the new one, both without the deleted extras."""
    require_clean()
    cut = set(recorded((ROOT / PROJECT).read_text(encoding="utf-8")))
    old, new = git("merge-base", "HEAD", ref), git("rev-parse", f"{ref}^{{commit}}")
    if old == new:
        print(f"{ref} is already merged")
        return
    commits: list[str] = []
    for number, commit in enumerate((old, new)):
        with tempfile.TemporaryDirectory() as temporary:
            tree = Path(temporary, "tree")
            git("worktree", "add", "--quiet", "--detach", str(tree), commit)
            try:
                if cut:
                    cut_tree(tree, cut)
                git("add", "--all", root=tree)
                made = git("write-tree", root=tree)
            finally:
                git("worktree", "remove", "--force", str(tree))
        parents = ["-p", commits[0]] if number else []
        commits.append(git("commit-tree", made, *parents, "-m", f"{commit} without {', '.join(sorted(cut))}"))
    ended = subprocess.run(["git", "merge-recursive", commits[0], "--", "HEAD", commits[1]], cwd=ROOT, check=False)
    if ended.returncode > 1:
        fail("git merge-recursive failed; git reset --merge undoes it")
    folder = Path(git("rev-parse", "--absolute-git-dir"))
    (folder / "MERGE_HEAD").write_text(f"{new}\n")
    (folder / "MERGE_MSG").write_text(f"Merge {ref} of the template\n")
    if ended.returncode:
        fail("resolve the conflicts above, git add them, then git commit (git merge --abort undoes the merge)")
    git("commit", "--no-edit", "--quiet")
    print(f"merged {ref}")


def main(words: list[str]) -> None:
    files = read_files(ROOT)
    known = extras_of(files)
    if words[:1] == ["--list"]:
        show_list(files)
    elif words[:1] == ["--merge"] and len(words) == 2:
        merge(words[1])
    elif words:
        names = set(words) - {"--all-but"}
        if wrong := names - known.keys():
            fail(f"{min(wrong)}: is not an extra; give some of {', '.join(known)}")
        require_clean()
        gone = recorded(files[PROJECT]).keys()
        names = (known.keys() - names if words[0] == "--all-but" else names) - gone
        delete(names) if names else print("these are already deleted")
    else:
        fail("give the names of extras to delete, or --list to see them (docs/extras.md)")


if __name__ == "__main__":
    main(sys.argv[1:])
