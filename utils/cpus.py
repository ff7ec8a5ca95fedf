"""The number of CPUs that a process may use. Without torch, which launch.sh does not import."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUP_MOUNT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
CPU_CGROUP = re.compile(r"^\d+:([^:]*\bcpu\b[^:]*|):/*(.*)", re.MULTILINE)  # no controllers: version 2
QUOTA_FILES = ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity mask (where the system has one) and the quotas of its cgroups."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cpus, *_quotas()]))


def _quotas() -> Iterator[int]:
    """Whole CPUs by each quota from this process's cgroup up to the root, in versions 1 and 2."""
    cgroups = "0::/\n0:cpu,cpuacct:/\n"  # in a container the mount's root may be the own one, under another path
    with suppress(OSError, ValueError):
        cgroups += OWN_CGROUP.read_text()
    for controllers, path in CPU_CGROUP.findall(cgroups):
        other_mount = "cpu" if controllers else "unified"
        for level in (Path(path), *Path(path).parents):
            yield from _quota_in(CGROUP_MOUNT / controllers / level)
            yield from _quota_in(CGROUP_MOUNT / other_mount / level)


def _quota_in(folder: Path) -> Iterator[int]:
    for names in QUOTA_FILES:
        with suppress(OSError, ValueError, ArithmeticError):  # no such file, or "max": no quota
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if quota != "-1":
                yield int(quota) // int(period)
