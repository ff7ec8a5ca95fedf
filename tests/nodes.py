# extra: template or launcher or kubernetes or companions
"""Nodes on one machine: namespaces with their own network, host name and mounts, connected by a bridge.

`with Nodes(2) as nodes:` creates node0 and node1. They reach only each other, so that several tests can run
at once; each node has its own ports, and the machine's network is not changed. Processes, memory and files are the
machine's: a folder is shared storage unless a node mounts something over it.
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ranks import DEADLINE, ROOT, Ended, finish, lack, need, start, stop

NETWORK = "10.0.0"
HOLD = "echo held; read _"  # runs until it is killed, or its input ends with pytest
# As in `ip netns exec`: /sys shows the interfaces of the network in which it was mounted. Its cgroups are kept.
OWN_SYS = "mount --rbind /sys/fs/cgroup /mnt; mount -t sysfs sysfs /sys && mount --rbind /mnt /sys/fs/cgroup"


class Place:
    """A process that holds namespaces open, and the programs in them. They end with the process."""

    def __init__(self, unshare: Sequence[str], within: "Place | None" = None) -> None:
        self._is_root = os.geteuid() == 0
        words = [*(within.enter if within else ()), "unshare", *unshare, "sh", "-c", HOLD]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._holder = subprocess.Popen(words, text=True, **pipes)
        self._programs: list[subprocess.Popen] = []
        if self._holder.stdout.readline() != "held\n":
            lack(f"this machine allows no namespaces: {self._holder.stderr.read()}")

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def enter(self) -> list[str]:
        """The prefix that makes a command run here."""
        as_user = [] if self._is_root else ["-U", "--preserve-credentials"]
        return ["nsenter", *as_user, "-m", "-n", "-u", "-t", str(self.pid)]

    def start(self, command: Sequence[object], *, env: dict | None = None, cwd: Path = ROOT) -> subprocess.Popen:
        """Start a program here, like `ranks.start`. The path of the folder is resolved here."""
        words = [*self.enter, "sh", "-c", 'cd "$0" && exec "$@"', cwd, *command]
        self._programs.append(start(words, env=env))
        return self._programs[-1]

    def run(self, *command: object, deadline: float = DEADLINE, **options: object) -> Ended:
        """Run a program here until it ends."""
        return finish(self.start(command, **options), deadline)

    def do(self, *command: object) -> None:
        """Run a command of the test's set-up, which must succeed."""
        done = subprocess.run([*self.enter, *map(str, command)], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, f"{done.args}: {done.stderr}"

    def seen(self, path: Path) -> Path:
        """The path by which the test can access a path of this place."""
        return Path(f"/proc/{self.pid}/root{path}")

    def mount_tmpfs(self, path: Path, size: str) -> None:
        """Mount a disk of this size (64k, 1m) over a folder."""
        self.do("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)

    def bind(self, source: Path, target: Path, is_read_only: bool = False) -> None:
        """Mount a file or a folder over another one."""
        self.do("mount", "--bind", source, target)
        if is_read_only:
            self.do("mount", "-o", "remount,bind,ro", target)

    def close(self) -> None:
        for program in self._programs:
            stop(program)
        self._holder.kill()
        self._holder.communicate()


class Node(Place):
    """One node. Its interface is eth0."""

    def __init__(self, number: int, switch: Place, folder: Path) -> None:
        super().__init__(["-n", "-u", "-m", "--propagation", "slave"], switch)
        self.name, self.address, self._switch, self._folder = f"node{number}", f"{NETWORK}.{number + 1}", switch, folder
        self.do("sh", "-c", f"hostname {self.name} && ip link set lo up; {OWN_SYS}")
        switch.do("ip", "link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.pid)
        switch.do("ip", "link", "set", self.name, "master", "bridge", "up")
        self.do("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.do("ip", "link", "set", "eth0", "up")

    def write(self, path: Path, text: str) -> None:
        """Replace a file of the machine by one with this text, for this node only."""
        handle, file = tempfile.mkstemp(dir=self._folder)
        with open(handle, "w") as opened:
            opened.write(text)
        os.chmod(file, 0o644)
        self.bind(Path(file), path)

    def link(self, up: bool) -> None:
        """Plug the cable in or out at the switch."""
        self._switch.do("ip", "link", "set", self.name, "up" if up else "down")

    def slow(self, rate: str) -> None:
        """Limit the rate of the link in each direction: 10mbit, 1gbit. Empty: no limit."""
        for place, interface in ((self, "eth0"), (self._switch, self.name)):
            shape = f"tbf rate {rate} burst 64kb latency 200ms".split() if rate else []
            place.do("tc", "qdisc", "replace" if rate else "delete", "dev", interface, "root", *shape)


class Nodes(contextlib.AbstractContextManager):
    """A number of nodes on one switch. /etc/hosts has their names; they have no name server."""

    def __init__(self, count: int) -> None:
        for tool in ("ip", "tc", "nsenter", "unshare", "mount", "hostname"):
            need(tool)
        self._count = count

    def __enter__(self) -> "Nodes":
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._switch = Place(["-n", "-m", "-u", *([] if os.geteuid() == 0 else ["--map-root-user"])])
            stack.callback(self._switch.close)
            # mounts made here from now on appear on all nodes; mounts of a node do not leave it
            bridge = "ip link add bridge type bridge && ip link set bridge up"
            self._switch.do("sh", "-c", f"mount --make-rshared / && {bridge}")
            self._nodes: list[Node] = []
            for number in range(self._count):
                self._nodes.append(Node(number, self._switch, folder))
                stack.callback(self._nodes[-1].close)
            names = "".join(f"{node.address} {node.name}\n" for node in self)
            for node in self:
                node.write(Path("/etc/hosts"), f"127.0.0.1 localhost\n{names}")
                node.write(Path("/etc/nsswitch.conf"), "hosts: files\n")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Node:
        return self._nodes[number]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def mount_tmpfs(self, path: Path, size: str) -> None:
        """Shared storage: mount a disk of this size over a folder on all nodes."""
        self._switch.mount_tmpfs(path, size)
