"""The nodes find each other on MASTER_PORT before torchrun starts: it would wait for minutes and not list missing ones.

Every second each node connects to node 0, receives {"host", "token", "port"}, checks that the other port is open too,
sends {"node", "rank", "host", "nnodes"}, and receives {"missing"}, {"error"}, or {"go"} with the launch's id. Messages
are lines of JSON; the first poll is padded, to check that large packets arrive. When all nodes have received "go",
node 0 frees the port for torchrun's store.
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
from dataclasses import dataclass
from typing import Any, TextIO

from config import UserError
from scripts.lib.network import why

LINE_INTERVAL_S = 10.0
POLL_S = 1.0
ABSENT_AFTER_S = 5.0  # without a poll
ERROR_PATIENCE_S = 8.0  # for transient errors: node 0 is shutting down, or remembers a node that was restarted
PATIENCE_S = 900.0  # for other nodes, which may still be pulling an image or ending an earlier attempt
ROUTE_PATIENCE_S = 15.0  # for a name or a route that does not exist
ANSWER_S = 4.0  # to connect, and for each message
PORT_PATIENCE_S = 10.0  # for an earlier attempt to free its port
PADDING = "x" * 100_000  # larger than any frame


class NodesMissing(Exception):
    """A node did not connect in time. Exit code 1, since the next attempt may succeed."""


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


def say(text: str) -> None:
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


class Wait:
    """Times a wait, and prints what it waits for."""

    def __init__(self) -> None:
        self._began, self._lines = time.monotonic(), 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, what: str, fix: str) -> None:
        """Print what is missing, once every ten seconds."""
        if self.seconds >= LINE_INTERVAL_S * (self._lines + 1):
            self._lines += 1
            say(f"waiting for {what} ({self.seconds:.0f} s); {fix}")


def find_nodes(nodes: Nodes, patience: float, launch_id: str, is_first_attempt: bool) -> str:
    """Wait until all nodes are connected. Returns node 0's launch id. Raises UserError and NodesMissing.

    Args:
        patience: seconds; 0 is the default, which is shorter if there is no route.
    """
    seconds = patience or PATIENCE_S
    if not nodes.is_host:
        has_seen_node_0 = not is_first_attempt  # it may be restarting
        return join(nodes, seconds, seconds if patience or has_seen_node_0 else ROUTE_PATIENCE_S, launch_id)
    host = Host(nodes, launch_id)
    try:
        check_leads_here(nodes.address, nodes.port, host.token)
        host.wait(seconds)
    finally:
        host.close()
    return launch_id


class Host:
    """Node 0's side: answers polls until all nodes are connected."""

    def __init__(self, nodes: Nodes, launch_id: str) -> None:
        self._nodes, self._id, self._is_complete = nodes, launch_id, False
        self.token = secrets.token_hex(8)  # identifies this process: a scheduler may give all nodes the same launch id
        self._lock = threading.Lock()
        self._present: dict[str, tuple[int, str, float]] = {}  # node: its rank, its host, the time of its last poll
        self._listener, self._other = _listen(nodes.port), _listen(0)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=self._answer, args=self._listener.accept()[:1], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, KeyError), connection, connection.makefile("rw") as file:
            connection.settimeout(ANSWER_S)
            port = self._other.getsockname()[1]
            _send(file, {"host": socket.gethostname(), "token": self.token, "port": port})
            message = _receive(file)
            node, rank, host = message["node"], message["rank"], message["host"]
            with self._lock:
                if problem := self._problem(node, rank, host, message["nnodes"]):
                    reply = {"error": problem}
                else:
                    self._present[node] = (rank, host, time.monotonic())
                    reply = {"go": self._id} if self._is_complete else {"missing": self._missing()}
            _send(file, reply | {"padding": message["padding"]})
            file.read()  # the node closes first, so that the port is free at once
            if "go" in reply:
                self._present.pop(node, None)

    def _problem(self, node: str, rank: int, host: str, nnodes: str) -> str:
        nodes = self._nodes
        if nnodes != nodes.nnodes:
            here = socket.gethostname()
            return f"NNODES={nnodes}: node 0 on {here} was started with NNODES={nodes.nnodes}; give all nodes the same"
        if nodes.rank >= 0 and not 0 < rank < nodes.most:
            return f"NODE_RANK={rank}: is node 0's or outside NNODES={nnodes}; give 1 to {nodes.most - 1}"
        for other, (its_rank, its_host, _) in self._present.items() if nodes.rank >= 0 else ():
            if its_rank == rank and other != node:
                return f"NODE_RANK={rank}: is already used by {its_host}; give {host} another"
        return ""

    def _missing(self) -> str:
        nodes = self._nodes
        if nodes.rank < 0:
            return f"{nodes.least - len(self._present) - 1} more of {nodes.least} nodes"
        present = [rank for rank, _, _ in self._present.values()]
        ranks = [str(rank) for rank in range(1, nodes.most) if rank not in present]
        return f"node{'s' * (len(ranks) > 1)} {', '.join(ranks)} of {nodes.most}"

    def wait(self, seconds: float) -> None:
        """Wait until all nodes are connected and have received the id. Raises NodesMissing."""
        wait = Wait()
        while not self._is_complete:
            with self._lock:
                now = time.monotonic()
                self._present = {node: it for node, it in self._present.items() if now - it[2] < ABSENT_AFTER_S}
                self._is_complete = len(self._present) + 1 >= self._nodes.least
                missing = self._missing()
            if self._is_complete:
                break
            if wait.seconds >= seconds:
                raise NodesMissing(f"{missing}: missing after {seconds:.0f} s; check launch.sh there, then restart all")
            wait.say(missing, "start launch.sh there with MASTER_ADDR of this node")
            time.sleep(0.1)
        closing = Wait()
        while self._present and closing.seconds < ABSENT_AFTER_S:
            time.sleep(0.01)

    def close(self) -> None:
        for listener in (self._listener, self._other):
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def join(
    nodes: Nodes, seconds: float, route_seconds: float, launch_id: str, error_seconds: float = ERROR_PATIENCE_S
) -> str:
    """Poll node 0 until all nodes are connected. Returns node 0's launch id. Raises UserError and NodesMissing."""
    node, node_0, wait = secrets.token_hex(8), f"node 0 at {nodes.address}:{nodes.port}", Wait()
    reached_at, padding = 0.0, PADDING
    while True:
        error, tolerance = "", 0.0
        fix = "start launch.sh with NODE_RANK=0 there, or check MASTER_ADDR and MASTER_PORT"
        try:
            reply = ask(nodes, node, padding)
            if not reply and nodes.backend == "c10d":
                return launch_id  # torchrun's store: the others have started
            if "go" in reply:
                return reply["go"]
            reached_at, padding = wait.seconds, ""
            text = f"{node_0}: another program is listening there, perhaps an earlier attempt"
            if reply:
                text, fix = reply["missing"], f"{node_0} is connected"
        except UserError as problem:
            text, error, tolerance = str(problem), str(problem), error_seconds
        except OSError as problem:
            if isinstance(problem, ConnectionError):
                reached_at = wait.seconds
            text, tolerance = f"{node_0}: {why(problem)}", route_seconds
            error = (
                f"MASTER_ADDR={nodes.address}: could not be reached from {socket.gethostname()} within"
                f" {wait.seconds:.0f} s ({why(problem)}); check MASTER_ADDR, the route and the firewall, and that"
                " launch.sh runs there with NODE_RANK=0"
            )
        if error and wait.seconds - reached_at >= tolerance:
            raise UserError(error)
        if wait.seconds >= seconds:
            raise NodesMissing(f"{text} ({wait.seconds:.0f} s); start launch.sh on all nodes again")
        wait.say(text, fix)
        time.sleep(POLL_S)


