"""The nodes meet on the master's port before torchrun starts: torchrun itself would wait for minutes and could not say
for whom.

Node 0 listens, the others come: one JSON object a line. Node 0 greets ({"host", "token", "echo"}), a node says who it
is ({"rank", "host", "nnodes"}),
and hears {"missing"} every ten seconds, {"refused"}, or {"go"} with the launch's id. Then the port is free again for
torchrun's store.
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
from collections.abc import Callable, Iterator
from typing import Any

from config import UserError
from scripts.network import owner_of, why

SECONDS_BETWEEN_LINES = 10.0
SECONDS_FOR_A_ROUTE = 15.0
PROBE = b"x" * 100_000  # more than a frame, however large frames are
SECONDS_FOR_A_PROBE = 5.0
SECONDS_TO_GO = 1.0  # for node 0 when its meeting is over
SECONDS_FOR_A_GREETING = 3.0
SECONDS_FOR_A_PORT = 10.0  # of an earlier attempt to be free again


class NotCome(Exception):
    """Some node was not there in time. The message is a sentence; exit code 1, for it may be there the next time."""


def say(text: str) -> None:
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


def names(ranks: list[int]) -> str:
    return f"node{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Host:
    """Node 0's side."""

    def __init__(self, least: int, most: int, port: int, launch_id: str, has_ranks: bool) -> None:
        self._least, self._most, self._id, self._has_ranks = least, most, launch_id, has_ranks
        self.token = secrets.token_hex(8)  # of this meeting alone: a launch's id may be given to all nodes
        # by rank, or by connection under c10d
        self._here: dict[Any, tuple[str, Any]] = {0: (socket.gethostname(), None)}
        self._change = threading.Condition()
        self._listener = _listen(port)
        self._echo = _listen(0)
        for listener, answer in ((self._listener, self._receive), (self._echo, _echo)):
            threading.Thread(target=self._accept, args=(listener, answer), daemon=True).start()

    def _accept(self, listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        key = None
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            connection,
            connection.makefile("rw") as file,
        ):
            _tell(file, {"host": socket.gethostname(), "token": self.token, "echo": self._echo.getsockname()[1]})
            word = json.loads(file.readline(4096))
            rank, host = int(word["rank"]), str(word["host"])[:80]
            with self._change:
                if problem := self._problem(rank, host, str(word["nnodes"])):
                    say(f"{host} was turned away ({problem})")
                    _tell(file, {"refused": problem})
                    return
                key = rank if self._has_ranks else id(connection)
                self._here[key] = (host, file)
                self._change.notify()
            file.readline()  # until it is gone
        with self._change:
            if key is not None:
                self._here.pop(key, None)
                self._change.notify()

    def _problem(self, rank: int, host: str, nnodes: str) -> str:
        expected = str(self._most) if self._least == self._most else f"{self._least}:{self._most}"
        if nnodes != expected:
            return (
                f"NNODES={nnodes}: node 0 on {socket.gethostname()} was started with NNODES={expected}; give all nodes"
                " the same"
            )
        if self._has_ranks and not 0 < rank < self._most:
            return f"NODE_RANK={rank}: is node 0's own or outside NNODES={nnodes}; give 1 to {self._most - 1}"
        if self._has_ranks and rank in self._here:
            return f"NODE_RANK={rank}: {self._here[rank][0]} has it already; give {host} another, each node its own"
        return ""

    def missing(self) -> str:
        if self._has_ranks:
            return f"{names([rank for rank in range(self._most) if rank not in self._here])} of {self._most}"
        return f"{self._least - len(self._here)} more of {self._least} nodes"

    def wait(self, seconds: float) -> None:
        """Until all are here; then all hear it, and leave. Raises NotCome."""
        began = time.monotonic()
        next_line = began + SECONDS_BETWEEN_LINES
        with self._change:
            while len(self._here) < self._least:
                self._change.wait(max(0.0, min(next_line, began + seconds) - time.monotonic()))
                now = time.monotonic()
                if len(self._here) < self._least and now >= next_line:
                    next_line += SECONDS_BETWEEN_LINES
                    say(
                        f"waiting for {self.missing()} ({now - began:.0f} s); start launch.sh there with MASTER_ADDR of"
                        " this node"
                    )
                    self._tell_all({"missing": self.missing()})
                if len(self._here) < self._least and now - began >= seconds:
                    text = (
                        f"{self.missing()}: did not come within {seconds:.0f} s; see what launch.sh says there, then"
                        " start all again"
                    )
                    self._tell_all({"over": text})
                    raise NotCome(text)
            self._tell_all({"go": self._id})
        ends = time.monotonic() + 2
        # they close first, so that no socket of this port lingers here
        while len(self._here) > 1 and time.monotonic() < ends:
            time.sleep(0.01)

    def _tell_all(self, word: dict[str, Any]) -> None:
        for _, file in [*self._here.values()]:
            with contextlib.suppress(OSError, ValueError):
                if file:
                    _tell(file, word)

    def close(self) -> None:
        for listener in (self._listener, self._echo):
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def _echo(connection: socket.socket) -> None:
    """Give back what comes, to show that another port is open and that large frames pass."""
    with contextlib.suppress(OSError), connection:
        connection.settimeout(SECONDS_FOR_A_PROBE)
        connection.sendall(_receive_all(connection))


