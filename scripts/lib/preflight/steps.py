# extra: preflight
"""Run the steps of preflight on all ranks. A rank that hangs is reported and not waited for."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from config import TrainingConfig
from scripts.lib.preflight import diagnosis
from utils.distributed.collectives import all_gather_json
from utils.distributed.context import DistributedContext
from utils.run.memory_errors import explain_out_of_memory
from utils.settings.errors import TrainingError, UserError

MAX_SECONDS, MAX_SECONDS_OF_MODEL = 25.0, 60.0  # the second is for a step that runs model or data, or uploads


KNOWN_ERRORS = (UserError, TrainingError, OSError)


class Steps:
    """Collects what each step measured on each rank, and the findings. They are the same on all ranks."""

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        self.measured: dict[str, Any] = {}
        self.findings: list[diagnosis.Finding] = []
        self._config, self._ctx, self._stage_numbers = config, ctx, itertools.count()
        # the connection is a separate one, because the main thread may be waiting in the default one
        self._store = dist.distributed_c10d._get_default_store().clone() if ctx.world_size > 1 else None

    def run_step(self, name: str, action: Callable, *args: Any, seconds: float = MAX_SECONDS) -> list[Any] | None:
        """Run `action(*args)`, and return each rank's result (plain JSON).

        If any rank failed, the result is None, and there is a finding.
        """
        if self._ctx.is_main:
            print(f"  {name}", flush=True)
        value, problem, seconds = None, "", min(seconds, self._config.timeout)
        with self._deadline(name, seconds):
            try:
                value = action(*args)
            except Exception as error:
                if not isinstance(
                    cause := explain_out_of_memory(error, self._config, self._ctx) or error, KNOWN_ERRORS
                ):
                    raise
                problem = str(cause)
                if isinstance(cause, OSError):
                    problem = f"The operating system refused an operation ({error}). Fix the cause on this node."
        with self._deadline(f"end of {name}", seconds):
            ranks = all_gather_json([value, problem], self._ctx)
        problems = [problem for _, problem in ranks]
        if any(problems):
            self.findings += diagnosis.create_failures(name, problems, self._ctx.hosts)
            return None
        self.measured[name] = [value for value, _ in ranks]
        return self.measured[name]

    @contextmanager
    def _deadline(self, stage: str, seconds: float) -> Iterator[None]:
        """Report the ranks that did not get here and end the process, unless the body ends in time."""
        key = f"preflight/{next(self._stage_numbers)}"
        if self._store:
            self._store.set(f"{key}/{self._ctx.rank}", "")
        timer = threading.Timer(seconds, self._exit_on_timeout, [key, stage, seconds])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _exit_on_timeout(self, key: str, stage: str, seconds: float) -> None:
        ranks = range(self._ctx.world_size)
        arrived = [rank for rank in ranks if not self._store or self._store.check([f"{key}/{rank}"])]
        missing = [rank for rank in ranks if rank not in arrived]
        fix = "Check MTU and firewall between the nodes."
        if stage in ("data", "loader"):
            fix = "Check the storage and the code of the data set."
        text = f"No rank finished '{stage}' in {seconds:.0f} s. {fix}"
        if missing:
            missing_ranks = diagnosis.describe_ranks(missing, self._ctx.hosts)
            text = f"{missing_ranks} did not reach '{stage}' in {seconds:.0f} s."
            text += " Check this node (top, dmesg, its storage)."
        if self._ctx.rank == arrived[0]:
            print(f"{diagnosis.FAILURE}  {text}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one exits
        os._exit(1)
