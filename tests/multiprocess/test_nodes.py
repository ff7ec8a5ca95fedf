"""The nodes of the tests: they are apart, they reach each other, and nothing of them stays."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nodes import Nodes
from ranks import launch

ANSWER = """
import socket, sys
server = socket.create_server(("", 29500))
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    with peer:
        peer.sendall(socket.gethostname().encode())
        while peer.recv(2**16):
            pass
"""
ASK = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], 29500), timeout=5)
print(link.recv(99).decode(), link.getsockname()[0])
began = time.monotonic()
link.sendall(bytes(int(sys.argv[2])))
link.shutdown(socket.SHUT_WR)
link.recv(1)
print(time.monotonic() - began)
"""


def network(pid):
    return os.readlink(f"/proc/{pid}/ns/net")


def networks():
    """The network namespaces that processes of this machine are in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.add(network(process.name))
    return found


def host():
    """What of the machine nodes might change."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return links, names, Path("/proc/self/mounts").read_text(), socket.gethostname()


def ask(node, name, size=0):
    return node.run(sys.executable, "-c", ASK, name, size, deadline=60)


@pytest.fixture(scope="module")
def nodes():
    with Nodes(2) as nodes:
        program = nodes[0].start([sys.executable, "-c", ANSWER])
        ends = time.monotonic() + 20
        while os.pread(program.files[0].fileno(), 9, 0) != b"ready\n" and time.monotonic() < ends:
            time.sleep(0.01)
        yield nodes


def test_names_resolve_and_nodes_reach_each_other(nodes):
    assert ask(nodes[1], "node0").out.split()[:2] == ["node0", "10.0.0.2"]
    assert ask(nodes[0], "localhost").out.split()[:2] == ["node0", "127.0.0.1"], "loopback is up"
    assert "ConnectionRefusedError" in ask(nodes[1], "localhost").err, "a port is each node's own"
    assert "gaierror: [Errno -2] Name or service not known" in ask(nodes[1], "node7").err
    assert nodes[1].run("sh", "-c", "ls /sys/class/net").out.split() == ["eth0", "lo"]


def test_a_cut_link_is_noticed_and_comes_back(nodes):
    nodes[1].link(up=False)
    assert "Error" in ask(nodes[1], "node0").err
    assert nodes[1].run("cat", "/sys/class/net/eth0/carrier").out == "0\n"
    nodes[1].link(up=True)
    assert ask(nodes[1], "node0").code == 0


def test_a_slowed_link_is_slow(nodes):
    megabits = 8 * 4
    fast = float(ask(nodes[1], "node0", megabits * 125_000).out.split()[2])
    nodes[1].slow("40mbit")
    slow = float(ask(nodes[1], "node0", megabits * 125_000).out.split()[2])
    nodes[1].slow("")
    assert slow > 0.6 > 2 * fast
    assert float(ask(nodes[1], "node0", megabits * 125_000).out.split()[2]) < 0.3


def test_what_is_mounted_on_a_node_is_its_own_and_a_shared_disk_is_all_nodes(nodes, tmp_path):
    own, shared, code = tmp_path / "own", tmp_path / "shared", tmp_path / "code"
    for folder in (own, shared, code):
        folder.mkdir()
    (code / "here").touch()
    nodes[0].mount_tmpfs(own, "1m")
    nodes.mount_tmpfs(shared, "1m")
    nodes[1].bind(code, own, is_read_only=True)
    assert nodes[0].run("sh", "-c", "touch file; ls; touch ../shared/file", cwd=own).out == "file\n"
    ended = nodes[1].run("sh", "-c", "ls . ../shared; touch file", cwd=own)
    assert ended.out.split() == [".:", "here", "../shared:", "file"] and "Read-only file system" in ended.err
    assert not list(own.iterdir()) and not list(shared.iterdir()) and list(nodes.seen(shared).iterdir())
    assert nodes[1].run("sh", "-c", "head -c 2000000 /dev/zero > ../shared/file", cwd=own).code
    nodes[1].write(Path("/etc/hosts"), "10.0.0.1 elsewhere\n")
    assert ask(nodes[1], "elsewhere").code == 0 and ask(nodes[0], "elsewhere").code


def test_nothing_is_left_behind_even_after_a_failure(tmp_path):
    before = host()
    with pytest.raises(RuntimeError, match="on purpose"), Nodes(3) as nodes:
        nodes[2].mount_tmpfs(tmp_path, "1m")
        program = nodes[1].start(["sleep", "60"])
        own = {network(node.pid) for node in nodes}
        assert len(own) == 3 and own < networks() and network("self") not in own and host() == before
        raise RuntimeError("on purpose")
    assert program.poll() is not None
    assert not own & networks() and host() == before


def test_nothing_is_left_behind_when_pytest_is_killed():
    code = """if True:
        import os, nodes
        with nodes.Nodes(2) as two:
            print(*[os.readlink(f"/proc/{node.pid}/ns/net") for node in two], flush=True)
            os.kill(os.getpid(), 9)
    """
    ended = launch([sys.executable, "-c", code])
    assert (ended.code, ended.left) == (-signal.SIGKILL, 0)
    assert len(ended.out.split()) == 2 and not set(ended.out.split()) & networks()