def ask(nodes: Nodes, node: str, padding: str) -> dict[str, Any]:
    """Poll once; empty if another program than node 0's launch.sh is listening. Raises OSError and UserError."""
    host, given = socket.gethostname(), f"MASTER_ADDR={nodes.address}"
    with socket.create_connection((nodes.address, nodes.port), ANSWER_S) as connection:
        file = connection.makefile("rw")
        if not (greeting := _receive_greeting(file)):
            return {}
        try:
            socket.create_connection((nodes.address, greeting["port"]), ANSWER_S).close()
        except OSError as error:
            text = f"MASTER_PORT is open to {host}, but port {greeting['port']} is not ({why(error)})"
            fix = "open all ports between the nodes, since gloo, NCCL and the stores choose their own"
            raise UserError(f"{given}: {text}; {fix}") from None
        try:
            message = {"node": node, "rank": nodes.rank, "host": host, "nnodes": nodes.nnodes, "padding": padding}
            _send(file, message)
            reply = _receive(file)
        except TimeoutError:
            text = f"small packets pass to and from {host}, but large ones do not"
            raise UserError(f"{given}: {text}; set the MTU of all nodes to one that the switch supports") from None
        if not reply:
            raise ConnectionResetError(errno.ECONNRESET, "node 0 has left")
        if "error" in reply:
            raise UserError(reply["error"])
        return reply


def check_leads_here(address: str, port: int, token: str) -> None:
    """On node 0: check that MASTER_ADDR leads to this process. Raises UserError."""
    try:
        with socket.create_connection((address, port), ANSWER_S) as connection, connection.makefile() as file:
            greeting = _receive_greeting(file)
        problem = f"but to {greeting.get('host', 'another program')}"
    except OSError as error:
        greeting, problem = {}, why(error)
    if greeting.get("token") != token:
        text = f"does not lead to {socket.gethostname()}, which is NODE_RANK=0 ({problem})"
        fix = "set MASTER_ADDR to an address of this node, or give this node another NODE_RANK"
        raise UserError(f"MASTER_ADDR={address}: {text}; {fix}")


def _listen(port: int) -> socket.socket:
    wait, has_both = Wait(), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=has_both, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or wait.seconds > PORT_PATIENCE_S:
                text = f"is in use on {socket.gethostname()} (`ss -ltnp` names the process)"
                raise UserError(
                    f"MASTER_PORT={port}: {text}; end that process, or give all nodes another port"
                ) from None
        time.sleep(0.2)


def _send(file: TextIO, message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


def _receive(file: TextIO) -> dict[str, Any]:
    """The next message; empty if it is not valid. Raises OSError."""
    with contextlib.suppress(ValueError):
        message = json.loads(file.readline(2 * len(PADDING)))
        return message if isinstance(message, dict) else {}
    return {}


def _receive_greeting(file: TextIO) -> dict[str, Any]:
    with contextlib.suppress(OSError):  # torchrun's store sends nothing before a request
        return _receive(file)
    return {}
