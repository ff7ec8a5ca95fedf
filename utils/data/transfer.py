"""Transfer to the device, on a GPU in a stream beside the one that computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from utils.batch import call_if_present, list_tensors, map_leaves

T = TypeVar("T")


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor in it on the device. Pinned tensors are copied to a GPU asynchronously.

    An object with a method `to` says itself which of its tensors move. A copy from a GPU is complete when the function
    returns, since an asynchronous copy could be read too early.
    """
    is_asynchronous = device.type != "cpu"

    def move(leaf: Any) -> Any:
        return call_if_present("to", leaf, device, non_blocking=is_asynchronous)

    return map_leaves(move, batch, leaf_method="to")


def pin_batch(batch: Any) -> Any:
    """Return the batch in pinned memory, for asynchronous copies. Tensors that are already on a device stay there."""

    def pin(leaf: Any) -> Any:
        if any(tensor.device.type != "cpu" for tensor in list_tensors(leaf)):
            return leaf
        return call_if_present("pin_memory", leaf)

    return map_leaves(pin, batch, leaf_method="pin_memory")


def indices_to_device(indices: list[int], device: torch.device) -> Tensor:
    """Return the indices as a tensor on the device, int64 [B].

    They are copied from pinned memory: another copy could wait for work that is queued on the device.
    """
    host_indices = torch.tensor(indices, pin_memory=device.type != "cpu")
    return host_indices.to(device, non_blocking=True)


def cache_per_stream(function: Callable[..., T], max_entries: int = 64) -> Callable[..., T]:
    """Cache what a function makes on the device that is its last argument, for each stream of that device.

    A value made in one stream is not given to another one. That stream would have to wait for the value, and the
    memory of the value must not be used again until that stream has read it.
    """

    @functools.lru_cache(max_entries)
    def cached(stream: torch.Stream | None, *key: Any) -> T:
        return function(*key)

    def find_or_create(*key: Any) -> T:
        device = key[-1]
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        return cached(stream, *key)

    return find_or_create


class SideStream:
    """A stream of the device next to the one that computes. `with side.stream` queues work on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.Stream(device)

    def wait_for_current_stream(self) -> None:
        """Let the side stream wait for work queued on the current stream, such as the constants of a transform."""
        self.stream.wait_stream(torch.accelerator.current_stream(self._device))

    def run(self, action: Callable[[], T]) -> tuple[T, torch.Event]:
        """Run the action, so that its work is queued on the side stream.

        Returns:
            The result, and the event that marks its completion on the device.
        """
        with self.stream:
            result = action()
            event = torch.Event()
            event.record(self.stream)
        return result, event

    def sync_to_current_stream(self, batch: Any, event: torch.Event) -> None:
        """Let the current stream wait for the batch, and keep its memory until that stream has used it."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(event)
        for tensor in list_tensors(batch):
            if tensor.device.type != "cpu":
                tensor.record_stream(current)
