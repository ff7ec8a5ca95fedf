# extra: launcher
"""lib/launching/rendezvous.py without nodes: races, errors and what other programs send."""

import contextlib
import itertools
import random
import re
import socket
import threading
import time
from dataclasses import replace

import pytest

from scripts.lib.launching import rendezvous
from scripts.lib.launching.rendezvous import (
    Nodes,
    NodesMissing,
    PollHandler,
    RendezvousServer,
    find_nodes,
    poll_until_connected,
)
from utils.settings.errors import UserError

NODES = Nodes(min_nodes=1, max_nodes=2, rank=1, address="127.0.0.1", port=0, backend="c10d", run="run")
TWO = replace(NODES, min_nodes=2, backend="static")
FORGED = "\nlaunch.sh: forged \x1b[2J"


@contextlib.contextmanager
def hosting(nodes, launch_id="job-7"):
    """Node 0, whose own polls are left to the test."""
    with RendezvousServer(nodes, "zero", launch_id) as host:
        threading.Thread(target=host.serve_forever, args=[0.01], daemon=True).start()
        try:
            yield host
        finally:
            host.shutdown()


@contextlib.contextmanager
def closed_beside(nodes, times):
    """A node 0 whose other port is closed, and that leaves after `times` polls; then the port is silent, as torchrun's
    store."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = gone.getsockname()[1]
    answers = iter(range(times))

    class Leaving(PollHandler):
        def handle(self):
            if next(answers, None) is not None:
                super().handle()

    with hosting(nodes) as host:
        host.greeting["port"], host.RequestHandlerClass = closed, Leaving
        yield replace(nodes, port=host.socket.getsockname()[1])


def port_of(host):
    return host.socket.getsockname()[1]


def send(host, line):
    """Send a line to the host, as another program; returns its greeting and what follows it."""
    with socket.create_connection(("127.0.0.1", port_of(host)), 5) as connection, connection.makefile("rwb") as file:
        greeting = file.readline()
        with contextlib.suppress(OSError):
            file.write(line + b"\n")
            file.flush()
            connection.shutdown(socket.SHUT_WR)
            return greeting + file.read()
    return greeting


def test_two_nodes_with_rank_0_and_the_same_launch_id_are_distinguished(monkeypatch):
    """Slurm's script and the Kubernetes manifests give all nodes the same id."""
    monkeypatch.setattr(rendezvous, "ERROR_PATIENCE_S", 0.0)
    with hosting(replace(TWO, rank=0)) as host:
        zero = replace(TWO, rank=0, is_host=True, port=port_of(host))
        with pytest.raises(NodesMissing, match=r"after 0 s\. Node 1 of 2 has not connected\. Check launch.sh there"):
            poll_until_connected(zero, "zero", "job-7", 0, 5)
        problem = r"127.0.0.1 does not lead to .*, which has NODE_RANK=0 \(.* answers there\)\. Set"
        with pytest.raises(UserError, match=problem):
            poll_until_connected(zero, "another process", "job-7", 60, 5)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_master_addr_without_this_node_0_is_an_error(monkeypatch, is_open):
    """Another program answers there, or nothing does."""
    monkeypatch.setattr(rendezvous, "ERROR_PATIENCE_S", 0.0)
    monkeypatch.setattr(rendezvous, "ANSWER_TIMEOUT_S", 0.2)
    cause = "another program answers there" if is_open else "connection refused"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        zero = replace(TWO, rank=0, is_host=True, port=silent.getsockname()[1])
        with contextlib.nullcontext() if is_open else silent, pytest.raises(UserError, match=f"does not lead.*{cause}"):
            if not is_open:
                silent.close()
            poll_until_connected(zero, "zero", "job-7", 60, 5)


def test_a_node_that_arrives_while_node_0_leaves_is_not_rejected():
    """Its probe finds a closed port because the others have started torchrun."""
    with closed_beside(NODES, times=1) as nodes:
        assert poll_until_connected(nodes, "mine", "own", 60, 45) == "own"


