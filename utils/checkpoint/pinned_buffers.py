"""Memory of the host for a copy of the state: training only waits for the copy, and a thread writes it."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint.archive import map_payload
from utils.distributed.dtensor import local_shard, pack_shard
from utils.logger import LOGGER_NAME
from utils.memory import ALIGNMENT


class PinnedBuffers:
    """One buffer in host memory that holds one checkpoint after the other.

    For tensors on a GPU the buffer is page-locked, so that copies run at full bus speed and overlap the computation.
    torch's own pinned memory would round each tensor up to a power of two.
    """

    def __init__(self) -> None:
        self._buffer = mmap.mmap(-1, 1)
        self._is_pinned = False
        self._sizes: list[tuple] = []  # type, shape and stride of each tensor in the latest payload
        self._views: list[Tensor] = []  # the memory of each of these tensors

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Allocate space for copies of these tensors at the same time, unless there is enough."""
        tensors = list(tensors)
        size = sum(map(_padded_bytes, tensors))
        if size <= len(self._buffer):
            return
        self.release()
        self._buffer = mmap.mmap(-1, size)
        if any(tensor.is_cuda for tensor in tensors):
            code = torch.cuda.cudart().cudaHostRegister(_buffer_address(self._buffer), size, 0)
            self._is_pinned = _is_cuda_success(code)
            if not self._is_pinned:
                text = "%.1f GB of host memory cannot be pinned, so checkpoints are copied more slowly."
                logging.getLogger(LOGGER_NAME).warning(text, size / 1e9)

    def allocate_copy(self, payload: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
        """Allocate memory for a copy of a payload.

        Tied tensors stay one. Of a sharded tensor the memory holds this rank's rows, as they are saved
        (`dtensor.pack_shard`).

        Returns:
            The payload with its tensors in this memory, and a pair for each tensor: the memory and the tensor to copy
            into it.

        Raises:
            UserError: for a value that a checkpoint cannot hold, with its name.
        """
        tensors: dict[tuple, Tensor] = {}

        def add_tensor(value: Tensor) -> None:
            shard = local_shard(value)
            tensors.setdefault(_storage_key(shard), shard.detach())

        map_payload(payload, add_tensor)
        sizes = [key[1:] for key in tensors]
        if sizes != self._sizes:  # creating the views takes a millisecond
            self.reserve(tensors.values())
            self._sizes = sizes
            self._views = list(self._create_views(tensors.values()))
        views = dict(zip(tensors, self._views, strict=True))

        def pack_into_view(value: Tensor) -> Any:
            return pack_shard(value, views[_storage_key(local_shard(value))])

        host_payload = map_payload(payload, pack_into_view)
        return host_payload, [(views[key], tensor) for key, tensor in tensors.items()]

    def _create_views(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        start = 0
        for tensor in tensors:
            view = torch.empty(tensor.shape, dtype=tensor.dtype)
            if tensor.numel():  # the view has a storage of its own, as torch.save wants, and the tensor's memory format
                stride = torch.empty_like(tensor, device="meta").stride()
                flat = torch.frombuffer(self._buffer, dtype=tensor.dtype, count=tensor.numel(), offset=start)
                view = flat.as_strided(tensor.shape, stride)
            yield view
            start += _padded_bytes(tensor)

    def release(self) -> None:
        """Give the memory back."""
        if self._is_pinned:
            code = torch.cuda.cudart().cudaHostUnregister(_buffer_address(self._buffer))
            _is_cuda_success(code)  # clears an error
        self._buffer = mmap.mmap(-1, 1)
        self._is_pinned = False
        self._sizes = []
        self._views = []


def _buffer_address(buffer: mmap.mmap) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def _padded_bytes(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return size + -size % ALIGNMENT


def _storage_key(tensor: Tensor) -> tuple:
    address = tensor.data_ptr() if tensor.numel() else 0
    return address, tensor.dtype, tensor.shape, tensor.stride()


def _is_cuda_success(code: Any) -> bool:
    """Return whether a call of the CUDA runtime succeeded. If not, clear its error: the next kernel would raise it."""
    if code == torch.cuda.cudart().cudaError.success:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # a kernel
    return False
