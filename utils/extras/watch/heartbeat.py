"""What the ranks of a launch tell each other through the process group's store, apart from collectives.

Each rank sets its status twice a second. `set_status` returns at once, even if the process that hosts the store is
stopped; reading then hangs, longer than any timeout, and blocks all calls on its connection. So each rank has one
connection to set and one to read, and reads in a thread of its own. The keys are below a random word of the launch,
because torchrun may keep a store for the next attempt.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from utils.clock import NO_HOOK, PHASES

T = TypeVar("T")
NO_FAILURE = "-"
NO_STACK = "This rank wrote no stack."
SECONDS_TO_JOIN = 2.0


class RankStatus(NamedTuple):
    """Where a rank is, as it tells the others."""

    heartbeat: int  # of the thread that watches
    progress_count: int  # number of phases entered
    step: int  # the current optimizer step, from 1
    phase: str
    pid: int
    hook: str = NO_HOOK  # of model.py, in which an evaluation is


def _resolve_future(future: Future, call: Callable) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


class Heartbeats:
    """The statuses of all ranks, the stacks of those that hang, and the first failure.

    Args:
        store: empty, and the same on all ranks.
        address: HOST:PORT of the process that hosts the store.
        is_hosted_by_rank_0: rank 0 hosts the store; else torchrun's agent on its node does.
    """

    def __init__(self, store: dist.Store, rank: int, pid: int, address: str, is_hosted_by_rank_0: bool) -> None:
        self._rank, self._pid, self._address, self.is_hosted_by_rank_0 = rank, pid, address, is_hosted_by_rank_0
        self._write_store, self._read_store = store.clone(), store.clone()
        self._calls: queue.SimpleQueue[tuple[Future, Callable] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.set_status(RankStatus(0, 0, 0, "start", pid))
        self.set_stack(NO_STACK)
        if rank == 0:
            self._write_store.set("failure", NO_FAILURE)

    def create_for_next_run(self) -> Heartbeats:
        """Heartbeats for another run of the same ranks. Each run closes its own when it ends."""
        return Heartbeats(self._write_store, self._rank, self._pid, self._address, self.is_hosted_by_rank_0)

    def set_status(self, status: RankStatus) -> None:
        """Returns at once. Raises dist.DistNetworkError if the process that hosts the store is gone."""
        self._write_store.set(str(self._rank), " ".join(map(str, status)))

    def set_stack(self, text: str) -> None:
        self._write_store.set(f"stack {self._rank}", text)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The result of one of the calls below, which may hang; it is made in another thread, after earlier ones."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_calls, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def _run_calls(self) -> None:
        while item := self._calls.get():
            _resolve_future(*item)
            del item  # a thread that ends after the interpreter must not be the last that refers to process groups

    def close(self) -> None:
        """End the thread, unless it hangs."""
        if self._thread:
            self._calls.put(None)
            self._thread.join(SECONDS_TO_JOIN)
            self._thread = None
        del self._write_store, self._read_store  # their sockets

    def read_statuses(self, ranks: Iterable[int]) -> tuple[dict[int, RankStatus], dict[str, Any]]:
        """The statuses of these ranks, and the first failure as given to `report_failure`, or nothing."""
        *texts, failure = self._read_keys([*map(str, ranks), "failure"])
        statuses = (
            RankStatus(int(heartbeat), int(progress_count), int(step), phase, int(pid), hook)
            for heartbeat, progress_count, step, phase, pid, hook in map(str.split, texts)
        )
        return dict(zip(ranks, statuses, strict=True)), {} if failure == NO_FAILURE else json.loads(failure)

    def read_stacks(self, ranks: int) -> list[str]:
        """Of the first `ranks` ranks."""
        return self._read_keys([f"stack {rank}" for rank in range(ranks)])

    def report_failure(self, failure: dict[str, Any]) -> None:
        """Report a failure of this rank or of a lost one. The first one counts."""
        self._read_store.compare_set("failure", NO_FAILURE, json.dumps(failure))

    def _read_keys(self, keys: list[str]) -> list[str]:
        return [value.decode() for value in self._read_store.multi_get(keys)]

    def ping_store_host(self) -> Future[bool]:
        """Whether the kernel of the store's host answers: the process that hosts the store is at most stopped."""
        host, _, port = self._address.rpartition(":")
        answer: Future[bool] = Future()

        def connect() -> None:
            try:
                socket.create_connection((host.strip("[]"), int(port)), 10).close()
                answer.set_result(True)
            except OSError:
                answer.set_result(False)

        threading.Thread(target=connect, daemon=True).start()
        return answer


def read_process_state(pid: int) -> str:
    """The state of a process on this host, as in /proc: Z and X are gone, T and t stopped. Empty if it is unknown."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return "X"
    except OSError:  # another user's process, or no /proc
        return ""


def describe_hang(
    statuses: dict[int, RankStatus], silent_ranks: set[int], hosts: tuple[str, ...], seconds: float, verb: str = "hangs"
) -> tuple[str, int]:
    """One sentence on what blocks the ranks, and the first rank that does.

    Args:
        statuses: of the ranks, as far as they are known.
        silent_ranks: ranks whose heartbeat has stopped.
        verb: what a live rank that holds up the others does.
    """
    if silent_ranks:
        hanging = min(silent_ranks)
        named = [
            f"rank {rank} on {hosts[rank]} was stopped, killed or cut off"
            + (f", last seen in {at.phase} of step {at.step} (process {at.pid})" if (at := statuses.get(rank)) else "")
            for rank in sorted(silent_ranks)
        ]
    else:
        progress = {
            rank: (rank_status.step, rank_status.hook == NO_HOOK, PHASES.index(rank_status.phase))
            for rank, rank_status in statuses.items()
        }
        last = [rank for rank, reached in progress.items() if reached == min(progress.values())]
        hanging, status = last[0], statuses[last[0]]
        location = f"in {status.phase} of step {status.step}"
        location += f", in {status.hook} of model.py" if status.hook != NO_HOOK else ""
        named = [f"rank {rank} on {hosts[rank]} {verb} {location} (process {statuses[rank].pid})" for rank in last]
        if len(last) == len(progress) > 1:
            named = [f"all ranks are slow {location}"]
            if verb == "hangs":
                cause = "the network between them, or for a collective that not all ranks have called"
                if status.phase == "data":  # no rank waits for another one there
                    cause = "the storage, or for the code of the data set"
                named = [f"all ranks wait {location} for {cause}"]
    return f"There was no progress for {seconds:.0f} s: {', and '.join(named)}.", hanging
