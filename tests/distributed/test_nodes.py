"""The nodes of the tests (nodes.py): they are apart, they reach each other, and nothing of them stays."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nodes import Nodes
from ranks import launch


def networks():
    """The network namespaces that processes of this machine are in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(process / "ns" / "net"))
    return found


def host():
    """What of the machine nodes might change."""
    words = [["ip", "-brief", "link"], ["ip", "netns", "list"]]
    return [subprocess.run(each, capture_output=True, check=True).stdout for each in words], Path("/proc/self/mounts").read_text()


def test_nothing_is_left_behind_after_a_failure_or_when_pytest_is_killed(tmp_path):
    before = host()
    with pytest.raises(RuntimeError, match="on purpose"), Nodes(2) as nodes:
        nodes[1].mount_tmpfs(tmp_path, "1m")
        program = nodes[1].start(["sleep", "60"])
        own = {os.readlink(f"/proc/{node.pid}/ns/net") for node in nodes}
        assert len(own) == 2 and own < networks() and os.readlink("/proc/self/ns/net") not in own and host() == before
        assert nodes[1].run("hostname").out == "node1\n" != socket.gethostname()
        raise RuntimeError("on purpose")
    assert program.poll() is not None
    assert not own & networks() and host() == before
    code = """if True:
        import os, nodes
        with nodes.Nodes(2) as two:
            print(*[os.readlink(f"/proc/{node.pid}/ns/net") for node in two], flush=True)
            os.kill(os.getpid(), 9)
    """
    ended = launch([sys.executable, "-c", code])
    assert (ended.code, ended.left) == (-signal.SIGKILL, 0)
    assert len(ended.out.split()) == 2 and not set(ended.out.split()) & networks()
