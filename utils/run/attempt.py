"""One attempt of a run: what every part of it shares."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass

from config import TrainingConfig
from utils.clock import PhaseClock
from utils.distributed.context import DistributedContext
from utils.run.folder import RunFolder
from utils.signals import STOP_HANDLER


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, from `open_run`."""

    config: TrainingConfig
    ctx: DistributedContext
    run: RunFolder
    clock: PhaseClock
    started_at: float  # when its process started, by time.monotonic
    logger: logging.Logger
    resources: ExitStack  # what ends or is closed with the attempt, also after a failure

    @property
    def is_stop_requested(self) -> bool:
        """Whether this rank got a stop signal, or max_time is over."""
        is_time_up = 0 < self.config.max_time < (time.monotonic() - self.started_at) / 60
        return bool(STOP_HANDLER.received) or is_time_up
