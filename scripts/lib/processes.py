# extra: launcher or benchmark or chaos or judge
"""Start and end child processes. Each leads its own session, so that it can be ended with its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GRACE_S = 10.0  # between SIGTERM and SIGKILL


def start_process(command: Sequence[object], **options: Any) -> subprocess.Popen:
    """Start a program like `subprocess.Popen`, in a new session."""
    return subprocess.Popen([str(word) for word in command], start_new_session=True, **options)


def end_process(process: subprocess.Popen, grace: float = GRACE_S) -> None:
    """Send SIGTERM to the process group, and SIGKILL to the rest of it after `grace` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)


@contextmanager
def running_process(command: Sequence[object], grace: float = GRACE_S, **options: Any) -> Iterator[subprocess.Popen]:
    """Start a program, and end what remains of its process group when the block exits."""
    process = start_process(command, **options)
    try:
        yield process
    finally:
        end_process(process, grace)


def run_process(command: Sequence[object], seconds: float | None = None, **options: Any) -> subprocess.CompletedProcess:
    """Run a program to its end and capture its output. Raises subprocess.TimeoutExpired after `seconds`."""
    with running_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        out, err = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def list_children(pid: int) -> list[int]:
    """Return the ids of the running child processes. There are none on a system without /proc."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                pids.append(int(file.parent.name))
    return pids
