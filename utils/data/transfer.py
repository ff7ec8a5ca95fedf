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
    """The batch with every tensor in it on the device; pinned ones are copied to a GPU asynchronously.

    An object with a method `to` says itself which of its tensors move. A copy from a GPU is complete when this returns:
    an asynchronous one could be read before.
    """
    is_asynchronous = device.type != "cpu"
    return map_leaves(
        lambda leaf: call_if_present("to", leaf, device, non_blocking=is_asynchronous), batch, leaf_method="to"
    )


def pin_batch(batch: Any) -> Any:
    """The batch in pinned memory, for asynchronous copies; tensors that are already on a device stay there."""

    def pin(leaf: Any) -> Any:
        is_on_device = any(tensor.device.type != "cpu" for tensor in list_tensors(leaf))
        return leaf if is_on_device else call_if_present("pin_memory", leaf)

    return map_leaves(pin, batch, leaf_method="pin_memory")


def indices_to_device(indices: list[int], device: torch.device) -> Tensor:
    """int64 [B] on the device. A copy from memory that is not pinned could wait for work queued there."""
    return torch.tensor(indices, pin_memory=device.type != "cpu").to(device, non_blocking=True)


def cache_per_stream(function: Callable[..., T], max_entries: int = 64) -> Callable[..., T]:
    """Cache what a function makes on the device that is its last argument, for each stream: another one would have to
    wait for it, and until it has read it the memory must not be used again."""
    cached = functools.lru_cache(max_entries)(lambda stream, *key: function(*key))
    return lambda *key: cached(None if key[-1].type == "cpu" else torch.accelerator.current_stream(key[-1]), *key)


class SideStream:
    """A stream next to the one that computes. `with side.stream` queues work on it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.stream = device, torch.Stream(device)

    def wait_for_current_stream(self) -> None:
        """Let the side stream wait for work queued on the current stream, such as the constants of a transform."""
        self.stream.wait_stream(torch.accelerator.current_stream(self._device))

    def run(self, action: Callable[[], T]) -> tuple[T, torch.Event]:
        """The result of the action, queued on the side stream, and the event that marks its completion."""
        with self.stream:
            result, event = action(), torch.Event()
            event.record(self.stream)
        return result, event

    def sync_to_current_stream(self, batch: Any, event: torch.Event) -> None:
        """Let the current stream wait for the batch, and keep its memory until that stream has used it."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(event)
        for tensor in list_tensors(batch):
            if tensor.device.type != "cpu":
                tensor.record_stream(current)
