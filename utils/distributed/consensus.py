"""What all ranks agree on while they train: to stop, to save now. It costs no rank a wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

SECONDS_BETWEEN_VOTES = 0.25
MAX_STEPS_BETWEEN_VOTES = 32


class Decision(NamedTuple):
    """What a rank wishes, and what all agreed on: the largest of the wishes."""

    stop: int = 0  # 1: the time is up, 2: a signal came
    save: int = 0  # 1: a checkpoint is due


class Consensus:
    """One small word on the control group, started at one step and read `every` steps later, so that nobody waits.

    `every` is common to all ranks and such that about 0.25 s pass between two words.

    Args:
        wish: gives what this rank would have the others agree to; it repeats itself until that came.
        group: a gloo group, the control group.
    """

    def __init__(self, vote: Callable[[], Decision], group: dist.ProcessGroup) -> None:
        self._wish, self._group = vote, group
        self._reset()

    def _reset(self) -> None:
        self._every, self._steps, self._started_at = 1, 0, time.monotonic()
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None

    def step(self) -> Decision:
        """Call once for each step of training or evaluation, on all ranks alike; all hear the same at the same step."""
        self._steps += 1
        if self._steps < self._every:
            return Decision()
        now = time.monotonic()
        seconds_per_step = (now - self._started_at) / self._steps
        self._started_at, self._steps = now, 0
        heard = self._read()
        every = max(1, min(MAX_STEPS_BETWEEN_VOTES, int(SECONDS_BETWEEN_VOTES / max(seconds_per_step, 1e-6))))
        word = torch.tensor([*self._wish(), every])
        is_alone = dist.get_world_size(self._group) == 1
        self._pending = (
            word,
            None if is_alone else dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self._group, async_op=True),
        )
        return heard

    def flush(self) -> Decision:
        """Read the word that is under way, before something after which no old word may be heard: a save, the end of an
        epoch."""
        heard = self._read()
        self._reset()
        return heard

    def _read(self) -> Decision:
        if self._pending is None:
            return Decision()
        word, work = self._pending
        if work:
            work.wait()
        stop, save, self._every = word.tolist()
        return Decision(stop, save)


def is_every(interval: int, index: int) -> bool:
    """Whether the index-th epoch or step (from 0) ends an interval of so many; never where the interval is 0."""
    return interval > 0 and (index + 1) % interval == 0
