"""Settings that were removed from this version, and what to use in their place."""

from __future__ import annotations

from typing import Any, NamedTuple


class RemovedSetting(NamedTuple):
    """A setting of the version before.

    A flag is refused. A value in a file or a checkpoint is ignored with a note. It is refused if `required_setting` is
    named here and not given.
    """

    default: float
    replacement: str  # what to use
    required_setting: str = ""  # the setting that has to be given in its place

    def describe_ignored(self, name: str, value: Any) -> str:
        """What the user is told about a value that is ignored."""
        answer = f"{self.required_setting} is used." if self.required_setting else self.replacement
        return f"{name}={value} is ignored, since {name} was removed. {answer}"


REMOVED_SETTINGS = {
    "check_every": RemovedSetting(
        default=0,
        replacement=(
            "Ranks that differ are found at each save. Nothing finds a device that computes wrong, finite gradients:"
            " leave it out."
        ),
    ),
    "minutes": RemovedSetting(
        default=0.0,
        replacement=(
            "Train 50 steps, and take step_s of the last train record in metrics.jsonl. Then give --max_steps ="
            " minutes x 60 / step_s. To stop a run early, use --max_time."
        ),
        required_setting="max_steps",
    ),
}


def pop_removed_settings(values: dict[str, Any], given: dict[str, str], file: str) -> tuple[list[str], list[str]]:
    """Take the removed settings out of the values of a file.

    Args:
        values: of the file.
        given: the flags.
        file: its name.

    Returns:
        A note for each one that is ignored although it is not at its default, and the problems with the others.
    """
    notes: list[str] = []
    problems: list[str] = []
    for name, removed in REMOVED_SETTINGS.items():
        value = values.pop(name, removed.default)
        if is_equal_number(value, removed.default):
            continue
        if removed.required_setting and is_equal_number((values | given).get(removed.required_setting, 0), 0):
            problems.append(f"{file}: {name} was removed. {removed.replacement}")
        else:
            notes.append(f"{file}: {removed.describe_ignored(name, value)}")
    return notes, problems


def is_equal_number(value: Any, number: Any) -> bool:
    """Whether a value of a file, which is text in YAML, is this number."""
    try:
        return float(value) == float(number)
    except (TypeError, ValueError):
        return False
