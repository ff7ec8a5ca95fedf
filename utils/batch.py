"""The tensors of a batch that may be nested: tuples, lists and dicts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with function(tensor) in the place of every tensor in it, through tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        mapped = [map_tensors(function, value) for value in batch]
        return type(batch)(*mapped) if hasattr(batch, "_fields") else type(batch)(mapped)
    return batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, through tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict | tuple | list):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_in(value)


def leaves(batch: Any) -> Iterator[Any]:
    """All that is in a batch, through tuples, lists and dicts."""
    if isinstance(batch, dict | tuple | list):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from leaves(value)
    else:
        yield batch
