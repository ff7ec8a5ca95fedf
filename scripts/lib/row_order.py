"""Check that the rows of `predict` belong to the samples of the batch, in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from utils.settings.errors import UserError

MIN_SAMPLES, MAX_SAMPLES = 4, 16  # samples that are compared
# These are fractions of the mean distance between outputs of two samples, for equality up to rounding and for others.
NEAR_FRACTION = 0.02
FAR_FRACTION = 0.2


@torch.no_grad()
def check_row_order(
    predict: Callable[[Any], dict[str, Tensor]],
    fetch: Callable[[list[int]], Any],
    size: int,
    batch_size: int = MAX_SAMPLES,
) -> Exception | None:
    """Compare the outputs of a batch with those of the same samples in another order.

    Args:
        predict: a function that returns the outputs of a batch in evaluation mode.
        fetch: a function that returns the batch of samples with these indices, on the device.
        size: the number of samples in the data set.
        batch_size: a number of samples that fits into memory.

    Returns:
        The error of outputs that cannot be compared (None: they were compared).

    Raises:
        UserError: if the outputs are those of the samples in another order, and only then. Padding, noise or the other
            samples of the batch may change an output.
    """
    count = min(MAX_SAMPLES, max(MIN_SAMPLES, batch_size))
    rows = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:count].tolist()
    try:
        batch = predict(fetch(rows))
        sorted_outputs, ordered = predict(fetch(sorted(rows))), sorted(range(len(rows)), key=rows.__getitem__)
        is_moved = are_rows_permuted(
            [([*sorted_outputs[name]], [output[k] for k in ordered]) for name, output in batch.items()]
        )
    except Exception as error:  # the caller may reject these outputs
        return error
    if is_moved:
        raise UserError(
            "The outputs of a batch are in another order than its samples, so they would be written to other samples."
            " Keep the order in collate, device_transform and predict, or restore it (a collate that sorts by length"
            " returns the positions too, or uses pack_padded_sequence(..., enforce_sorted=False))."
        )
    return None


def are_rows_permuted(outputs: list[tuple[list[Tensor], list[Tensor]]]) -> bool:
    """Return whether a permutation of the rows fits and the identity does not.

    Args:
        outputs: pairs of the rows that were found and the rows that were expected.
    """
    count = len(outputs[0][0])
    near, far = torch.ones(count, count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
    for actual, expected in outputs:
        actual, expected = ([row.detach().cpu().double() for row in rows] for rows in (actual, expected))
        distance, between = measure_distances(actual, expected), measure_distances(expected, expected)
        spread = between.sum() / max(1, count * (count - 1))
        size = torch.stack([row.abs().mean() for row in expected]).mean()
        rounding = size * (1e-5 if outputs[0][0][0].dtype.itemsize > 2 else 0.02)
        near &= distance <= NEAR_FRACTION * spread + rounding
        far |= distance.diagonal() > FAR_FRACTION * spread + rounding
    return bool(far.any()) and can_match(near)


def measure_distances(rows: list[Tensor], other_rows: list[Tensor]) -> Tensor:
    """Return the mean absolute differences of rows, [B, B].

    Where padding differs, only the part that both rows have counts.
    """

    def measure_distance(a: Tensor, b: Tensor) -> float:
        common = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
        return (a[common] - b[common]).abs().mean().item()

    return torch.tensor([[measure_distance(a, b) for b in other_rows] for a in rows])


def can_match(fits: Tensor) -> bool:
    """Return whether each row can get a column of its own that fits it, where `fits` is bool [B, B]."""
    owner: dict[int, int] = {}  # the row that has each column

    def assign_column(row: int, visited: set[int]) -> bool:
        for column in set(fits[row].nonzero().flatten().tolist()) - visited:
            visited.add(column)
            if column not in owner or assign_column(owner[column], visited):
                owner[column] = row
                return True
        return False

    return all(assign_column(row, set()) for row in range(len(fits)))
