# extra: launcher and template
"""Misconfigurations of several nodes, set up in network namespaces: the messages in docs/troubleshooting.md."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from images import folder_of_images
from nodes import Nodes
from ranks import ROOT, need
from training import wait_until

BEGIN, END = "<!-- troubleshooting: messages of nodes -->", "<!-- end of troubleshooting -->"
PORT = 29500
TINY = "--image_size 8 --batch_size 4 --dataset_size 400 --epochs 1 --backend gloo --num_workers 1".split()


class Setup:
    """Correctly configured nodes and their commands. A condition breaks something before they are started."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self.storage, self.data = folder / "storage", folder / "data"
        for new_folder in (self.storage, self.data):
            new_folder.mkdir()
        path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        common = {"PATH": path, "NNODES": str(len(nodes)), "NPROC_PER_NODE": "1", "MASTER_ADDR": "node0"}
        self.env = [common | {"NODE_RANK": str(number)} for number in range(len(nodes))]
        self.flags: list[list] = [[*TINY, "--run_dir", self.storage / "run"] for _ in nodes]
        self.before: list[list[str]] = [[] for _ in nodes]  # the command that starts launch.sh
        self.left_out: list[int] = []  # nodes that are not started

    def start(self, *flags: str) -> list:
        """Run launch.sh on each node."""
        return [
            node.start([*self.before[k], "scripts/launch.sh", *flags, *self.flags[k]], env=self.env[k])
            for k, node in enumerate(self.nodes)
            if k not in self.left_out
        ]

    def use_images(self) -> None:
        """Train on the image folder self.data."""
        folder_of_images(self.data)
        for flags in self.flags:
            flags += ["--dataset", "imagefolder", "--data_dir", self.data, "--dataset_size", 0]


# ---- conditions ----


def given(*nodes: int, **variables: str) -> Callable[[Setup], None]:
    """Set variables on these nodes (none: on all)."""

    def condition(setup: Setup) -> None:
        for number in nodes or range(len(setup.nodes)):
            setup.env[number] |= variables

    return condition


def before(number: int, script: str) -> Callable[[Setup], None]:
    """Start the node's command through a shell script."""

    def condition(setup: Setup) -> None:
        setup.before[number] = ["sh", "-c", script, "sh"]

    return condition


def hosts(number: int, lines: str) -> Callable[[Setup], None]:
    """Replace the node's /etc/hosts."""
    return lambda setup: setup.nodes[number].write(Path("/etc/hosts"), f"127.0.0.1 localhost\n{lines}")


def no_route(setup: Setup) -> None:
    """MASTER_ADDR is in a network to which node1 has no route."""
    setup.nodes[0].do("ip", "address", "add", "10.1.0.1/24", "dev", "eth0")
    given(MASTER_ADDR="10.1.0.1")(setup)


def closed(*ports: str) -> Callable[[Setup], None]:
    """node0 drops packets to these ports without an answer."""

    def condition(setup: Setup) -> None:
        rules = ["add pref 9 lookup local", "del pref 0"]  # the rule for local addresses is first by default
        for rule in [*rules, *(f"add pref 5 iif eth0 ipproto tcp dport {port} blackhole" for port in ports)]:
            setup.nodes[0].do("ip", "rule", *rule.split())

    return condition


def node_0_twice(setup: Setup) -> None:
    """Start the same command on both nodes, first on node0, with the launch id that a scheduler gives to both."""
    given(1, NODE_RANK="0")(setup)
    given(LAUNCH_ID="job-7")(setup)
    before(1, 'sleep 3 && exec "$@"')(setup)


def port_taken(setup: Setup) -> None:
    program = setup.nodes[0].start([sys.executable, "-u", "-m", "http.server", PORT])
    wait_until(lambda: b"Serving" in os.pread(program.files[0].fileno(), 99, 0))


def busy_node(setup: Setup) -> None:
    """node1 shares one core with five other programs."""
    need("taskset")
    setup.before[1] = ["taskset", "-c", "0"]
    for _ in range(5):
        setup.nodes[1].start(["taskset", "-c", "0", sys.executable, "-c", "while True: pass"])


def other_code(setup: Setup) -> None:
    other = setup.folder / "model.py"
    other.write_text((ROOT / "model.py").read_text() + "# a change on node0 that node1 lacks\n")
    setup.nodes[1].bind(other, ROOT / "model.py")


