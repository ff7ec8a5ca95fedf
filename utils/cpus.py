"""The number of CPUs that a process may use. It does not import torch, which takes seconds."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import product
from pathlib import Path

CGROUP_MOUNT = Path("/sys/fs/cgroup")
PROCESS_CGROUP_FILE = Path("/proc/self/cgroup")
CPU_CGROUP_PATTERN = r"(?m)^\d+:([^:]*\bcpu\b[^:]*|):/*(.*)"  # the controllers (none in version 2) and the path
QUOTA_FILES = (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])  # of version 2 and of version 1


def count_usable_cpus() -> int:
    """Return the number of CPUs that this process may use.

    This is the size of its affinity mask (where the system has one), or the smallest quota of a cgroup from its own one
    up to the root, in versions 1 and 2.
    """
    if hasattr(os, "sched_getaffinity"):
        cpus = [len(os.sched_getaffinity(0))]
    else:
        cpus = [os.cpu_count() or 1]
    cgroups = "0::/\n0:cpu,cpuacct:/\n"  # in a container the mount's root may be the own one, under another path
    with suppress(OSError, ValueError):
        cgroups += PROCESS_CGROUP_FILE.read_text()
    for controllers, path in re.findall(CPU_CGROUP_PATTERN, cgroups):
        mounts = (controllers, "cpu") if controllers else ("",)
        levels = [Path(path), *Path(path).parents]
        for mount, level, names in product(mounts, levels, QUOTA_FILES):
            folder = CGROUP_MOUNT / mount / level
            with suppress(OSError, ValueError, ArithmeticError):  # no such file, or "max": no quota
                texts = [(folder / name).read_text() for name in names]
                quota, period = map(int, " ".join(texts).split())
                if quota > 0:
                    cpus.append(quota // period)
    return max(1, min(cpus))
