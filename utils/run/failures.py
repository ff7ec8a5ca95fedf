"""How a process ends after a failure: finds the cause, reports it and exits."""

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

import torch

from config import TrainingConfig, TrainingError, UserError
from utils.checkpoint.format import step_checkpoints
from utils.clock import Clock
from utils.data.loader import GlobalBatchLoader
from utils.data.worker import explain
from utils.distributed.collectives import all_gather_json, is_of_a_peer, on_all_ranks, within
from utils.distributed.context import DistributedContext, Launch, read_launch
from utils.files import read_json
from utils.logger import NAME, setup_logger, told
from utils.memory import is_out_of_memory, let_go
from utils.run.attempt import Attempt
from utils.run.command_line import end_now, reject, report_to_torchrun
from utils.run.folder import Run
from utils.run.resume import claim_run
from utils.run.start_checks import check_alike
from utils.run.watchdog import Watchdog
from utils.signals import StopSignals, began_at
from utils.training.state import TrainState

SECONDS_FOR_BLAME = 2.0
SECONDS_TO_WRITE = 15.0  # to storage that may hang
SECONDS_TO_TELL = 2.0  # the other ranks, through a store that may hang
PREEMPTED = 75  # exit code


def for_torchrun(error: Exception) -> Exception:
    """The error as torchrun's summary should show it. Waits if another rank failed: the earliest report is blamed."""
    if isinstance(error, UserError):
        error.__cause__ = error.__traceback__ = None  # it shows the sentence
    elif is_of_a_peer(error) or getattr(error, "rank", None) not in (None, read_launch().rank):
        time.sleep(SECONDS_FOR_BLAME)
    return error


def cause_of(
    error: BaseException, run: Run | None, watchdog: Watchdog, config: TrainingConfig, ctx: DistributedContext
) -> BaseException:
    """The cause of the error: a loader worker of this rank, its memory, another rank, or else the error itself."""
    # the folder is read only if it matters, since its storage may hang
    is_resumed = is_out_of_memory(error) and bool(run and (run.resume_path or step_checkpoints(run.checkpoints)))
    known = explain(error, ctx.rank) or explain_memory(error, config, ctx, is_resumed)
    return known or (watchdog.find_lost() if is_of_a_peer(error) else None) or error


def explain_memory(
    error: BaseException, config: TrainingConfig, ctx: DistributedContext, is_resumed: bool = False
) -> TrainingError | None:
    """The error for a failed allocation, with flags that help; None for another error.

    is_resumed: the run has a checkpoint, so the size of its micro-batch is fixed.
    """
    if not is_out_of_memory(error):
        return None
    text = next(iter(str(error).splitlines()), type(error).__name__)
    let_go(error)
    is_of_device = isinstance(error, torch.OutOfMemoryError) or "CUDA" in text
    place = f"{ctx.device_names[ctx.rank]} ({ctx.device})" if is_of_device else "memory"
    ways = [] if config.activation_checkpointing else ["--activation_checkpointing"]
    if not is_of_device:
        ways += ["fewer --num_workers", "more memory for the job"]
    elif ctx.world_size > 1 and config.sharding == "none":
        ways.append("--sharding zero3")
    flags = halved(config.batch_size, config, ctx.world_size)
    if flags and not is_resumed:
        ways.insert(0, f"{flags} (the same global batch; scripts/benchmark.py --find-batch shows what fits)")
    ways.append("a smaller model or image size")
    return TrainingError(f"rank {ctx.rank} on {ctx.host} ran out of {place}: {text}; use {' or '.join(ways)}")


def halved(size: int, config: TrainingConfig, world_size: int) -> str:
    """Flags for a micro-batch of at most half of `size` with the same global batch; empty below one sample."""
    whole = config.batch_size * config.micro_batches_per_step(world_size)
    size = next((size for size in range(size // 2, 0, -1) if whole % size == 0), 0)
    return f"--batch_size {size} --global_batch_size {whole}" if size else ""


@contextmanager
def open_run(config: TrainingConfig, ctx: DistributedContext) -> Iterator[Attempt]:
    """An attempt of the run in its folder. Until the block ends, stop signals become a flag, and all ranks are watched.

    If the block fails, the cause is written to status.json and raised.

    Raises:
        UserError: if the run cannot be started or continued.
    """
    began = began_at()
    with StopSignals() as signals, watched(config.run_folder, config, ctx) as ending:
        run, clock = claim_run(config, ctx), ending.clock
        ending.run = run
        if folder := ctx.launch.flight_recorder and Path(ctx.launch.flight_recorder).parent:
            on_all_ranks(lambda: folder.mkdir(parents=True, exist_ok=True), ctx)  # torch does not create it
        logger = setup_logger(ctx.rank, None if run.start.is_completed else run.log_file)
        if run.start.is_completed:
            logger.info("%s: this run is already completed; to train longer, increase --epochs", run.folder)
        yield Attempt(config, ctx, run, clock, began, signals, logger)
    run.close()


def failure_of_data(loaders: Iterable[GlobalBatchLoader], state: TrainState, attempt: Attempt) -> Exception | None:
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


@contextmanager
def watched(folder: Path, config: TrainingConfig, ctx: DistributedContext) -> Iterator[Ending]:
    """Watch over all ranks. If one hangs or is gone, the others end. If the block fails, its cause is raised.

    folder: for the stacks of ranks that hang.

    Raises:
        UserError: also if the ranks differ in code, settings or versions.
    """
    setup_logger(ctx.rank)
    ending = Ending(folder, ctx)
    watchdog = Watchdog(ending.clock, ctx, config.hang_timeout, ending)
    try:
        check_alike(config, ctx)
        yield ending
    except BaseException as error:
        watchdog.stand_down()
        cause = cause_of(error, ending.run, watchdog, config, ctx)
        ending.announce(cause, is_lost=cause is not error and isinstance(cause, TrainingError))
        if ending.run:
            ending.run.failed(cause, ending.clock.completed)
        raise cause from (error if cause is not error else error.__cause__)
    finally:
        watchdog.close()


class Ending:
    """Ends this process if ranks hang or are gone: called by the watchdog's thread, which must not wait for storage
    that stalls while this process is alive: other hosts would miss its beats.
    """

    def __init__(self, folder: Path, ctx: DistributedContext) -> None:
        self.run: Run | None = None  # once it is claimed
        self.clock = Clock(ctx.device)
        self._folder, self._ctx, self._logger = folder, ctx, logging.getLogger(NAME)

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
            if self.run:
                self.run.failed(error, self.clock.completed)

        self._write(write)
        end_now(1)


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
