"""Ranks watch each other: one that hangs, is stopped, killed or cut off is reported, and the others end.

It costs a thread per rank, which talks to the process group's store twice a second. Without it a rank whose peer is
gone waits until `--timeout`, or for ever, and nobody names the rank that hangs. Who trains on several ranks needs it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from utils.distributed.collectives import call_with_timeout, is_peer_failure
from utils.distributed.context import DistributedContext
from utils.extras.watch.watchdog import Watchdog
from utils.files import read_json
from utils.logger import LOGGER_NAME
from utils.run.command_line import exit_now, write_error_file
from utils.run.supervisor import Supervisor
from utils.settings.errors import EXIT_PREEMPTED, TrainingError

if TYPE_CHECKING:  # it imports this module
    from utils.run.exit import ExitReporter

SECONDS_TO_WRITE = 15.0  # to storage that may hang
SECONDS_TO_REPORT = 2.0  # to the other ranks, through a store that may hang


class RankSupervisor(Supervisor):
    """Ends this process if ranks hang or are gone.

    Its methods are called by the watchdog's thread, which must not wait for storage that stalls unless it ends this
    process: other hosts would miss its heartbeats.

    Args:
        folder: for the stacks of ranks that hang.
        hang_timeout: seconds without progress after which the run is ended; 0: never.
    """

    def __init__(self, folder: Path, hang_timeout: float, ctx: DistributedContext, exit_reporter: ExitReporter) -> None:
        self._folder = folder
        self._ctx = ctx
        self._logger = logging.getLogger(LOGGER_NAME)
        self._exit_reporter = exit_reporter
        self._watchdog = Watchdog(exit_reporter.clock, ctx, hang_timeout, self)

    def disarm(self) -> None:
        self._watchdog.disarm()

    def close(self) -> None:
        self._watchdog.close()

    def report_to_ranks(self, error: BaseException, cause: BaseException) -> BaseException:
        if cause is error and is_peer_failure(error):
            cause = self._watchdog.find_lost_rank() or error
        self.report_failure(cause, is_lost=cause is not error and isinstance(cause, TrainingError))
        return cause

    def _run_with_time_limit(self, action: Callable[[], object], seconds: float = SECONDS_TO_WRITE) -> None:
        """Run it in a thread, and wait at most this long for it."""
        with suppress(OSError, TrainingError, TimeoutError):
            call_with_timeout(seconds, action)

    def warn(self, text: str) -> None:
        self._run_with_time_limit(lambda: self._logger.warning("%s", text), seconds=0.0)

    def report_hang(self, text: str, stacks: str, seconds: float = 0.0) -> Path:
        """A rank hangs: log it, and write the stacks to a file; wait at most this long."""
        file = self._folder / f"hang-{time.strftime('%Y%m%dT%H%M%S')}.txt"

        def write() -> None:
            self._logger.error("%s The stacks of all ranks are in %s.", text, file)
            self._logger.debug("%s", stacks)
            if self._folder.is_dir():  # else the file would be below a mount point
                file.write_text(f"{text}\n{stacks}\n", encoding="utf-8", errors="backslashreplace")

        self._run_with_time_limit(write, seconds)
        return file

    def exit_hung(self, text: str, hanging_rank: int | None, stacks: str = "") -> None:
        """End this process because a rank hangs. hanging_rank: that rank; None if another rank reports it."""
        if hanging_rank is None:
            self._run_with_time_limit(lambda: self._logger.info("This rank ends: %s", text))
            exit_now(1)
        remedy = f"Fix what the stacks in {self.report_hang(text, stacks, SECONDS_TO_WRITE)} show"
        remedy += ", or raise --hang_timeout, then start again with --resume_from auto."
        self._exit_with_error(
            TrainingError(f"{text} {remedy}", hanging_rank, self._ctx.hosts[hanging_rank]), f"{stacks}\n"
        )

    def exit_peer_lost(self, error: TrainingError) -> None:
        """End this process because a rank is gone."""
        run, heartbeats = self._exit_reporter.run, self._ctx.heartbeats
        # rank 0 may have reported why it ended
        if run and heartbeats and heartbeats.is_hosted_by_rank_0 and error.rank == 0:
            with suppress(OSError, TimeoutError):
                status = call_with_timeout(SECONDS_TO_WRITE, lambda: read_json(run.folder / "status.json"))
                if status.get("state") == "failed":
                    self.exit_hung(str(status.get("error")), None)
        self._run_with_time_limit(lambda: self._logger.error("%s", error))
        self._exit_with_error(error)

    def exit_preempted(self) -> None:
        """End this process, which does not end after a stop signal before the first step."""
        text = "There was no progress after a stop signal. This rank ends before the first step, so nothing is lost."
        self._run_with_time_limit(lambda: self._logger.info(text))
        if run := self._exit_reporter.run:
            self._run_with_time_limit(lambda: run.status.write("preempted"))
        if self._ctx.launch.is_under_torchrun:
            os.kill(os.getppid(), signal.SIGTERM)  # else it would wait for ranks that do not end, or restart them
        exit_now(0 if self._ctx.launch.is_under_torchrun else EXIT_PREEMPTED)

    def exit_unreported(self) -> None:
        """End this process, which has failed and could not report it."""
        exit_now(1)

    def report_failure(self, error: BaseException, is_lost: bool) -> None:
        """Tell the other ranks. is_lost: the error is that of a rank that could not report it."""
        if heartbeats := self._ctx.heartbeats:
            rank = getattr(error, "rank", None)
            rank = self._ctx.rank if rank is None else rank
            failure = {"text": str(error), "rank": rank, "host": self._ctx.hosts[rank], "is_lost": is_lost}
            wait([heartbeats.submit(lambda: heartbeats.report_failure(failure))], SECONDS_TO_REPORT)

    def _exit_with_error(self, error: TrainingError, stacks: str = "") -> None:
        self.report_failure(error, is_lost=True)

        def write() -> None:
            write_error_file(f"TrainingError: {error}", f"{stacks}TrainingError: {error}", self._ctx.launch)
            self._exit_reporter.write_failure(error)

        self._run_with_time_limit(write)
        exit_now(1)
