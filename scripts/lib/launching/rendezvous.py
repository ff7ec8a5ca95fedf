# extra: launcher
"""Let the nodes find each other on MASTER_PORT before torchrun starts.

Torchrun itself would wait for minutes, and would not list missing nodes.

Every second each node polls node 0, and node 0 polls itself too. The node connects, receives {"node", "host", "run",
"nnodes", "port"}, sends {"node", "rank", "host", "padding"}, and receives {"missing"}, {"error"} or {"go": launch id}.
The first poll is padded, to check that large packets arrive. The port that the node learns of must be open too. When
all nodes have received "go", node 0 frees MASTER_PORT for torchrun's store. A message is a line of JSON. Nothing is
authenticated, as in that store.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import socket
import socketserver
import sys
import threading
import time
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

from scripts.lib.network import explain_connection_error
from utils.settings.errors import UserError

LINE_INTERVAL_S = 10.0
POLL_INTERVAL_S = 1.0
ABSENT_AFTER_S = 5.0  # a node is absent after this time without a poll
ERROR_PATIENCE_S = 8.0  # errors may pass: node 0 may be shutting down, or remember a node that was restarted
PATIENCE_S = 900.0  # other nodes may still be pulling an image or ending an earlier attempt
ROUTE_PATIENCE_S = 15.0  # a name or a route may not exist yet
ANSWER_TIMEOUT_S = 4.0  # for a connection, and for each message
PORT_PATIENCE_S = 10.0  # an earlier attempt may still have to free its port
PADDING = "x" * 100_000  # it is larger than any frame


class NodesMissing(Exception):
    """A node did not connect in time. The exit code is 1, since the next attempt may succeed."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch, and which one this is."""

    min_nodes: int
    max_nodes: int
    rank: int  # -1 means that it was not given (c10d)
    address: str  # MASTER_ADDR
    port: int
    backend: str  # torchrun's rendezvous: static or c10d
    is_host: bool = False
    run: str = ""  # the name of the run folder

    @property
    def nnodes(self) -> str:
        return f"{self.min_nodes}:{self.max_nodes}" if self.min_nodes < self.max_nodes else f"{self.max_nodes}"


def print_status(text: str) -> None:
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


def sanitize_text(text: object) -> str:
    """Return text from another machine as one short line without control characters."""
    return "".join(letter for letter in str(text) if letter.isprintable())[:300]


class Wait:
    """Measures how long a wait lasts, and prints why it does."""

    def __init__(self) -> None:
        self._started_at, self._lines_printed = time.monotonic(), 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_at

    def print_missing(self, text: str) -> None:
        """Print what is missing and the fix, once every ten seconds."""
        if self.seconds >= LINE_INTERVAL_S * (self._lines_printed + 1):
            self._lines_printed += 1
            print_status(f"This node has waited for {self.seconds:.0f} s. {text}")


def find_nodes(nodes: Nodes, patience: float, launch_id: str, is_first_attempt: bool) -> str:
    """Wait until all nodes are connected, and return node 0's launch id. Raises UserError and NodesMissing.

    Args:
        nodes: the nodes of the launch.
        patience: the seconds to wait. 0 means the default, which is shorter if there is no route.
        launch_id: the launch id of this node.
        is_first_attempt: whether no attempt of this launch came before.
    """
    seconds, node = patience or PATIENCE_S, secrets.token_hex(8)
    if not nodes.is_host:
        has_seen_node_0 = not is_first_attempt  # node 0 may be restarting
        return poll_until_connected(
            nodes, node, launch_id, seconds, seconds if patience or has_seen_node_0 else ROUTE_PATIENCE_S
        )
    with RendezvousServer(nodes, node, launch_id) as server:
        threading.Thread(target=server.serve_forever, args=[0.1], daemon=True).start()
        try:
            poll_until_connected(nodes, node, launch_id, seconds, ERROR_PATIENCE_S)
            server.wait_for_others()
        finally:
            server.shutdown()
    return launch_id


