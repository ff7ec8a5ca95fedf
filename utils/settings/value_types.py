"""The types that a setting may have: how a value is read, what it is called, and how it is stored."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.settings.errors import UserError

BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True)
class ValueType:
    """A type of settings.

    Args:
        read: makes a value of the type from text or another value. Raises ValueError, KeyError or TypeError.
        noun: what a value is called in messages, which say that the setting must be it.
        placeholder: what stands for the value in `--help`.
        is_list: whether a value has elements, which are checked one by one.
        is_path: whether `~` and $NAME are replaced.
        may_be_auto: whether the type is written as `int | str`, where the text is "auto".
        is_bool: whether `--NAME` and `--no-NAME` are the flags.
    """

    read: Callable[[Any], Any]
    noun: str
    placeholder: str
    is_list: bool = False
    is_path: bool = False
    may_be_auto: bool = False
    is_bool: bool = False


def _read_int(value: Any) -> int:
    return int(str(value))


def _read_float(value: Any) -> float:
    number = float(str(value))
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _read_bool(value: Any) -> bool:
    return BOOLEANS[str(value).lower()]


def _read_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not text")
    return value


def _read_path(value: Any) -> Path:
    if isinstance(value, Path):
        return value
    if not _read_str(value):
        raise ValueError("empty, which pathlib takes for the working folder")
    if "://" in value:
        raise ValueError("a URL, of which pathlib drops a slash")
    return Path(value)


VALUE_TYPES = {
    int: ValueType(_read_int, "an integer", "INT"),
    float: ValueType(_read_float, "a number", "FLOAT"),
    bool: ValueType(_read_bool, "true or false", "BOOL", is_bool=True),
    str: ValueType(_read_str, "text", "STR"),
    Path: ValueType(_read_path, "a path", "PATH", is_path=True),
}
PLURAL_NOUNS = {int: "integers", float: "numbers", bool: "true or false values", str: "texts", Path: "paths"}
ALLOWED_TYPES = "int, float, bool, str, pathlib.Path, and list[...] or tuple[..., ...] of one of them"


def find_value_type(name: str, annotation: Any) -> ValueType:
    """The ValueType of a setting.

    Args:
        name: of the setting, for the error.
        annotation: its type.

    Raises:
        UserError: if a setting cannot have this type.
    """
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation in VALUE_TYPES:
        return VALUE_TYPES[annotation]
    if origin in (types.UnionType, typing.Union):
        if types.NoneType in arguments:
            raise UserError(f'config.py: {name} must not be None. Leave None out, and write "off" as 0, "" or "auto".')
        non_str_types = [argument for argument in arguments if argument is not str]
        if len(arguments) == 2 and len(non_str_types) == 1:
            return dataclasses.replace(find_value_type(name, non_str_types[0]), may_be_auto=True)
    if origin is list and len(arguments) == 1 and arguments[0] in VALUE_TYPES:
        return _create_list_type(arguments[0], list)
    if origin is tuple and len(arguments) == 2 and arguments[1] is ... and arguments[0] in VALUE_TYPES:
        return _create_list_type(arguments[0], tuple)
    shown = annotation.__name__ if isinstance(annotation, type) and not origin else str(annotation)
    raise UserError(f"config.py: {name} has the type {shown}. A setting may have the types {ALLOWED_TYPES}.")


def _create_list_type(element: type, collection_type: Callable[[Any], Any]) -> ValueType:
    """The ValueType of a list or tuple. Its text has commas between the elements."""
    kind = VALUE_TYPES[element]

    def read(value: Any) -> Any:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")] if value.strip() else []
            if "" in value:
                raise ValueError("nothing between two commas")
        if hasattr(value, "tolist"):  # an array or tensor of the training set
            value = value.tolist()
        if not isinstance(value, (list, tuple, range)):
            raise TypeError("not a list")
        return collection_type(kind.read(part) for part in value)

    return ValueType(
        read,
        noun=f"{PLURAL_NOUNS[element]} with commas between them",
        placeholder=f"{kind.placeholder},...",
        is_list=True,
        is_path=kind.is_path,
    )


def to_json_value(value: Any) -> Any:
    """The value of a setting as JSON has it: a list for a tuple, text for a path."""
    if isinstance(value, (list, tuple)):
        return [to_json_value(element) for element in value]
    if isinstance(value, Path):
        return str(value)
    return value


def to_text(value: Any) -> str:
    """The value of a setting as a flag has it."""
    if isinstance(value, (list, tuple)):
        return ",".join(str(element) for element in value)
    return str(value)
