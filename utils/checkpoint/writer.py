"""A separate process writes checkpoints, so that training only waits for a copy of the state in memory.

The copy is in memory that both processes map (memfd: /dev/shm has 64 MB in a container). The process is forked early,
before CUDA, the process group, the model and the data exist, keeps no file of the training process open, and ignores
stop signals: it survives a SIGTERM to the group and exits when the training process is gone. Without memfd (macOS),
`Writer` writes in the training process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import UserError
from utils.checkpoint import format as checkpoint
from utils.files import TEMPORARY
from utils.logger import NAME
from utils.signals import STOP_SIGNALS, die_with_parent, kept_back

SECONDS_AS_AN_ORPHAN = 8  # to finish a file that was committed before the training process was killed
ALIGNMENT = 64  # bytes
SECONDS_TO_END = 10.0  # for the process; one that waits for the storage cannot even be killed, and is left behind
SECONDS_COUNTED = 10.0  # at most, between two looks: a suspended job does not write
FLUSHED_PER_SECOND = 50e6  # bytes, at least; a flush shows no progress
NICENESS = 10  # training comes first if every core has a rank
HAS_PROCESS = sys.platform == "linux"


@dataclass(frozen=True)
class Job:
    """One checkpoint to be written."""

    number: int
    path: Path
    flat: Any  # the payload, as returned by checkpoint.flatten
    layout: list[tuple]  # of each tensor: dtype, size, stride, offset in the shared memory
    keep: tuple[int, int]  # keep_last and keep_every
    lock_file: Path
    lock_number: int  # in lock_file, which must be unchanged before the rename


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    path: Path
    step: int
    epoch: int
    seconds: float
    problem: str = ""  # an error message; empty: success
    is_final: bool = False  # another try will not help
    was_killed: bool = False  # the writer process was killed


class Background:
    """What both kinds of writers have: memory for copies of tensors, one job at a time, and its progress.

    The memory is one buffer, pinned if tensors are on a GPU: torch would round each tensor up to a power of two.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._descriptor, self._pinned = -1, None
        self._views: list[Tensor] = []
        self._key: Any = None
        self._layout: list[tuple] = []
        self._job: Job | None = None
        self._task, self._is_waiting = Path(), False  # of what writes: its folder in /proc; whether for other ranks
        self._seen, self._stalled, self._looked_at = None, 0.0, 0.0

    def fit(self, tensors: list[Tensor]) -> list[Tensor]:
        """Views of the memory for these tensors; it is reused if it is large enough."""
        key = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        if key != self._key:
            sizes = [-(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT for tensor in tensors]
            offsets = [sum(sizes[:number]) for number in range(len(sizes))]
            if self._memory is None or len(self._memory) < sum(sizes):
                self._allocate(max(sum(sizes), 1), any(tensor.is_cuda for tensor in tensors))
            self._layout = []
            for tensor, offset in zip(tensors, offsets, strict=True):
                stride = torch.empty_like(tensor, device="meta").stride()  # dense, in the tensor's own memory format
                self._layout.append((tensor.dtype, tuple(tensor.shape), stride, offset))
            self._views = [_view(self._memory, place) for place in self._layout]
            self._key = key
        return self._views

    def _allocate(self, size: int, is_pinned: bool) -> None:
        self._let_go()
        if HAS_PROCESS:
            self._descriptor = os.memfd_create("checkpoint")
            os.ftruncate(self._descriptor, size)
        self._memory = mmap.mmap(self._descriptor, size)
        if is_pinned:  # the copy runs at full bus speed and overlaps the computation
            self._pinned = torch.frombuffer(self._memory, dtype=torch.uint8)
            if not _has_succeeded(torch.cuda.cudart().cudaHostRegister(self._pinned.data_ptr(), size, 0)):
                self._pinned = None
                text = "%.1f GB of host memory cannot be pinned: checkpoints are copied more slowly"
                logging.getLogger(NAME).warning(text, size / 1e9)
        self._share()

    def _let_go(self) -> None:
        """Release the memory."""
        if self._pinned is not None:
            _has_succeeded(torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr()))
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._memory, self._descriptor, self._pinned, self._views, self._layout = None, -1, None, [], []

    def _share(self) -> None:
        """The memory is new."""

    def send(self, path: Path, flat: Any, keep: tuple[int, int], lock_file: Path, lock_number: int) -> None:
        """Have it written from the memory. It gets its final name after `commit`."""
        number = self._job.number + 1 if self._job else 0
        self._job = Job(number, path, flat, self._layout, keep, lock_file, lock_number)
        self._tell(self._job)

    def again(self) -> None:
        """Send the same job once more; the memory still holds it."""
        self._job = dataclasses.replace(self._job, number=self._job.number + 1)
        self._tell(self._job)

    def _tell(self, message: Any) -> None:
        """Send a job."""

    def stalled(self) -> tuple[Path, float, float]:
        """The path, for how many seconds nothing was read or written for it, and how many of them a flush may take.

        This asks the kernel, not the storage, which may hang.
        """
        now, seen = time.monotonic(), None
        with contextlib.suppress(OSError):
            is_running = (self._task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
            seen = self._job.number, (self._task / "io").read_text(), is_running and now
        is_stalled = seen == self._seen and not self._is_waiting
        self._stalled = is_stalled * (self._stalled + min(now - self._looked_at, SECONDS_COUNTED))
        self._seen, self._looked_at = seen, now
        return self._job.path, self._stalled, _size(self._job) / FLUSHED_PER_SECOND

    def end(self, seconds: float = SECONDS_TO_END) -> None:
        """`close`, and release the memory."""
        self.close(seconds)
        self._let_go()


class Writer(Background):
    """The training process's side. One checkpoint at a time: `fit`, `send`, `commit`, then an outcome from `wait`."""

    def __init__(self) -> None:
        super().__init__()
        self.pid, self._connection = -1, None
        self._outcome: Outcome | None = None  # used if there is no process
        self._start()

    def _start(self) -> None:
        if HAS_PROCESS:
            ours, theirs = _pair()
            with kept_back():  # the new process does not ignore signals yet
                self.pid = os.fork()
                if self.pid == 0:
                    _be_the_writer(theirs)
            theirs.close()
            self._connection, self._task = ours, Path(f"/proc/{self.pid}")
            if self._memory is not None:
                self._share()

    def _share(self) -> None:
        if HAS_PROCESS:
            with contextlib.suppress(OSError):  # a dead process is noticed by `wait`
                self._connection.send(len(self._memory))
                send_handle(self._connection, self._descriptor, self.pid)

    def commit(self, is_right: bool = True) -> None:
        """Let the file of the last job appear, or drop it."""
        self._tell((self._job.number, is_right))
        if not HAS_PROCESS:
            self._outcome = _write(self._job, self._memory, lambda: is_right)

    def _tell(self, message: Any) -> None:
        if HAS_PROCESS:
            with contextlib.suppress(OSError):
                self._connection.send(message)

    def wait(self, seconds: float) -> Outcome | None:
        """The outcome of the job, after at most this many seconds. A dead process is an outcome and is replaced."""
        if not HAS_PROCESS:
            outcome, self._outcome = self._outcome, None
            return outcome
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, OSError):
            self.close()
            with contextlib.suppress(OSError):  # free the space on a full disk
                for partial in self._job.path.parent.glob(f"{self._job.path.name}.*{TEMPORARY}"):
                    partial.unlink()
            self._start()
            killed = outcome_of(self._job, 0.0, f"{self._job.path}: the writer process was killed")
            return dataclasses.replace(killed, was_killed=True)

    def close(self, seconds: float = SECONDS_TO_END) -> None:
        """End the process after it has written what was committed. After these seconds it is killed; 0: at once."""
        if self.pid > 0:
            if seconds:
                self._tell(None)
            self._connection.close()
            ends = time.monotonic() + seconds
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                    if time.monotonic() > ends:
                        os.kill(self.pid, signal.SIGKILL)
                        break
                    time.sleep(0.01)
            self.pid = -1


