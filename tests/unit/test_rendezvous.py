"""lib/launching/rendezvous.py without nodes: races and errors (real nodes: builtin/test_misconfigurations.py)."""

import contextlib
import json
import socket
import threading
from dataclasses import replace

import pytest

from config import UserError
from scripts.lib.launching.rendezvous import Host, Nodes, check_leads_here, join

NODES = Nodes(least=1, most=2, rank=1, address="127.0.0.1", port=0, backend="c10d")


@contextlib.contextmanager
def hosting(nodes, launch_id="job-7"):
    host = Host(nodes, launch_id)
    try:
        yield host
    finally:
        host.close()


@contextlib.contextmanager
def greeting(other_port, times):
    """A node 0 that sends `times` greetings and then none, as torchrun's store."""

    def serve(server):
        with contextlib.suppress(OSError):
            for k in range(times + 1):
                connection, _ = server.accept()
                with connection:
                    if k < times:
                        message = {"host": "node0", "token": "x", "port": other_port}
                        connection.sendall(json.dumps(message).encode() + b"\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield replace(NODES, port=server.getsockname()[1])


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return gone.getsockname()[1]


def test_two_nodes_with_rank_0_and_the_same_launch_id_are_distinguished():
    """Slurm's script and the Kubernetes manifests give all nodes the same id."""
    with hosting(replace(NODES, least=2, rank=0)) as other:
        check_leads_here("127.0.0.1", other.port, other.token)
        with pytest.raises(UserError, match="127.0.0.1: does not lead to .*, which is NODE_RANK=0 .*; set"):
            check_leads_here("127.0.0.1", other.port, "the token of another host")


def test_a_node_that_arrives_while_node_0_leaves_is_not_rejected():
    """Its probe finds a closed port because the others have started torchrun."""
    with greeting(closed_port(), times=1) as nodes:
        assert join(nodes, 60, 45, "mine") == "mine"


def test_a_closed_port_is_an_error_while_node_0_listens():
    with greeting(closed_port(), times=99) as nodes, pytest.raises(UserError, match="MASTER_PORT is open to .* is not"):
        join(nodes, 60, 45, "mine", error_seconds=0.5)


def test_all_nodes_receive_the_id_of_node_0():
    three, received = replace(NODES, least=3, most=3, backend="static"), {}
    with hosting(replace(three, rank=0)) as host:
        nodes = [replace(three, rank=rank, port=host.port) for rank in (1, 2)]
        threads = [
            threading.Thread(target=lambda each=each: received.update({each.rank: join(each, 60, 45, "own")}))
            for each in nodes
        ]
        for thread in threads:
            thread.start()
        host.wait(60)
        for thread in threads:
            thread.join(60)
    assert received == {1: "job-7", 2: "job-7"}
