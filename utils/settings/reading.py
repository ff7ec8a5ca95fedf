"""A config from its defaults, the file of `--config` and flags. All problems are shown at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from utils.settings.declarations import list_settings
from utils.settings.errors import InvalidSettings
from utils.settings.fields import Settings
from utils.settings.files import read_config_file
from utils.settings.flags import read_flags
from utils.settings.help import format_help
from utils.settings.problems import REDACTED
from utils.settings.removed import pop_removed_settings
from utils.settings.value_types import BOOLEANS

T = TypeVar("T", bound=Settings)


def read_config(config: type[T], argv: Sequence[str], defaults: dict[str, Any], notes: list[str]) -> tuple[T, bool]:
    """The config that flags and the file of `--config` give.

    Exits 0 after `--help`. Prints all problems and exits 2 if there are any.

    Args:
        config: the class.
        argv: of the command line.
        defaults: values that replace those of the settings.
        notes: gets a line for each setting of the file that was removed from this version and is ignored.

    Returns:
        The config, and whether `--print_config` is given.
    """
    settings = list_settings(config)
    flags = read_flags(argv, settings)
    given = flags.given
    problems = flags.problems
    without_value = flags.names_without_value
    help_value = given.pop("help", "")
    file = given.pop("config", "")
    print_config = given.pop("print_config", "")
    if help_value in ("true", "all"):
        print(format_help(settings, shows_rare=help_value == "all"))
        raise SystemExit(0)
    if help_value:
        problems.append(f'--help must have no value or all, got "{help_value}".')
    in_file: dict[str, Any] = {}
    if file:
        read = read_config_file(file, settings)
        in_file = read.values
        problems += read.problems
        without_value |= read.names_without_value
    ignored, refused = pop_removed_settings(in_file, given, file)
    notes += ignored
    problems += refused
    if BOOLEANS.get(given.get("eval_only", "").lower()):
        in_file.pop("init_from", None)  # the weights that the run of a config.json started from
    values = defaults | in_file | given
    sources = {name: f"{file}: " for name in in_file if name not in given}
    for name, value in (in_file | given).items():
        if REDACTED in str(value):
            problems.append(
                f"{sources.get(name, '')}--{name} contains {REDACTED}, which stands for a secret that a run did not"
                " store. Give the command again, or better a script that holds the secret."
            )
    # no conflict is a consequence of what could not be read
    names = {setting.name for setting in settings}
    unreadable = names & without_value - given.keys() - in_file.keys()
    try:
        instance = config(**values | dict.fromkeys(unreadable))
    except InvalidSettings as error:
        problems += [sources.get(name, "") + text for name, text in error.problems if name not in unreadable]
    if problems:
        print("\n".join(problems), file=sys.stderr, flush=True)
        raise SystemExit(2)
    return instance, bool(print_config)
