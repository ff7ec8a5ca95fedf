"""A stop signal (SIGTERM, SIGINT, SIGUSR1, SIGHUP) becomes a flag that the loop reads between optimizer steps."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not hasattr(signal, "SIGUSR1"):
    text = "Windows has no SIGUSR1, fork or file locks, which training needs. Start the training under WSL 2."
    print(text, file=sys.stderr)
    sys.exit(2)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PROCESS_ID = os.getpid()
PARENT_ID = os.getppid()
PROCESS_START_TIMES = {PROCESS_ID: time.monotonic()}


class StopSignals:
    """A context manager that keeps the name of the first stop signal. A SIGINT after it interrupts at once.

    The process has one, `STOP_HANDLER`, which may be entered again meanwhile. The last exit restores the handlers.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._reset()

    def _reset(self) -> None:
        self._received = ""
        self.received_at = math.inf  # when the first signal came, by time.monotonic
        self._is_handled = False
        self._previous_wakeup_fd = -1
        self._previous_handlers: dict[int, Any] = {}
        self._wakeup_sockets: tuple[socket.socket, ...] = ()  # one is read, the interpreter writes to the other

    @property
    def received(self) -> str:
        """The name of the first stop signal, or "".

        Any thread may read this. Python's handlers do not run while the main thread is blocked in C, but before that
        the interpreter writes the number of the signal into a socket.
        """
        sockets = self._wakeup_sockets
        if sockets:
            with contextlib.suppress(BlockingIOError):
                for number in sockets[0].recv(4096):
                    self._record(number)
        return self._received

    @property
    def is_catching(self) -> bool:
        return bool(self._previous_handlers)

    def __enter__(self) -> StopSignals:
        self._depth += 1
        # Python handles signals only in its main thread
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup ignores SIGHUP
                self._previous_handlers[number] = signal.signal(number, self._handle)
            self._wakeup_sockets = socket.socketpair()
            for sock in self._wakeup_sockets:
                sock.setblocking(False)
            write_fd = self._wakeup_sockets[1].fileno()
            self._previous_wakeup_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_) -> None:
        self._depth -= 1
        if self._depth == 0 and self._previous_handlers:
            signal.set_wakeup_fd(self._previous_wakeup_fd)
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)
            self._reset()  # for a later run in this process

    def _handle(self, number: int, _frame) -> None:
        if self._is_handled and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._is_handled = True
        self._record(number)

    def _record(self, number: int) -> None:
        if number in STOP_SIGNALS and not self._received:
            self._received = signal.Signals(number).name
            self.received_at = time.monotonic()


STOP_HANDLER = StopSignals()
# a child must not write there, nor into a file that gets the same number
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def catch_stop_signals() -> None:
    """Catch stop signals from now on, while torch is imported; the run acts on them."""
    STOP_HANDLER.__enter__()


def restore_signals() -> None:
    """Undo `catch_stop_signals`: stop signals end this process, also one that has come since."""
    received = STOP_HANDLER.received
    if STOP_HANDLER.is_catching:
        STOP_HANDLER.__exit__()
    if received:
        os.kill(os.getpid(), signal.Signals[received])


def pop_process_start_time() -> float:
    """Return when this process began, by time.monotonic.

    A second run in the process and a forked process get the current time.
    """
    return PROCESS_START_TIMES.pop(os.getpid(), time.monotonic())


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block stop signals, so that a process started meanwhile gets none before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals_in_worker(_worker: int) -> None:
    """Ignore stop signals in a DataLoader worker.

    torchrun signals the whole process group, and without its workers a rank cannot save.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # `signals_blocked` blocked them at the start
    die_with_parent()


def kill_workers() -> None:
    """Kill the remaining workers at exit.

    multiprocessing would send SIGTERM to the workers, which ignore it, and wait forever.
    """
    if threading.current_thread() is threading.main_thread():
        if STOP_HANDLER.is_catching:
            # Python removes its handlers now, and another signal (srun --kill-on-bad-exit) would change the exit code
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise for workers killed here
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def register_kill_workers(_=None) -> None:
    """Let this process call `kill_workers` before multiprocessing's own handler, which its import above has registered.

    A process of multiprocessing runs no handlers of atexit before Python 3.13, and later none from before its fork.
    """
    atexit.register(kill_workers)
    multiprocessing.util.Finalize(None, kill_workers, exitpriority=100)


register_kill_workers()
multiprocessing.util.register_after_fork(kill_workers, register_kill_workers)


def wait_for_gloo_threads() -> None:
    """Wait before a fork until gloo's threads are idle.

    After a collective, these threads briefly create Python thread states. A process that CPython 3.11 forks at that
    moment hangs (python/cpython#112275): 10 of 4,000 did.
    """
    time.sleep(0.01)


if sys.version_info < (3, 12):
    os.register_at_fork(before=wait_for_gloo_threads)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the Linux kernel send this signal when the parent (torchrun's agent) dies, so that no orphan keeps a GPU."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def exit_with_torchrun() -> None:
    """End this process when torchrun dies, or now if torchrun is gone. torchrun may be process 1 of a container."""
    die_with_parent()
    is_orphan = PARENT_ID != os.getppid()
    if not is_orphan and sys.platform == "linux":
        is_orphan = not is_torchrun_alive(PARENT_ID)
    if is_orphan and PROCESS_ID == os.getpid():
        sys.exit("torchrun has already exited, so this rank ends. Start torchrun again.")


def is_torchrun_alive(pid: int) -> bool:
    """Return whether torchrun may be alive.

    torchrun has loaded torch, and the processes between torchrun and a rank have its variables. If a process cannot be
    read, torchrun may be alive, unless that process is init.
    """
    try:
        if b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes():
            return True
        if b"TORCHELASTIC_RUN_ID=" not in Path(f"/proc/{pid}/environ").read_bytes():
            return False
        stat_fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return is_torchrun_alive(int(stat_fields[1]))  # the parent
    except OSError:  # of another user, or outside of the rank's own container
        return pid != 1
