"""What other machines, a firewall and DNS do to launch.sh on two nodes: the table in docs/multi-node.md.

A node that is lost and returns: test_two_nodes.py; one that reboots: test_ssh.py.
"""

import os
import re
import time
from pathlib import Path

import pytest

from nodes import NETWORK, Nodes
from ranks import finish
from test_two_nodes import difference_from_one_node, launch
from training import wait_for_step, wait_until

RULES = ("add pref 9 lookup local", "del pref 0", "add pref 5 iif eth0 ipproto tcp blackhole")


def printed(program):
    return os.pread(program.files[1].fileno(), 2**22, 0).decode()


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
    assert [each.code for each in ended] == [0, 0], "".join(each.text for each in ended)


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
    assert [each.code for each in ended] == [0, 0], "".join(each.text for each in ended)
    assert difference_from_one_node(tmp_path, 6) == []
