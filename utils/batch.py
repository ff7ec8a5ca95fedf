"""Map functions over nested batches: containers, dataclasses and other objects that hold tensors."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


def map_leaves(function: Callable[[Any], Any], batch: Any, leaf_method: str = "") -> Any:
    """Return the batch with function(value) in place of every value that is not a container.

    Containers and objects are copied without their constructors. The copies have the same class, and what else the
    containers and objects hold.

    Args:
        leaf_method: objects that have a method of this name are leaves.
    """
    return _map_nested(batch, function, leaf_method, {})


def _map_nested(
    value: Any,
    function: Callable[[Any], Any],
    leaf_method: str,
    memo: dict[int, tuple[Any, Any]],
) -> Any:
    """Return what `map_leaves` returns for a part of the batch.

    This is no nested function, since a nested function that calls itself would be a reference cycle, and would keep the
    batch in memory until the garbage collector runs.

    Args:
        memo: containers and objects by id, since these may refer to each other. The original is stored beside its copy,
            so that its id cannot be used again.
    """
    if isinstance(value, Tensor) or has_method(value, leaf_method):
        return function(value)
    if id(value) in memo:
        return memo[id(value)][1]
    if isinstance(value, tuple):
        values = [_map_nested(entry, function, leaf_method, memo) for entry in value]
        try:
            return tuple.__new__(type(value), values)
        except TypeError:  # torch.Size and torch.return_types are classes of C
            return type(value)(values)
    is_container = isinstance(value, dict | list | deque)
    if is_container or (has_batch_attributes(type(value)) and object.__getstate__(value)):
        result = copy.copy(value)
        memo[id(value)] = value, result
        if is_container:
            _map_entries(result, function, leaf_method, memo)
        attributes = getattr(result, "__dict__", None)
        if attributes:
            _map_entries(attributes, function, leaf_method, memo)
        state: Any = object.__getstate__(result)
        if isinstance(state, tuple):  # the second entry has the attributes in slots
            for name, entry in state[1].items():
                mapped = _map_nested(entry, function, leaf_method, memo)
                object.__setattr__(result, name, mapped)  # also if the object is frozen
        return result
    if isinstance(value, Mapping):  # without attributes, such as types.MappingProxyType
        return {key: _map_nested(entry, function, leaf_method, memo) for key, entry in value.items()}
    return function(value)


def _map_entries(
    entries: Any,
    function: Callable[[Any], Any],
    leaf_method: str,
    memo: dict[int, tuple[Any, Any]],
) -> None:
    """Replace the entries of a dict, a list or a deque in place."""
    pairs = list(entries.items()) if isinstance(entries, dict) else enumerate(entries)
    for key, entry in pairs:
        entries[key] = _map_nested(entry, function, leaf_method, memo)


def has_batch_attributes(kind: type) -> bool:
    """Return whether the attributes of a class's objects are values of a batch."""
    if issubclass(kind, Mapping | Sequence):
        return True
    marks = ("__dataclass_fields__", "__attrs_attrs__", "to", "pin_memory")
    return any(hasattr(kind, mark) for mark in marks)


def has_method(value: Any, name: str) -> bool:
    """Return whether an object has a method of its own.

    A UserDict counts as a container, since `BatchEncoding.to` of transformers skips nested tensors.
    """
    return callable(getattr(type(value), name, None)) and not isinstance(value, UserDict)


def call_if_present(
    name: str,
    value: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Return value.name(*args, **options) of a tensor or of an object that has such a method, else the value itself.

    An object's method may lack the options. It may change the object and its containers in place, so it is called on a
    copy of them.
    """
    if isinstance(value, Tensor):
        return getattr(value, name)(*args, **options)
    if not has_method(value, name):
        return value
    result = map_leaves(lambda leaf: leaf, value)
    try:
        returned = getattr(result, name)(*args, **options)
    except TypeError:
        returned = getattr(result, name)(*args)
    return result if returned is None else returned


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return the batch with function(tensor) in place of every tensor."""

    def map_leaf(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return map_leaves(map_leaf, batch)


def list_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of the batch, in order."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    return tensors
