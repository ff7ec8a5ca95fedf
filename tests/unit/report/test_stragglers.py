"""Which rank is reported as slow, and why."""

import pytest

from utils.report.stragglers import find_straggler


def test_the_slowest_rank_and_the_cause():
    even = {"data": 0.1, "compute": 1.0}
    assert find_straggler([even, even, {"data": 1.5, "compute": 1.0}, even]) == (2, pytest.approx(2.5 / 1.1), "data")
    assert find_straggler([even, {"data": 0.1, "compute": 3.0}])[::2] == (1, "compute")
    assert find_straggler([even, even])[1] == 1.0
