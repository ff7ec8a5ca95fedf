"""The command line. argparse stops at the first problem and cannot answer names of other trainers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from utils.settings.fields import GENERAL_FLAGS, Setting
from utils.settings.unknown_flags import explain_unknown_flag

FLAG_PATTERN = re.compile(r"--?[^\W\d][\w.-]*(=|$)")  # a negative number is a value


class ParsedFlags(NamedTuple):
    """What a command line gives.

    Args:
        given: the text of each flag that has one, by name.
        problems: what is wrong.
        names_without_value: the names of settings that were meant by a flag that has no value or another name.
    """

    given: dict[str, str]
    problems: list[str]
    names_without_value: set[str]


def read_flags(argv: Sequence[str], settings: Sequence[Setting]) -> ParsedFlags:
    """Read a command line.

    Args:
        argv: of the command line.
        settings: all settings.
    """
    flag_names = {*GENERAL_FLAGS, *(setting.name for setting in settings)}
    booleans = {setting.name for setting in settings if setting.value_type.is_bool}
    lists = {setting.name for setting in settings if setting.value_type.is_list}
    given: dict[str, str] = {}
    problems: list[str] = []
    without_value: set[str] = set()
    for flag, values in _group_words_by_flag(argv):
        name, values = _normalize_flag(flag, values, flag_names, booleans)
        if name in flag_names and values:
            given[name] = values[0]
            values = values[1:]
        elif name in flag_names:
            problems.append(f"{flag} has no value. Write {flag} VALUE.")
            without_value.add(name)
        elif flag:
            answer, meant = explain_unknown_flag(flag, flag_names)
            problems.append(answer)
            without_value.add(meant)
            continue  # the words after it may be its values
        if values:
            example = f"{flag} 1,2,3" if name in lists else "--NAME VALUE"
            problems.append(f'"{values[0]}" is not a flag. Write {example}.')
    return ParsedFlags(given, problems, without_value)


def _group_words_by_flag(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the words after it. Words before the first flag come with the flag ""."""
    flags: list[tuple[str, list[str]]] = [("", [])]
    for word in argv:
        if FLAG_PATTERN.match(word):
            flag, equals, value = word.partition("=")
            flags.append((flag, [value] if equals else []))
        else:
            flags[-1][1].append(word)
    return flags


def _normalize_flag(flag: str, values: list[str], flag_names: set[str], booleans: set[str]) -> tuple[str, list[str]]:
    """The name that a flag stands for, and its values: a boolean and `--help` need none, `--no-NAME` is "false"."""
    name = flag.removeprefix("--").replace("-", "_")
    if flag == "-h":
        name = "help"
    if name not in flag_names and name.removeprefix("no_") in booleans:
        return name.removeprefix("no_"), ["false", *values]
    if name == "print_config":
        return name, ["true", *values]
    if name == "help" or name in booleans:
        return name, values or ["true"]
    return name, values
