"""Settings that do not go together."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.settings.deleted_extras import read_deleted_extras
from utils.settings.problems import describe_problem
from utils.settings.value_types import to_text

if TYPE_CHECKING:
    from utils.settings.fields import Setting

GIVE_ONLY_ONE = "Give only one of the two."


class Conflict(NamedTuple):
    """A combination of settings that is refused. It is declared with a setting.

    It is looked for only if the setting that the message is about differs from its default.

    Args:
        other: the name of another setting, which is in conflict if it differs from its default too, or a condition. A
            condition gets the config, and returns something true if there is a conflict.
        problem: as a check returns it. {NAME} is the value of a setting, {found} what the condition returned.
        subject: the name of the setting that the message is about, if that is another one.
    """

    other: str | Callable[[Any], Any]
    problem: str
    subject: str = ""


class UnreadableSettingError(Exception):
    """A condition has read a setting that has no valid value."""


def find_conflicts(settings: Iterable[Setting], config: Any, invalid: set[str]) -> list[tuple[str, str]]:
    """Return the name of a setting and a message, for each combination of values that is refused.

    Args:
        settings: all settings.
        config: has their values.
        invalid: the names of those that cannot be used. A conflict that depends on one of them is not found, nor is one
            that depends on the setting of an extra which this fork has deleted.
    """
    of_deleted_extras = {name for names in read_deleted_extras().values() for name in names}
    missing = invalid | of_deleted_extras - {setting.name for setting in settings}
    if missing:
        config = _create_partial_config(config, missing)
    values = vars(config)
    texts = {name: to_text(value) for name, value in values.items()}
    given = {field.name for field in settings if field.name in values and values[field.name] != field.resolved_default}
    problems = []
    for setting in settings:
        for conflict in setting.conflicts:
            name = conflict.subject or setting.name
            found = name in given and _is_met(conflict, config, given)
            if found and not invalid.intersection(list_field_names(conflict.problem)):
                problem = conflict.problem.format_map(texts | {"found": found})
                problems.append((name, describe_problem(name, values[name], problem)))
    return problems


def list_field_names(text: str) -> list[str]:
    """The names in braces."""
    return [name for _, name, _, _ in string.Formatter().parse(text) if name]


def _is_met(conflict: Conflict, config: Any, given: set[str]) -> Any:
    if isinstance(conflict.other, str):
        return conflict.other in given
    try:
        return conflict.other(config)
    except UnreadableSettingError:
        return False


def _create_partial_config(config: Any, missing: set[str]) -> Any:
    """The config, of which these settings cannot be read: that raises UnreadableSettingError."""

    def raise_unreadable(config: Any) -> None:
        raise UnreadableSettingError

    attributes = dict.fromkeys(missing, property(raise_unreadable))
    part: Any = object.__new__(type("ValidPart", (type(config),), attributes))
    part.__dict__.update({name: value for name, value in vars(config).items() if name not in missing})
    return part