def _pair() -> tuple[Connection, Connection]:
    pair = socket.socketpair()
    return tuple(Connection(each.detach()) for each in pair)


def _has_succeeded(code: Any) -> bool:
    """Whether a call of the CUDA runtime succeeded. If not, clears its error, which the next kernel would raise."""
    if code == torch.cuda.cudart().cudaError.success:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # a kernel
    return False


def _view(memory: mmap.mmap, place: tuple) -> Tensor:
    dtype, size, stride, offset = place
    count = torch.Size(size).numel()
    if not count:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).as_strided(size, stride)


# ---- the process ----


def _be_the_writer(connection: Connection) -> None:
    """Never returns."""
    with contextlib.suppress(BaseException):
        os.setsid()
        gc.disable()  # a process group of the training process, collected here, would wait for its threads
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # `kept_back` blocked them for the fork
        # sockets of the ranks, GPUs: they must close when the training process ends
        for name in os.listdir("/proc/self/fd"):  # os.closerange up to a limit of 1e9 takes minutes before glibc 2.34
            if int(name) > 2 and int(name) != connection.fileno():
                with contextlib.suppress(OSError):  # the one that listed the folder
                    os.close(int(name))
        signal.signal(signal.SIGUSR2, lambda number, frame: signal.alarm(SECONDS_AS_AN_ORPHAN))
        die_with_parent(signal.SIGUSR2)  # the connection ends later: the loader's workers hold copies of it
        torch.set_num_threads(1)
        os.nice(NICENESS)
        _serve(connection)
    os._exit(0)


