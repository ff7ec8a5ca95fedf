"""One attempt of a run: what every part of it shares."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from config import TrainingConfig
from utils.clock import Clock
from utils.distributed.collectives import broadcast_json
from utils.distributed.context import DistributedContext
from utils.run.folder import RunFolder
from utils.signals import STOP

SECONDS_AFTER_RANK_0 = 5.0  # for programs beside other ranks to end


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, from `open_run`."""

    config: TrainingConfig
    ctx: DistributedContext
    run: RunFolder
    clock: Clock
    began: float  # when its process started, by time.monotonic
    logger: logging.Logger

    def finish_companions(self) -> None:
        """Wait for the programs beside training, on all ranks, for a limited time. Call it after the last write."""
        companions = self.run.companions
        tick = lambda: self.clock.enter("save")  # noqa: E731 - a long upload is not a hang
        self.run.mark_ended()
        if companions and self.ctx.is_main:
            seconds = math.inf
            seconds = self.config.hang_timeout or seconds  # extra: watch
            companions.finish(seconds, tick)
        broadcast_json(None, self.ctx)  # other ranks wait here, where `timeout` does not apply
        if companions and not self.ctx.is_main:  # which rank 0's have waited for
            companions.finish(SECONDS_AFTER_RANK_0, tick)

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether this rank got a stop signal, or max_time is over."""
        is_time_up = 0 < self.config.max_time < (time.monotonic() - self.began) / 60
        return bool(STOP.received) or is_time_up