def other_data(setup: Setup) -> None:
    """node1 has an older copy of the data, without one image."""
    setup.use_images()
    older = shutil.copytree(setup.data, setup.folder / "older")
    (older / "train" / "cat" / "005.png").unlink()
    setup.nodes[1].bind(older, setup.data)


def no_data(setup: Setup) -> None:
    setup.use_images()
    setup.nodes[1].mount_tmpfs(setup.data, "1m")


def other_time(setup: Setup) -> None:
    """Python's clock on node1 is two minutes ahead; the machine has only one clock."""
    (setup.folder / "sitecustomize.py").write_text(
        "import time\nplain = time.time\ntime.time = lambda: plain() + 120\n"
    )
    given(1, PYTHONPATH=f"{setup.folder}:{os.environ['PYTHONPATH']}")(setup)


def other_environment(setup: Setup) -> None:
    """On node1 a Python without torch is first in PATH, and the checkout has no .venv."""
    folder, nothing = setup.folder / "python", setup.folder / "nothing"
    for new_folder in (folder, nothing):
        new_folder.mkdir()
    if (ROOT / ".venv").exists():
        setup.nodes[1].bind(nothing, ROOT / ".venv")
    for name in ("python3", "python"):
        (folder / name).symlink_to("/usr/bin/python3")
    given(1, PATH=f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin")(setup)


def large_frames(setup: Setup) -> None:
    """Jumbo frames on both nodes and a switch that drops them."""
    for node in setup.nodes:
        node.do("ip", "link", "set", "eth0", "mtu", "9000", "gso_max_segs", "1")


# ---- the table ----


@dataclass(frozen=True)
class Row:
    """One misconfiguration.

    Args:
        by: the program that detects it: launch.sh, preflight or train.py.
        of: words that must be in the message or the table below it, such as the node and what is wrong there.
        sees: a part of the message, as in a heading of docs/troubleshooting.md; ... matches anything.
        code: the exit code of the program that prints it; None if it continues to wait.
    """

    name: str
    condition: Callable[[Setup], object]
    by: str
    of: str
    sees: str
    code: int | None = 2
    nodes: int = 2

    def is_in(self, text: str, is_named: bool = True) -> bool:
        """Whether a line has the message and a fix, and it or the next three lines have the words of `of`.

        The fix is a sentence of its own, or what a variable must be.
        """
        pattern = ".*".join(map(re.escape, self.sees.split("...")))
        has_fix = r"(?=.*(\. [A-Z-]|, got ))"
        matches = re.finditer(rf"^{has_fix}.*{pattern}.*\.\n(.*\n){{0,3}}", text, re.MULTILINE)
        return any(all(word in match[0] for word in self.of.split() if is_named) for match in matches)


# fmt: off
TABLE = [
    Row("unresolvable address", given(MASTER_ADDR="gpu-head"), "launch.sh", "node1", "could not resolve MASTER_ADDR=... within"),
    Row("address not given", given(MASTER_ADDR=""), "launch.sh", "node", "MASTER_ADDR must be set, since NNODES is"),
    Row("loopback address", given(MASTER_ADDR="127.0.0.1"), "launch.sh", "node",
        "MASTER_ADDR=... is ... on ..., which the other nodes cannot reach"),
    Row("own name on loopback", hosts(0, "127.0.1.1 node0\n10.0.0.2 node1\n"), "launch.sh", "node0",  # as Debian writes it
        "MASTER_ADDR=... is ... on ..., which the other nodes cannot reach"),
    Row("stale address", hosts(1, "10.0.0.2 node1\n10.0.0.99 node0\n"), "launch.sh", "node1", "could not be reached from ... (no route to host, or no machine has that address)"),
    Row("no route", no_route, "launch.sh", "node1", "has no route to MASTER_ADDR=... (no route to host, or no machine has that address)"),
    Row("cable out", lambda setup: setup.nodes[0].link(up=False), "launch.sh", "node1",
        "could not be reached from ... (no route to host, or no machine has that address)"),
    Row("firewall", closed(f"{PORT}"), "launch.sh", "node1",
        "could not be reached from ... (no answer, the machine is off or a firewall drops the packets)"),
    Row("one open port", closed(f"1-{PORT - 1}", f"{PORT + 1}-65534"), "launch.sh", "node1",
        "MASTER_PORT of ... is open to ..., but port ... is not"),
    Row("node 0 not started", lambda setup: setup.left_out.append(0), "launch.sh", "node0", "Node 0 at ... cannot be reached (connection refused, nothing is listening there)", None),
    Row("node 1 not started", lambda setup: setup.left_out.append(1), "launch.sh", "Node 1", "Node ... of ... has not connected", None),
    Row("another port", given(1, MASTER_PORT="29501"), "launch.sh", "node0:29501",
        "Node 0 at ... cannot be reached (connection refused, nothing is listening there)", None),
    Row("port taken", port_taken, "launch.sh", "node0", "MASTER_PORT=... is in use on"),
    Row("node rank outside", given(1, NODE_RANK="2"), "launch.sh", "node1", "NODE_RANK must be from 0 to ..., since NNODES is"),
    Row("node 0 twice", node_0_twice, "launch.sh", "node1", "MASTER_ADDR=... does not lead to ..., which has NODE_RANK=0"),
    Row("node 1 twice", given(2, NODE_RANK="1"), "launch.sh", "node1", "NODE_RANK=... is already used by ...", nodes=3),
    Row("address of another node", given(MASTER_ADDR="node1"), "launch.sh", "node0",
        "MASTER_ADDR=... does not lead to ..., which has NODE_RANK=0"),
    Row("other number of nodes", given(1, NNODES="3"), "launch.sh", "node0", "NNODES is ... on this node, but node 0 on ... was started with NNODES="),
    Row("restarts with fixed ranks", given(MAX_RESTARTS="2", RDZV_BACKEND="static"), "launch.sh", "node",
        "static rendezvous hangs on a restart"),
    Row("interface missing", given(1, GLOO_SOCKET_IFNAME="eth9"), "launch.sh", "node1", "GLOO_SOCKET_IFNAME must name an interface of ..., got"),
    Row("other Python", other_environment, "launch.sh", "node", "This Python (...) has no torchrun, since torch is not installed there"),
    Row("other code", other_code, "train.py", "node1 model.py", "The ranks differ in code, settings or versions"),
    Row("other settings", lambda setup: setup.flags[1].extend(["--lr", "0.2"]), "train.py", "node1 lr", "The ranks differ in code, settings or versions"),
    Row("other data", other_data, "train.py", "node1", "have different data in --data_dir ... Copy the data again"),
    Row("no data", no_data, "train.py", "node1", "--data_dir ... has no .../train/<class>/ folders"),
    Row("run folder not shared", lambda setup: setup.nodes[1].mount_tmpfs(setup.storage, "64m"), "train.py", "node1",
        "... does not see what rank 0 on ... has written to --run_dir ..."),
    Row("run folder read-only", lambda setup: setup.nodes[1].bind(setup.storage, setup.storage, is_read_only=True), "launch.sh", "node1",
        "cannot write to the folder that holds --run_dir ... (Read-only file system)"),
    Row("run folder full", lambda setup: setup.nodes.mount_tmpfs(setup.storage, "4m"), "preflight", "node0",
        "of free space, but ... checkpoints of ... need", 1),  # extra: preflight
    Row("small shared memory", lambda setup: setup.nodes[1].mount_tmpfs(Path("/dev/shm"), "64k"), "preflight", "node1",
        "give the job more memory or a larger --shm-size", 1),  # extra: preflight
    Row("few open files", before(1, 'ulimit -n 40 && exec "$@"'), "train.py", "node1", "The limit on open files is"),
    Row("clock off", other_time, "preflight", "node1", "The clock of ... is ... ahead of", 1),  # extra: preflight
    Row("busy node", busy_node, "preflight", "node1", "times slower than the median", 0),  # extra: preflight
    Row("slow link", lambda setup: setup.nodes[1].slow("500mbit"), "preflight", "node1", "All links of ... are slow", 0, nodes=3),  # extra: preflight
    Row("large frames", large_frames, "launch.sh", "node1", "Small packets pass between ... and MASTER_ADDR=..., but large ones do not", None),
    Row("other launch on the port", lambda setup: setup.flags[1].extend(["--run_dir", setup.storage / "other"]), "launch.sh", "node0",
        "MASTER_PORT=... of ... is used by another launch, with another --run_dir", None),
]
# fmt: on
