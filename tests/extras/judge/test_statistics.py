# extra: judge
"""The arithmetic of scripts/judge.py."""

import pytest

from scripts.lib.judge.statistics import judged, t_quantile


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


def test_the_interval_is_the_published_one_of_students_data():
    """The ten differences of "The probable error of a mean" (1908), and the interval that R's t.test(sleep) prints."""
    found = judged([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4], 1)
    assert found.mean == pytest.approx(1.58) and found.deviation == pytest.approx(1.229995)
    assert found.interval == pytest.approx((0.7001142, 2.4598858))


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
    found = judged(differences, sign)
    assert found.verdict == verdict
    expected = "no difference shown (the interval contains 0)" if verdict == "none" else f"{verdict} is better"
    assert found.sentence == expected
