"""Recognises allocation failures and reports how much memory is free."""

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
# gives no reason
ONEDNN_FAILURE_PATTERN = re.compile(r"could not (create|execute) a primitive|could not create a memory object")
ALIGNMENT = 64  # bytes: tensors that share a block of memory begin at multiples of it
LOW_MEMORY_BYTES = 512 * 2**20  # bytes: if less memory than this is free, it was the reason


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text, free = str(error), read_free_memory()
    has_little = free is not None and free < LOW_MEMORY_BYTES
    return bool(
        OUT_OF_MEMORY_PATTERN.search(text)
        or (has_little and (ONEDNN_FAILURE_PATTERN.search(text) or "can't start new thread" in text))
    )


def drop_traceback(error: BaseException) -> None:
    """Free the local variables in the tracebacks of the error and of those in whose handlers it was raised."""
    exception: BaseException | None = error
    while exception:
        traceback.clear_frames(exception.__traceback__)
        exception = exception.__context__


def read_free_memory() -> int | None:
    """Bytes that the machine, the cgroup (version 2) and ulimit let this process still allocate. None if unknown."""
    limits = []
    if "MemAvailable" in (machine := _read_proc_table("/proc/meminfo")):
        limits.append(machine["MemAvailable"])
    with contextlib.suppress(OSError, ValueError, LookupError):  # no cgroup of version 2, or "max": no limit
        cgroup = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().split("::")[1].strip())
        files = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(files["inactive_file"])
        limits.append(int((cgroup / "memory.max").read_text()) - used)
    if sys.platform == "linux":
        for number, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            limit = resource.getrlimit(number)[0]
            if limit != resource.RLIM_INFINITY:
                limits.append(limit - read_process_memory(name))
    return max(0, min(limits)) if limits else None


def read_process_memory(name: str) -> int:
    """A value in /proc/self/status in bytes (VmRSS, VmHWM, VmData, VmSize); 0 if there is none."""
    return _read_proc_table("/proc/self/status").get(name, 0)


def read_peak_memory() -> int:
    """Peak bytes of the CUDA allocator, or of the process without CUDA."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def format_bytes(size: float) -> str:
    """A size in MiB or GiB."""
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"


def _read_proc_table(file: str) -> dict[str, int]:
    """The kB lines of a /proc file, in bytes. Empty if there is no such file."""
    try:
        lines = [line.split() for line in Path(file).read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
