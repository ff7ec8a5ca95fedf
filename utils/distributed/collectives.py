"""Small messages between ranks on the control group: gather values, fail together, run an action once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils.distributed.context import DistributedContext
from utils.files import is_transient
from utils.logger import error_text
from utils.metrics import all_reduce_scalar
from utils.settings.errors import StartError, TrainingError, UserError

T = TypeVar("T")
LOST_PEER_PATTERN = re.compile(
    "gloo|ncclRemoteError|NCCL communicator was aborted|NCCL operation timed out|timed out in blocking wait"
)


def all_gather_json(value: Any, ctx: DistributedContext) -> list[Any]:
    """The values of all ranks, in rank order, on every rank: its bytes grow with the ranks. The value is plain JSON."""
    data = json.dumps(value).encode()
    size = int(all_reduce_scalar(len(data), "max", ctx.control_group))
    rows = gather_rows(torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8), ctx)
    return broadcast_json([json.loads(bytes(row)) for row in rows], ctx)


def broadcast_json(value: Any, ctx: DistributedContext, source: int = 0) -> Any:
    """The value of the rank `source`, on every rank. The value is plain JSON."""
    data = json.dumps(value).encode()
    if ctx.world_size == 1:
        return json.loads(data)
    length = torch.tensor([len(data)])
    dist.broadcast(length, source, group=ctx.control_group)
    row = torch.frombuffer(bytearray(data if ctx.rank == source else int(length)), dtype=torch.uint8)
    dist.broadcast(row, source, group=ctx.control_group)
    return json.loads(bytes(row.tolist()))


def gather_rows(row: Tensor, ctx: DistributedContext) -> list[list[Any]]:
    """On rank 0, the rows of all ranks, in rank order; elsewhere only this rank's own. Rows: [n], on the CPU."""
    if ctx.world_size == 1:
        return [row.tolist()]
    rows = [torch.empty_like(row) for _ in range(ctx.world_size)] if ctx.rank == 0 else None
    dist.gather(row, rows, group=ctx.control_group)
    return [tensor.tolist() for tensor in rows or [row]]


def first_rank_where(condition: bool, ctx: DistributedContext) -> int | None:
    """The lowest rank on which the condition is true; None if there is none."""
    rank = int(all_reduce_scalar(ctx.rank if condition else ctx.world_size, "min", ctx.control_group))
    return rank if rank < ctx.world_size else None


def on_rank_0(action: Callable[[], T], ctx: DistributedContext) -> T | None:
    """Run `action` on rank 0 while the others wait. Returns its result there, None elsewhere."""
    return on_all_ranks(lambda: action() if ctx.is_main else None, ctx, is_for_all=True)


def on_all_ranks(action: Callable[[], T], ctx: DistributedContext, is_for_all: bool = False) -> T:
    """Run `action` on every rank. If it fails on one, every rank raises that rank's error, so that none waits.

    Args:
        is_for_all: the message does not name the rank.

    Raises:
        UserError: when the action raised UserError or OSError on any rank; StartError if another attempt may succeed.
    """
    problem: tuple[str, bool] = ("", False)
    try:
        result = action()
    except UserError as error:
        problem = error_text(error), isinstance(error, StartError)
    except OSError as error:
        problem = f"{error_text(error)}; fix that and start again", is_transient(error)
    if (rank := first_rank_where(bool(problem[0]), ctx)) is None:
        return result
    text, is_transient_error = broadcast_json(problem, ctx, rank)
    is_for_all = is_for_all or first_rank_where(problem[0] != text, ctx) is None
    text = text if is_for_all else f"{text} (rank {rank} on {ctx.hosts[rank]})"
    raise (StartError if is_transient_error else UserError)(text, rank, ctx.hosts[rank])


def require_equal(value: Any, sentence: str, ctx: DistributedContext) -> None:
    """Raise UserError on every rank if the value on one of them differs from rank 0's.

    Args:
        value: plain JSON.
        sentence: the message; {other} and {first} become the two ranks and their hosts.
    """
    text = json.dumps(value)
    if rank := first_rank_where(text != broadcast_json(text, ctx), ctx):
        other, first = (f"{ctx.hosts[number]} (rank {number})" for number in (rank, 0))
        raise UserError(sentence.format(other=other, first=first), rank, ctx.hosts[rank])


def run_once_per_file_system(
    folder: Path, is_done: Callable[[], bool], action: Callable[[], None], ctx: DistributedContext
) -> None:
    """If `is_done` is False, run `action` once per file system: on the rank that creates a file in `folder` first."""
    is_needed = not on_all_ranks(is_done, ctx)
    if not any(all_gather_json(is_needed, ctx)):
        return
    unique_name, *_ = all_gather_json(f"{os.getpid()}-{time.time_ns()}", ctx)
    lock_path = folder / f".{unique_name}"

    def is_first() -> bool:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_path.touch(exist_ok=False)
        except OSError:  # another rank was first; or the folder cannot be written, which the action says with a fix
            return not lock_path.exists()
        return True

    is_leader = on_all_ranks(lambda: is_needed and is_first(), ctx)  # returns when all have looked
    if is_leader:
        with suppress(OSError):
            lock_path.unlink()
    on_all_ranks(lambda: action() if is_leader else None, ctx)


def read_once_per_file_system(folder: Path, read: Callable[[], bytes], sentence: str, ctx: DistributedContext) -> bytes:
    """What `read` returns on rank 0, for all ranks. Of those that share `folder`, which may be read-only, one calls it.

    sentence: as for `require_equal`, if it returns something else on another file system.
    """
    status, number = on_all_ranks(lambda: (folder.stat(), os.statvfs(folder).f_fsid), ctx)
    host = os.major(status.st_dev) and ctx.host  # a network file system has no device
    folder_ids = all_gather_json([host, number, status.st_ino, status.st_ctime_ns], ctx)
    reader = folder_ids.index(folder_ids[ctx.rank])
    data = on_all_ranks(lambda: read() if reader == ctx.rank else b"", ctx)
    digests = all_gather_json([len(data), hashlib.sha256(data).hexdigest()], ctx)
    require_equal(digests[reader], sentence, ctx)
    buffer = bytearray(data or digests[0][0])
    if ctx.world_size > 1 and buffer:
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), 0, group=ctx.control_group)
    return bytes(buffer)


class RankSum:
    """The sum of a vector over micro-batches and ranks. All ranks call `start` in the same order."""

    def add(self, values: Tensor, number: int) -> None:
        """Call when a micro-batch has been added to the vector. number: within its global batch."""

    def start_all_reduce(self, values: Tensor, count: int) -> Any:
        """Begin to replace the vector by the sum over the ranks. Returns what has `wait()`, or None if it is complete.

        count: micro-batches in the global batch.
        """
        return dist.all_reduce(values, async_op=True) if dist.get_world_size() > 1 else None


def call_with_timeout(seconds: float, action: Callable[[], T]) -> T:
    """The result of the action, or TimeoutError: a store connected to some other program ignores its own timeout."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def is_peer_failure(error: BaseException) -> bool:
    """Whether a collective failed because a peer is gone (by gloo's and NCCL's messages): another rank failed first."""
    if isinstance(error, TrainingError):
        return error.__cause__ is not None and is_peer_failure(error.__cause__)
    text = str(error) if isinstance(error, RuntimeError) else ""
    # the error of a loader worker begins with "Caught", and the names of its files may contain the words of the pattern
    is_named = not text.startswith("Caught ") and LOST_PEER_PATTERN.search(text) is not None
    return is_named or isinstance(error, dist.DistNetworkError)