def test_a_closed_port_is_an_error_while_node_0_listens(monkeypatch):
    monkeypatch.setattr(rendezvous, "ERROR_PATIENCE_S", 0.5)
    with closed_beside(NODES, 99) as nodes, pytest.raises(UserError, match="MASTER_PORT of .* is open to .* is not"):
        poll_until_connected(nodes, "mine", "own", 60, 45)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_all_nodes_find_each_other_and_return_node_0s_id(backend):
    """And node 0 leaves when all have received it; its port is free at once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank = itertools.count() if backend == "static" else itertools.repeat(-1)
    three = [
        replace(NODES, min_nodes=3, max_nodes=3, rank=next(rank), backend=backend, port=port, is_host=k == 0)
        for k in range(3)
    ]
    received = {}

    def start(k):
        thread = threading.Thread(target=lambda: received.update({k: find_nodes(three[k], 60, f"id-{k}", True)}))
        thread.start()
        return thread

    for thread in [start(k) for k in (1, 0, 2)]:
        thread.join(60)
    assert received == dict.fromkeys(range(3), "id-0")
    socket.create_server(("", port)).close()


def test_a_wrong_number_is_an_error_that_names_the_host(monkeypatch):
    monkeypatch.setattr(rendezvous, "ERROR_PATIENCE_S", 0.0)
    with hosting(replace(TWO, min_nodes=3, max_nodes=3, rank=0)) as host:
        setup = replace(TWO, min_nodes=3, max_nodes=3, port=port_of(host))
        with pytest.raises(NodesMissing, match=r"Nodes 0, 2 of 3 have not connected\."):
            poll_until_connected(setup, "first", "own", 0, 5)
        with pytest.raises(UserError, match=r"NODE_RANK=1 is already used by .*\. Give .* another NODE_RANK\."):
            poll_until_connected(setup, "second", "own", 60, 5)
        with pytest.raises(UserError, match=r"NNODES is 2 .* node 0 on .* was started with NNODES=3\. Give all nodes"):
            poll_until_connected(replace(setup, min_nodes=2, max_nodes=2), "third", "own", 60, 5)
        problem = "NODE_RANK must be from 1 to 2, since NNODES is 3 on .*, got -1"  # c10d there, static here
        with pytest.raises(UserError, match=problem):
            poll_until_connected(replace(setup, rank=-1), "fourth", "own", 60, 5)


def test_what_a_port_scanner_sends_neither_prints_nor_refuses_a_node(capfd):
    """Silence, bytes, and JSON of other shapes."""
    odd = [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"\xff" * 300_000,
        b"[" * 100_000,
        b"{}",
        b"null",
        b'{"node": [], "rank": "x", "host": {}, "padding": 0}',
        random.Random(0).randbytes(999),
    ]
    with hosting(replace(TWO, rank=0)) as host:
        answers = b"".join(send(host, line) for line in odd)
        assert b"job-7" not in answers and b'"go"' not in answers and not host._waiting_nodes
        host.answer_poll("zero", 0, "node0")
        assert poll_until_connected(replace(TWO, port=port_of(host)), "one", "own", 20, 5) == "job-7"
    assert capfd.readouterr().err == ""


def test_silent_connections_are_closed_after_seconds(monkeypatch):
    monkeypatch.setattr(PollHandler, "timeout", 1.0)
    before = threading.active_count()
    with hosting(replace(TWO, rank=0)) as host, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(host))))
        ends = time.monotonic() + 30
        while threading.active_count() <= before + 50 and time.monotonic() < ends:
            time.sleep(0.01)
        host.answer_poll("zero", 0, "node0")
        assert poll_until_connected(replace(TWO, port=port_of(host)), "one", "own", 20, 5) == "job-7"
        while (count := threading.active_count()) > before + 1 and time.monotonic() < ends:
            time.sleep(0.02)
    assert count <= before + 1


def test_a_node_sees_that_large_packets_are_lost_although_node_0_waits_longer(monkeypatch, capfd):
    """Node 0 greets and then receives nothing, as when a switch drops the frames."""

    class Deaf(PollHandler):
        def handle(self):
            rendezvous._send(self.connection, self.server.greeting)
            time.sleep(1)

    assert PollHandler.timeout >= 2 * rendezvous.ANSWER_TIMEOUT_S  # otherwise the node sees that node 0 has left
    monkeypatch.setattr(rendezvous, "LINE_INTERVAL_S", 0.0)
    monkeypatch.setattr(rendezvous, "ANSWER_TIMEOUT_S", 0.2)
    with hosting(replace(TWO, rank=0)) as host, pytest.raises(NodesMissing):
        host.RequestHandlerClass = Deaf
        poll_until_connected(replace(TWO, port=port_of(host)), "one", "own", 0.5, 5)
    assert "Small packets pass between" in capfd.readouterr().err


def test_text_from_another_program_cannot_begin_a_line(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "LINE_INTERVAL_S", 0.0)
    monkeypatch.setattr(RendezvousServer, "answer_poll", lambda *_: {"missing": FORGED})
    with hosting(replace(TWO, rank=0)) as host, pytest.raises(NodesMissing):
        poll_until_connected(replace(TWO, port=port_of(host)), "one", "own", 0.5, 5)
    lines = capfd.readouterr().err.splitlines()
    pattern = r"launch\.sh: This node has waited for \d+ s\. launch\.sh: forged \[2J "
    assert lines and all(re.match(pattern, line) for line in lines), lines


def test_two_launches_that_cross_do_not_join_each_other(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "LINE_INTERVAL_S", 0.0)
    with hosting(replace(TWO, rank=0)) as host, pytest.raises(NodesMissing):
        poll_until_connected(replace(TWO, run="other", port=port_of(host)), "one", "own", 0.5, 5)
    assert "is used by another launch, with another --run_dir." in capfd.readouterr().err
    assert not host._waiting_nodes
