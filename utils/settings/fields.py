"""How a setting is declared, and how a value of it is converted and checked."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from utils.settings.checks import Check, one_of
from utils.settings.conflicts import Conflict
from utils.settings.errors import UserError
from utils.settings.paths import expand_path, explain_path_problem
from utils.settings.problems import describe_problem
from utils.settings.value_types import ValueType

FORK_GROUP = "model and data"  # the group of the fork's own settings
GROUPS = (
    "run",
    FORK_GROUP,
    "data",
    "training",
    "performance",
    "distributed",
    "checkpoints and evaluation",
    "logging",
)
GENERAL_FLAGS = ("help", "config", "print_config")  # flags that are no settings
RESUME_RULES = ("must", "may", "free")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A part of the config: the template's, the fork's own, or that of an extra."""

    def micro_batch_setting(self) -> str:
        """The name of the setting that says how large a micro-batch is."""
        return "batch_size"


def setting(
    group: str,
    default: Any,
    help: str,
    check: Check | None = None,
    resume: str = "free",
    *,
    rare: bool = False,
    conflicts: Conflict | Sequence[Conflict] = (),
    is_path: bool = False,
    is_copied: bool = True,
) -> Any:
    """One setting: a field of the config.

    Its type is int, float, bool, str, Path, or a list[...] or tuple[..., ...] of one of them. One of type `int | str`,
    or whose default is "auto", may also be "auto".

    Args:
        group: the heading in `--help`.
        default: its value if none is given.
        help: what it is. `--help` adds the choices and the default.
        check: of the value; of each element, if it is a list.
        resume: when a run is resumed the value "must" be the same, "may" change (which is logged), or is "free".
        rare: only `--help all` shows it.
        conflicts: what it does not go together with.
        is_path: `~` and $NAME are replaced in the text. They always are in a `Path`.
        is_copied: whether `--config RUN/config.json` takes it from that run.
    """
    if resume not in RESUME_RULES:
        raise UserError(
            f'config.py: the resume rule of the setting "{help}" must be must, may or free, got {resume!r}.'
        )
    metadata = {
        "default": default,
        "group": group,
        "help": help,
        "check": check,
        "resume": resume,
        "is_rare": rare,
        "conflicts": (conflicts,) if isinstance(conflicts, Conflict) else tuple(conflicts),
        "is_path": is_path,
        "is_copied": is_copied,
    }
    if isinstance(default, (list, dict, set)):  # each config gets its own; only a list is a valid default
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def yours(
    default: Any,
    help: str,
    check: Check | None = None,
    resume: str = "must",
    *,
    rare: bool = False,
    conflicts: Conflict | Sequence[Conflict] = (),
) -> Any:
    """A setting that only model.py and dataset.py read. "auto" takes the training set's attribute of the same name.

    Args: as those of `setting`.
    """
    return setting(FORK_GROUP, default, help, check, resume, rare=rare, conflicts=conflicts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of one setting. The attributes that `setting` has as arguments are explained there."""

    name: str
    value_type: ValueType
    default: Any
    group: str
    help: str
    check: Check | None
    resume: str
    is_rare: bool
    conflicts: tuple[Conflict, ...]
    is_copied: bool

    @property
    def is_path(self) -> bool:
        return self.value_type.is_path

    @property
    def choices(self) -> list[str]:
        return [str(choice) for choice in self.check.choices] if isinstance(self.check, one_of) else []

    @property
    def may_be_auto(self) -> bool:
        """Whether the setting may be "auto", and that stands for another value."""
        return self.value_type.may_be_auto or (self.default == "auto" and "auto" not in self.choices)

    @property
    def placeholder(self) -> str:
        """What stands for the value in `--help`."""
        if self.value_type.is_list:
            return self.value_type.placeholder
        if self.is_path:
            return "PATH"
        return "NAME" if self.choices else self.value_type.placeholder

    @property
    def help_with_choices(self) -> str:
        if not self.choices:
            return self.help
        return f"{self.help}: {{{','.join(self.choices)}}}"

    @property
    def resolved_default(self) -> Any:
        """The default as a config has it, with `~` and $NAME replaced in a path."""
        return self.convert(self.default)[0]

    def convert(self, value: Any) -> tuple[Any, str]:
        """Return the value converted to the setting's type, and a message about the problem with it, or ""."""
        if self.may_be_auto and isinstance(value, str) and value == "auto":
            return value, ""
        try:
            converted = self.value_type.read(value)
        except (ValueError, KeyError, TypeError):
            requirement = f"must be {self.value_type.noun}"
            if self.may_be_auto:
                requirement += ' or "auto"'
            return value, describe_problem(self.name, value, requirement)
        if not self.value_type.is_list:
            resolved, problem = self._resolve_value(converted)
            return resolved, describe_problem(self.name, resolved, problem)
        elements = []
        message = ""
        for element in converted:
            resolved, problem = self._resolve_value(element)
            elements.append(resolved)
            if not message:
                message = describe_problem(self.name, resolved, problem, owner="each element of ")
        return type(converted)(elements), message

    def _resolve_value(self, value: Any) -> tuple[Any, str]:
        """One value, or one element of a list, with `~` and $NAME replaced if it is a path; and its problem."""
        if not self.is_path:
            return value, self.find_problem(value)
        text = expand_path(str(value))
        return type(value)(text), self.find_problem(text) or explain_path_problem(text)

    def find_problem(self, value: Any) -> str:
        """What the check says about one value or element, which is a text if it is a path."""
        try:
            return self.check(value) if self.check else ""
        except Exception as error:
            return f"cannot be checked ({error}). Correct the check of {self.name} in config.py."


def convert_values(settings: Iterable[Setting], values: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the valid values, converted to the types of the settings, and the name and message of each invalid one."""
    converted = {}
    problems = []
    for setting in settings:
        value, message = setting.convert(values[setting.name])
        if message:
            problems.append((setting.name, message))
        else:
            converted[setting.name] = value
    return converted, problems
