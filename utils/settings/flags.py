"""The command line. argparse stops at the first problem and cannot answer names of other trainers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from utils.settings.fields import GENERAL, Setting
from utils.settings.unknown import answer_unknown

FLAG = re.compile(r"--?[^\W\d][\w.-]*(=|$)")  # a negative number is a value


def read_flags(words: Sequence[str], settings: Sequence[Setting]) -> tuple[dict[str, str], list[str]]:
    """The text given with each flag, and the problems with the flags.

    Args:
        words: of the command line.
        settings: all settings.
    """
    known = {*GENERAL, *(setting.name for setting in settings)}
    booleans = {setting.name for setting in settings if setting.kind.is_bool}
    given: dict[str, str] = {}
    problems: list[str] = []
    for flag, values in _split(words):
        name, values = _name_and_values(flag, values, known, booleans)
        if name in known and values:
            given[name] = values[0]
            values = values[1:]
        elif name in known:
            problems.append(f"{flag}: expected one argument; see --help")
        elif flag:
            problems.append(answer_unknown(flag, known))
            continue  # the words after it may be its values
        if values:
            problems.append(f"{values[0]}: is not a flag; write --flag value")
    return given, problems


def _split(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the words after it. Words before the first flag come with the flag ""."""
    flags: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if FLAG.match(word):
            flag, equals, value = word.partition("=")
            flags.append((flag, [value] if equals else []))
        else:
            flags[-1][1].append(word)
    return flags


def _name_and_values(flag: str, values: list[str], known: set[str], booleans: set[str]) -> tuple[str, list[str]]:
    """The name that a flag stands for, and its values: a boolean and `--help` need none, `--no-NAME` is "false"."""
    name = flag.removeprefix("--").replace("-", "_")
    if flag == "-h":
        name = "help"
    if name not in known and name.removeprefix("no_") in booleans:
        return name.removeprefix("no_"), ["false", *values]
    if name == "print_config":
        return name, ["true", *values]
    if name == "help" or name in booleans:
        return name, values or ["true"]
    return name, values
