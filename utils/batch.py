"""Map functions over nested batches: tuples, named tuples, lists and dicts of tensors and other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with function(value) in place of every value that is not a container."""
    if isinstance(batch, dict):
        return {key: map_leaves(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        mapped = [map_leaves(function, value) for value in batch]
        return type(batch)(*mapped) if hasattr(batch, "_fields") else type(batch)(mapped)
    return function(batch)


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with function(tensor) in place of every tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of the batch, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found
