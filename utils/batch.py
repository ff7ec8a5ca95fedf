"""Map functions over nested batches: tuples, lists, mappings and dataclasses of tensors and other values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with function(value) in place of every value that is not a container."""
    if isinstance(batch, Mapping):
        mapped = {key: map_leaves(function, value) for key, value in batch.items()}
        if not hasattr(batch, "update"):
            return mapped
        result = copy.copy(batch)  # keeps its class: transformers' BatchEncoding is a UserDict
        result.update(mapped)
        return result
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: map_leaves(function, getattr(batch, name)) for name in names})
    if isinstance(batch, PackedSequence):  # whose batch_sizes stay on the CPU
        values = [each if each is batch.batch_sizes else map_leaves(function, each) for each in batch]
        return PackedSequence(*values)
    if isinstance(batch, tuple | list):
        values = [map_leaves(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return function(batch)


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with function(tensor) in place of every tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of the batch, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, batch)
    return found