def _serve(connection: Connection) -> None:
    memory = None
    with contextlib.suppress(EOFError, OSError):  # the training process is gone
        while True:
            job = connection.recv()
            if job is None:
                return
            if type(job) is int:
                descriptor = recv_handle(connection)
                memory = mmap.mmap(descriptor, job)
                os.close(descriptor)
            elif isinstance(job, Job):
                connection.send(_write(job, memory, lambda number=job.number: _hear(connection, number)))


def _hear(connection: Connection, number: int) -> bool:
    """Whether to let this job's file appear; answers for earlier, failed jobs are skipped. Raises EOFError."""
    while True:
        answer = connection.recv()
        if answer[0] == number:
            return answer[1]


class _Dropped(Exception):
    """The ranks did not commit this checkpoint."""


def _write(job: Job, memory: mmap.mmap, is_right: Callable[[], bool]) -> Outcome:
    begin, problem, is_final = time.monotonic(), "", False

    def may_appear() -> None:
        if not is_right():
            raise _Dropped
        if HAS_PROCESS:
            check_owner(job)

    try:
        check_room(job)
        payload = checkpoint.unflatten(job.flat, [_view(memory, place) for place in job.layout])
        checkpoint.write(job.path, payload, may_appear)
        with contextlib.suppress(OSError):
            checkpoint.prune(job.path.parent, *job.keep)
    except _Dropped:
        problem, is_final = "dropped", True
    except UserError as error:
        problem, is_final = str(error), True
    except (OSError, RuntimeError) as error:
        problem = problem_of(job, error)
    return outcome_of(job, time.monotonic() - begin, problem, is_final)


def outcome_of(job: Job, seconds: float, problem: str = "", is_final: bool = False) -> Outcome:
    progress = job.flat["progress"]
    epoch = progress["epoch"] + (progress["samples_in_epoch"] > 0)  # as in records
    return Outcome(job.path, progress["step"], epoch, seconds, problem, is_final)


def check_room(job: Job) -> None:
    """Raises OSError if the checkpoint does not fit on the disk. Creates a missing folder of checkpoints."""
    folder = job.path.parent
    if folder.parent == job.lock_file.parent and job.lock_file.exists():  # else it may be on an unmounted disk
        folder.mkdir(exist_ok=True)
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize < _size(job):
        raise OSError(28, "No space left on device")


def check_owner(job: Job) -> None:
    """Raises UserError if another job owns the run folder now, OSError if that cannot be read."""
    if (number := read_lock_number(job.lock_file)) != job.lock_number:
        raise UserError(f"{job.path.parent}: another job has taken over this run (owner {number}); end this one")


def _size(job: Job) -> int:
    return sum(torch.Size(size).numel() * dtype.itemsize for dtype, size, *_ in job.layout)


def problem_of(job: Job, error: BaseException) -> str:
    """The message for a checkpoint that cannot be written, with the free space."""
    reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
    reason = "a write was cut short" if "unexpected pos" in reason else reason  # of torch.save on a full disk
    try:
        room = os.statvfs(job.path.parent)
        free = f"{room.f_bavail * room.f_frsize / 1e6:,.1f} MB are free"
        is_out_of_inodes = room.f_files and not room.f_favail
    except OSError as missing:
        free, is_out_of_inodes = f"its folder cannot be accessed ({missing.strerror})", False
    space = f"it needs {_size(job) / 1e6:,.1f} MB, {free}; make room or repair the storage"
    if is_out_of_inodes:
        space = "no inodes are free, so the file system can hold no more files; delete some"
    return f"{job.path}: cannot be written ({reason}); {space}"


def read_lock_number(file: Path) -> int:
    """The number of the folder's owner. Raises OSError if the file is missing."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["number"]
    except (ValueError, KeyError):
        raise OSError(5, f"{file} cannot be read") from None
