# extra: launcher and template
"""What other machines, a firewall and DNS do to launch.sh on two nodes: the list in docs/multi-node.md.

A node that is lost and returns: test_two_nodes.py; one that reboots: test_ssh.py.
"""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from nodes import NETWORK, Nodes
from ranks import finish
from test_two_nodes import difference_from_one_node, launch
from training import wait_for_step, wait_until

OF_THE_PORT = "'' 'GET / HTTP/1.1\\r\\n\\r\\n' '{\"rank\": 1}\\n' '\\x16\\x03\\x01' '\\xff\\xff\\xff\\x7f'"
SCANNER = """
import random, shlex, socket, sys, time
words = [word.encode().decode("unicode_escape").encode("latin-1") for word in shlex.split(sys.argv[1])]
words.append(random.Random(0).randbytes(999))
held = []
while True:
    for port in [29500, *random.sample(range(20000, 30000), 20)]:
        for word in words if port == 29500 else words[:1]:
            try:
                held.append(socket.create_connection(("10.0.0.1", port), 0.2))
                held[-1].sendall(word)
            except OSError:
                pass
    del held[:-200]
    time.sleep(0.05)
"""
RULES = ("add pref 9 lookup local", "del pref 0", "add pref 5 iif eth0 ipproto tcp blackhole")


def printed(program):
    return os.pread(program.files[1].fileno(), 2**22, 0).decode()


@pytest.mark.slow
def test_a_port_scanner_during_the_start_delays_it_at_most(tmp_path):
    """A third machine connects to node 0 all the time, silently or with bytes of other protocols. Node 1 is late."""
    with Nodes(3) as nodes:
        nodes[2].start([sys.executable, "-c", SCANNER, OF_THE_PORT])
        flags = ["--epochs", 1, "--run_dir", tmp_path / "run"]
        first = launch(nodes[0], 0, *flags)
        wait_until(lambda: "Node 1 of 2 has not connected." in printed(first))
        second = launch(nodes[1], 1, *flags)
        ended = [finish(program, 120) for program in (first, second)]
    assert [result.code for result in ended] == [0, 0], "".join(result.text for result in ended)
    assert "Traceback" not in ended[0].err, ended[0].err


@pytest.mark.slow
def test_two_launches_that_cross(tmp_path):
    """Both have the same node 0 and port; node 1 of the second one reaches node 0 of the first."""
    with Nodes(2) as nodes:
        flags = ["--epochs", 2, "--run_dir"]
        crossing = launch(nodes[1], 1, *flags, tmp_path / "b", LAUNCH_WAIT="60")
        first = launch(nodes[0], 0, *flags, tmp_path / "a")
        wait_until(lambda: "is used there by another launch" in printed(crossing))
        other = finish(launch(nodes[0], 0, *flags, tmp_path / "b"))
        assert other.code == 2 and "MASTER_PORT=29500 is in use on node0" in other.err, other.text
        second = launch(nodes[1], 1, *flags, tmp_path / "a")
        ended = [finish(program, 120) for program in (first, second, crossing)]
    assert [result.code for result in ended] == [0, 0, 1], "\n--------\n".join(result.text for result in ended)
    assert (tmp_path / "a/summary.json").exists() and not [*(tmp_path / "b").iterdir()]


@pytest.mark.slow
def test_dns_that_changes_while_a_node_waits(tmp_path):
    with Nodes(2) as nodes:
        hosts = nodes[1].seen(Path("/etc/hosts"))
        right = hosts.read_text()
        hosts.write_text(right.replace(f"{NETWORK}.1 node0", f"{NETWORK}.99 node0"))
        flags = ["--epochs", 1, "--run_dir", tmp_path / "run"]
        programs = [launch(node, number, *flags, LAUNCH_WAIT="60") for number, node in enumerate(nodes)]
        wait_until(lambda: "no machine has that address" in printed(programs[1]))
        hosts.write_text(right)
        ended = [finish(program, 120) for program in programs]
    assert [result.code for result in ended] == [0, 0], "".join(result.text for result in ended)


@pytest.mark.slow
def test_a_firewall_that_closes_in_the_middle_of_the_run(tmp_path):
    """node0 drops all packets of node1 for 25 s, without an answer."""
    with Nodes(2) as nodes:
        flags = ["--epochs", 6, "--run_dir", tmp_path / "run", "--timeout", 10, "--hang_timeout", 20]
        programs = [launch(node, number, *flags, LAUNCH_RETRIES="4") for number, node in enumerate(nodes)]
        wait_for_step(tmp_path / "run", 1, 12)
        # otherwise the rules do not apply to established connections
        nodes[0].do("sh", "-c", "cd /proc/sys/net/ipv4 && echo 0 | tee ip_early_demux tcp_early_demux")
        for rule in RULES:
            nodes[0].do("ip", "rule", *rule.split())
        time.sleep(25)
        assert re.search("exit code 1; attempt 2", printed(programs[0])), printed(programs[0])
        nodes[0].do("ip", "rule", "del", "pref", "5")
        ended = [finish(program, 240) for program in programs]
    assert [result.code for result in ended] == [0, 0], "".join(result.text for result in ended)
    assert difference_from_one_node(tmp_path, 6) == []
