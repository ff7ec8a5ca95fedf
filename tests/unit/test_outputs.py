"""Outputs of all ranks, merged on rank 0."""

import pytest
import torch

from utils.training.outputs import sort_by_sample


@pytest.mark.guarantee(
    "predict",
    "summary",
)
def test_outputs_of_ranks_come_in_the_order_of_the_samples():
    """Each rank has every other batch; `ragged` has another width in the last one."""
    batches = torch.arange(5).split(2)
    ragged = [torch.zeros(len(batch), 1 + (len(batch) == 1)) + batch[:, None] for batch in batches]
    parts = [
        {"indices": [0, 1, 4], "outputs": {"even": [batches[0], batches[2]], "ragged": [ragged[0], ragged[2]]}},
        {"indices": [2, 3], "outputs": {"even": [batches[1]], "ragged": [ragged[1]]}},
    ]
    merged = sort_by_sample(parts, 5)
    assert merged["even"].tolist() == [0, 1, 2, 3, 4]
    assert [row.tolist() for row in merged["ragged"]] == [[0.0], [1.0], [2.0], [3.0], [4.0, 4.0]]
