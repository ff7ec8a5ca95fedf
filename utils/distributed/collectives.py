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
    """Return the values of all ranks on every rank, in rank order. The bytes of a message grow with the ranks.

    Args:
        value: plain JSON.
    """
    data = json.dumps(value).encode()
    size = int(all_reduce_scalar(len(data), "max", ctx.control_group))
    buffer = bytearray(data.ljust(size))
    row = torch.frombuffer(buffer, dtype=torch.uint8)
    rows = gather_rows(row, ctx)
    values = [json.loads(bytes(row)) for row in rows]
    return broadcast_json(values, ctx)


def broadcast_json(value: Any, ctx: DistributedContext, source: int = 0) -> Any:
    """Return the value of the rank `source` on every rank. The value is plain JSON."""
    data = json.dumps(value).encode()
    if ctx.world_size == 1:
        return json.loads(data)
    length = torch.tensor([len(data)])
    dist.broadcast(length, source, group=ctx.control_group)
    buffer = bytearray(data) if ctx.rank == source else bytearray(int(length))
    row = torch.frombuffer(buffer, dtype=torch.uint8)
    dist.broadcast(row, source, group=ctx.control_group)
    return json.loads(bytes(row.tolist()))


def gather_rows(row: Tensor, ctx: DistributedContext) -> list[list[Any]]:
    """Return the rows of all ranks, in rank order, on rank 0, and only this rank's own row elsewhere.

    Args:
        row: [n], on the CPU.
    """
    if ctx.world_size == 1:
        return [row.tolist()]
    if ctx.rank != 0:
        dist.gather(row, None, group=ctx.control_group)
        return [row.tolist()]
    rows = [torch.empty_like(row) for _ in range(ctx.world_size)]
    dist.gather(row, rows, group=ctx.control_group)
    return [gathered.tolist() for gathered in rows]


def first_rank_where(condition: bool, ctx: DistributedContext) -> int | None:
    """Return the lowest rank on which the condition is true, or None if there is none."""
    vote = ctx.rank if condition else ctx.world_size
    rank = int(all_reduce_scalar(vote, "min", ctx.control_group))
    return rank if rank < ctx.world_size else None


def on_rank_0(action: Callable[[], T], ctx: DistributedContext) -> T | None:
    """Run `action` on rank 0 while the others wait. Return the result on rank 0, and None elsewhere."""

    def run_on_main() -> T | None:
        return action() if ctx.is_main else None

    return on_all_ranks(run_on_main, ctx, is_for_all=True)


def on_all_ranks(action: Callable[[], T], ctx: DistributedContext, is_for_all: bool = False) -> T:
    """Run `action` on every rank. If it fails on one, every rank raises that rank's error, so that none waits.

    Args:
        is_for_all: whether the problem is one of all ranks, so that the message does not name the rank.

    Raises:
        UserError: if the action raised UserError or OSError on any rank.
        StartError: the same, if another attempt may succeed.
    """
    problem = ""
    may_pass = False  # whether another attempt may succeed
    try:
        result = action()
    except UserError as error:
        problem = error_text(error)
        may_pass = isinstance(error, StartError)
    except OSError as error:
        problem = f"The operating system refused an operation ({error_text(error)}). Fix the cause and start again."
        may_pass = is_transient(error)
    rank = first_rank_where(bool(problem), ctx)
    if rank is None:
        return result

    text, may_pass = broadcast_json([problem, may_pass], ctx, rank)
    host = ctx.hosts[rank]
    if not is_for_all and first_rank_where(problem != text, ctx) is not None:
        text = f"Rank {rank} on {host} failed: {text}"
    if may_pass:
        raise StartError(text, rank, host)
    raise UserError(text, rank, host)


def require_equal(value: Any, sentence: str, ctx: DistributedContext) -> None:
    """Raise UserError on every rank if the value on one of them differs from rank 0's.

    Args:
        value: plain JSON.
        sentence: the message; {other} and {first} become the two ranks and their hosts.
    """
    text = json.dumps(value)
    is_different = text != broadcast_json(text, ctx)
    rank = first_rank_where(is_different, ctx)
    if rank is not None:
        host = ctx.hosts[rank]
        message = sentence.replace("{other}", f"{host} (rank {rank})")  # other braces are those of a path
        message = message.replace("{first}", f"{ctx.hosts[0]} (rank 0)")
        raise UserError(message, rank, host)


