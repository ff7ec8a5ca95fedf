# extra: verify
"""Check that tokens of one document have no effect on the loss of another document in the same packed row."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import model as your_model
from lib.values import ROUNDING_TOLERANCE, compute_sums
from lib.verify.fork import BrokenInvariant, Fork, measure_cancellation, perturb_parameters
from lib.verify.result import NOT_CHECKED
from utils.batch import map_tensors
from utils.training.signatures import has_parameter

MAX_ROWS = 8  # rows of the batch that is changed


def check_segments(fork: Fork) -> str:
    """Raise BrokenInvariant if the effects of two documents on the loss do not add up, since one attends to the other.

    The check is made only if model.py has segments(batch). It returns int [B, T], the number of each token's document,
    or less than 0 for a token of no document.
    """
    if not hasattr(your_model, "segments"):
        return ""
    subset = fork.small_train_set()
    batch = fork.create_loader(subset).fetch_samples([*range(min(MAX_ROWS, len(subset)))])[2]
    segments = your_model.segments
    if has_parameter(segments, "config"):
        segments = functools.partial(segments, config=fork.config)
    ids = segments(batch)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise BrokenInvariant(
            "segments(batch) of model.py gives no document number for each token. Return an int tensor [B, T]."
        )
    net, inside = perturb_parameters(fork.create_model(), 1), find_interior(ids)
    is_odd = torch.stack([row.unique(return_inverse=True)[1] % 2 == 1 for row in ids])

    def compute_losses(*chosen: Tensor) -> Tensor:
        mask = inside & torch.stack([torch.zeros_like(inside), *chosen]).any(0)
        torch.manual_seed(0)  # the loss may draw random numbers
        named_sums = compute_sums(fork.hooks, net, exchange_tokens(batch, ids, inside, mask), is_training=True)
        return torch.cat(
            [value.double() for name, value in named_sums.items() if name.startswith("loss") and name.endswith("sum")]
        )

    usual, cancelled = measure_cancellation(compute_losses)
    loss_odd, loss_even, both = compute_losses(is_odd), compute_losses(~is_odd), compute_losses(is_odd, ~is_odd)
    if torch.equal(usual, loss_odd) or torch.equal(usual, loss_even):
        return f"{NOT_CHECKED}segments, which has no row with two documents whose tokens change the loss."
    limit = ROUNDING_TOLERANCE[fork.loss_dtype] * (usual.norm() + cancelled)
    if not (mixed := (usual - loss_odd - loss_even + both).norm()) <= limit:
        raise BrokenInvariant(
            f"The loss of a document changes with the tokens of another in its row, by {mixed:.1e} in all. Tokens of"
            " one document attend to another. Let the attention mask compare the segments, and pool within a segment."
        )
    return f"No document of {len(ids)} packed rows has an effect on the loss of another."


def find_interior(ids: Tensor) -> Tensor:
    """Return which tokens are between two others of their document, bool [B, T].

    At the ends of a document are separators and targets of other documents.
    """
    is_joined = ids[:, 1:] == ids[:, :-1]
    edge = torch.zeros_like(is_joined[:, :1])
    return (ids >= 0) & torch.cat([edge, is_joined], 1) & torch.cat([is_joined, edge], 1)


def exchange_tokens(batch: Any, ids: Tensor, inside: Tensor, chosen: Tensor) -> Any:
    """Return the batch with the values of other interior positions at the chosen ones, inputs and targets alike."""
    positions = inside.flatten().nonzero().flatten()
    sources, targets = positions.roll(len(positions) // 2), chosen.flatten()[positions]

    def exchange_values(leaf: Tensor) -> Tensor:
        is_mask = leaf.ndim == 3 and leaf.shape[1] == leaf.shape[2]
        if leaf.shape[:2] != ids.shape or is_mask or has_positions(leaf, ids):
            return leaf
        flat = leaf.flatten(0, 1).clone()
        flat[positions[targets]] = leaf.flatten(0, 1)[sources[targets]]
        return flat.view(leaf.shape)

    return map_tensors(exchange_values, batch)


def has_positions(leaf: Tensor, ids: Tensor) -> bool:
    """Return whether a tensor holds document numbers, or positions that count within each document."""
    steps = leaf.diff(dim=1)[(ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)]
    return leaf.ndim == 2 and not leaf.is_floating_point() and len(steps) > 0 and bool((steps == steps[0]).all())
