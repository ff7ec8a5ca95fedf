"""How a process ends when something failed: who is to blame, what is said last, and that it does end."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from config import TrainingConfig, TrainingError, UserError
from utils.checkpoint.format import step_checkpoints
from utils.data.worker import explain
from utils.distributed.collectives import is_of_a_peer
from utils.distributed.context import DistributedContext
from utils.logger import NAME
from utils.memory import explain_memory
from utils.run.folder import Run
from utils.run.watchdog import Watch
from utils.signals import end_workers

SECONDS_OF_BLAME = 2.0


def wait_for_blame(error: BaseException) -> None:
    """After an error that is a peer's: torchrun blames the rank whose report has the earliest second, so this one comes
    later."""
    if is_of_a_peer(error):
        time.sleep(SECONDS_OF_BLAME)


def cause_of(error: BaseException, run: Run, config: TrainingConfig, ctx: DistributedContext) -> BaseException:
    """What ended the run, as a sentence where it can be known: a worker of this rank, its memory, another rank. Else
    the error itself."""
    known = explain(error, ctx.rank)
    if not known:
        its_own = [] if run.is_replacing else step_checkpoints(run.checkpoints)
        known = explain_memory(error, config, ctx, its_own[-1] if its_own else run.resume_path)
    return known or (run.lost_ranks() if is_of_a_peer(error) else None) or error


def fail(error: BaseException, run: Run, watch: Watch, config: TrainingConfig, ctx: DistributedContext) -> NoReturn:
    """Say in status.json what ended the run, and raise it."""
    cause = cause_of(error, run, config, ctx)
    run.failed(cause)
    watch.close()
    raise cause from (error if cause is not error else error.__cause__)


def leave_after(error: BaseException, rank: int, may_restart: bool = False) -> NoReturn:
    """Say the error and end this process at once: nothing waits for peers, and gloo's threads do not make an abort of
    the exit code.

    may_restart: torchrun would start another attempt; where that is of no use it is asked to end.
    """
    logger, is_refused = logging.getLogger(NAME), isinstance(error, UserError)
    if is_refused and error.rank is not None:  # every rank has it: rank 0 says it, and nobody leaves before it has
        if rank == 0:
            logger.error("%s", error)
        time.sleep(1 if rank == 0 else 3)
        if may_restart and error.is_final:
            os.kill(os.getppid(), signal.SIGTERM)
    elif is_refused or isinstance(error, TrainingError):
        logger.error("%s", error)
        logger.debug("the way to it", exc_info=error)
    elif is_of_a_peer(error):
        logger.error(
            "this rank lost its peers (%s): another rank failed first, and its log says of what",
            str(error).splitlines()[0],
        )
        logger.debug("the way to it", exc_info=error)
    else:
        logger.error("this rank failed", exc_info=error)
        logger.error("failed: rank %d on %s: %s: %s", rank, socket.gethostname(), type(error).__name__, error)
    end_now(2 if is_refused else 1)


def end_now(code: int) -> NoReturn:
    """End this process, whatever its threads wait for."""
    end_workers()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_watch(run: Run, config: TrainingConfig, ctx: DistributedContext, logger: logging.Logger) -> Watch:
    """Begin to say where this rank is, and to look after all ranks."""

    def report(text: str, stacks: str) -> Path:
        file = run.folder / f"hang-{time.strftime('%Y%m%dT%H%M%S')}.txt"
        with suppress(OSError):
            file.write_text(f"{text}\n{stacks}\n", encoding="utf-8")
        logger.error("%s; the stacks of all ranks: %s", text, file)
        logger.debug("%s", stacks)
        return file

    def end(text: str, stacks: str, guilty: int | None) -> None:
        if guilty is None:  # another rank says it
            end_now(1)
        file = report(text, stacks)
        sentence = (
            f"{text} (hang_timeout={config.hang_timeout:g}); mend what the stacks in {file} show, then --resume_from"
            " auto"
        )
        run.failed(TrainingError(sentence, guilty, ctx.hosts[guilty]))
        if path := ctx.launch.error_file:  # torchrun's summary shows it
            # it shows this alone
            extra = {
                "py_callstack": f"{stacks}\nRunFailed: {sentence}",
                "timestamp": str(int(time.time())),
            }
            with suppress(OSError):
                Path(path).write_text(
                    json.dumps({"message": {"message": f"TrainingError: {sentence}", "extraInfo": extra}})
                )
        end_now(1)

    return Watch(run.watch_folder, ctx.rank, ctx.hosts, config.hang_timeout, report, end)
