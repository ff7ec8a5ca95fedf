"""Which rank is reported as slow, and why."""

import pytest

from utils.report.stragglers import slowest


def test_the_slowest_rank_and_the_cause():
    even = {"data": 0.1, "compute": 1.0}
    assert slowest([even, even, {"data": 1.5, "compute": 1.0}, even]) == (2, pytest.approx(2.5 / 1.1), "data")
    assert slowest([even, {"data": 0.1, "compute": 3.0}])[::2] == (1, "compute")
    assert slowest([even, even])[1] == 1.0
