# extra: verify
"""Notes on what is consistent in the data, but seldom meant. A person has to judge it."""

from __future__ import annotations

import ast
import re
import sys
import time
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

import dataset as your_data
from lib.values import flatten_nested, hash_nested, hash_rng_states, join_first_three, scramble_global_rngs, spread_rows
from lib.verify.fork import Fork, Subset, allow_failure
from lib.verify.hidden_state import is_fork_class, list_fork_modules, parse_modules
from lib.verify.randomness import replace_seeds
from lib.verify.result import NOT_CHECKED, PLEASE_CHECK, join_parts
from utils.rng import seed_host

SAMPLE_COUNT, MAX_READ_SECONDS, MAX_ROW_SIZE = 16, 1.5, 4096  # samples, seconds to read a set, numbers in a row
MAX_PARTS = 20  # transforms of a list that are looked at
MAX_ROWS_AT_LIMIT = 4  # rows that reach the largest value of a column


def inspect_data(fork: Fork) -> str:
    return join_parts(note_augmentation(fork), note_unread_samplers(fork), note_separate_scaling(fork))


@allow_failure("how samples are augmented")
def note_augmentation(fork: Fork) -> str:
    note = ""
    is_validated = fork.held_out is not None
    if is_validated and len({*hash_epochs(fork, fork.held_out_subset(SAMPLE_COUNT))}) > 1:
        note = f"{PLEASE_CHECK}Held-out samples differ between epochs, so they are augmented at random."
    subset = Subset(fork.train_set, spread_rows(SAMPLE_COUNT, len(fork.train_set)), fork.dtype)
    if len({*hash_epochs(fork, subset)}) > 1:
        return note
    if has_random_draws(fork, subset):
        return join_parts(
            note,
            f"{PLEASE_CHECK}__getitem__ draws random numbers, but its samples are the same in all epochs, so"
            " __getitem__ seeds a generator. Let it draw from the global generators, which are seeded for each sample"
            " and epoch.",
        )
    if (
        is_validated
        and is_seed_dependent(fork, subset)
        and not is_seed_dependent(fork, fork.held_out_subset(SAMPLE_COUNT))
    ):
        return join_parts(
            note,
            f"{PLEASE_CHECK}Training samples, and not held-out ones, depend on a generator that is seeded alike in all"
            " epochs. If it augments the samples, seed it with a draw from a global generator or with the epoch.",
        )
    return note


@allow_failure("whether a sampler is read")
def note_unread_samplers(fork: Fork) -> str:
    unread = find_unread_samplers(fork.train_set)
    if not unread:
        return ""
    return (
        f"{PLEASE_CHECK}No code of the fork reads {join_first_three(unread)}, and only epoch_order changes the order of"
        " training. Use such samplers and weights in epoch_order or in the loss, or delete them."
    )


@allow_failure("whether each set is scaled by itself")
def note_separate_scaling(fork: Fork) -> str:
    if fork.held_out is None:
        return ""
    train_scales, held_out_scales = find_scales(fork.train_set), find_scales(fork.held_out)
    if train_scales is None or held_out_scales is None:
        return f"{NOT_CHECKED}whether each set is scaled by itself, since reading one takes over {MAX_READ_SECONDS} s."
    for _, scale in sorted(train_scales & held_out_scales):
        return (
            f"{PLEASE_CHECK}Held-out columns have {scale}, as training columns have, so each set is scaled by itself."
            " Scale both sets by the values of the training set."
        )
    return ""


def hash_epochs(fork: Fork, subset: Subset) -> list[str]:
    """Return digests of the samples on the device in three epochs."""
    fetch = fork.create_loader(subset).fetch_samples
    return [hash_nested([fetch([row], epoch)[2] for row in range(len(subset))]) for epoch in range(3)]


def has_random_draws(fork: Fork, subset: Subset) -> bool:
    """Return whether fetching a sample draws from a global generator, after the generator was seeded for the sample."""

    for row in range(len(subset)):
        seed_host("sample", fork.config.seed, 0, row)
        before = hash_rng_states()
        _ = subset[row]
        if hash_rng_states() != before:
            return True
    return False


def is_seed_dependent(fork: Fork, subset: Subset) -> bool:
    """Return whether samples are others if the fork seeds its generators with other numbers."""
    fork.initial_hidden_state.restore()  # a cache would return earlier samples
    before = hash_epochs(fork, subset)
    fork.initial_hidden_state.restore()
    try:
        with replace_seeds(*(part for part in find_dataset_objects(subset) if hasattr(part, "__dict__"))):
            return hash_epochs(fork, subset) != before
    finally:
        fork.initial_hidden_state.restore()


def find_dataset_objects(dataset: Any) -> list[Any]:
    """Return the data set, and the data sets, transforms and other objects of the fork's classes in its attributes."""
    objects = [dataset]
    for owner in objects:
        for name, value in getattr(owner, "__dict__", {}).items():
            for part in value if isinstance(value, list | tuple) and len(value) < MAX_PARTS else [value]:
                is_part = (
                    isinstance(part, Dataset) or is_fork_class(type(part)) or name.startswith(("dataset", "transf"))
                )
                if is_part and all(part is not existing for existing in objects):
                    objects.append(part)
    return objects


