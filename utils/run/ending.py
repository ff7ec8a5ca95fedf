"""How a process ends: the cause is found, reported to the other ranks, the run folder and torchrun, and gives the exit
code. 0: completed, or stopped and saved under torchrun; 75: stopped and saved; 2: the user's to fix; 1: anything else.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from config import TrainingConfig, TrainingError, UserError
from utils.checkpoint.format import step_checkpoints
from utils.clock import Clock
from utils.data.loader import GlobalBatchLoader
from utils.data.worker import explain
from utils.distributed.collectives import all_gather_json, is_of_a_peer, within
from utils.distributed.context import DistributedContext, Launch, read_launch
from utils.files import read_json
from utils.logger import NAME, setup_logger, told
from utils.memory import is_out_of_memory
from utils.run.attempt import Attempt
from utils.run.command_line import end_now, reject, report_to_torchrun
from utils.run.failures import explain_memory
from utils.run.folder import RunFolder
from utils.run.watchdog import Watchdog
from utils.training.state import TrainState

SECONDS_FOR_BLAME = 2.0
SECONDS_TO_WRITE = 15.0  # to storage that may hang
SECONDS_TO_TELL = 2.0  # the other ranks, through a store that may hang
PREEMPTED = 75  # exit code


@contextmanager
def watched(folder: Path, config: TrainingConfig, ctx: DistributedContext) -> Iterator[Ending]:
    """Watch over all ranks. If one hangs or is gone, the others end. If the block fails, its cause is raised.

    folder: for the stacks of ranks that hang.
    """
    setup_logger(ctx.rank)
    ending = Ending(folder, ctx)
    watchdog = Watchdog(ending.clock, ctx, config.hang_timeout, ending)
    try:
        yield ending
    except BaseException as error:
        watchdog.stand_down()
        cause = cause_of(error, ending.run, watchdog, config, ctx)
        ending.announce(cause, is_lost=cause is not error and isinstance(cause, TrainingError))
        ending.write_failure(cause)
        raise cause from (error if cause is not error else error.__cause__)
    finally:
        watchdog.close()


def cause_of(
    error: BaseException, run: RunFolder | None, watchdog: Watchdog, config: TrainingConfig, ctx: DistributedContext
) -> BaseException:
    """The cause of the error: a loader worker of this rank, its memory, another rank, or else the error itself."""
    # the folder is read only if it matters, since its storage may hang
    is_resumed = is_out_of_memory(error) and bool(run and (run.resume_path or step_checkpoints(run.checkpoints)))
    known = explain(error, ctx.rank) or explain_memory(error, config, ctx, is_resumed)
    return known or (watchdog.find_lost() if is_of_a_peer(error) else None) or error


def take_back_failed_steps(
    loaders: Iterable[GlobalBatchLoader], state: TrainState, attempt: Attempt
) -> Exception | None:
    """The error with which the run ends if a rank could not fetch its samples: that of the first one. The state is then
    that before its step. Collective."""
    ctx, progress = attempt.ctx, state.progress
    mine = next((each.failure for each in loaders if each.failure), None)
    found = all_gather_json((state.spoiled_at or vars(progress), told(mine)) if mine else None, ctx)
    failed = [(at["step"], rank, at, text) for rank, each in enumerate(found) if each for at, text in [each]]
    if not failed:
        return None
    _, rank, at, text = min(failed, key=lambda each: each[:2])
    state.take_back(at)
    attempt.clock.take_back(progress.step)
    where = {"epoch": progress.epoch_number, "step": progress.step, "samples_seen": progress.samples_seen}
    attempt.run.status("running", **where)
    if mine and rank == ctx.rank:
        return mine
    return TrainingError(text, rank, ctx.hosts[rank])


class Ending:
    """Ends this process if ranks hang or are gone: called by the watchdog's thread, which must not wait for storage
    that stalls unless it ends this process: other hosts would miss its beats.
    """

    def __init__(self, folder: Path, ctx: DistributedContext) -> None:
        self.run: RunFolder | None = None
        self.clock = Clock(ctx.device)
        self._folder, self._ctx, self._logger = folder, ctx, logging.getLogger(NAME)

    def report_to(self, run: RunFolder) -> None:
        """From now on how this process ends is written to the run's status.json."""
        self.run = run

    def write_failure(self, error: BaseException) -> None:
        if self.run:
            self.run.failed(error, self.clock.completed)

    def _write(self, action: Callable[[], object], seconds: float = SECONDS_TO_WRITE) -> None:
        """Run it in a thread, and wait at most this long for it."""
        with suppress(OSError, TrainingError, TimeoutError):
            within(seconds, action)

    def warn(self, text: str) -> None:
        self._write(lambda: self._logger.warning("%s", text), seconds=0.0)

    def report(self, text: str, stacks: str, seconds: float = 0.0) -> Path:
        """A rank hangs: log it, and write the stacks to a file; wait at most this long."""
        file = self._folder / f"hang-{time.strftime('%Y%m%dT%H%M%S')}.txt"

        def write() -> None:
            self._logger.error("%s; the stacks of all ranks: %s", text, file)
            self._logger.debug("%s", stacks)
            if self._folder.is_dir():  # else the file would be below a mount point
                file.write_text(f"{text}\n{stacks}\n", encoding="utf-8", errors="backslashreplace")

        self._write(write, seconds)
        return file

    def end(self, text: str, hanging: int | None, stacks: str = "") -> None:
        """End this process because a rank hangs. hanging: that rank; None if another rank reports it."""
        if hanging is None:
            self._write(lambda: self._logger.info("this rank ends: %s", text))
            end_now(1)
        remedy = f"fix what the stacks in {self.report(text, stacks, SECONDS_TO_WRITE)} show"
        remedy += ", or raise --hang_timeout, then --resume_from auto"
        self._end_with(TrainingError(f"{text}; {remedy}", hanging, self._ctx.hosts[hanging]), f"{stacks}\n")

    def lose(self, error: TrainingError) -> None:
        """End this process because a rank is gone."""
        run, beats = self.run, self._ctx.beats
        if run and beats and beats.is_of_rank_0 and error.rank == 0:  # rank 0 may have reported why it ended
            with suppress(OSError, TimeoutError):
                status = within(SECONDS_TO_WRITE, lambda: read_json(run.folder / "status.json"))
                if status.get("state") == "failed":
                    self.end(str(status.get("error")), None)
        self._write(lambda: self._logger.error("%s", error))
        self._end_with(error)

    def preempt(self) -> None:
        """End this process, which does not end after a stop signal before the first step."""
        text = "no progress after a stop signal; this rank ends before the first step, so nothing is lost"
        self._write(lambda: self._logger.info(text))
        if run := self.run:
            self._write(lambda: run.status("preempted"))
        if self._ctx.launch.is_under_torchrun:
            os.kill(os.getppid(), signal.SIGTERM)  # else it would wait for ranks that do not end, or restart them
        end_now(0 if self._ctx.launch.is_under_torchrun else PREEMPTED)

    def give_up(self) -> None:
        """End this process, which has failed and could not report it."""
        end_now(1)

    def announce(self, error: BaseException, is_lost: bool) -> None:
        """Tell the other ranks. is_lost: the error is that of a rank that could not report it."""
        if beats := self._ctx.beats:
            rank = getattr(error, "rank", None)
            rank = self._ctx.rank if rank is None else rank
            failure = {"text": str(error), "rank": rank, "host": self._ctx.hosts[rank], "is_lost": is_lost}
            wait([beats.ask(lambda: beats.report(failure))], SECONDS_TO_TELL)

    def _end_with(self, error: TrainingError, stacks: str = "") -> None:
        self.announce(error, is_lost=True)

        def write() -> None:
            report_to_torchrun(f"TrainingError: {error}", f"{stacks}TrainingError: {error}", self._ctx.launch)
            self.write_failure(error)

        self._write(write)
        end_now(1)


