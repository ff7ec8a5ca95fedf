"""Checks of a setting's value.

A check is called with the value, and for a list with each element. It returns "" if the value is valid, else the
problem: what the value must be, as in "must be even", or what is wrong, as in "has a space. Write it without.". The
message begins with the flag: `--NAME must be even, got 3.` or `--NAME "a b" has a space. Write it without.`
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
    return lambda value: "" if value >= low else f"must be at least {low}"


def above(low: float) -> Check:
    """low < value."""
    return lambda value: "" if value > low else f"must be above {low}"


def between(low: float, high: float, inclusive: bool = False) -> Check:
    """low <= value < high; with `inclusive` low <= value <= high."""
    if inclusive:
        return lambda value: "" if low <= value <= high else f"must be from {low} to {high}"
    return lambda value: "" if low <= value < high else f"must be at least {low} and below {high}"


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
        if 0 < low <= high <= limit:
            return ""
        return f"must be two numbers above 0 and up to {limit}, the smaller one first, such as 1/2,1"

    return check


class one_of:  # used like the functions around it
    """value is one of the choices, which `--help` shows."""

    def __init__(self, *choices: Any) -> None:
        self.choices = choices

    def __call__(self, value: Any) -> str:
        if value in self.choices:
            return ""
        names = [str(choice) for choice in self.choices]
        requirement = f"must be {join_alternatives(names)}"
        similar = difflib.get_close_matches(str(value), names, n=1)
        if similar:
            return f"{requirement}. Did you mean {similar[0]}?"
        return requirement


def join_alternatives(names: Sequence[str]) -> str:
    """Return "a, b or c"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} or {names[-1]}"


def refuse(*rows: tuple[str, str]) -> Check:
    """A check by patterns.

    Args:
        rows: a regular expression, and the problem with a value in which it is found. The first one counts.
    """

    def check(value: str) -> str:
        for pattern, problem in rows:
            if re.search(pattern, value):
                return problem
        return ""

    return check


probability = between(0, 1, inclusive=True)
KEY_IN_URL = (
    r"://.*\?|://[^/]*:[^/]*@",
    "must not contain a key. Give the key in the environment or in the files of the storage provider.",
)
path_or_url = refuse(
    (r"^(?=.*://)(?!\w+://[^/]|file:///[^/])", "must be a path or a URL such as s3://BUCKET/NAME"),
    KEY_IN_URL,
)
EMPTY = (r"^\s*$", "must be a folder such as runs/NAME")
local_path = refuse(("://", "must be a path, not a URL. Mount the storage and give its path."))
run_path = refuse(("://", "must be a local folder, not a URL"), EMPTY)
metric_name = refuse((r"^(?!(min:|max:)?[^:]*$)", "must be auto, NAME, min:NAME or max:NAME"))
rendezvous_url = refuse((r"^(?!(env|tcp|file)://|$)", "must be env://, tcp://HOST:PORT or file:///SHARED/PATH"))