class RendezvousServer(socketserver.ThreadingTCPServer):
    """The server on node 0, which answers polls until it is shut down."""

    daemon_threads = True

    def __init__(self, nodes: Nodes, node: str, launch_id: str) -> None:
        super().__init__(("", nodes.port), PollHandler, bind_and_activate=False)
        self.socket.close()
        self.socket, self._second_socket = _listen(nodes.port), _listen(0)
        self._nodes, self._launch_id, self._is_complete = nodes, launch_id, False
        self._lock = threading.Lock()
        # the rank, the host and the time of the last poll of each node
        self._waiting_nodes: dict[str, tuple[int, str, float]] = {}
        about = {"run": nodes.run, "nnodes": nodes.nnodes, "port": self._second_socket.getsockname()[1]}
        self.greeting = {"node": node, "host": socket.gethostname(), **about}

    def server_close(self) -> None:
        super().server_close()
        self._second_socket.close()

    def handle_error(self, *_: object) -> None:
        """Ignore errors: another program may send anything, and a node that is gone polls again."""

    def answer_poll(self, node: str, rank: int, host: str) -> dict[str, str]:
        nodes = self._nodes
        if nodes.rank >= 0 and not 0 <= rank < nodes.max_nodes:
            reason = f"since NNODES is {nodes.nnodes} on {self.greeting['host']}"
            return {"error": f"NODE_RANK must be from 1 to {nodes.max_nodes - 1}, {reason}, got {rank}."}
        with self._lock:
            now = time.monotonic()
            self._waiting_nodes = {
                other_node: entry
                for other_node, entry in self._waiting_nodes.items()
                if now - entry[2] < ABSENT_AFTER_S
            }
            present = self._waiting_nodes.items() if nodes.rank >= 0 else ()
            if used_by := [
                its_host for other_node, (its_rank, its_host, _) in present if its_rank == rank and other_node != node
            ]:
                text = f"NODE_RANK={rank} is already used by {used_by[0]}."
                return {"error": f"{text} Give {host} another NODE_RANK."}
            self._waiting_nodes[node] = (rank, host, now)
            self._is_complete = self._is_complete or len(self._waiting_nodes) >= nodes.min_nodes
            return {"go": self._launch_id} if self._is_complete else {"missing": self._describe_missing()}

    def _describe_missing(self) -> str:
        nodes = self._nodes
        if nodes.rank < 0:
            return f"Only {len(self._waiting_nodes)} of {nodes.min_nodes} nodes have connected."
        present = [rank for rank, _, _ in self._waiting_nodes.values()]
        ranks = [str(rank) for rank in range(nodes.max_nodes) if rank not in present]
        if len(ranks) == 1:
            return f"Node {ranks[0]} of {nodes.max_nodes} has not connected."
        return f"Nodes {', '.join(ranks)} of {nodes.max_nodes} have not connected."

    def remove_node(self, node: str) -> None:
        """Forget a node that has received "go"."""
        self._waiting_nodes.pop(node, None)

    def wait_for_others(self) -> None:
        """Wait until all nodes have received "go"."""
        closing = Wait()
        while self._waiting_nodes and closing.seconds < ABSENT_AFTER_S:
            time.sleep(0.01)


class PollHandler(socketserver.StreamRequestHandler):
    """Answers one poll of one node."""

    server: RendezvousServer
    timeout = 3 * ANSWER_TIMEOUT_S  # the node gives up first, and reports that its large packets do not arrive

    def handle(self) -> None:
        _send(self.connection, self.server.greeting)
        message = _receive(self.rfile)
        node, reply = str(message["node"]), {"padding": message["padding"]}
        if not message["padding"]:
            reply = self.server.answer_poll(node, int(message["rank"]), sanitize_text(message["host"])[:64])
        _send(self.connection, reply)
        self.rfile.read(1)  # the node closes first, so that the port is free at once
        if "go" in reply:
            self.server.remove_node(node)


def poll_until_connected(nodes: Nodes, node: str, launch_id: str, seconds: float, route_seconds: float) -> str:
    """Poll node 0 until all nodes are connected, and return its launch id. Raises UserError and NodesMissing."""
    node_0, wait = f"Node 0 at {nodes.address}:{nodes.port}", Wait()
    reached_at, padding = 0.0, PADDING
    while True:
        error, tolerance = "", ERROR_PATIENCE_S
        fix = "Start launch.sh with NODE_RANK=0 there, or check MASTER_ADDR and MASTER_PORT."
        try:
            reply = poll_once(nodes, node, padding)
            if not reply and nodes.backend == "c10d":
                return launch_id  # torchrun's store has answered, so that the other nodes have started
            if "go" in reply:
                return str(reply["go"])
            reached_at = wait.seconds
            if "padding" in reply:
                padding = ""
                continue
            reason = f"{node_0} does not answer: another program, perhaps an earlier attempt, is listening there."
            if reply:
                reason = sanitize_text(reply["missing"])
                fix = f"{node_0} is connected."
                if nodes.is_host:
                    fix = "Start launch.sh there with MASTER_ADDR of this node."
                fix = reply.get("fix", fix)
        except UserError as problem:
            reason = error = str(problem)
            fix = ""
        except OSError as problem:
            if isinstance(problem, ConnectionError):
                reached_at = wait.seconds
            cause = explain_connection_error(problem)
            reason, tolerance = f"{node_0} cannot be reached ({cause}).", route_seconds
            error = (
                f"MASTER_ADDR={nodes.address} could not be reached from {socket.gethostname()} within"
                f" {wait.seconds:.0f} s ({cause}). Check MASTER_ADDR, the route and the firewall, and that launch.sh"
                " runs there with NODE_RANK=0."
            )
        if error and wait.seconds - reached_at >= tolerance:
            raise UserError(error)
        if wait.seconds >= seconds:
            fix = "Check launch.sh there, then start it on all nodes again."
            raise NodesMissing(f"This node gave up after {wait.seconds:.0f} s. {reason} {fix}")
        wait.print_missing(f"{reason} {fix}".strip())
        time.sleep(POLL_INTERVAL_S)


