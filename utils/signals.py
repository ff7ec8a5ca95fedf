"""A request to stop (SIGTERM, SIGINT, SIGUSR1) becomes a flag that the loop reads between two optimizer steps."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing.util
import signal
import sys
import threading

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Holds the name of the first stop signal that came; a second SIGINT interrupts at once. For use in `with`."""

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number).name


def ignore_in_worker(_worker: int) -> None:
    """For DataLoader workers: torchrun signals the whole process group, and a worker that dies takes the last save with it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_workers() -> None:
    """At exit: multiprocessing would send SIGTERM to the workers that are left, which ignore it, and wait for them for ever."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


atexit.register(end_workers)  # runs before multiprocessing's own handler, which its import above has registered


def die_with_parent() -> None:
    """Ask the kernel (Linux only) to end this process when its parent, torchrun's agent, is gone: no orphan keeps a GPU."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
