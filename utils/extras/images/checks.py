"""Checks of the flags. Standard library only, as config.py."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

AUTO_AUGMENTS = ("none", "ra", "ta_wide", "augmix", "autoaugment")


def probability(value: float) -> str:
    return "" if 0 <= value <= 1 else "is not a probability; give a number from 0 to 1"


def range_of(value: str) -> tuple[float, float]:
    """The two numbers of "0.08,1" or "3/4,4/3"."""
    low, high = (float(Fraction(number)) for number in value.split(","))
    return low, high


def range_up_to(most: float) -> Callable[[str], str]:
    def check(value: str) -> str:
        try:
            low, high = range_of(value)
        except (ValueError, ArithmeticError):
            low = high = 0.0
        return "" if 0 < low <= high <= most else f"is not a range above 0 and up to {most}; give e.g. 1/2,1"

    return check
