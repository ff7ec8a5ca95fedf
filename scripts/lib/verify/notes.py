# extra: verify
"""What is consistent in the data, but seldom meant: a person has to judge it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lib.values import digest, generators, leaves, scramble_global_rngs, spread
from lib.verify.fork import Fork, Subset
from utils.rng import seed_host

COUNT, SECONDS, LARGEST = 16, 1.5, 4096  # samples; to read a whole set; numbers in a row of it


def notes(fork: Fork) -> str:
    found = []
    held_out: Any = fork.held_out
    if held_out is not None and len({*by_epoch(fork, fork.held_out_subset(COUNT))}) > 1:
        found.append("held-out samples differ between epochs, so they are augmented at random")
    subset = Subset(fork.train_set, spread(COUNT, len(fork.train_set)), fork.dtype)
    if draws(fork, subset) and len({*by_epoch(fork, subset)}) == 1:
        found.append("__getitem__ draws, but its samples are the same in all epochs, so it seeds a generator")
    if held_out is not None and (own := standardized(fork.train_set)) and own & standardized(held_out):
        found.append(
            "held-out columns have mean 0 and deviation 1, as training columns have, so each set is scaled by itself;"
            " scale both by the values of the training set"
        )
    return "".join(f"; please check: {each}" for each in found)


def by_epoch(fork: Fork, subset: Subset) -> list[str]:
    """Digests of the samples on the device, in three epochs."""
    fetch = fork.loader(subset).fetch
    return [digest([fetch([row], epoch)[2] for row in range(len(subset))]) for epoch in range(3)]


def draws(fork: Fork, subset: Subset) -> bool:
    """Whether fetching a sample moves a global generator from where the sample has seeded it."""

    for row in range(len(subset)):
        seed_host("sample", fork.config.seed, 0, row)
        before = generators()
        _ = subset[row]
        if generators() != before:
            return True
    return False


def standardized(dataset: Any) -> set[str]:
    """The names of values whose columns all have mean 0 and deviation 1 over the set, up to rounding. None if the set
    takes long to read."""
    rows: list[dict[str, Tensor]] = []
    end = time.monotonic() + SECONDS
    for row in range(len(dataset)):
        scramble_global_rngs(0)
        rows.append({name: each for name, leaf in leaves(dataset[row]).items() if (each := numbers(leaf)) is not None})
        if not rows[0] or time.monotonic() > end:
            return set()
    found = set()
    for name in rows[0]:
        with suppress(RuntimeError, KeyError):  # shapes differ
            columns = torch.stack([row[name] for row in rows])
            columns = columns[:, columns.std(0, correction=0) > 1e-6]  # others are constant
            deviations = torch.stack([columns.std(0, correction=k) for k in (0, 1)])
            is_one = ((deviations - 1).abs() < 1e-4).any(0)
            if columns.shape[1] and len(rows) > 9 and is_one.all() and (columns.mean(0).abs() < 1e-4).all():
                found.add(name)
    return found


def numbers(leaf: Any) -> Tensor | None:
    """float64, flat; None for other things than a few floats."""
    with suppress(TypeError, ValueError, RuntimeError):  # text, objects
        values = torch.as_tensor(leaf)
        return values.double().flatten() if values.is_floating_point() and values.numel() <= LARGEST else None
    return None
