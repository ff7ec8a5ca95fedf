"""The nodes find each other on MASTER_PORT before torchrun starts: it would wait for minutes and not list missing ones.

Every second each node connects to node 0, receives {"host", "token", "nonce"}, sends {"node", "rank", "host",
"nnodes", "nonce", "padding"}, and receives {"missing"}, {"error"} or {"go"}. The first poll is padded, to check that
large packets arrive, and returns {"port"}, which must be open too. When all nodes have received "go", node 0 frees the
port for torchrun's store.

A message is a line: an HMAC and JSON. The key is LAUNCH_SECRET and the name of the run folder; each message covers the
receiver's nonce. Without LAUNCH_SECRET anyone could send it: errors are then only printed, and no node is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import math
import secrets
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

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
MAX_CONNECTIONS = 256  # at once; further ones close the oldest


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
    secret: str = ""  # LAUNCH_SECRET
    run: str = ""  # the name of the run folder

    @property
    def nnodes(self) -> str:
        return f"{self.least}:{self.most}" if self.least < self.most else f"{self.most}"


def say(text: str) -> None:
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


def clean(text: object) -> str:
    """Text from another machine: one short line without control characters."""
    return "".join(letter for letter in str(text) if letter.isprintable())[:300]


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
    """Wait until all nodes are connected. Returns the launch id. Raises UserError and NodesMissing.

    Args:
        patience: seconds; 0 is the default, which is shorter if there is no route.
        launch_id: this node's; under c10d, where rank 0 may be on any node, all return one that follows from node 0's.
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
    return host.launch_id


class Host:
    """Node 0's side: answers polls until all nodes are connected."""

    def __init__(self, nodes: Nodes, launch_id: str) -> None:
        self._nodes, self._is_complete = nodes, False
        self._seed = _mac(nodes, launch_id, "seed") if nodes.backend == "c10d" else ""  # the id itself is never sent
        self.launch_id = _mac(nodes, self._seed, "id") if self._seed else launch_id
        self.token = secrets.token_hex(8)  # identifies this process
        self._lock = threading.Lock()
        self._present: dict[str, tuple[int, str, float]] = {}  # node: its rank, its host, the time of its last poll
        self._others: set[str] = set()  # addresses that sent messages of another launch
        self._listener, self._other = _listen(nodes.port), _listen(0)
        self.port, self._other_port = (each.getsockname()[1] for each in (self._listener, self._other))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connections: deque[socket.socket] = deque()
        while self._listener.fileno() >= 0:
            with contextlib.suppress(OSError):  # closed, or aborted by the other side
                connections.append(self._listener.accept()[0])
                if len(connections) > MAX_CONNECTIONS:
                    with contextlib.suppress(OSError):  # closed
                        connections.popleft().shutdown(socket.SHUT_RDWR)
                threading.Thread(target=self._answer, args=[connections[-1]], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError), connection:
            nonce = secrets.token_hex(8)
            _send(connection, {"host": socket.gethostname(), "token": self.token, "nonce": nonce})
            if not (message := _receive(connection, self._nodes, nonce)):
                if len(self._others) < 10 and (address := connection.getpeername()[0]) not in self._others:
                    self._others.add(address)
                    say(f"ignored {address} on MASTER_PORT: not a node of this launch (run_dir and LAUNCH_SECRET)")
                _send(connection, {})
                return
            reply = self._reply(str(message["node"]), int(message["rank"]), clean(message["host"])[:64], message)
            _send(connection, reply | {"padding": message["padding"]}, self._nodes, message["nonce"])
            connection.recv(1)  # the node closes first, so that the port is free at once
            if "go" in reply:
                self._present.pop(message["node"], None)

    def _reply(self, node: str, rank: int, host: str, message: dict[str, Any]) -> dict[str, Any]:
        nodes = self._nodes
        nnodes = clean(message["nnodes"])[:9]
        if message["padding"]:
            return {"port": self._other_port}
        if nnodes != nodes.nnodes:
            here = f"node 0 on {socket.gethostname()} was started with NNODES={nodes.nnodes}"
            return {"error": f"NNODES={nnodes}: {here}; give all nodes the same"}
        if nodes.rank >= 0 and not 0 < rank < nodes.most:
            return {"error": f"NODE_RANK={rank}: is node 0's or outside NNODES={nnodes}; give 1 to {nodes.most - 1}"}
        with self._lock:
            present = self._present.items() if nodes.rank >= 0 else ()
            used_by = [its_host for other, (its_rank, its_host, _) in present if its_rank == rank and other != node]
            used = {}
            if used_by:
                used = {"error": f"NODE_RANK={rank}: is already used by {used_by[0]}; give {host} another"}
            if used and nodes.secret:
                return used
            # without a secret, either of the two may be the right one
            self._present[node] = (rank, host, time.monotonic())
            return {"go": self._seed} if self._is_complete else used or {"missing": self._missing()}

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
    """Poll node 0 until all nodes are connected. Returns the launch id. Raises UserError and NodesMissing."""
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
                return _mac(nodes, reply["go"], "id") if reply["go"] else launch_id
            reached_at = wait.seconds
            if "port" in reply:
                padding = ""
                continue
            text = f"{node_0}: another program is listening there, perhaps an earlier attempt"
            if reply:
                text, fix = clean(reply["missing"]), reply.get("fix", f"{node_0} is connected")
        except UserError as problem:
            text, error, tolerance = str(problem), str(problem), error_seconds if nodes.secret else math.inf
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
    host, nonce, given = socket.gethostname(), secrets.token_hex(8), f"MASTER_ADDR={nodes.address}"
    message = {"node": node, "rank": nodes.rank, "host": host, "nnodes": nodes.nnodes, "nonce": nonce}
    with socket.create_connection((nodes.address, nodes.port), ANSWER_S) as connection:
        if "nonce" not in (greeting := _receive_greeting(connection)):
            return {}
        try:
            _send(connection, message | {"padding": padding}, nodes, str(greeting["nonce"]))
            reply = _receive(connection, nodes, nonce)
        except TimeoutError:
            text = f"{given}: small packets pass to and from {host}, but large ones do not"
            return {"missing": text, "fix": "set the MTU of all nodes to one that the switch supports"}
    if not reply:
        other = "another launch, with another run_dir or LAUNCH_SECRET"
        fix = "give each launch its own port, and all nodes of one the same run_dir and secret"
        return {"missing": f"{given}: MASTER_PORT={nodes.port} is used there by {other}", "fix": fix}
    if "port" in reply:
        try:
            socket.create_connection((nodes.address, reply["port"]), ANSWER_S).close()
        except OSError as error:
            text = f"MASTER_PORT is open to {host}, but port {reply['port']} is not ({why(error)})"
            fix = "open all ports between the nodes, since gloo, NCCL and the stores choose their own"
            raise UserError(f"{given}: {text}; {fix}") from None
    if "error" in reply:
        raise UserError(clean(reply["error"]))
    return reply


