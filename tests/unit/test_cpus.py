"""CPUs that a process may use: the quotas of its cgroup and of those above it, in both versions."""

import os
import subprocess
import sys

import pytest

from ranks import ROOT
from utils import cpus

V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
BOTH = "5:memory:/other\n4:cpu,cpuacct:/pod/c\n1:name=systemd:/pod/c\n0::/pod/c\n"


def write(root, folder, quota):
    """quota: the text of cpu.max, or with a comma those of the two files of version 1; None: a folder in its place."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    if quota is None:
        (root / folder / "cpu.max").mkdir()
        return
    names = V1 if "," in quota else ["cpu.max"]
    for name, text in zip(names, quota.split(","), strict=True):
        (root / folder / name).write_bytes(text.encode("latin-1") + b"\n")


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A function that writes the files and returns the CPUs of a machine with 64."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(cpus, "CGROUP_MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(cpus, "PROCESS_CGROUP_FILE", tmp_path / "own")

    def count(own, quotas):
        if own is not None:
            (tmp_path / "own").write_bytes(own.encode("latin-1"))
        for folder, quota in quotas.items():
            write(tmp_path / "cgroup", folder, quota)
        return cpus.count_usable_cpus()

    return count


@pytest.mark.parametrize(
    ("own", "quotas", "expected"),
    [
        # version 2
        ("0::/\n", {"": "400000 100000"}, 4),
        ("0::/\n", {"": "max 100000"}, 64),
        ("0::/a/b/c\n", {"a/b/c": "800000 100000"}, 8),
        ("0::/a/b/c\n", {"a/b/c": "max 100000", "a/b": "max 100000", "a": "300000 100000"}, 3),
        ("0::/a/b\n", {"a/b": "800000 100000", "a": "300000 100000", "": "500000 100000"}, 3),
        ("0::/a/b\n", {"a/b": "200000 100000", "a": "300000 100000"}, 2),
        ("0::/a/b\n", {"a/other": "100000 100000", "other": "100000 100000"}, 64),
        ("0::/docker/gone\n", {"": "400000 100000"}, 4),  # in a container: the mount's root is its own group
        ("0::/../../gone\n", {"": "400000 100000"}, 4),
        ("0::/a (deleted)\n", {"": "400000 100000"}, 4),
        ("0::/a:b\n", {"a:b": "400000 100000"}, 4),
        ("0::/\n", {"": "50000 100000"}, 1),  # less than one CPU
        ("0::/\n", {"": "350000 100000"}, 3),
        ("0::/\n", {"": "99900000 100000"}, 64),
        # version 1
        ("4:cpu,cpuacct:/\n", {"cpu": "400000,100000"}, 4),
        ("4:cpu,cpuacct:/\n", {"cpu,cpuacct": "400000,100000"}, 4),
        ("4:cpuacct,cpu:/a\n", {"cpuacct,cpu/a": "400000,100000"}, 4),
        ("4:cpu:/a/b\n", {"cpu/a/b": "-1,100000", "cpu/a": "300000,100000", "cpu": "-1,100000"}, 3),
        ("4:cpu,cpuacct:/a/b\n", {"cpu,cpuacct/a/b": "200000,100000", "cpu,cpuacct/a": "300000,100000"}, 2),
        ("4:cpu,cpuacct:/docker/gone\n", {"cpu,cpuacct": "400000,100000"}, 4),
        ("4:cpu:/\n", {"cpu": "-1,100000"}, 64),
        ("4:cpuset:/a\n4:memory:/a\n", {"cpu/a": "400000,100000"}, 64),  # of another process
        # both versions
        (BOTH, {"cpu,cpuacct/pod": "500000,100000", "unified/pod/c": None}, 5),
        (BOTH, {"cpu/pod/c": "-1,100000", "pod": "300000 100000"}, 3),
        # nothing that can be read
        (None, {}, 64),
        (None, {"": "400000 100000"}, 4),
        (None, {"cpu": "400000,100000"}, 4),
        (None, {"cpu,cpuacct": "400000,100000"}, 4),
        ("0::/a\n", {"a": None, "": "400000 100000"}, 4),
        ("\xff\xfe", {"": "400000 100000"}, 4),
        ("nonsense\n\n::\n:\n0::\n", {"": "400000 100000"}, 4),
        ("0::/\n", {"": "100000 0"}, 64),
        ("0::/\n", {"": "400000"}, 64),
        ("0::/\n", {"": "\xff"}, 64),
        ("0::/\n", {"": ""}, 64),
        ("4:cpu:/\n", {"cpu": "much,100000"}, 64),
        ("4:cpu:/\n", {"cpu": "400000,0"}, 64),
    ],
)
def test_the_smallest_quota_from_the_own_cgroup_to_the_root_counts(cgroups, own, quotas, expected):
    assert cgroups(own, quotas) == expected


def test_counting_cpus_does_not_import_torch():
    code = (
        "import sys\nfrom utils.cpus import count_usable_cpus\ncount_usable_cpus()\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
