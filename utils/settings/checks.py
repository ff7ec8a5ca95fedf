"""Checks of a setting's value.

A check is called with the value and returns "what is wrong; what to do", or "" if the value is valid. A check of a list
is called with each element.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

Check = Callable[[Any], str]


def at_least(low: float) -> Check:
    """low <= value."""
    return lambda value: "" if value >= low else f"is below {low}; give {low} or more"


def above(low: float) -> Check:
    """low < value."""
    return lambda value: "" if value > low else f"is not above {low}; give a number above {low}"


def between(low: float, high: float, inclusive: bool = False) -> Check:
    """low <= value < high; with `inclusive` low <= value <= high."""
    if inclusive:
        wrong = f"is outside [{low}, {high}]; give a number from {low} to {high}"
        return lambda value: "" if low <= value <= high else wrong
    wrong = f"is outside [{low}, {high}); give a number from {low} to below {high}"
    return lambda value: "" if low <= value < high else wrong


def parse_range(value: str) -> tuple[float, float]:
    """The two numbers of "0.08,1" or "3/4,4/3"."""
    low, high = (float(Fraction(number)) for number in value.split(","))
    return low, high


def range_up_to(limit: float) -> Check:
    """0 < low <= high <= limit."""

    def check(value: str) -> str:
        try:
            low, high = parse_range(value)
        except (ValueError, ArithmeticError):
            low = high = 0.0
        return "" if 0 < low <= high <= limit else f"is not a range above 0 and up to {limit}; give e.g. 1/2,1"

    return check


class one_of:  # used like the functions around it
    """value is one of the choices, which `--help` shows."""

    def __init__(self, *choices: Any) -> None:
        self.choices = choices

    def __call__(self, value: Any) -> str:
        return "" if value in self.choices else f"is not known; choose {nearest(value, self.choices)}"


def nearest(value: Any, choices: Sequence[Any]) -> str:
    """The choices as text, with "(did you mean x?)" if one of them is similar to the value."""
    names = [str(choice) for choice in choices]
    close = difflib.get_close_matches(str(value), names, n=1)
    text = ", ".join(names)
    if close:
        text += f" (did you mean {close[0]}?)"
    return text


def refuse(*rows: tuple[str, str]) -> Check:
    """A check by patterns.

    Args:
        rows: a regular expression, and what is wrong with a value in which it is found. The first one counts.
    """

    def check(value: str) -> str:
        for pattern, wrong in rows:
            if re.search(pattern, value):
                return wrong
        return ""

    return check


probability = between(0, 1, inclusive=True)
KEY_IN_URL = (r"://.*\?|://[^/]*:[^/]*@", "has a key in it; give that in the environment or the provider's files")
path_or_url = refuse(
    (r"^(?=.*://)(?!\w+://[^/]|file:///[^/])", "is not a URL; give e.g. s3://BUCKET/NAME, or a path"),
    KEY_IN_URL,
)
EMPTY = (r"^\s*$", "is empty; give a folder, e.g. runs/NAME")
local_path = refuse(("://", "is not a path; mount the storage and give its path"))
run_path = refuse(("://", "is not a path; give a local folder"), EMPTY)
metric_name = refuse((r"^(?!(min:|max:)?[^:]*$)", "has an unknown prefix; write min:NAME or max:NAME"))
rendezvous_url = refuse(
    (r"^(?!(env|tcp|file)://|$)", "is not a rendezvous address; give env://, tcp://HOST:PORT or file:///SHARED/PATH")
)