def check_leads_here(address: str, port: int, token: str) -> None:
    """On node 0: check that MASTER_ADDR leads to this process. Raises UserError."""
    wait, greeting = Wait(), {}
    while not greeting:
        problem = "but to another program"
        try:
            with socket.create_connection((address, port), ANSWER_S) as connection:
                greeting = _receive_greeting(connection)
        except OSError as error:
            problem = why(error)
        if greeting.get("token") == token:
            return
        if greeting or wait.seconds > ERROR_PATIENCE_S:
            break
        time.sleep(0.2)
    problem = f"but to {clean(greeting['host'])[:64]}" if "host" in greeting else problem
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


def _mac(nodes: Nodes | None, text: str, nonce: str) -> str:
    key = f"{nodes.secret}\n{nodes.run}" if nodes else ""
    return hmac.new(key.encode(), f"{nonce}\n{text}".encode(), "sha256").hexdigest()


def _send(connection: socket.socket, message: dict[str, Any], nodes: Nodes | None = None, nonce: str = "") -> None:
    text = json.dumps(message)
    connection.settimeout(ANSWER_S)
    connection.sendall(f"{_mac(nodes, text, nonce)}{text}\n".encode())


def _receive(connection: socket.socket, nodes: Nodes | None = None, nonce: str = "") -> dict[str, Any]:
    """The next message; empty if it is not valid. Raises OSError."""
    line, ends = b"", time.monotonic() + ANSWER_S
    while not line.endswith(b"\n") and len(line) < 2 * len(PADDING):
        connection.settimeout(max(ends - time.monotonic(), 0.001))
        if not (part := connection.recv(65536)):
            raise ConnectionResetError(errno.ECONNRESET, "the other side has left")
        line += part
    mac, text = line[:64].decode("ascii", "replace"), line[64:-1].decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(text) if hmac.compare_digest(mac.encode(), _mac(nodes, text, nonce).encode()) else {}
        return message if isinstance(message, dict) else {}
    return {}


def _receive_greeting(connection: socket.socket) -> dict[str, Any]:
    with contextlib.suppress(OSError):  # torchrun's store sends nothing before a request
        return _receive(connection)
    return {}
