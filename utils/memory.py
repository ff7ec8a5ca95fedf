"""Failed allocations, and how much memory is free."""

from __future__ import annotations

import contextlib
import errno
import re
import resource
import sys
import traceback
from pathlib import Path

import torch

OUT_OF_MEMORY_PATTERN = re.compile(
    r"(CUDA|HIP) (out of memory|error: out of memory)|(CUDNN|CUBLAS)_STATUS_ALLOC_FAILED|Cuda failure.*out of memory"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|bad_alloc|Cannot allocate memory"
)
# oneDNN gives no reason
ONEDNN_FAILURE_PATTERN = re.compile(r"could not (create|execute) a primitive|could not create a memory object")
ALIGNMENT = 64  # bytes: tensors that share a block of memory begin at multiples of it
LOW_MEMORY_BYTES = 512 * 2**20  # if less memory than this is free, an error without a reason is put down to it


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if OUT_OF_MEMORY_PATTERN.search(text):
        return True
    free = read_free_memory()
    if free is None or free >= LOW_MEMORY_BYTES:
        return False
    return ONEDNN_FAILURE_PATTERN.search(text) is not None or "can't start new thread" in text


def drop_traceback(error: BaseException) -> None:
    """Free the local variables in the tracebacks of the error and of the errors in whose handlers it was raised."""
    exception: BaseException | None = error
    while exception:
        traceback.clear_frames(exception.__traceback__)
        exception = exception.__context__


def read_free_memory() -> int | None:
    """Return the bytes that the machine, the cgroup (version 2) and ulimit let this process still allocate.

    Returns:
        None if nothing is known.
    """
    limits = []
    machine = _read_proc_table("/proc/meminfo")
    if "MemAvailable" in machine:
        limits.append(machine["MemAvailable"])
    with contextlib.suppress(OSError, ValueError, LookupError):  # no cgroup of version 2, or "max": no limit
        limits.append(_read_free_cgroup_memory())
    if sys.platform == "linux":
        for number, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            limit = resource.getrlimit(number)[0]
            if limit != resource.RLIM_INFINITY:
                limits.append(limit - read_process_memory(name))
    if not limits:
        return None
    return max(0, min(limits))


def _read_free_cgroup_memory() -> int:
    """Return the bytes that this process's cgroup of version 2 lets it still allocate.

    Raises:
        OSError, ValueError, LookupError: if there is no such cgroup, or the cgroup has no limit.
    """
    path = Path("/proc/self/cgroup").read_text().split("::")[1].strip()
    cgroup = Path("/sys/fs/cgroup" + path)
    lines = (cgroup / "memory.stat").read_text().splitlines()
    statistics = dict(line.split() for line in lines)
    used = int((cgroup / "memory.current").read_text()) - int(statistics["inactive_file"])
    limit = int((cgroup / "memory.max").read_text())
    return limit - used


def read_process_memory(name: str) -> int:
    """Return a value in /proc/self/status in bytes (VmRSS, VmHWM, VmData, VmSize), or 0 if there is none."""
    return _read_proc_table("/proc/self/status").get(name, 0)


def read_peak_memory() -> int:
    """Return the peak bytes of the CUDA allocator, or of the process without CUDA."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def format_bytes(size: float) -> str:
    """Return a size in MiB or GiB, as a text."""
    if size < 2**30:
        return f"{size / 2**20:,.0f} MiB"
    return f"{size / 2**30:,.2f} GiB"


def _read_proc_table(file: str) -> dict[str, int]:
    """Return the kB lines of a /proc file, in bytes. The dict is empty if there is no such file."""
    try:
        text = Path(file).read_text()
    except OSError:
        return {}
    table = {}
    for line in text.splitlines():
        words = line.split()
        if words[-1] == "kB":
            table[words[0].rstrip(":")] = int(words[1]) * 1024
    return table
