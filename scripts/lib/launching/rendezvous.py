"""The nodes find each other on MASTER_PORT before torchrun starts, which would wait for minutes and name nobody.

Node 0 listens, the others connect; one JSON object per line. Node 0 sends {"host", "token", "echo"}, the node answers
{"rank", "host", "nnodes"} and receives {"missing"} every ten seconds, {"error"}, {"timeout"}, or {"go"} with the
launch's id. Then the port is free for torchrun's store.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from config import UserError
from scripts.lib.network import why

LINE_INTERVAL_S = 10.0
PATIENCE_S = 900.0  # for other nodes, which may still pull an image or end an earlier attempt
ROUTE_PATIENCE_S = 15.0  # for a name or a route that does not exist
CONNECT_S = 5.0  # to connect, and to receive a greeting
PORT_PATIENCE_S = 10.0  # for an earlier attempt to free its port
PROBE = b"x" * 100_000  # larger than any frame


class NodesMissing(Exception):
    """A node did not come in time. Exit code 1: it may come the next time."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch, and which one this is."""

    least: int
    most: int
    rank: int  # -1: not given (c10d)
    address: str  # MASTER_ADDR
    port: int
    backend: str  # torchrun's rendezvous: static or c10d
    is_host: bool = False

    @property
    def nnodes(self) -> str:
        return f"{self.least}:{self.most}" if self.least < self.most else f"{self.most}"


class Progress:
    """The time of a wait, and when to print a line about it."""

    def __init__(self) -> None:
        self._began, self._lines = time.monotonic(), 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def is_line_due(self) -> bool:
        """True once every ten seconds."""
        is_due = self.seconds >= LINE_INTERVAL_S * (self._lines + 1)
        self._lines += is_due
        return is_due


def say(text: str) -> None:
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


def find_nodes(nodes: Nodes, patience: float, launch_id: str, is_first_attempt: bool) -> str:
    """Wait until all nodes are there. Returns node 0's launch id. Raises UserError and NodesMissing.

    Args:
        patience: seconds; 0 is the default, which is short for a route that does not exist.
    """
    seconds = patience or PATIENCE_S
    if not nodes.is_host:
        has_seen_node_0 = not is_first_attempt  # it may be on its way back
        return join(nodes, seconds, seconds if patience or has_seen_node_0 else ROUTE_PATIENCE_S, launch_id)
    host = Host(nodes, launch_id)
    try:
        check_leads_here(nodes.address, nodes.port, host.token)
        host.wait(seconds)
    finally:
        host.close()
    return launch_id


