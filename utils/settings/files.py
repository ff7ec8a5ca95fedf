"""The file of `--config`: TOML, YAML, or the config.json of a run."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.settings.deleted_extras import read_deleted_extras
from utils.settings.errors import UserError
from utils.settings.fields import Setting
from utils.settings.paths import expand_path
from utils.settings.removed import REMOVED_SETTINGS, is_equal_number
from utils.settings.unknown_flags import explain_unknown_flag
from utils.settings.value_types import BOOLEANS

YAML_NULLS = ("", "~", "null", "Null", "NULL")  # of YAML
FILE_REMEDY = "Give a TOML or YAML file, or the config.json of a run."


class FileValues(NamedTuple):
    """What a file gives.

    Args:
        values: by name, also of removed settings. A checkpoint_dir inside run_dir is left out, so that it follows that.
        problems: with the names in the file, or with the file.
        names_without_value: the names of settings that have none, or that were meant by another name.
    """

    values: dict[str, Any]
    problems: list[str]
    names_without_value: set[str]


def read_config_file(file: str, settings: Sequence[Setting]) -> FileValues:
    """Read the file of `--config`."""
    by_name = {setting.name: setting for setting in settings}
    path = Path(expand_path(file))
    try:
        content = _parse_file(path, file)
    except UserError as error:
        return FileValues({}, [str(error)], set(by_name))
    values = {name.replace("-", "_"): value for name, value in content.items()}
    for defaults in read_deleted_extras().values():
        for name, default in defaults.items():
            is_gone = name in values and name not in by_name
            if is_gone and _is_default(values[name], default):  # what this fork does without it
                del values[name]
    read: dict[str, Any] = {}
    unknown: list[str] = []
    empty: list[str] = []
    without_value: set[str] = set()
    for name, value in values.items():
        setting = by_name.get(name)
        if name in REMOVED_SETTINGS:
            read[name] = value
        elif not setting:
            answer, meant = explain_unknown_flag(name, by_name)
            unknown.append(f"{file}: {answer}")
            without_value.add(meant)
        elif value is None or (isinstance(value, list) and not setting.value_type.is_list):
            empty.append(f"{file}: {name} has no value, or more than one. Give one value, or leave {name} out.")
            without_value.add(name)
        elif setting.is_copied or path.suffix.lower() != ".json":
            read[name] = value
    if read.get("checkpoint_dir") == f"{read.get('run_dir')}/checkpoints":
        del read["checkpoint_dir"]
    return FileValues(read, unknown + empty, without_value)


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value of a file, which is text in YAML, is this default."""
    if isinstance(default, bool):
        return BOOLEANS.get(str(value).lower()) == default
    return str(value) == str(default) or is_equal_number(value, default)


def _parse_file(path: Path, file: str) -> dict[str, Any]:
    """The content of the file. file: its name for an error. Raises UserError."""
    kind = path.suffix.lower()
    try:
        text = path.read_text(encoding="utf-8-sig")
        if kind != ".json":  # \udcXX, a byte of a name that is not UTF-8, is in JSON but not in TOML
            text = re.sub(r"(?<!\\)\\u(dc[89a-f][0-9a-f])", lambda code: chr(int(code[1], 16)), text)
        if kind == ".json":
            values = json.loads(text)
        elif kind in (".yaml", ".yml"):
            values = _parse_yaml(text, file)
        else:
            values = tomllib.loads(text)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--config {file} cannot be read ({error}). {FILE_REMEDY}") from None
    if not isinstance(values, dict):
        raise UserError(f"--config {file} must be a table of names and values. {FILE_REMEDY}")
    return values


def _parse_yaml(text: str, file: str) -> dict[str, Any]:
    """The values of a YAML file as text, as flags have them, or lists of it; None for another or no value.

    Raises:
        UserError: if PyYAML is missing.
        ValueError: if it is no YAML.
    """
    try:
        import yaml
    except Exception as error:
        raise UserError(
            f"--config {file} needs PyYAML, which cannot be imported ({error})."
            " Run pip install pyyaml, or give a TOML file."
        ) from None
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if node and not isinstance(node, yaml.MappingNode):
        raise ValueError("it is not a table of names and values")
    values: dict[str, Any] = {}
    for key, value in node.value if node else []:
        name = str(key.value)
        if name in values:  # twice
            values[name] = None
        elif isinstance(value, yaml.SequenceNode):
            elements = [_read_node_text(element) for element in value.value]
            values[name] = None if None in elements else elements
        else:
            values[name] = _read_node_text(value)
    return values


def _read_node_text(node: Any) -> str | None:
    """The text of a node of YAML, or None if it is null or no scalar."""
    if node.id != "scalar":
        return None
    is_null = node.style is None and node.value in YAML_NULLS
    return None if is_null else node.value