def run_once_per_file_system(
    folder: Path,
    is_done: Callable[[], bool],
    action: Callable[[], None],
    ctx: DistributedContext,
) -> None:
    """If `is_done` is False, run `action` once per file system: on the rank that creates a file in `folder` first."""
    is_needed = not on_all_ranks(is_done, ctx)
    if not any(all_gather_json(is_needed, ctx)):
        return
    unique_names = all_gather_json(f"{os.getpid()}-{time.time_ns()}", ctx)
    lock_path = folder / f".{unique_names[0]}"

    def become_leader() -> bool:
        if not is_needed:
            return False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_path.touch(exist_ok=False)
        except OSError:  # another rank was first; or the folder cannot be written, which the action says with a fix
            return not lock_path.exists()
        return True

    is_leader = on_all_ranks(become_leader, ctx)  # returns when all have looked
    if is_leader:
        with suppress(OSError):
            lock_path.unlink()

    def run_as_leader() -> None:
        if is_leader:
            action()

    on_all_ranks(run_as_leader, ctx)


def read_once_per_file_system(
    folder: Path,
    read: Callable[[], bytes],
    sentence: str,
    ctx: DistributedContext,
) -> bytes:
    """Return what `read` returns on rank 0, on all ranks. Of the ranks that share `folder`, one calls `read`.

    Args:
        folder: may be read-only.
        sentence: the message if `read` returns something else on another file system, as for `require_equal`.
    """

    def identify_folder() -> list[Any]:
        status = folder.stat()
        file_system = os.statvfs(folder).f_fsid
        host: Any = ctx.host
        if os.major(status.st_dev) == 0:  # a network file system, which has no device
            host = 0
        return [host, file_system, status.st_ino, status.st_ctime_ns]

    folder_ids = all_gather_json(on_all_ranks(identify_folder, ctx), ctx)
    reader = folder_ids.index(folder_ids[ctx.rank])

    def read_as_reader() -> bytes:
        return read() if reader == ctx.rank else b""

    data = on_all_ranks(read_as_reader, ctx)
    digest = hashlib.sha256(data).hexdigest()
    sizes_and_digests = all_gather_json([len(data), digest], ctx)
    require_equal(sizes_and_digests[reader], sentence, ctx)
    size = sizes_and_digests[0][0]
    buffer = bytearray(data) if data else bytearray(size)
    if ctx.world_size > 1 and buffer:
        content = torch.frombuffer(buffer, dtype=torch.uint8)  # in the same memory
        dist.broadcast(content, 0, group=ctx.control_group)
    return bytes(buffer)


class RankSum:
    """Forms the sum of a vector over micro-batches and ranks. All ranks call `start_all_reduce` in the same order."""

    def add(self, values: Tensor, number: int) -> None:
        """Note that a micro-batch has been added to the vector.

        Args:
            number: of the micro-batch in its global batch.
        """

    def start_all_reduce(self, values: Tensor, count: int) -> Any:
        """Begin to replace the vector by the sum over the ranks.

        Args:
            count: micro-batches in the global batch.

        Returns:
            An object with a method `wait`, or None if the sum is complete.
        """
        if dist.get_world_size() > 1:
            return dist.all_reduce(values, async_op=True)
        return None


def call_with_timeout(seconds: float, action: Callable[[], T]) -> T:
    """Return the result of the action. A store that is connected to some other program ignores its own timeout.

    Raises:
        TimeoutError: if the action takes longer than so many seconds.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def is_peer_failure(error: BaseException) -> bool:
    """Return whether a collective failed because a peer is gone, so that another rank failed first.

    gloo's and NCCL's messages tell.
    """
    if isinstance(error, TrainingError):
        return error.__cause__ is not None and is_peer_failure(error.__cause__)
    if isinstance(error, dist.DistNetworkError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    # the error of a loader worker begins with "Caught", and the names of its files may contain the words of the pattern
    return not text.startswith("Caught ") and LOST_PEER_PATTERN.search(text) is not None
