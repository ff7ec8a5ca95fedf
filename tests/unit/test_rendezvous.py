"""lib/launching/rendezvous.py without nodes: races, errors and what other machines send (real nodes:
builtin/test_misconfigurations.py)."""

import contextlib
import json
import random
import re
import socket
import threading
import time
from dataclasses import replace

import pytest

from config import UserError
from scripts.lib.launching import rendezvous
from scripts.lib.launching.rendezvous import Host, Nodes, NodesMissing, ask, check_leads_here, join

NODES = Nodes(least=1, most=2, rank=1, address="127.0.0.1", port=0, backend="c10d", secret="s", run="run")
TWO = replace(NODES, least=2, backend="static")
FORGED = "\nlaunch.sh: forged \x1b[2J"


@contextlib.contextmanager
def hosting(nodes, launch_id="job-7"):
    host = Host(nodes, launch_id)
    try:
        yield host
    finally:
        host.close()


@contextlib.contextmanager
def closed_beside(nodes, times):
    """A node 0 whose other port is closed, and that leaves after `times` polls; then the port is silent, as torchrun's
    store."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = gone.getsockname()[1]
    host = Host(replace(nodes, rank=-1), "job-7")
    host._other_port, answers, plain = closed, iter(range(times)), host._answer
    host._answer = lambda connection: plain(connection) if next(answers, None) is not None else connection.close()
    try:
        yield replace(nodes, port=host.port)
    finally:
        host.close()


def send(host, line):
    """Send a line to the host, as another machine; returns its greeting and what follows it."""
    with socket.create_connection(("127.0.0.1", host.port), 5) as connection, connection.makefile("rwb") as file:
        greeting = file.readline()
        with contextlib.suppress(OSError):
            file.write(line + b"\n")
            file.flush()
            return greeting + file.read()
    return greeting


def test_two_nodes_with_rank_0_and_the_same_launch_id_are_distinguished():
    """Slurm's script and the Kubernetes manifests give all nodes the same id."""
    with hosting(replace(NODES, least=2, rank=0)) as other:
        check_leads_here("127.0.0.1", other.port, other.token)
        with pytest.raises(UserError, match="127.0.0.1: does not lead to .*, which is NODE_RANK=0 .*; set"):
            check_leads_here("127.0.0.1", other.port, "the token of another host")


def test_a_node_that_arrives_while_node_0_leaves_is_not_rejected():
    """Its probe finds a closed port because the others have started torchrun."""
    with closed_beside(NODES, times=1) as nodes:
        assert join(nodes, 60, 45, "mine") == "mine"


def test_a_closed_port_is_an_error_while_node_0_listens():
    with closed_beside(NODES, 99) as nodes, pytest.raises(UserError, match="MASTER_PORT is open to .* is not"):
        join(nodes, 60, 45, "mine", error_seconds=0.5)


@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize("secret", ["s", ""])
def test_all_nodes_find_each_other_and_agree_on_an_id_that_is_not_sent(monkeypatch, secret, backend):
    """Under static rendezvous, rank 0, which alone uses the id, is on node 0."""
    sent, plain = [], rendezvous._send
    monkeypatch.setattr(rendezvous, "_send", lambda *words: (sent.append(str(words)), plain(*words)))
    three, received = replace(NODES, least=3, most=3, backend=backend, secret=secret), {}
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
    assert received == dict.fromkeys((1, 2), host.launch_id if backend == "c10d" else "own")
    assert len(sent) >= 8 and not any(word in "".join(sent) for word in ("job-7", host.launch_id, "s\nrun"))


def test_what_a_port_scanner_sends_neither_prints_more_than_a_line_nor_refuses_a_node(capfd):
    """Silence, bytes, JSON of other shapes, and messages of a launch with another secret."""

    def forged(**message):
        return rendezvous._mac(replace(TWO, secret=""), text := json.dumps(message), "").encode() + text.encode()

    odd = [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"\xff" * 300_000,
        b"[" * 100_000,
        b"{}",
        b"null",
        random.Random(0).randbytes(999),
    ]
    odd += [forged(node=[], rank="1", host={}, nnodes=None), forged(node="x", rank=1, host=FORGED, nnodes="2")]
    with hosting(replace(TWO, rank=0)) as host:
        said = b"".join(send(host, line) for line in odd)
        assert b"job-7" not in said and b'"go"' not in said and not host._present
        threading.Thread(target=host.wait, args=[60], daemon=True).start()
        assert join(replace(TWO, port=host.port), 20, 5, "own") == "own"
    assert re.fullmatch(
        r"launch.sh: ignored \S+ on MASTER_PORT: not a node of this launch .*\n", capfd.readouterr().err
    )


def test_silent_connections_hold_no_threads(monkeypatch):
    """A flood closes the oldest; the others are closed after seconds, also if they send a byte now and then."""
    monkeypatch.setattr(rendezvous, "ANSWER_S", 1.0)
    before = threading.active_count()
    with hosting(replace(TWO, rank=0)) as host, contextlib.ExitStack() as stack:
        flood = [stack.enter_context(socket.create_connection(("127.0.0.1", host.port))) for _ in range(400)]
        check_leads_here("127.0.0.1", host.port, host.token)  # after all of them, in the order of their arrival
        peak, ends = 0, time.monotonic() + 30
        while (count := threading.active_count()) > before + 1 and time.monotonic() < ends:
            peak = max(peak, count)
            with contextlib.suppress(OSError):
                flood[-1].sendall(b"x")
            time.sleep(0.02)
        assert 10 < peak - before <= rendezvous.MAX_CONNECTIONS + 20 and count <= before + 1


def test_without_a_secret_another_machine_cannot_take_the_place_of_a_node():
    """It speaks the protocol and knows the name of the run. With a secret, the second of two such nodes is refused."""
    open_, fake = replace(TWO, secret="", port=1), "f" * 16
    for nodes, refused in ((open_, False), (replace(open_, secret="s"), True)):
        with hosting(replace(nodes, rank=0, port=0)) as host:
            mine = replace(nodes, port=host.port)
            assert "missing" in ask(mine, fake, "")
            with pytest.raises(UserError, match="NODE_RANK=1: is already used by .*; give"):
                ask(mine, "a" * 16, "")
            threading.Thread(target=host.wait, args=[60], daemon=True).start()
            with pytest.raises(UserError) if refused else contextlib.nullcontext():
                assert join(mine, 10, 5, "own", error_seconds=0) == "own"


@pytest.mark.parametrize(("reply", "secret"), [("error", ""), ("missing", "")])
def test_without_a_secret_an_answer_from_another_program_only_prints_a_line(monkeypatch, capfd, reply, secret):
    monkeypatch.setattr(rendezvous, "LINE_INTERVAL_S", 0.0)
    monkeypatch.setattr(Host, "_reply", lambda *_: {reply: FORGED})
    with hosting(replace(TWO, secret=secret, rank=0)) as host, pytest.raises(NodesMissing):
        join(replace(TWO, secret=secret, port=host.port), 0.5, 5, "own", error_seconds=0)
    lines = capfd.readouterr().err.splitlines()
    assert lines and all(line.startswith("launch.sh: waiting for launch.sh: forged [2J (") for line in lines)


def test_two_launches_that_cross_do_not_join_each_other(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "LINE_INTERVAL_S", 0.0)
    with hosting(replace(TWO, secret="", rank=0)) as host, pytest.raises(NodesMissing):
        join(replace(TWO, secret="", run="other", port=host.port), 0.5, 5, "own", error_seconds=0)
    assert "is used there by another launch, with another run_dir or LAUNCH_SECRET" in capfd.readouterr().err
    assert not host._present
