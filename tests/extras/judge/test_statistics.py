# extra: judge
"""The arithmetic of scripts/judge.py."""

import math

import pytest
import simulated

from ranks import ROOT
from scripts.lib.judge.statistics import are_equal, correct_skewness, find_collapsed, judge_differences, t_quantile


@pytest.mark.parametrize(
    ("freedom", "level", "published"),
    [  # NIST/SEMATECH e-Handbook, 1.3.6.7.2
        (1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.95, 3.182), (4, 0.95, 2.776), (5, 0.95, 2.571), (7, 0.95, 2.365),
        (9, 0.95, 2.262), (10, 0.95, 2.228), (19, 0.95, 2.093), (30, 0.95, 2.042), (60, 0.95, 2.000),
        (100, 0.95, 1.984), (1, 0.9, 6.314), (4, 0.9, 2.132), (30, 0.9, 1.697), (2, 0.99, 9.925), (10, 0.99, 3.169),
    ],
)  # fmt: skip
def test_quantiles_of_t_are_those_of_the_published_table(freedom, level, published):
    assert t_quantile(freedom, level) == pytest.approx(published, abs=6e-4)


def test_the_interval_ends_where_students_or_halls_does():
    """The ten differences of "The probable error of a mean" (1908). R's t.test(sleep) prints 0.7001142 and 2.4598858.
    They are skewed to the right, so the upper end is that of Hall."""
    differences = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    result = judge_differences(differences, 1)
    assert result.mean == pytest.approx(1.58) and result.deviation == pytest.approx(1.229995)
    assert result.interval[0] == pytest.approx(0.7001142)
    skewness = 1.7455497  # of scipy.stats.skew(differences, bias=False)
    upper = (result.interval[1] - result.mean) / (result.deviation / math.sqrt(10))  # in standard errors
    assert hall(-upper, skewness, 10) == pytest.approx(-t_quantile(9), abs=1e-3)
    mirrored = judge_differences([-value for value in differences], 1).interval
    assert mirrored == pytest.approx((-result.interval[1], -result.interval[0]))


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300])
def test_the_interval_has_the_scale_of_the_differences(scale):
    """Their squares are 0 or too large for a float."""
    result = judge_differences([1 * scale, 2 * scale, 3 * scale, -4 * scale], 1)
    expected = [end * scale for end in judge_differences([1.0, 2.0, 3.0, -4.0], 1).interval]
    assert result.verdict == "none" and result.interval == pytest.approx(expected, rel=1e-9, abs=0)


def hall(t, skewness, n):
    """The transformation as it is in Hall's paper."""
    return t + skewness / math.sqrt(n) * (t * t / 3 + 1 / 6) + skewness**2 / n * t**3 / 27


@pytest.mark.parametrize("n", [3, 5, 20])
@pytest.mark.parametrize("skewness", [-1.7, -0.3, -1e-12, 0.0, 1e-5, 0.3, 1.7])
@pytest.mark.parametrize("t", [-40.0, -2.776, 0.0, 2.093, 4.303])
def test_the_corrected_t_is_the_inverse_of_halls_transformation(n, skewness, t):
    assert hall(correct_skewness(t, skewness, n), skewness, n) == pytest.approx(t, abs=1e-6)


def test_a_larger_effect_is_never_weaker_evidence():
    """Johnson's modified t has no verdict for the later ones of these."""
    differences = [0.0, 0.1, 0.1, 0.12, -0.3]
    verdicts = [judge_differences([value + 0.05 * step for value in differences], 1).verdict for step in range(100)]
    assert verdicts == sorted(verdicts, key=["none", "B"].index) and {*verdicts} == {"none", "B"}


FLOAT32 = [0.8500000238418579, 0.800000011920929, 0.8999999761581421]  # 17/20, 16/20, 18/20


