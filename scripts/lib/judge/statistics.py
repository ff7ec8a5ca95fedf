# extra: judge
"""The confidence interval of paired differences, and the verdict."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

CONFIDENCE_LEVEL = 0.95
ROUNDING_TOLERANCE = 1e-6  # relative (equal metrics of float32 values differ by less through rounding)
BETTER_SENTENCE = "{} is better"
NO_DIFFERENCE = "no difference shown (the interval contains 0)"


class Result(NamedTuple):
    mean: float  # the mean of the differences B - A
    deviation: float  # the standard deviation of the differences
    interval: tuple[float, float]
    verdict: str  # "A", "B" or "none"
    sentence: str


def probability_within(t: float, degrees_of_freedom: int) -> float:
    """Return P(|T| <= t) of Student's t with so many degrees of freedom (1 or more).

    The formulas are the finite sums for whole degrees of freedom in Abramowitz and Stegun, Handbook of Mathematical
    Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(t, math.sqrt(degrees_of_freedom))
    sine = math.sin(angle)
    cosine = math.cos(angle)
    is_odd = degrees_of_freedom % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(2 + is_odd, degrees_of_freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    if is_odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total


@functools.cache
def t_quantile(degrees_of_freedom: int, level: float = CONFIDENCE_LEVEL) -> float:
    """Return the t for which P(|T| <= t) is `level`, by bisection."""
    low = 0.0
    high = 1.0
    while probability_within(high, degrees_of_freedom) < level:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if probability_within(middle, degrees_of_freedom) < level:
            low = middle
        else:
            high = middle
    return high


def judge_differences(differences: Sequence[float], sign: int) -> Result:
    """Return the 95 % interval of the mean of paired differences B - A, and what it shows.

    It is the shortest interval that holds two others. One is that of Student's t. The other is corrected for skewness
    by Hall's transformation. The first alone gives too many false verdicts if the differences have outliers on one
    side, and the second alone if they have outliers on both sides.

    Args:
        differences: at least 3 finite numbers.
        sign: 1 if higher is better, -1 if lower is better.
    """
    n = len(differences)
    mean = math.fsum(differences) / n
    # math.hypot is used because squares may underflow or overflow
    deviation = math.hypot(*(difference - mean for difference in differences)) / math.sqrt(n - 1)
    skewness = 0.0
    if deviation:
        # this is the adjusted Fisher-Pearson coefficient (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.11)
        cubes = math.fsum(((difference - mean) / deviation) ** 3 for difference in differences)
        skewness = n * cubes / ((n - 1) * (n - 2))
    t = t_quantile(n - 1)
    standard_error = deviation / math.sqrt(n)
    low = mean - standard_error * max(t, correct_skewness(t, skewness, n))
    high = mean - standard_error * min(-t, correct_skewness(-t, skewness, n))
    if low <= 0 <= high:
        return Result(mean, deviation, (low, high), "none", NO_DIFFERENCE)
    verdict = "B" if mean * sign > 0 else "A"
    return Result(mean, deviation, (low, high), verdict, BETTER_SENTENCE.format(verdict))


def correct_skewness(t: float, skewness: float, n: int) -> float:
    """Return the t statistic that Hall's transformation maps to t, for n values with this skewness.

    The transformation is T + g/sqrt(n) (T^2/3 + 1/6) + g^2/n T^3/27, with the skewness g (Hall, Journal of the Royal
    Statistical Society B 54, 1992). Without the last term it is Johnson's modified t (Journal of the American
    Statistical Association 73, 1978). With it, the transformation increases with T, so that a larger effect is never
    weaker evidence. Willink uses it with quantiles of Student's t and this estimate of the skewness (Communications in
    Statistics: Theory and Methods 34, 2005).
    """
    a = skewness / (3 * math.sqrt(n))
    if abs(a) < 1e-9:  # the formula below would divide 0 by 0
        return t
    return (math.cbrt(1 + 3 * a * (t - a / 2)) - 1) / a


def are_equal(differences: Sequence[float], values: Sequence[float]) -> bool:
    """Return whether the differences of these values are equal up to rounding."""
    largest = max(map(abs, values))
    return max(differences) - min(differences) <= ROUNDING_TOLERANCE * largest


def find_collapsed(values: Sequence[float], sign: int) -> list[int]:
    """Return the indices of values that are far worse than the median.

    They are worse by more than a tenth of the median, and by more than ten times the median absolute deviation.

    Args:
        values: the values.
        sign: 1 if higher is better, -1 if lower is better.
    """
    middle = median(values)
    limit = max(10 * median(abs(value - middle) for value in values), 0.1 * abs(middle))
    return [index for index, value in enumerate(values) if (middle - value) * sign > limit]
