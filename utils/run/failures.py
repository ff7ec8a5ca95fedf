"""How a process ends after a failure: finds the cause, reports it and exits."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch

from config import TrainingConfig, TrainingError, UserError
from utils.checkpoint.format import step_checkpoints
from utils.clock import Clock, read_place
from utils.data.worker import explain
from utils.distributed.collectives import broadcast_json, is_of_a_peer
from utils.distributed.context import DistributedContext, Launch, read_launch
from utils.files import read_json, replace_json
from utils.logger import NAME
from utils.memory import is_out_of_memory, let_go
from utils.run.claim import Start
from utils.run.command_line import end_now, reject, report_to_torchrun
from utils.run.folder import Run
from utils.run.watchdog import Watchdog

SECONDS_FOR_BLAME = 2.0
PREEMPTED = 75  # exit code


def wait_for_blame(error: BaseException) -> None:
    """Wait if a peer failed first: torchrun blames the rank with the earliest report."""
    if is_of_a_peer(error):
        time.sleep(SECONDS_FOR_BLAME)


def cause_of(error: BaseException, run: Run, config: TrainingConfig, ctx: DistributedContext) -> BaseException:
    """The cause of the error: a loader worker of this rank, its memory, another rank, or else the error itself."""
    # the folder is read only if it matters, since its storage may hang
    is_resumed = is_out_of_memory(error) and bool(run.resume_path or step_checkpoints(run.checkpoints))
    known = explain(error, ctx.rank) or explain_memory(error, config, ctx, is_resumed)
    return known or (run.lost_ranks() if is_of_a_peer(error) else None) or error


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


def fail(
    error: BaseException, run: Run, watchdog: Watchdog, config: TrainingConfig, ctx: DistributedContext
) -> NoReturn:
    """Write the cause of the failure to status.json and raise it."""
    watchdog.stand_down()
    cause = cause_of(error, run, config, ctx)
    run.failed(cause, watchdog.completed)
    watchdog.close()
    raise cause from (error if cause is not error else error.__cause__)


@contextmanager
def watched(folder: Path, config: TrainingConfig, ctx: DistributedContext) -> Iterator[None]:
    """Watch over lost ranks in a program without a run: an evaluation, a prediction. `folder`: that all ranks share.

    Its files are in `folder`/watch, which the next start of a run clears; they remain if ranks are lost.
    """
    place = folder / "watch" / broadcast_json(f"{os.getpid()}-{time.time_ns()}", ctx)
    run = Run(place, place, ctx.rank, ctx.hosts, Start(), None)
    if ctx.is_main:
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            replace_json(run.lock_file, {})
            run.begin()
    clock = Clock(run.watch_folder / f"rank{ctx.rank}" if ctx.world_size > 1 else None)
    watchdog = start_watchdog(run, config, ctx, logging.getLogger(NAME), clock, lambda: None)
    try:
        yield
    except BaseException as error:
        fail(error, run, watchdog, config, ctx)
    finally:
        watchdog.close()
        if ctx.is_main:
            shutil.rmtree(place, ignore_errors=True)
            with suppress(OSError):
                place.parent.rmdir()


def leave_after(error: BaseException) -> NoReturn:
    """Log the error and end this process at once, so that no peer is waited for and no thread changes the exit code."""
    logger, is_user_error = logging.getLogger(NAME), isinstance(error, UserError)
    try:
        launch = read_launch()
    except UserError:
        launch = Launch()
    if is_user_error and error.rank is not None:  # raised on every rank
        if launch.rank == 0:
            logger.error("%s", error)
        reject(error, launch)
    elif is_user_error or isinstance(error, TrainingError):
        logger.error("%s", error)
        logger.debug("traceback", exc_info=error)
    elif is_of_a_peer(error):
        reason = str(error).splitlines()[0]
        logger.error("this rank lost its peers (%s): another rank failed first, see its log", reason)
        logger.debug("traceback", exc_info=error)
    else:
        logger.error("this rank failed", exc_info=error)
        logger.error("failed: rank %d on %s: %s: %s", launch.rank, socket.gethostname(), type(error).__name__, error)
    end_now(error.exit_code if is_user_error else 1)


def start_watchdog(
    run: Run,
    config: TrainingConfig,
    ctx: DistributedContext,
    logger: logging.Logger,
    clock: Clock,
    every_second: Callable[[], None],
) -> Watchdog:
    """The watchdog of this rank: it reports a hang to a file and the log, and ends the process after hang_timeout."""

    def report(text: str, stacks: str) -> Path:
        file = run.folder / f"hang-{time.strftime('%Y%m%dT%H%M%S')}.txt"
        with suppress(OSError):
            if run.lock_file.exists():  # else the file would be below a mount point
                file.write_text(f"{text}\n{stacks}\n", encoding="utf-8")
        logger.error("%s; the stacks of all ranks: %s", text, file)
        logger.debug("%s", stacks)
        return file

    def end(text: str, stacks: str, hanging: int | None) -> None:
        if hanging is None:  # another rank reports it
            logger.info("this rank ends: %s", text)
            end_now(1)
        remedy = f"fix what the stacks in {report(text, stacks)} show, then --resume_from auto"
        end_with(TrainingError(f"{text}; {remedy}", hanging, ctx.hosts[hanging]), f"{stacks}\n")

    def end_with(error: TrainingError, stacks: str = "") -> None:
        run.failed(error, clock.completed)
        report_to_torchrun(f"TrainingError: {error}", f"{stacks}TrainingError: {error}", ctx.launch)
        end_now(1)

    before = read_json(run.folder / "status.json")  # of the last attempt, until rank 0 begins

    def failure() -> str:
        status = read_json(run.folder / "status.json")
        has_failed = status.get("state") == "failed" and status != before
        return f"{status.get('error')}" if has_failed else ""

    def lose(peer: int) -> None:
        place, host = read_place(run.watch_folder / f"rank{peer}"), ctx.hosts[peer]
        error = run.look_for_lost_ranks(meanwhile=clock.beat)
        if place and place.phase == "end":  # it could not report why
            error = error or TrainingError(f"rank {peer} on {host} has ended; see its log", peer, host)
        if error:
            logger.error("%s", error)
            end_with(error)

    def preempt() -> None:
        logger.info("no progress after a stop signal; this rank ends before the first step, so nothing is lost")
        with suppress(OSError, TrainingError):
            run.status("preempted")
        if ctx.launch.is_under_torchrun:
            os.kill(os.getppid(), signal.SIGTERM)  # else it would wait for ranks that do not end, or restart them
        end_now(0 if ctx.launch.is_under_torchrun else PREEMPTED)

    parts = (config.hang_timeout, every_second, report, end, failure, lose, preempt)
    return Watchdog(clock, run.watch_folder, ctx.rank, ctx.hosts, *parts)
