"""What a train record has of the values of the ranks."""

import pytest

from utils.report.records import weighted_mean


@pytest.mark.parametrize(
    ("values", "weights", "mean"),
    [
        ([0.1, 0.1, 0.1], [0.3, 0.7, 0.11], 0.1),  # not rounded
        ([1.0, 3.0], [1.0, 3.0], 2.5),
        ([1.0, 3.0], [0.0, 0.0], 0.0),  # an interval without steps
    ],
)
def test_values_of_ranks_are_weighted_by_their_seconds(values, weights, mean):
    assert weighted_mean(values, weights) == mean
