"""How a process ends: the cause is found, and reported to the other ranks, the run folder and torchrun.

The cause gives the exit code. 0: completed, or stopped and saved under torchrun; 75: stopped and saved; 2: the user's
to fix; 1: anything else. Under torchrun, an error that is the user's to fix on every rank ends only one rank per node
with 2 and the others with 0, so that torchrun reports it once.
"""

from __future__ import annotations

import gc
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from config import TrainingConfig
from utils.checkpoint.format import list_step_checkpoints
from utils.clock import PhaseClock
from utils.data.worker import explain_open_file_limit, explain_worker_error
from utils.distributed.collectives import call_with_timeout, is_peer_failure
from utils.distributed.context import DistributedContext, Launch, read_launch
from utils.logger import LOGGER_NAME, error_text, setup_logger
from utils.memory import drop_traceback, is_out_of_memory
from utils.run.command_line import exit_now, exit_with_user_error
from utils.run.folder import RunFolder
from utils.run.memory_errors import explain_out_of_memory
from utils.run.run_lock import RunLock
from utils.run.supervisor import Supervisor
from utils.settings.errors import EXIT_PREEMPTED as EXIT_PREEMPTED  # train.py and forks import it from here
from utils.settings.errors import TrainingError, UserError

SECONDS_AFTER_FIRST_FAILURE = 2.0
# destroying process groups may wait for a peer, and this rank has to be blamed before its peers
SECONDS_TO_DESTROY_GROUPS = 1.0


@contextmanager
def clean_up_on_exit() -> Iterator[None]:
    """Release what the decorated function leaves behind, so that it may be called again in the same process.

    After an exception, the locks and the process groups are closed. The next start closes NCCL groups of several ranks.
    The frames in the traceback lose their values, which would keep the model, the data and the
    sockets of the groups. A function that returns has closed its locks and groups itself.
    """
    try:
        yield
    except BaseException as error:
        for lock in list(RunLock.held_locks):
            lock.close()
        drop_traceback(error)
        # NCCL waits for the operations that were begun, and peers may be gone
        if dist.is_initialized() and (dist.get_world_size() == 1 or "nccl" not in dist.get_backend()):
            with suppress(TimeoutError):
                call_with_timeout(SECONDS_TO_DESTROY_GROUPS, dist.destroy_process_group)
        raise
    finally:
        gc.collect()  # objects that refer to each other keep groups and memory of the device


@contextmanager
def supervise_ranks(folder: Path, config: TrainingConfig, ctx: DistributedContext) -> Iterator[ExitReporter]:
    """Watch over all ranks. If one hangs or is gone, the others end. If the block fails, its cause is raised.

    Args:
        folder: for the stacks of ranks that hang.
    """
    setup_logger(ctx.rank)
    exit_reporter = ExitReporter(ctx)
    exit_reporter.resources.callback(exit_reporter.clock.close)
    from utils.extras.watch.rank_supervisor import RankSupervisor  # extra: watch

    supervisor = Supervisor()  # the one of a fork that has deleted the next line
    supervisor = RankSupervisor(folder, config.hang_timeout, ctx, exit_reporter)  # extra: watch
    exit_reporter.resources.callback(supervisor.close)
    try:
        yield exit_reporter
    except BaseException as error:
        supervisor.disarm()
        cause = find_cause(error, exit_reporter.run, config, ctx)
        cause = supervisor.report_to_ranks(error, cause)
        exit_reporter.write_failure(cause)
        if cause is error:
            # "from" keeps the cause of the error, and hides other errors that were being handled when it was raised
            raise cause from error.__cause__
        raise cause from error
    finally:
        exit_reporter.resources.close()


def find_cause(
    error: BaseException, run: RunFolder | None, config: TrainingConfig, ctx: DistributedContext
) -> BaseException:
    """Return the cause of the error: a loader worker of this rank, its open files or memory, or else the error."""
    text = explain_open_file_limit(error)
    if text:
        # closes the files in the frames of the traceback, so that the run folder can be written
        drop_traceback(error)
        return TrainingError(f"Rank {ctx.rank} failed: {text}")

    is_resumed = False
    if run and is_out_of_memory(error):  # after other errors the folder is not read, since its storage may hang
        is_resumed = run.resume_path is not None or bool(list_step_checkpoints(run.checkpoint_folder))
    cause = explain_worker_error(error, ctx.rank)
    if cause is None:
        cause = explain_out_of_memory(error, config, ctx, is_resumed=is_resumed)
    return cause or error


class ExitReporter:
    """Writes how this process ends to the run, once that is known."""

    def __init__(self, ctx: DistributedContext) -> None:
        self.run: RunFolder | None = None  # its status.json shows how this process ends; `acquire_run_folder` sets it
        self.clock = PhaseClock(ctx.device)
        self.resources = ExitStack()  # closed in reverse order

    def write_failure(self, error: BaseException) -> None:
        """Write the error to the run, if this process has one."""
        if self.run:
            self.run.report_failure(error, self.clock.last_completed_step)


def prepare_for_torchrun(error: Exception) -> Exception:
    """Return the error as torchrun's summary should show it.

    If another rank failed, wait a moment: torchrun blames the earliest report.
    """
    if isinstance(error, UserError):  # the summary shows the sentence alone
        error.__cause__ = None
        error.__traceback__ = None
        return error
    failed_rank = getattr(error, "rank", None)
    if is_peer_failure(error) or failed_rank not in (None, read_launch().rank):
        time.sleep(SECONDS_AFTER_FIRST_FAILURE)
    return error


def exit_with_error(error: BaseException, code: int = 1) -> NoReturn:
    """Log the error and end this process at once, so that no peer is waited for and no thread changes the exit code.

    Args:
        code: the exit code, if the error is not the user's.
    """
    logger = logging.getLogger(LOGGER_NAME)
    try:
        launch = read_launch()
    except UserError:
        launch = Launch()
    if isinstance(error, UserError):
        if error.rank is not None:
            # every rank has raised the error, and rank 0 logs it
            if launch.rank == 0:
                logger.error("%s", error)
            exit_with_user_error(error, launch)
        code = error.exit_code
    if isinstance(error, UserError | TrainingError):
        logger.error("%s", error)
        logger.debug("traceback", exc_info=error)
    elif is_peer_failure(error):
        reason = str(error).splitlines()[0]
        logger.error("Another rank failed first, so this rank lost its peers (%s). See the log of that rank.", reason)
        logger.debug("traceback", exc_info=error)
    else:
        host = socket.gethostname()
        logger.error("An exception ended rank %d on %s.", launch.rank, host, exc_info=error)
        text = f"{type(error).__name__}: {error_text(error)}"
        logger.error("Rank %d on %s failed: %s", launch.rank, host, text)
    exit_now(code)
