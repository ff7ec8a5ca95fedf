"""What is set up wrongly on several nodes, each as a condition on real ones; the README's troubleshooting table is made of it.

`python tests/misconfigurations.py` prints the rows of that table.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from images import save_images
from nodes import Nodes
from ranks import ROOT, copy_repository, need

BEGIN, END = "<!-- troubleshooting: made by tests/misconfigurations.py -->", "<!-- end of troubleshooting -->"
PORT = 29500
TINY = ["--image_size", "8", "--batch_size", "4", "--dataset_size", "400", "--epochs", "1", "--backend", "gloo", "--num_workers", "1"]
CLOCK = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, id, at);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += 120;
    return failed;
}
int gettimeofday(struct timeval *at, void *zone) { int failed = syscall(SYS_gettimeofday, at, zone); at->tv_sec += 120; return failed; }
time_t time(time_t *at) { struct timespec now; clock_gettime(CLOCK_REALTIME, &now); if (at) *at = now.tv_sec; return now.tv_sec; }
"""


class Setup:
    """Nodes that are set up well, and the command of each; a condition spoils something before they are started."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self.storage, self.data = folder / "storage", folder / "data"
        for each in (self.storage, self.data):
            each.mkdir()
        path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        common = {"PATH": path, "NNODES": str(len(nodes)), "NPROC_PER_NODE": "1", "MASTER_ADDR": "node0"}
        self.env = [common | {"NODE_RANK": str(number)} for number in range(len(nodes))]
        self.flags: list[list] = [[*TINY, "--run_dir", self.storage / "run"] for _ in nodes]
        self.before: list[list[str]] = [[] for _ in nodes]  # words that come first
        self.is_started = [True for _ in nodes]

    def give(self, *flags: object) -> None:
        """Further flags, on all nodes."""
        for own in self.flags:
            own += flags

    def start(self, *flags: str) -> list:
        """Run launch.sh on each node."""
        starts = zip(self.nodes, self.before, self.flags, self.env, self.is_started, strict=True)
        return [
            node.start([*before, "scripts/launch.sh", *flags, *own], env=env) for node, before, own, env, is_started in starts if is_started
        ]

    def images(self, name: str) -> Path:
        """An image folder."""
        folder = self.folder / name
        for split in ("train", "val"):
            save_images(folder / split, {"cat": 6, "dog": 6})
        return folder


# ---- conditions ----


def given(*nodes: int, **variables: str) -> Callable[[Setup], None]:
    """These variables on these nodes; none named: on all."""

    def condition(setup: Setup) -> None:
        for number in nodes or range(len(setup.nodes)):
            setup.env[number] |= variables

    return condition


def own_name_on_loopback(setup: Setup) -> None:
    """As Debian's installer writes it."""
    setup.nodes[0].write(Path("/etc/hosts"), "127.0.0.1 localhost\n127.0.1.1 node0\n10.0.0.2 node1\n")


def stale_name(setup: Setup) -> None:
    """node1 knows an address of node0 that nobody has any more."""
    setup.nodes[1].write(Path("/etc/hosts"), "127.0.0.1 localhost\n10.0.0.2 node1\n10.0.0.99 node0\n")


def no_route(setup: Setup) -> None:
    """node1's routes lead to its own network alone, and node0 is in another one."""
    setup.nodes[0].do("ip", "address", "add", "10.1.0.1/24", "dev", "eth0")
    given(MASTER_ADDR="10.1.0.1")(setup)


def firewall(setup: Setup) -> None:
    """node0 drops what comes to the port, without an answer; other ports are open."""
    rules = ["add pref 9 lookup local", "del pref 0", f"add pref 5 iif eth0 ipproto tcp dport {PORT} blackhole"]
    for rule in rules:  # the rule of the node's own addresses comes first by default, and would let it in
        setup.nodes[0].do("ip", "rule", *rule.split())


def one_open_port(setup: Setup) -> None:
    """node0 drops what comes to any port but MASTER_PORT, without an answer."""
    rules = ["add pref 9 lookup local", "del pref 0"]
    rules += [f"add pref 5 iif eth0 ipproto tcp dport {ports} blackhole" for ports in (f"1-{PORT - 1}", f"{PORT + 1}-65534")]
    for rule in rules:
        setup.nodes[0].do("ip", "rule", *rule.split())


def cable(setup: Setup) -> None:
    setup.nodes[0].link(up=False)


