"""Sharded tensors: a DTensor is one tensor over the ranks, of which this rank holds a plain tensor, the local shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(value: Any) -> bool:
    return hasattr(value, "device_mesh")  # a DTensor; its class takes a second to import


def local_shard(value: Any) -> Any:
    """The local shard, in the same memory; the value itself if it is not a sharded tensor."""
    if not is_sharded(value):
        return value
    with torch.no_grad():
        return value.to_local()


def create_dtensor(shard: Tensor, like: Any) -> Tensor:
    """A DTensor with this local shard, sharded as `like`; the shard itself if `like` is not sharded."""
    # not from_local, which would move it to the mesh's device
    return type(like)(shard, like._spec, requires_grad=False) if is_sharded(like) else shard


def shard_like(value: Any, like: Any) -> Any:
    """The part of a full tensor that this rank holds, sharded as `like`. Anything else is returned unchanged."""
    if not is_sharded(like) or is_sharded(value) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    first, count = local_row_range(like)
    return create_dtensor(value[first : first + count], like)


def local_row_range(value: Any) -> tuple[int, int]:
    """The first row of a sharded tensor that this rank has, and how many it has."""
    mesh, rows = value.device_mesh, value.shape[0]
    rows_per_rank = -(-rows // mesh.get_group("shards").size())  # per rank, as in torch.chunk
    first = min(rows, rows_per_rank * mesh.get_local_rank("shards"))
    return first, min(rows_per_rank, rows - first)


def pack_shard(value: Tensor, shard: Tensor) -> Any:
    """What a checkpoint has of a sharded tensor: `shard`, its local one or a copy of that, and the place of its rows.

    `shard` itself if the tensor is not sharded.
    """
    return (
        {"rows": shard, "first": local_row_range(value)[0], "size": list(value.shape)} if is_sharded(value) else shard
    )


def model_device(model: nn.Module) -> torch.device:
    """The device that computes; shards may be in host memory."""
    parameter: Any = next(model.parameters())
    if is_sharded(parameter) and parameter.device_mesh.device_type != "cpu":
        return torch.device(parameter.device_mesh.device_type, torch.accelerator.current_device_index())
    return parameter.device


def find_shard_group(parameters: Iterable[Any]) -> dist.ProcessGroup | None:
    """The ranks that hold the shards of a parameter; None if nothing is sharded."""
    return next((p.device_mesh.get_group("shards") for p in parameters if is_sharded(p)), None)


def gather_full_tensor(value: Any) -> Tensor:
    """The whole tensor, gathered from all ranks; the value itself if it is not sharded."""
    return value.full_tensor() if is_sharded(value) else value