@pytest.mark.parametrize(
    ("a", "b", "is_so"),
    [
        ([16 / 20, 17 / 20, 18 / 20], [17 / 20, 18 / 20, 19 / 20], True),
        ([80.0, 85.0, 90.0], [85.0, 90.0, 95.0], True),
        ([1 / 3, 2 / 3, 1 / 7], [1 / 3 + 0.1, 2 / 3 + 0.1, 1 / 7 + 0.1], True),
        ([0.1, 0.2, 0.3], [0.1 + 0.2, 0.2 + 0.2, 0.3 + 0.2], True),
        ([0.5, 0.6, 0.7], [0.5, 0.6, 0.7 + 1e-16], True),
        ([FLOAT32[1], FLOAT32[0]], [FLOAT32[0], FLOAT32[2]], True),
        ([-1.6, -1.7], [-1.7, -1.8], True),
        ([1e-9, 2e-9], [3e-9, 4e-9], True),
        ([1e9, 2e9], [1e9 + 1, 2e9 + 1], True),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([16 / 20, 17 / 20, 18 / 20], [17 / 20, 18 / 20, 20 / 20], False),
        ([1e-9, 2e-9], [3e-9, 4.01e-9], False),
        ([0.5, 0.6], [0.7, 0.8001], False),
    ],
)
def test_differences_that_are_equal_but_for_rounding_are_seen(a, b, is_so):
    differences = [y - x for x, y in zip(a, b, strict=True)]
    assert are_equal(differences, a + b) == is_so


@pytest.mark.parametrize(
    ("values", "sign", "places"),
    [
        ([0.41, 0.42, 0.40, 2.30, 0.43], -1, [3]),
        ([0.81, 0.10, 0.80, 0.82, 0.10, 0.79], 1, [1, 4]),
        ([0.4, 0.4, 0.4, 2.3], -1, [3]),
        ([0.85, 0.85, 0.85, 0.80], 1, []),  # one sample less of twenty
        ([0.41, 0.42, 0.40, 0.10, 0.43], -1, []),  # better
        ([0.41, 0.45, 0.40, 0.50, 0.43], -1, []),
        ([-5.1, -5.0, -5.2, -1.0, -5.1], -1, [3]),
    ],
)
def test_a_value_far_worse_than_the_others_is_a_collapse(values, sign, places):
    assert find_collapsed(values, sign) == places


KINDS = simulated.SYMMETRIC | simulated.ONE_SIDED | simulated.REFUSED
SIZES = [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 20))]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_share_of_false_verdicts_in_4000_comparisons(kind, n):
    """Where differences are symmetric it is at most 6 %. With one-sided outliers it is two thirds of Student's."""
    verdicts = simulated.percent(simulated.now, KINDS[kind], n)
    if kind in simulated.SYMMETRIC:
        assert verdicts <= 6
    elif kind in simulated.REFUSED:
        assert verdicts == 0
    elif "collapses" in kind:  # rare runs that no seed shows leave no trace
        assert verdicts <= simulated.percent(simulated.before, KINDS[kind], n)
    else:
        assert verdicts <= 11 and verdicts < 0.67 * simulated.percent(simulated.before, KINDS[kind], n)


@pytest.mark.slow
def test_the_tables_of_the_documentation_are_those_of_the_simulation():
    text = (ROOT / "docs/judge.md").read_text()
    missing = [line for line in simulated.tables() if line not in text]
    assert not missing


@pytest.mark.parametrize(
    ("differences", "sign", "verdict"),
    [
        ([0.2, 0.3, 0.25], 1, "B"),
        ([0.2, 0.3, 0.25], -1, "A"),
        ([-0.2, -0.3, -0.25], -1, "B"),
        ([-0.2, -0.3, -0.25], 1, "A"),
        ([0.1, 0.9, 0.2], 1, "none"),  # all positive, and too few
        ([0.1, -0.1, 0.3, -0.3], 1, "none"),
        ([0.0, 0.0, 0.0], 1, "none"),
    ],
)
def test_the_verdict_follows_the_interval_and_the_direction_of_the_metric(differences, sign, verdict):
    result = judge_differences(differences, sign)
    assert result.verdict == verdict
    expected = "no difference shown (the interval contains 0)" if verdict == "none" else f"{verdict} is better"
    assert result.sentence == expected
