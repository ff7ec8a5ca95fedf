# extra: judge
"""The confidence interval of paired differences, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.95
BETTER = "{} is better"
NONE = "no difference shown (the interval contains 0)"


class Result(NamedTuple):
    mean: float  # of the differences B - A
    deviation: float  # their standard deviation
    interval: tuple[float, float]
    verdict: str  # "A", "B" or "none"
    sentence: str


def probability_within(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's t with so many degrees of freedom (1 or more).

    The finite sums for whole degrees of freedom: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and
    26.7.4.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term, total = cosine if is_odd else 1.0, 0.0
    for k in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t for which P(|T| <= t) is `level`, by bisection."""
    low, high = 0.0, 1.0
    while probability_within(high, freedom) < level:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if probability_within(middle, freedom) < level else (low, middle)
    return high


def judged(differences: Sequence[float], sign: int) -> Result:
    """The 95 % interval of the mean of paired differences B - A, and what it shows.

    It is mean +- t s / sqrt(n), with s the standard deviation and t Student's quantile for n - 1 degrees of freedom
    (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.2 and 7.3.1.1).

    Args:
        differences: at least 2, finite.
        sign: 1 if higher is better, -1 if lower is better.
    """
    n = len(differences)
    mean = math.fsum(differences) / n
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in differences) / (n - 1))
    half = t_quantile(n - 1) * deviation / math.sqrt(n)
    interval = mean - half, mean + half
    if interval[0] <= 0 <= interval[1]:
        return Result(mean, deviation, interval, "none", NONE)
    verdict = "B" if mean * sign > 0 else "A"
    return Result(mean, deviation, interval, verdict, BETTER.format(verdict))