def poll_once(nodes: Nodes, node: str, padding: str) -> dict[str, Any]:
    """Poll once, and return the answer. Raises OSError and UserError.

    The answer is empty if another program than node 0's launch.sh is listening.
    """
    host = socket.gethostname()
    try:
        connection = socket.create_connection((nodes.address, nodes.port), ANSWER_TIMEOUT_S)
    except OSError as error:
        if nodes.is_host:
            raise _create_address_error(nodes, explain_connection_error(error)) from None
        raise
    with connection, connection.makefile("rb") as file:
        greeting = {}
        with contextlib.suppress(OSError):  # torchrun's store sends nothing before a request
            greeting = _receive(file)
        if nodes.is_host and greeting.get("node") != node:
            program = sanitize_text(greeting.get("host", "another program"))[:64]
            raise _create_address_error(nodes, f"{program} answers there")
        if not {"node", "host", "run", "nnodes", "port"} <= greeting.keys():
            return {}
        if greeting["run"] != nodes.run:
            fix = "Give each launch its own port, and all nodes of one launch the same --run_dir."
            port = f"MASTER_PORT={nodes.port} of {nodes.address}"
            return {"missing": f"{port} is used by another launch, with another --run_dir.", "fix": fix}
        if greeting["nnodes"] != nodes.nnodes:
            host = sanitize_text(greeting["host"])[:64]
            text = f"NNODES is {nodes.nnodes} on this node, but node 0 on {host} was started with NNODES="
            text += f"{sanitize_text(greeting['nnodes'])[:9]}."
            raise UserError(f"{text} Give all nodes the same NNODES.")
        try:
            _send(connection, {"node": node, "rank": nodes.rank, "host": host, "padding": padding})
            reply = _receive(file)
        except TimeoutError:
            text = f"Small packets pass between {host} and MASTER_ADDR={nodes.address}, but large ones do not."
            return {"missing": text, "fix": "Set the MTU of all nodes to one that the switch supports."}
    if "padding" in reply:
        try:
            socket.create_connection((nodes.address, greeting["port"]), ANSWER_TIMEOUT_S).close()
        except OSError as error:
            text = f"MASTER_PORT of {nodes.address} is open to {host}, but port {greeting['port']} is not"
            text += f" ({explain_connection_error(error)})."
            fix = "Open all ports between the nodes, since gloo, NCCL and the stores choose their own ports."
            raise UserError(f"{text} {fix}") from None
    if "error" in reply:
        raise UserError(sanitize_text(reply["error"]))
    return reply


def _create_address_error(nodes: Nodes, problem: str) -> UserError:
    text = f"MASTER_ADDR={nodes.address} does not lead to {socket.gethostname()}, which has NODE_RANK=0 ({problem})."
    fix = "Set MASTER_ADDR to an address of this node, or give this node another NODE_RANK."
    return UserError(f"{text} {fix}")


def _listen(port: int) -> socket.socket:
    wait, has_dualstack = Wait(), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_dualstack else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=has_dualstack, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or wait.seconds > PORT_PATIENCE_S:
                text = f"MASTER_PORT={port} is in use on {socket.gethostname()} (`ss -ltnp` names the process)."
                raise UserError(f"{text} End that process, or give all nodes another MASTER_PORT.") from None
        time.sleep(0.2)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(file: BufferedIOBase) -> dict[str, Any]:
    """Return the next message, or an empty one if it is not valid. Raises OSError."""
    line = file.readline(2 * len(PADDING))
    if not line.endswith(b"\n"):
        raise ConnectionResetError(errno.ECONNRESET, "the other side has left")
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(line)
        return message if isinstance(message, dict) else {}
    return {}