def not_started(number: int) -> Callable[[Setup], None]:
    def condition(setup: Setup) -> None:
        setup.is_started[number] = False

    return condition


def node_0_twice(setup: Setup) -> None:
    """The same command on both nodes, first on node0, under a scheduler that gives all of them one launch id."""
    given(1, NODE_RANK="0")(setup)
    given(LAUNCH_ID="job-7")(setup)
    setup.before[1] = ["sh", "-c", 'sleep 3 && exec "$@"', "sh"]


def port_taken(setup: Setup) -> None:
    program, ends = setup.nodes[0].start([sys.executable, "-u", "-m", "http.server", PORT]), time.monotonic() + 20
    while b"Serving" not in os.pread(program.files[0].fileno(), 99, 0):
        assert time.monotonic() < ends
        time.sleep(0.01)


def large_frames(setup: Setup) -> None:
    """Jumbo frames on both nodes, and a switch that drops them."""
    for node in setup.nodes:
        node.do("ip", "link", "set", "eth0", "mtu", "9000", "gso_max_segs", "1")


def slow_link(setup: Setup) -> None:
    setup.nodes[1].slow("500mbit")


def busy_node(setup: Setup) -> None:
    """node1 has one core, which two other programs want too."""
    need("taskset")
    setup.before[1] = ["taskset", "-c", "0"]
    for _ in range(2):
        setup.nodes[1].start(["taskset", "-c", "0", sys.executable, "-c", "while True: pass"])


def other_code(setup: Setup) -> None:
    """On node1 the repository is a second checkout, which lacks a change."""
    copy = copy_repository(setup.folder / "checkout")
    model = copy / "model.py"
    model.write_text(model.read_text().replace("def compute_loss", "# a change that did not come here\ndef compute_loss"))
    setup.nodes[1].bind(copy, ROOT)


def other_config(setup: Setup) -> None:
    setup.flags[1] += ["--lr", "0.2"]


def other_data(setup: Setup) -> None:
    """node1 has an older copy, which lacks an image."""
    older = setup.images("older")
    (older / "train" / "cat" / "005.png").unlink()
    setup.nodes[1].bind(older, setup.images("data"))
    setup.give("--dataset", "imagefolder", "--data_dir", setup.data, "--dataset_size", 0)


def no_data(setup: Setup) -> None:
    setup.images("data")
    setup.nodes[1].mount_tmpfs(setup.data, "1m")
    setup.give("--dataset", "imagefolder", "--data_dir", setup.data, "--dataset_size", 0)


def unshared_storage(setup: Setup) -> None:
    setup.nodes[1].mount_tmpfs(setup.storage, "64m")


def full_storage(setup: Setup) -> None:
    setup.nodes.mount_tmpfs(setup.storage, "4m")


def read_only_storage(number: int) -> Callable[[Setup], None]:
    def condition(setup: Setup) -> None:
        setup.nodes[number].bind(setup.storage, setup.storage, is_read_only=True)

    return condition


def small_shared_memory(setup: Setup) -> None:
    setup.nodes[1].mount_tmpfs(Path("/dev/shm"), "64k")


def few_open_files(setup: Setup) -> None:
    setup.before[1] = ["sh", "-c", 'ulimit -n 40 && exec "$@"', "sh"]


def other_time(setup: Setup) -> None:
    """Programs that are started on node1 read a clock that is two minutes ahead: the machine has but one."""
    need("cc")
    source, library = setup.folder / "clock.c", setup.folder / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    given(1, LD_PRELOAD=str(library))(setup)


