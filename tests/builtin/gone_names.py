# extra: template
"""The paths, flags and choices that a deletion of extras takes away, and what still names them."""

import ast
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lib import remove_extras
from lib.fork_files import Files

# What may name deleted parts: the history, what can be deleted, versions with it, and answers to deleted flags.
EXEMPT = ("CHANGELOG.md", "docs/extras.md", "docs/upgrading.md", "utils/settings/other_trainers.py")
OTHER_PROGRAMS = "docs/coming-from.md"  # whose options may have the names of those of our scripts
WORD = re.compile(r"[\w.*/-]+")
FLAG = re.compile(r"--(?:\[no-\]|no-)?([\w-]+)")
CODE = re.compile(r"`([^`]+)`")
GIVEN = re.compile(r"--\w+[ =](\w+)")  # a flag with its value
LISTED = re.compile(r"\{([\w-]+(?:,[\w-]+)+)\}")  # choices, as --help shows them
SCRIPT_OPTION = re.compile(r"""add(?:_argument)?\(\s*(?:"-\w", )?"(--[\w-]+)\"""")
SHELL_OPTION = re.compile(r"^\s*(?:[\w-]+ \| )*(--[\w-]+)(?: \| [\w-]+)*\)|= (--\w+) \]", re.MULTILINE)
SETTING = re.compile(r"^    (\w+): ", re.MULTILINE)
SETTINGS_FILES = re.compile(r"config\.py|utils/extras/(\w+/)?settings\.py")


@dataclass
class GoneNames:
    """What exists in the template and not in a fork.

    Args:
        paths: files and folders, and the ends of their paths that name no remaining one.
        settings: flags of train.py, with their dashes.
        script_flags: flags of scripts alone.
        choices: values of settings.
    """

    paths: set[str]
    settings: set[str]
    script_flags: set[str]
    choices: set[str]

    def find_in_line(self, line: str, is_test: bool) -> set[str]:
        """The gone names in this line. Commands of tests do not count, since a test of a deleted extra is skipped."""
        quoted = CODE.findall(line)
        found = {code for code in quoted if code.strip('"') in self.choices}
        found |= {code for code in quoted if "_" in code and f"--{code}" in self.settings}
        for text in quoted if is_test else [line]:
            values = GIVEN.findall(text) + ",".join(LISTED.findall(text)).split(",")
            found |= self.choices.intersection(values)
            found |= {word for word in map(strip_word, WORD.findall(text)) if word in self.paths}
            found |= {f"--{name}" for name in FLAG.findall(text)} & (self.settings | self.script_flags)
        return found


def strip_word(word: str) -> str:
    """The path that a word of a text is, without a full stop after it."""
    return word.removeprefix("./").rstrip("./")


def find_gone_names(before: Files, left: Files, extras: set[str]) -> GoneNames:
    """Compare the files of the template with those of a fork that has deleted these extras."""
    path_ends = list_path_ends(before) - list_path_ends(left)
    fields = remove_extras.read_settings(before, extras)
    settings = {f"--{name}" for names in fields.values() for name in names}
    return GoneNames(
        paths={end for end in path_ends if "/" in end or "." in end},
        settings=settings,
        script_flags=list_options(before) - list_options(left) - settings,
        choices=list_choices(before) - list_choices(left),
    )


def list_path_ends(files: Files) -> set[str]:
    """Each file and folder, as a path from the root or from any folder above it."""
    ends = set()
    for file in files:
        parts = file.split("/")
        for last in range(1, len(parts) + 1):
            is_picture = parts[0] == ".github"  # whose name a command may give to another picture
            ends |= {"/".join(parts[first:last]) for first in range(1 if is_picture else last)}
    return ends


def list_options(files: Files) -> set[str]:
    """The flags of the scripts, and the settings, which scripts take as well."""
    options = set()
    for name, text in files.items():
        if name.startswith("scripts/"):
            options |= {*SCRIPT_OPTION.findall(text), *chain(*SHELL_OPTION.findall(text))} - {""}
        if SETTINGS_FILES.fullmatch(name):
            options |= {f"--{field}" for field in SETTING.findall(text)}
    return options


def list_choices(files: Files) -> set[str]:
    """The values of settings that have a few: the arguments of one_of, and the tuples which they unpack."""
    choices: set[str] = set()
    names: set[str] = set()  # of settings, which tuples list too
    for name, text in files.items():
        if not SETTINGS_FILES.fullmatch(name):
            continue
        names.update(SETTING.findall(text))
        for node in ast.walk(ast.parse(text)):
            values = []
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "one_of":
                values = node.args
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                values = node.value.elts
            choices |= {value.value for value in values if isinstance(value, ast.Constant)}
    return choices - names


def list_mentions(before: Files, left: Files, extras: set[str]) -> list[str]:
    """The lines of a fork that name what is gone: "FILE:LINE: NAMES"."""
    gone = find_gone_names(before, left, extras)
    mentions = []
    for name, text in left.items():
        if name in EXEMPT or Path(name).suffix == ".patch":  # of lines elsewhere
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if remove_extras.DELETED_RECORD.match(f"[tool.extras]\n{line}\n"):
                continue
            names = gone.find_in_line(line, is_test=name.startswith("tests/"))
            if name == OTHER_PROGRAMS:
                names -= gone.script_flags
            if names:
                mentions.append(f"{name}:{number}: {', '.join(sorted(names))}")
    return mentions
