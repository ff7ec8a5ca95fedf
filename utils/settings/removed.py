"""Settings that were removed from this version, and what to use in their place."""

from __future__ import annotations

from typing import Any, NamedTuple


class RemovedSetting(NamedTuple):
    """A setting of the version before.

    A flag is refused. A value in a file or a checkpoint is ignored with a note; if `needs` is not given, it is refused.
    """

    default: float
    instead: str  # what to use
    needs: str = ""  # the setting that has to be given in its place

    def note(self, name: str, value: Any) -> str:
        """What the user is told about a value that is ignored."""
        answer = f"{self.needs} is used." if self.needs else self.instead
        return f"{name}={value} is ignored, since {name} was removed. {answer}"


REMOVED = {
    "check_every": RemovedSetting(
        default=0,
        instead=(
            "Ranks that differ are found at each save. Nothing finds a device that computes wrong, finite gradients:"
            " leave it out."
        ),
    ),
    "minutes": RemovedSetting(
        default=0.0,
        instead=(
            "Train 50 steps, and take step_s of the last train record in metrics.jsonl. Then give --max_steps ="
            " minutes x 60 / step_s. To stop a run early, use --max_time."
        ),
        needs="max_steps",
    ),
}


def take_removed(values: dict[str, Any], given: dict[str, str], file: str) -> tuple[list[str], list[str]]:
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
    for name, removed in REMOVED.items():
        value = values.pop(name, removed.default)
        if is_number(value, removed.default):
            continue
        if removed.needs and is_number((values | given).get(removed.needs, 0), 0):
            problems.append(f"{file}: {name} was removed. {removed.instead}")
        else:
            notes.append(f"{file}: {removed.note(name, value)}")
    return notes, problems


def is_number(value: Any, number: Any) -> bool:
    """Whether a value of a file, which is text in YAML, is this number."""
    try:
        return float(value) == float(number)
    except (TypeError, ValueError):
        return False