def other_environment(setup: Setup) -> None:
    """On node1 another Python comes first, which has no torch."""
    folder = setup.folder / "python"
    folder.mkdir()
    for name in ("python3", "python"):
        (folder / name).symlink_to("/usr/bin/python3")
    given(1, PATH=f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin")(setup)


# ---- the table ----


@dataclass(frozen=True)
class Misconfiguration:
    """One row."""

    name: str
    condition: Callable[[Setup], None]
    by: str  # who catches it: launch.sh, preflight, train.py
    of: str  # the node that the sentence names, or the table below it, and what of that is wrong: all these words are there
    sees: str  # words of the sentence; ... stands for what differs from case to case
    remedy: str  # what it is, and what to do
    code: int | None = 2  # of whoever says it; None: it goes on waiting
    nodes: int = 2

    @property
    def pattern(self) -> re.Pattern:
        return re.compile(".*".join(map(re.escape, self.sees.split("..."))))


# fmt: off
TABLE = [
    Misconfiguration("unresolvable address", given(MASTER_ADDR="gpu-head"), "launch.sh", "node1",
        "MASTER_ADDR=...: ... cannot resolve this name in",
        "the name is in no name server and no `/etc/hosts`: give one that `getent hosts NAME` finds on every node, or the address of node 0"),
    Misconfiguration("address not given", given(MASTER_ADDR=""), "launch.sh", "node",
        "MASTER_ADDR: is not set, with NNODES=",
        "several nodes have to know where node 0 is: give all of them its name or address"),
    Misconfiguration("loopback address", given(MASTER_ADDR="127.0.0.1"), "launch.sh", "node",
        "MASTER_ADDR=...: is ... on ..., which the other nodes cannot reach",
        "it means each node itself: give the address of node 0 that `ip -brief address` shows on its network"),
    Misconfiguration("own name on loopback", own_name_on_loopback, "launch.sh", "node0",
        "MASTER_ADDR=...: is ... on ..., which the other nodes cannot reach",
        "Debian writes `127.0.1.1 NAME` into `/etc/hosts`: take that line out on node 0, or give its address on the network"),
    Misconfiguration("stale address", stale_name, "launch.sh", "node1",
        "cannot be reached from ... (no route to it, or nobody has that address)",
        "`/etc/hosts` or the name server give an old address: compare `getent hosts NAME` on all nodes"),
    Misconfiguration("no route", no_route, "launch.sh", "node1",
        "MASTER_ADDR=...: ... has no way to it (no route to it, or nobody has that address)",
        "the address is in a network that this node is not in: give node 0's address on the common one (`ip route get ADDRESS`)"),
    Misconfiguration("cable out", cable, "launch.sh", "node1",
        "cannot be reached from ... (no route to it, or nobody has that address)",
        "the link of node 0 is down or it is switched off: `ip link`, then cable, port, power"),
    Misconfiguration("firewall", firewall, "launch.sh", "node1",
        "cannot be reached from ... (no answer at all: the machine is off, or a firewall drops what comes)",
        "a firewall or security group: let the nodes reach each other on all ports, on a private network"),
    Misconfiguration("one open port", one_open_port, "launch.sh", "node1",
        "MASTER_ADDR=...: MASTER_PORT is open to ..., and port ... is not",
        "only MASTER_PORT is open: gloo, NCCL and the stores take further ports, let the nodes reach each other on all of them"),
    Misconfiguration("node 0 not started", not_started(0), "launch.sh", "node0",
        "waiting for node 0 at ...: refused: nothing listens there",
        "node 0 is not started yet, or with another MASTER_PORT, or has ended: look at what it says", None),
    Misconfiguration("node 1 not started", not_started(1), "launch.sh", "node 1",
        "waiting for node ... of ...; start launch.sh there",
        "node 0 is there and the named ones are not: start `launch.sh` on them; what keeps them stands on their own terminals", None),
    Misconfiguration("another port", given(1, MASTER_PORT="29501"), "launch.sh", "node0:29501",
        "waiting for node 0 at ...: refused: nothing listens there",
        "the nodes were given different ports: give all of them the same MASTER_PORT", None),
    Misconfiguration("port taken", port_taken, "launch.sh", "node0",
        "MASTER_PORT=...: is taken on ... by process",
        "another program, or an earlier run that has not ended, holds the port: end it, or give all nodes another one"),
    Misconfiguration("node rank outside", given(1, NODE_RANK="2"), "launch.sh", "node1",
        "NODE_RANK=...: is outside NNODES=",
        "nodes are counted from 0: give each its own number up to NNODES - 1"),
    Misconfiguration("node 0 twice", node_0_twice, "launch.sh", "node1",
        "NODE_RANK=0: MASTER_ADDR=... is ..., not ..., and node 0 is there",
        "two nodes were started with the same command: give each its own NODE_RANK"),
    Misconfiguration("node 1 twice", given(2, NODE_RANK="1"), "launch.sh", "node1",
        "NODE_RANK=...: ... has it already",
        "the same NODE_RANK on two nodes: number them from 0 to NNODES - 1", nodes=3),
    Misconfiguration("address of another node", given(MASTER_ADDR="node1"), "launch.sh", "node0",
        "MASTER_ADDR=...: does not lead to ..., which is NODE_RANK=0",
        "MASTER_ADDR and NODE_RANK=0 belong to one and the same node: change one of the two"),
    Misconfiguration("other number of nodes", given(1, NNODES="3"), "launch.sh", "node0",
        "NNODES=...: node 0 on ... was started with NNODES=",
        "the nodes were not given the same NNODES: end all, give all the same"),
    Misconfiguration("restarts with fixed ranks", given(MAX_RESTARTS="2", RDZV_BACKEND="static"), "launch.sh", "node",
        "static rendezvous hangs at a restart",
        "leave RDZV_BACKEND out, or let `--retries` start a failed launch anew"),
    Misconfiguration("interface missing", given(1, GLOO_SOCKET_IFNAME="eth9"), "launch.sh", "node1",
        "GLOO_SOCKET_IFNAME=...: ... has no interface",
        "the variable names an interface of another machine: leave it out, or name one of those listed"),
    Misconfiguration("other Python", other_environment, "launch.sh", "node",
        "torchrun: this Python has no torch",
        "the environment with torch is not the active one on this node: activate it there (`.venv` in the repository is found by itself)"),
    Misconfiguration("other code", other_code, "train.py", "node1 model.py",
        "the ranks do not run the same thing",
        "the table below names the files in which the checkouts differ: bring the same commit to all nodes"),
    Misconfiguration("other settings", other_config, "train.py", "node1 lr",
        "the ranks do not run the same thing",
        "the settings in which flags or config files differ: give all nodes the same"),
    Misconfiguration("other data", other_data, "train.py", "node1",
        "data_dir=...: holds other data on",
        "a copy of the data on one node is older or incomplete: make them alike"),
    Misconfiguration("no data", no_data, "train.py", "node1",
        "data_dir=...: has no .../train/<class>/ folders",
        "the data is not there on one node: mount or copy it"),
    Misconfiguration("run folder not shared", unshared_storage, "train.py", "node1",
        "run_dir=...: ... does not see there what rank 0 on ... has written",
        "each node sees a folder of its own: put `--run_dir` on storage that all nodes share"),
    Misconfiguration("run folder read-only", read_only_storage(1), "launch.sh", "node1",
        "run_dir=...: ... cannot write beside it (Read-only file system)",
        "the storage is mounted read-only on the named node: mount it writable there"),
    Misconfiguration("run folder full", full_storage, "preflight", "node0",
        "free, ... checkpoints of ... need",
        "make room, give another `--run_dir`, or a smaller `--keep_last`", 1),
    Misconfiguration("small shared memory", small_shared_memory, "preflight", "node1",
        "could not hand over its batch, since /dev/shm is full",
        "containers give 64 MB: `docker run --shm-size=8g`, in Kubernetes an emptyDir of medium Memory", 1),
    Misconfiguration("few open files", few_open_files, "train.py", "node1",
        "open files: the limit is",
        "`ulimit -n 65536`, `docker run --ulimit nofile=65536`"),
    Misconfiguration("clock off", other_time, "preflight", "node1",
        "the clock of ... is ... ahead of",
        "turn NTP on there (`timedatectl set-ntp true`): logs of several nodes are read by their times", 1),
    Misconfiguration("busy node", busy_node, "preflight", "node1",
        "times slower than the median",
        "other programs, heat or power limits: `top`, `nvidia-smi -q -d PERFORMANCE`", 0),
    Misconfiguration("slow link", slow_link, "preflight", "node1",
        "all links of ... are bad",
        "its cable, port or interface is slower than the others': `ethtool eth0` shows its speed, `ip -s link` its errors", 0, nodes=3),
    Misconfiguration("large frames", large_frames, "launch.sh", "node1",
        "MASTER_ADDR=...: small frames pass between it and ..., large ones do not",
        "the nodes send larger frames than the switch takes: the same MTU everywhere (`ip link set eth0 mtu 1500`)"),
]
# fmt: on


def markdown(table: list[Misconfiguration]) -> str:
    """The README's table. What is said in the same words is one row of it."""
    rows: dict[str, list[str]] = {}
    for row in table:
        rows.setdefault(row.sees, []).append(row.remedy)
    lines = ["| what you see | what it is, what to do |", "|---|---|"]
    return "\n".join(lines + [f"| `{sees}` | {'; or '.join(remedies)} |" for sees, remedies in rows.items()])


if __name__ == "__main__":
    print(markdown(TABLE))