def find_unread_samplers(dataset: Any) -> list[str]:
    """Return the names of samplers and of weights of samples that nothing reads.

    They are looked for in data sets, and in their classes and modules.
    """
    sets, modules = find_dataset_objects(dataset), list_fork_modules()
    kinds = {kind for part in sets for kind in type(part).__mro__}
    nodes = parse_modules({*modules, *(sys.modules.get(kind.__module__) for kind in kinds)})
    read = list_names_read(nodes, ast.Attribute, "attr") | list_names_read(nodes, ast.Constant, "value")
    unread = []
    for part in sets:
        for name, value in getattr(part, "__dict__", {}).items():
            is_sampler = isinstance(value, Sampler) or (name == "shuffle" and value is True)
            is_sampler |= name.endswith("weights")
            if re.search("sampler|sampling|weight", name):
                with suppress(TypeError, NotImplementedError):  # it may be a number, or a set without a size
                    is_sampler |= len(value) == len(part)
            if is_sampler and name not in read:
                unread.append(name)
    read |= list_names_read(nodes, ast.Name, "id")
    own_kinds = [kind for kind in kinds if sys.modules.get(kind.__module__) in modules]
    for namespace in (*own_kinds, *(sys.modules[kind.__module__] for kind in own_kinds), your_data):
        for name, value in vars(namespace).items():
            is_named = re.search("sampler|^(sampl[a-z]+_)?weights$", name.lower())
            is_sampler = is_named or (isinstance(value, type) and issubclass(value, Sampler))
            is_own = not str(getattr(value, "__module__", "")).startswith("torch")
            if name not in read and ((is_sampler and is_own) or isinstance(value, Sampler)):
                unread.append(name)
    return sorted({*unread})


def list_names_read(nodes: list[Any], kind: type, field: str) -> set[Any]:
    loads = [node for node in nodes if isinstance(node, kind) and not isinstance(getattr(node, "ctx", None), ast.Store)]
    return {getattr(node, field) for node in loads}


def find_scales(dataset: Any) -> set[tuple[str, str]] | None:
    """Return the names of values whose columns all have one scale over the set, each with its scale.

    The result is None if the set takes long to read.
    """
    rows: list[dict[str, Tensor]] = []
    end = time.monotonic() + MAX_READ_SECONDS
    for row in range(len(dataset)):
        scramble_global_rngs(0)
        rows.append(
            {
                name: vector
                for name, leaf in flatten_nested(dataset[row]).items()
                if (vector := flatten_floats(leaf)) is not None
            }
        )
        if not rows[0]:
            return set()
        if time.monotonic() > end:
            return None
    named_scales = {(name, scale) for name, table in find_tables(dataset).items() for scale in describe_scales(table)}
    for name in rows[0]:
        with suppress(RuntimeError, KeyError):  # shapes or names may differ
            columns = torch.stack([row[name] for row in rows])[:, : 1 + 2**20 // len(rows)]  # enough of a wide set
            tables = [columns]
            if not are_all_near(columns.mean(1), 0):  # otherwise each row is scaled by itself
                tables.append(columns.reshape(-1, 1))
            named_scales |= {(name, scale) for table in tables for scale in describe_scales(table)}
    return named_scales


def find_tables(dataset: Any) -> dict[str, Tensor]:
    """Return the attributes of a data set that have rows of numbers. Samples may be windows of such a table."""
    tables = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if getattr(value, "ndim", 0) in (1, 2) and len(value) < MAX_ROW_SIZE**2:
            with suppress(TypeError, ValueError, RuntimeError):  # as in `flatten_floats`
                table = torch.as_tensor(value)
                if table.is_floating_point() and table.numel():
                    tables[name] = table.double().reshape(len(table), -1)[:, :MAX_ROW_SIZE]
    return tables


def describe_scales(columns: Tensor) -> list[str]:
    """Return what all columns of a table have in common, up to rounding, and hardly by chance."""
    columns = columns[:, columns.std(0, correction=0) > 1e-6]  # the other columns are constant
    if len(columns) < 10 or not columns.shape[1]:
        return []
    deviations = torch.stack([columns.std(0, correction=k) for k in (0, 1)])
    is_standardized = are_all_near(columns.mean(0), 0) and ((deviations - 1).abs() < 1e-4).any(0).all()
    scale_names = ["mean 0 and deviation 1"] if is_standardized else []
    gaps = columns.sort(0).values.diff(dim=0)
    # flags, counts, ratings and steps of one size are left out
    is_rich = ((gaps > 0).sum(0) > 10) & (columns != columns.round()).any(0) & (gaps.amax(0) > gaps.amin(0) + 1e-6)
    columns = columns[:, is_rich]
    if not columns.shape[1]:
        return scale_names
    sizes, least = columns.abs(), columns.amin(0)
    reached = (sizes > 1 - 1e-6).sum(0)
    has_limits = len(least) > 1 or are_all_near(least, 0) or are_all_near(least, -1)
    if has_limits and sizes.max() < 1 + 1e-6 and 0 < reached.min() and reached.max() <= MAX_ROWS_AT_LIMIT:
        scale_names.append("a maximum of exactly 1")
    return scale_names


def are_all_near(values: Tensor, wanted: float) -> bool:
    return bool(((values - wanted).abs() < 1e-4).all())


def flatten_floats(leaf: Any) -> Tensor | None:
    """Return a value of a sample as a flat float64 tensor, or None if it is an image or is not a few floats."""
    with suppress(TypeError, ValueError, RuntimeError):  # it may be text or an object
        values = torch.as_tensor(leaf)
        is_row = values.is_floating_point() and values.ndim < 3 and values.numel() <= MAX_ROW_SIZE
        return values.double().flatten() if is_row else None
    return None