class Host:
    """Node 0's side."""

    def __init__(self, nodes: Nodes, launch_id: str) -> None:
        self._nodes, self._id = nodes, launch_id
        self.token = secrets.token_hex(8)  # of this process: a scheduler may give all nodes one launch id
        self._present: dict[int, tuple[str, TextIO | None]] = {0: (socket.gethostname(), None)}
        self._changed = threading.Condition()
        self._listener, self._echo = _listen(nodes.port), _listen(0)
        self.port = self._listener.getsockname()[1]
        for listener, answer in ((self._listener, self._answer), (self._echo, _echo)):
            threading.Thread(target=_accept, args=(listener, answer), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        key = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection.makefile("rw") as file:
            echo = self._echo.getsockname()[1]
            _send(file, {"host": socket.gethostname(), "token": self.token, "echo": echo})
            message = _receive(file)
            rank, host = int(message["rank"]), str(message["host"])[:80]
            with self._changed:
                if problem := self._problem(rank, host, str(message["nnodes"])):
                    say(f"rejected {host}: {problem}")
                    _send(file, {"error": problem})
                    return
                key = rank if self._nodes.rank >= 0 else id(connection)
                self._present[key] = (host, file)
                self._changed.notify()
            file.readline()  # until it closes
        with self._changed:
            self._present.pop(key, None)

    def _problem(self, rank: int, host: str, nnodes: str) -> str:
        nodes = self._nodes
        if nnodes != nodes.nnodes:
            here = socket.gethostname()
            return f"NNODES={nnodes}: node 0 on {here} was started with NNODES={nodes.nnodes}; give all nodes the same"
        if nodes.rank >= 0 and not 0 < rank < nodes.most:
            return f"NODE_RANK={rank}: is node 0's or outside NNODES={nnodes}; give 1 to {nodes.most - 1}"
        if nodes.rank >= 0 and rank in self._present:
            return f"NODE_RANK={rank}: {self._present[rank][0]} has it already; give {host} another"
        return ""

    def missing(self) -> str:
        if self._nodes.rank < 0:
            return f"{self._nodes.least - len(self._present)} more of {self._nodes.least} nodes"
        ranks = [str(rank) for rank in range(self._nodes.most) if rank not in self._present]
        return f"node{'s' * (len(ranks) > 1)} {', '.join(ranks)} of {self._nodes.most}"

    def wait(self, seconds: float) -> None:
        """Until all nodes are here; then each receives the id and closes. Raises NodesMissing."""
        progress = Progress()
        with self._changed:
            while len(self._present) < self._nodes.least:
                if progress.seconds >= seconds:
                    text = f"{self.missing()}: missing after {seconds:.0f} s; check launch.sh there, then restart all"
                    self._send_all({"timeout": text})
                    raise NodesMissing(text)
                if progress.is_line_due():
                    fix = "start launch.sh there with MASTER_ADDR of this node"
                    say(f"waiting for {self.missing()} ({progress.seconds:.0f} s); {fix}")
                    self._send_all({"missing": self.missing()})
                self._changed.wait(0.5)
            self._send_all({"go": self._id})
        closing = Progress()
        while len(self._present) > 1 and closing.seconds < 2:  # they close first, so that the port is free at once
            time.sleep(0.01)

    def _send_all(self, message: dict[str, Any]) -> None:
        for _, file in [*self._present.values()]:
            with contextlib.suppress(OSError, ValueError):
                if file:
                    _send(file, message)

    def close(self) -> None:
        for listener in (self._listener, self._echo):
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def join(nodes: Nodes, seconds: float, route_seconds: float, launch_id: str) -> str:
    """Connect to node 0 and wait for the others. Returns node 0's launch id. Raises UserError and NodesMissing."""
    host, where, progress = socket.gethostname(), (nodes.address, nodes.port), Progress()
    route_lost_at, has_failed_probe = 0.0, False
    while True:
        try:
            with socket.create_connection(where, CONNECT_S) as connection, connection.makefile("rw") as file:
                greeting = _receive(file)
                if not greeting and nodes.backend == "c10d":
                    return launch_id  # torchrun's store: the others have started
                if not greeting:
                    problem = "another program listens there, perhaps an earlier attempt"
                elif unreachable := probe(nodes.address, greeting["echo"]):
                    if has_failed_probe:
                        raise UserError(f"MASTER_ADDR={nodes.address}: {unreachable}")
                    has_failed_probe, problem = True, unreachable  # node 0 may just be leaving
                else:
                    connection.settimeout(2 * LINE_INTERVAL_S)
                    if found := _take_part(file, nodes, greeting["host"]):
                        return found
                    problem = "node 0 has left"
            route_lost_at = progress.seconds
        except OSError as error:
            problem = why(error)
            route_lost_at = progress.seconds if isinstance(error, ConnectionError) else route_lost_at
        waited = progress.seconds
        if waited - route_lost_at >= route_seconds:
            raise UserError(
                f"MASTER_ADDR={nodes.address}: cannot be reached from {host} in {waited:.0f} s ({problem}); check"
                " MASTER_ADDR, the route and the firewall, and that launch.sh runs there with NODE_RANK=0"
            )
        text = f"node 0 at {nodes.address}:{nodes.port}: {problem}"
        if waited >= seconds:
            raise NodesMissing(f"{text} ({waited:.0f} s); start launch.sh with NODE_RANK=0 there, then restart all")
        if progress.is_line_due():
            fix = "start launch.sh with NODE_RANK=0 there, or check MASTER_ADDR and MASTER_PORT"
            say(f"waiting for {text} ({waited:.0f} s); {fix}")
        time.sleep(0.5)


def _take_part(file: TextIO, nodes: Nodes, host: str) -> str:
    """Returns the launch id, or an empty text if node 0 leaves."""
    _send(file, {"rank": nodes.rank, "host": socket.gethostname(), "nnodes": nodes.nnodes})
    while message := _receive(file):
        if "go" in message:
            return message["go"]
        if "error" in message:
            raise UserError(message["error"])
        if "timeout" in message:
            raise NodesMissing(message["timeout"])
        say(f"node 0 ({host}) is there; waiting for {message['missing']}")
    return ""


def check_leads_here(address: str, port: int, token: str) -> None:
    """On node 0: MASTER_ADDR leads to this process. Raises UserError."""
    host, fix = socket.gethostname(), "give an address of this node as MASTER_ADDR, or this node another NODE_RANK"
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection, connection.makefile() as file:
            greeting = _receive(file)
    except OSError as error:
        problem = f"MASTER_ADDR={address}: does not lead to {host}, which is NODE_RANK=0 ({why(error)})"
        raise UserError(f"{problem}; {fix}") from None
    if greeting.get("token") != token:
        other = greeting.get("host", "another machine")
        raise UserError(f"NODE_RANK=0: MASTER_ADDR={address} is {other}, not {host}, and node 0 is there; {fix}")


def probe(address: str, port: int) -> str:
    """What is wrong with another port of node 0, or with large packets to it; empty if both work."""
    host, is_open = socket.gethostname(), False
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection:
            is_open = True
            connection.sendall(PROBE)
            _receive_probe(connection)
            return ""
    except OSError as error:
        if is_open:
            return f"small packets pass to and from {host}, large ones do not; give all nodes the switch's MTU"
        fix = "open all ports between the nodes, since gloo, NCCL and the stores choose theirs"
        return f"MASTER_PORT is open to {host} and port {port} is not ({why(error)}); {fix}"


def _echo(connection: socket.socket) -> None:
    connection.settimeout(CONNECT_S)
    with contextlib.suppress(OSError):
        connection.sendall(_receive_probe(connection))


def _receive_probe(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < len(PROBE):
        if not (some := connection.recv(len(PROBE))):
            raise OSError(errno.ECONNRESET, "the connection was closed")
        data += some
    return data


def _listen(port: int) -> socket.socket:
    progress, has_both = Progress(), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
        except OSError as error:
            if error.errno == errno.EACCES:
                raise UserError(f"MASTER_PORT={port}: needs root; give one above 1023") from None
            if error.errno != errno.EADDRINUSE or progress.seconds > PORT_PATIENCE_S:
                raise UserError(
                    f"MASTER_PORT={port}: is in use on {socket.gethostname()} (`ss -ltnp` names the process); end"
                    " that process, or give all nodes another port"
                ) from None
        time.sleep(0.2)


def _accept(listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    def serve(connection: socket.socket) -> None:
        with connection:
            answer(connection)

    with contextlib.suppress(OSError):  # closed
        while True:
            threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()


def _send(file: TextIO, message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


def _receive(file: TextIO) -> dict[str, Any]:
    """The next line; empty if there is none, or not one of ours."""
    with contextlib.suppress(OSError, ValueError):
        message = json.loads(file.readline(4096))
        return message if isinstance(message, dict) else {}
    return {}
