"""Declares settings, and reads the declarations of a config class."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from utils.settings.checks import Check, one_of
from utils.settings.conflicts import Conflict, names_in
from utils.settings.deleted_extras import deleted_extras
from utils.settings.errors import UserError
from utils.settings.kinds import Kind, kind_of, to_text
from utils.settings.paths import expand, known_path
from utils.settings.removed import REMOVED

YOURS = "model and data"  # the group of the fork's own settings
GROUPS = ("run", "data", "model", "training", "precision", "distributed", "checkpoints", "logging", YOURS)
GENERAL = ("help", "config", "print_config")  # flags that are no settings
REDACTED = "[redacted]"  # in place of a secret
CREDENTIALS = re.compile(r"(?<=://)[^/@]*:[^/@]*(?=@)|(?<=\?).*")  # in a URL
RESUME_RULES = ("must", "may", "free")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A part of the config: the kernel's, the fork's own, or that of an extra."""

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
        raise UserError(f"config.py: resume={resume!r} of the setting {help!r} is not known; give must, may or free")
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
    return setting(YOURS, default, help, check, resume, rare=rare, conflicts=conflicts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of one setting. The attributes that `setting` has as arguments are explained there."""

    name: str
    kind: Kind
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
        return self.kind.is_path

    @property
    def choices(self) -> list[str]:
        return [str(choice) for choice in self.check.choices] if isinstance(self.check, one_of) else []

    @property
    def may_be_auto(self) -> bool:
        """Whether the setting may be "auto", and that stands for another value."""
        return self.kind.may_be_auto or (self.default == "auto" and "auto" not in self.choices)

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
        """The value converted to the setting's type, and the problem with it ("" if there is none)."""
        if self.may_be_auto and isinstance(value, str) and value == "auto":
            return value, ""
        try:
            converted = self.kind.read(value)
        except (ValueError, KeyError, TypeError):
            noun = self.kind.noun
            remedy = self.kind.remedy or noun
            if self.may_be_auto:
                noun += " or auto"
                remedy += " or auto"
            return value, f"is not {noun}; give {remedy}"
        if not self.kind.is_list:
            return self._resolve(converted)
        resolved = [self._resolve(element) for element in converted]
        problems = [problem if self.is_path else f"{element} {problem}" for element, problem in resolved if problem]
        first_problem = problems[0] if problems else ""
        return type(converted)(element for element, _ in resolved), first_problem

    def _resolve(self, value: Any) -> tuple[Any, str]:
        """One value, or one element of a list, with `~` and $NAME replaced if it is a path; and its problem."""
        if not self.is_path:
            return value, self.problem_with(value)
        text = expand(str(value))
        return type(value)(text), self.problem_with(text) or known_path(text)

    def problem_with(self, value: Any) -> str:
        """What the check says about one value or element, which is a text if it is a path."""
        try:
            return self.check(value) if self.check else ""
        except Exception as error:
            return f"cannot be checked ({error}); correct the check of {self.name} in config.py"


def convert_values(settings: Iterable[Setting], values: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The valid values, converted to the types of the settings, and the name and problem of each invalid one."""
    converted = {}
    problems = []
    for setting in settings:
        value, problem = setting.convert(values[setting.name])
        if problem:
            shown = CREDENTIALS.sub(REDACTED, to_text(value) if setting.kind.is_list else str(value))
            problems.append((setting.name, f"{setting.name}={shown}: {problem}"))
        else:
            converted[setting.name] = value
    return converted, problems


_SETTINGS: dict[type[Settings], tuple[Setting, ...]] = {}  # those that have been read, by config class


def settings_of(config: type[Settings]) -> tuple[Setting, ...]:
    """The settings of a config class by group, and within a group in the order of the classes that it is composed of.

    Raises:
        UserError: if a setting is declared in a way that cannot work, with the remedy.
    """
    if config not in _SETTINGS:
        _SETTINGS[config] = _read_settings(config)
    return _SETTINGS[config]


def _read_settings(config: type[Settings]) -> tuple[Setting, ...]:
    try:
        annotations = typing.get_type_hints(config)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise UserError(f"config.py: {error} in the type of a setting; import or correct it") from None
    settings = {}
    problems = []
    for field in dataclasses.fields(config):
        try:
            _check_declaration(field, config)
            settings[field.name] = _setting_of(field, annotations[field.name])
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    _check_conflicts(settings)
    in_order = []
    for part in config.__mro__:
        in_order += [settings.pop(name) for name in inspect.get_annotations(part) if name in settings]
    return tuple(sorted(in_order, key=_place_of_group))


def _place_of_group(setting: Setting) -> int:
    return GROUPS.index(setting.group) if setting.group in GROUPS else len(GROUPS)


def _check_declaration(field: dataclasses.Field, config: type[Settings]) -> None:
    """Raises UserError if the field is not made by `setting` or `yours`, or has a name that is taken."""
    name = field.name
    if "group" not in field.metadata:
        raise UserError(f'config.py: {name} needs a help; write {name}: {field.type} = yours(DEFAULT, "what it is")')
    if name in REMOVED:
        raise UserError(f"config.py: {name} is the name of a setting that was removed; choose another name")
    if name in GENERAL:
        raise UserError(f"config.py: --{name} is a flag of train.py itself; choose another name")
    for part in config.__mro__:
        if name not in inspect.get_annotations(part):
            if name in vars(part):
                raise UserError(f"config.py: {name} is a name that the template uses; choose another")
            continue
        (other,) = (declared for declared in dataclasses.fields(part) if declared.name == name)
        are_of_fork = field.metadata["group"] == other.metadata["group"] == YOURS
        if other is not field and not are_of_fork:  # which may replace a setting of the example
            raise UserError(f"config.py: {name} is a setting of the template; choose another name")


def _check_conflicts(settings: dict[str, Setting]) -> None:
    """Raises UserError if a conflict names a setting that there is not."""
    known = {*settings, *(name for names in deleted_extras().values() for name in names)}
    for setting in settings.values():
        for conflict in setting.conflicts:
            names = names_in(conflict.problem)
            names += [conflict.subject, conflict.other if isinstance(conflict.other, str) else ""]
            for name in names:
                if name and name != "found" and name not in known:
                    raise UserError(f"config.py: a conflict of {setting.name} names {name}, which is no setting")


def _setting_of(field: dataclasses.Field, annotation: Any) -> Setting:
    metadata = dict(field.metadata)
    kind = kind_of(field.name, annotation)
    if metadata.pop("is_path"):
        kind = dataclasses.replace(kind, is_path=True)
    default = metadata.pop("default")
    setting = Setting(name=field.name, kind=kind, default=default, **metadata)
    if default == "auto" and setting.may_be_auto:
        return setting
    try:
        setting = dataclasses.replace(setting, default=kind.read(default))
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"config.py: the default of {field.name} is {default!r}, which is not {kind.noun};"
            f" give {kind.remedy or kind.noun}"
        ) from None
    _try_check(setting)
    return setting


def _try_check(setting: Setting) -> None:
    """Raises UserError if the check of a setting gives no text for the default, which need not be valid."""
    elements = setting.default if setting.kind.is_list else [setting.default]
    for element in elements:
        answer = setting.problem_with(str(element) if setting.is_path else element)
        if not isinstance(answer, str):
            remedy = 'let it return "" or "what is wrong; what to do"'
            raise UserError(f"config.py: the check of {setting.name} returns {answer!r} for {element!r}; {remedy}")
