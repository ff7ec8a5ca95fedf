"""scripts/meeting.py without nodes: what two of them say to each other at odd moments (real nodes:
builtin/test_misconfigurations.py)."""

import json
import socket
import threading

import pytest

from config import UserError
from scripts import meeting

NODES = {"least": 1, "most": 2, "rank": 1, "address": "127.0.0.1", "backend": "c10d"}


def test_a_launch_id_that_all_nodes_were_given_does_not_make_two_nodes_0_one():
    """Slurm's script and the Kubernetes manifests give it."""
    other = meeting.Host(2, 2, 0, "job-7", has_ranks=True)
    port = other._listener.getsockname()[1]
    try:
        meeting.check_way_back("127.0.0.1", port, other.token)
        with pytest.raises(UserError, match="NODE_RANK=0: MASTER_ADDR=127.0.0.1 is .*, and node 0 is there; give"):
            meeting.check_way_back("127.0.0.1", port, "of a meeting on another host")
    finally:
        other.close()


def test_a_node_that_comes_while_node_0_leaves_is_not_refused():
    """The others had enough and went: its probe meets a closed port, and then the store of torchrun, which greets
    nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed_port = gone.getsockname()[1]

        def leave():
            first, _ = server.accept()
            with first:
                first.sendall(json.dumps({"host": "node0", "token": "x", "echo": closed_port}).encode() + b"\n")
            second, _ = server.accept()
            second.recv(1)  # until it gives up

        thread = threading.Thread(target=leave, daemon=True)
        thread.start()
        assert meeting.join(NODES | {"port": server.getsockname()[1]}, 60, 45, "mine") == "mine"
        thread.join(60)


def test_a_port_that_is_closed_while_node_0_stays_is_refused(monkeypatch):
    monkeypatch.setattr(meeting, "_echo", lambda connection: connection.close())
    host = meeting.Host(2, 2, 0, "id", has_ranks=False)
    try:
        with pytest.raises(
            UserError, match="small frames pass between it and .*, large ones do not; give all nodes the MTU"
        ):
            meeting.join(NODES | {"least": 2, "port": host._listener.getsockname()[1]}, 60, 45, "mine")
    finally:
        host.close()


def test_all_that_came_hear_the_id_of_node_0():
    host, heard = meeting.Host(3, 3, 0, "job-7", has_ranks=True), {}
    port = host._listener.getsockname()[1]
    nodes = [NODES | {"least": 3, "most": 3, "rank": rank, "backend": "static", "port": port} for rank in (1, 2)]
    threads = [
        threading.Thread(target=lambda each=each: heard.update({each["rank"]: meeting.join(each, 60, 45, "own")}))
        for each in nodes
    ]
    for thread in threads:
        thread.start()
    host.wait(60)
    for thread in threads:
        thread.join(60)
    host.close()
    assert heard == {1: "job-7", 2: "job-7"}
