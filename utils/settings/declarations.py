"""Reads the settings of a config class when config.py is imported, and rejects invalid declarations."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

from utils.settings.conflicts import list_field_names
from utils.settings.deleted_extras import read_deleted_extras
from utils.settings.errors import UserError
from utils.settings.fields import FORK_GROUP, GENERAL_FLAGS, GROUPS, Setting, Settings
from utils.settings.removed import REMOVED_SETTINGS
from utils.settings.value_types import find_value_type

_SETTINGS_BY_CLASS: dict[type[Settings], tuple[Setting, ...]] = {}  # those that have been read, by config class


def list_settings(config: type[Settings]) -> tuple[Setting, ...]:
    """The settings of a config class by group, and within a group in the order of the classes that it is composed of.

    Raises:
        UserError: if a setting is declared in a way that cannot work, with the fix.
    """
    if config not in _SETTINGS_BY_CLASS:
        _SETTINGS_BY_CLASS[config] = _read_settings(config)
    return _SETTINGS_BY_CLASS[config]


def _read_settings(config: type[Settings]) -> tuple[Setting, ...]:
    try:
        annotations = typing.get_type_hints(config)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise UserError(f"config.py: the type of a setting cannot be read ({error}). Import or correct it.") from None
    settings = {}
    problems = []
    for field in dataclasses.fields(config):
        try:
            _check_declaration(field, config)
            settings[field.name] = _create_setting(field, annotations[field.name])
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    _check_conflicts(settings)
    in_order = []
    for part in config.__mro__:
        in_order += [settings.pop(name) for name in inspect.get_annotations(part) if name in settings]
    return tuple(sorted(in_order, key=_group_position))


def _group_position(setting: Setting) -> int:
    return GROUPS.index(setting.group) if setting.group in GROUPS else len(GROUPS)


def _check_declaration(field: dataclasses.Field, config: type[Settings]) -> None:
    """Raises UserError if the field is not made by `setting` or `yours`, or has a name that is taken."""
    name = field.name
    if "group" not in field.metadata:
        raise UserError(
            f'config.py: {name} has no help text. Write {name}: {field.type} = yours(DEFAULT, "what it is").'
        )
    if name in REMOVED_SETTINGS:
        raise UserError(f"config.py: {name} is the name of a setting that was removed. Choose another name.")
    if name in GENERAL_FLAGS:
        raise UserError(f"config.py: --{name} is a flag of train.py itself. Choose another name.")
    for part in config.__mro__:
        if name not in inspect.get_annotations(part):
            if name in vars(part):
                raise UserError(f"config.py: {name} is a name that the template uses. Choose another name.")
            continue
        (inherited,) = (declared for declared in dataclasses.fields(part) if declared.name == name)
        are_of_fork = field.metadata["group"] == inherited.metadata["group"] == FORK_GROUP
        if inherited is not field and not are_of_fork:  # which may replace a setting of the example
            raise UserError(f"config.py: {name} is a setting of the template. Choose another name.")


def _check_conflicts(settings: dict[str, Setting]) -> None:
    """Raises UserError if a conflict names a setting that there is not."""
    setting_names = {*settings, *(name for names in read_deleted_extras().values() for name in names)}
    for setting in settings.values():
        for conflict in setting.conflicts:
            names = list_field_names(conflict.problem)
            names += [conflict.subject, conflict.other if isinstance(conflict.other, str) else ""]
            for name in names:
                if name and name != "found" and name not in setting_names:
                    raise UserError(
                        f"config.py: a conflict of {setting.name} names {name}. Name a setting that exists."
                    )


def _create_setting(field: dataclasses.Field, annotation: Any) -> Setting:
    metadata = dict(field.metadata)
    kind = find_value_type(field.name, annotation)
    if metadata.pop("is_path"):
        kind = dataclasses.replace(kind, is_path=True)
    default = metadata.pop("default")
    setting = Setting(name=field.name, value_type=kind, default=default, **metadata)
    if default == "auto" and setting.may_be_auto:
        return setting
    try:
        setting = dataclasses.replace(setting, default=kind.read(default))
    except (ValueError, KeyError, TypeError):
        raise UserError(f"config.py: the default of {field.name} must be {kind.noun}, got {default!r}.") from None
    _check_default(setting)
    return setting


def _check_default(setting: Setting) -> None:
    """Raises UserError if the check of a setting gives no text for the default, which need not be valid."""
    elements = setting.default if setting.value_type.is_list else [setting.default]
    for element in elements:
        answer = setting.find_problem(str(element) if setting.is_path else element)
        if not isinstance(answer, str):
            raise UserError(
                f"config.py: the check of {setting.name} returns {answer!r} for {element!r}."
                ' Let it return "" or the problem, such as "must be even".'
            )
