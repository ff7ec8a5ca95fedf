# extra: preflight
"""Measure how fast the devices compute and reduce, by torch's own timer, which synchronises with CUDA."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # the timer imports it

from torch.utils.benchmark import Timer

MEASURED_SECONDS = 0.6  # duration of the device measurement
MAX_MESSAGE_BYTES, ROUNDS = 2**24, 3  # bytes of the all-reduce, at most


def measure_device_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a matrix product, measured long enough to see a throttled or shared device."""
    size = 4096 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=MEASURED_SECONDS).mean


def time_all_reduce(message_bytes: int, device: torch.device) -> float:
    """Return the seconds of an all-reduce of this number of bytes. All ranks call this together."""
    data = torch.zeros(max(1, message_bytes // 4), device=device)
    names = {"all_reduce": dist.all_reduce, "data": data}
    return Timer("all_reduce(data)", globals=names, num_threads=torch.get_num_threads()).timeit(ROUNDS).mean
