"""Sharded tensors: a DTensor is one tensor over the ranks, of which this rank holds a plain tensor, the local shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(value: Any) -> bool:
    """Return whether the value is a sharded tensor."""
    return hasattr(value, "device_mesh")  # a DTensor; its class takes a second to import


def local_shard(value: Any) -> Any:
    """Return the local shard, in the same memory, or the value itself if it is not a sharded tensor."""
    if not is_sharded(value):
        return value
    with torch.no_grad():
        return value.to_local()


def create_dtensor(shard: Tensor, like: Any) -> Tensor:
    """Return a DTensor with this local shard, sharded as `like`, or the shard itself if `like` is not sharded."""
    if not is_sharded(like):
        return shard
    # not from_local, which would move the shard to the mesh's device
    return type(like)(shard, like._spec, requires_grad=False)


def shard_like(value: Any, like: Any) -> Any:
    """Return the part of a full tensor that this rank holds, sharded as `like`. Return anything else unchanged."""
    if not is_sharded(like) or is_sharded(value):
        return value
    if not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    first, count = local_row_range(like)
    return create_dtensor(value[first : first + count], like)


def local_row_range(value: Any) -> tuple[int, int]:
    """Return the first row of a sharded tensor that this rank has, and how many rows it has."""
    mesh = value.device_mesh
    rows = value.shape[0]
    ranks = mesh.get_group("shards").size()
    rows_per_rank = -(-rows // ranks)  # rounded up, as in torch.chunk
    first = min(rows, rows_per_rank * mesh.get_local_rank("shards"))
    return first, min(rows_per_rank, rows - first)


def pack_shard(value: Tensor, shard: Tensor) -> Any:
    """Return what a checkpoint has of a sharded tensor: the shard and the place of its rows.

    Args:
        value: the tensor.
        shard: the local shard of the tensor, or a copy of that.

    Returns:
        A dict, or `shard` itself if the tensor is not sharded.
    """
    if not is_sharded(value):
        return shard
    return {
        "rows": shard,
        "first": local_row_range(value)[0],
        "size": list(value.shape),
    }


def model_device(model: nn.Module) -> torch.device:
    """Return the device that computes. Shards may be in host memory."""
    parameter: Any = next(model.parameters())
    if is_sharded(parameter):
        device_type = parameter.device_mesh.device_type
        if device_type != "cpu":
            return torch.device(device_type, torch.accelerator.current_device_index())
    return parameter.device


def find_shard_group(parameters: Iterable[Any]) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold the shards of a parameter, or None if nothing is sharded."""
    for parameter in parameters:
        if is_sharded(parameter):
            return parameter.device_mesh.get_group("shards")
    return None


def gather_full_tensor(value: Any) -> Tensor:
    """Return the whole tensor, gathered from all ranks, or the value itself if it is not sharded."""
    if is_sharded(value):
        return value.full_tensor()
    return value