def for_torchrun(error: Exception) -> Exception:
    """The error as torchrun's summary should show it. Waits if another rank failed: the earliest report is blamed."""
    if isinstance(error, UserError):
        error.__cause__ = error.__traceback__ = None  # it shows the sentence
    elif is_of_a_peer(error) or getattr(error, "rank", None) not in (None, read_launch().rank):
        time.sleep(SECONDS_FOR_BLAME)
    return error


def leave_after(error: BaseException) -> NoReturn:
    """Log the error and end this process at once, so that no peer is waited for and no thread changes the exit code."""
    logger, user_error = logging.getLogger(NAME), error if isinstance(error, UserError) else None
    try:
        launch = read_launch()
    except UserError:
        launch = Launch()
    if user_error and user_error.rank is not None:  # raised on every rank
        if launch.rank == 0:
            logger.error("%s", error)
        reject(user_error, launch)
    elif user_error or isinstance(error, TrainingError):
        logger.error("%s", error)
        logger.debug("traceback", exc_info=error)
    elif is_of_a_peer(error):
        reason = str(error).splitlines()[0]
        logger.error("this rank lost its peers (%s): another rank failed first, see its log", reason)
        logger.debug("traceback", exc_info=error)
    else:
        logger.error("this rank failed", exc_info=error)
        text = f"{type(error).__name__}: {told(error)}"
        logger.error("failed: rank %d on %s: %s", launch.rank, socket.gethostname(), text)
    end_now(user_error.exit_code if user_error else 1)