def _receive_all(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < len(PROBE):
        if not (some := connection.recv(len(PROBE))):
            raise OSError(errno.ECONNRESET, "the connection was closed")
        data += some
    return data


def probe(address: str, port: int) -> None:
    """Another port of node 0 is open, and large frames pass. Raises UserError."""
    host, is_open = socket.gethostname(), False
    try:
        with socket.create_connection((address, port), SECONDS_FOR_A_PROBE) as connection:
            is_open = True
            connection.sendall(PROBE)
            _receive_all(connection)
    except OSError as error:
        if is_open:
            text, remedy = (
                f"small frames pass between it and {host}, large ones do not",
                "give all nodes the MTU that the switch takes",
            )
        else:
            text = f"MASTER_PORT is open to {host}, and port {port} is not ({why(error)})"
            remedy = "let the nodes reach each other on all ports: gloo, NCCL and the stores take any"
        raise UserError(f"MASTER_ADDR={address}: {text}; {remedy}") from None


def _listen(port: int) -> socket.socket:
    ends = time.monotonic() + SECONDS_FOR_A_PORT
    while True:
        try:
            has_both = socket.has_dualstack_ipv6()
            return socket.create_server(
                ("", port), family=socket.AF_INET6 if has_both else socket.AF_INET, dualstack_ipv6=has_both
            )
        except OSError as error:
            if error.errno == errno.EACCES:
                raise UserError(f"MASTER_PORT={port}: only root may listen there; give one above 1023") from None
            if error.errno != errno.EADDRINUSE or time.monotonic() > ends:
                owner = owner_of(port) or "another process"
                raise UserError(
                    f"MASTER_PORT={port}: is taken on {socket.gethostname()} by {owner}; end it, or give all nodes"
                    " another"
                ) from None
        time.sleep(0.2)


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side goes, in this moment too: then what else it does not answer means nothing."""
    connection.settimeout(SECONDS_TO_GO)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    except OSError:
        return True


def _tell(file: Any, word: dict[str, Any]) -> None:
    file.write(json.dumps(word) + "\n")
    file.flush()


def check_way_back(address: str, port: int, token: str) -> None:
    """On node 0: the address that the others were given leads here. Raises UserError."""
    host, remedy = socket.gethostname(), "give an address of this node as MASTER_ADDR, or this node another NODE_RANK"
    try:
        with (
            socket.create_connection((address, port), SECONDS_FOR_A_GREETING) as connection,
            connection.makefile("rw") as file,
        ):
            greeting = _read(file, connection, SECONDS_FOR_A_GREETING)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR={address}: does not lead to {host}, which is NODE_RANK=0 ({why(error)}); {remedy}"
        ) from None
    if not greeting or greeting.get("token") != token:
        other = (greeting or {}).get("host", "another machine")
        raise UserError(f"NODE_RANK=0: MASTER_ADDR={address} is {other}, not {host}, and node 0 is there; {remedy}")


def _read(file: Any, connection: socket.socket, seconds: float) -> dict[str, Any] | None:
    connection.settimeout(seconds)
    try:
        word = json.loads(file.readline(4096) or "null")
    except (OSError, ValueError):
        return None
    return word if isinstance(word, dict) else None


def host(nodes: dict[str, Any], seconds: float, launch_id: str) -> str:
    """Node 0: wait for the others. Returns the launch's id."""
    meeting = Host(nodes["least"], nodes["most"], nodes["port"], launch_id, nodes["rank"] >= 0)
    try:
        check_way_back(nodes["address"], nodes["port"], meeting.token)
        meeting.wait(seconds)
    finally:
        meeting.close()
    return launch_id


def join(nodes: dict[str, Any], seconds: float, seconds_for_a_route: float, launch_id: str) -> str:
    """Another node: come to node 0 and wait for its word. Returns the launch's id.

    Raises:
        UserError: when node 0 says so, or cannot be reached.
        NotCome: when it is not there in time.
    """
    where, host = f"{nodes['address']}:{nodes['port']}", socket.gethostname()
    nnodes = str(nodes["most"]) if nodes["least"] == nodes["most"] else f"{nodes['least']}:{nodes['most']}"
    began, lines = time.monotonic(), _every(SECONDS_BETWEEN_LINES)
    seen = began  # when there last was a machine at that address
    while True:
        try:
            with (
                socket.create_connection((nodes["address"], nodes["port"]), 5) as connection,
                connection.makefile("rw") as file,
            ):
                if not (greeting := _read(file, connection, SECONDS_FOR_A_GREETING)):
                    if nodes["backend"] == "c10d":
                        return launch_id  # torchrun's store: the others run already
                    problem = "something else than launch.sh listens there, an earlier attempt perhaps"
                else:
                    try:
                        probe(nodes["address"], greeting["echo"])
                    except UserError:
                        if not _is_closed(connection):
                            raise
                    _tell(file, {"rank": nodes["rank"], "host": host, "nnodes": nnodes})
                    while word := _read(file, connection, 2 * SECONDS_BETWEEN_LINES):
                        if "go" in word:
                            return word["go"]
                        if "refused" in word:
                            raise UserError(word["refused"])
                        if "over" in word:
                            raise NotCome(word["over"])
                        if "missing" in word:
                            say(f"node 0 ({greeting.get('host')}) is there; waiting for {word['missing']}")
                    problem = "node 0 has left"
            seen = time.monotonic()
        except OSError as error:
            problem = why(error)
            seen = time.monotonic() if isinstance(error, ConnectionError) else seen
        text, waited = f"node 0 at {where}: {problem}", time.monotonic() - began
        if time.monotonic() - seen >= seconds_for_a_route:
            remedy = (
                "check MASTER_ADDR, the route and the firewall; node 0 should be running launch.sh with NODE_RANK=0"
            )
            raise UserError(
                f"MASTER_ADDR={nodes['address']}: cannot be reached from {host} in {waited:.0f} s ({problem}); {remedy}"
            )
        if waited >= seconds:
            raise NotCome(
                f"{text}; it should be running launch.sh with NODE_RANK=0, start it and then all again ({waited:.0f} s)"
            )
        if next(lines):
            say(
                f"waiting for {text} ({waited:.0f} s); start launch.sh with NODE_RANK=0 there, or check MASTER_ADDR and"
                " MASTER_PORT"
            )
        time.sleep(0.5)


def _every(seconds: float) -> Iterator[bool]:
    """Whether so many seconds have passed since the last time it gave True."""
    last = time.monotonic()
    while True:
        is_time = time.monotonic() - last >= seconds
        last = time.monotonic() if is_time else last
        yield is_time
