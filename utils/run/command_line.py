"""How train.py starts before torch is imported, and how its processes exit."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any, NoReturn

from config import TrainingConfig
from utils.distributed.context import Launch, read_launch
from utils.settings.errors import UserError
from utils.signals import exit_with_torchrun, kill_workers

SECONDS_TO_FLUSH = 5.0
# after a user error: the first rank to end makes the launcher kill the others, and rank 0 prints
SECONDS_UNTIL_RANK_0_FAILS = 1.0
SECONDS_UNTIL_OTHERS_FAIL = 3.0


class _LossyStream(io.FileIO):
    """Standard output or error. What it does not take (a full disk, a closed pipe) is lost, and the run goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)  # None if a non-blocking stream is full
        except OSError:
            return len(data)


def repair_standard_streams() -> None:
    """Make the standard streams usable if they are closed or full, or their encoding lacks the names of files."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The stream is closed. The next file that is opened would get its number, and all that is printed.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _open_lossy_stream(1)
    sys.stderr = _open_lossy_stream(2)


def _open_lossy_stream(number: int) -> io.TextIOWrapper:
    """Open a file descriptor for text. A character that UTF-8 cannot encode is written as an escape."""
    buffer = io.BufferedWriter(_LossyStream(number, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", newline="", line_buffering=True)


def check_command_line() -> None:
    """Prepare this process before torch is imported, or exit after --help, --print-config and bad flags.

    The standard streams are repaired, and under torchrun this process is made to end with torchrun. Rank 0 prints the
    notes about the flags and the first line.
    """
    repair_standard_streams()
    launch = Launch()
    out = io.StringIO()
    err = io.StringIO()
    notes: list[str] = []
    try:
        launch = read_launch()
        with redirect_stdout(out), redirect_stderr(err):
            TrainingConfig.from_args(notes=notes)
    except SystemExit as ended:
        if launch.rank == 0:
            print(out.getvalue(), end="", flush=True)
            print(err.getvalue(), end="", file=sys.stderr, flush=True)
        if ended.code:
            exit_with_user_error(UserError(err.getvalue().strip(), is_final=True), launch)
        raise
    except UserError as error:  # only some of the launcher's variables are set
        print(error, file=sys.stderr)
        sys.exit(2)
    if launch.is_under_torchrun:
        exit_with_torchrun()
    if launch.rank == 0:
        for line in notes:
            print(line, file=sys.stderr, flush=True)
        ranks = f"{launch.world_size} rank"
        if launch.world_size > 1:
            ranks += "s"
        print(f"Starting on {ranks}. Importing torch takes a few seconds.", flush=True)


def exit_with_user_error(error: UserError, launch: Launch) -> NoReturn:
    """End this process because of a user error that every rank has and rank 0 has printed.

    torchrun reports each rank that fails; only one rank per node fails, so that the error appears once.
    """
    if launch.is_under_torchrun and launch.local_rank > 0:
        exit_now(0)
    write_error_file(f"{type(error).__name__}: {error}", str(error), launch)
    if launch.is_launched:
        time.sleep(SECONDS_UNTIL_RANK_0_FAILS if launch.rank == 0 else SECONDS_UNTIL_OTHERS_FAIL)
    if launch.may_restart and error.is_final:
        # torchrun must not start another attempt
        os.kill(os.getppid(), signal.SIGTERM)
    exit_now(error.exit_code)


def write_error_file(message: str, callstack: str, launch: Launch) -> None:
    """Write the file that launchers read for their summary: `callstack`, and the error in one line."""
    if launch.error_file:
        extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(launch.error_file, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def exit_now(code: int) -> NoReturn:
    """End this process without waiting for its threads."""
    kill_workers()
    flush = threading.Thread(target=_flush_output, daemon=True)
    flush.start()
    flush.join(SECONDS_TO_FLUSH)  # the log may be on storage that hangs
    os._exit(code)


def _flush_output() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
