"""Decisions that all ranks make together in training: to stop or to save.

A vote is read a few steps after it began, so that no rank waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

SECONDS_BETWEEN_VOTES = 0.25
MAX_STEPS_BETWEEN_VOTES = 32
RANKS_PER_INTERVAL = 1024  # more ranks vote less often, since gloo passes a vote from rank to rank around a ring


class Vote(NamedTuple):
    """A vote says what one rank wants. All ranks decide by the maximum of their votes."""

    stop: bool = False  # a signal came, or the time is up
    save: bool = False  # a checkpoint is due


class Stopped(Exception):
    """The ranks have agreed to stop. All of them raise this at the same step, and `train.run_training` catches it."""


class Consensus:
    """Lets the ranks agree by one small all-reduce, which starts at one step and is read a few steps later.

    About 0.25 s pass between votes, or 0.25 s per 1024 ranks. Each vote also agrees on the number of steps between the
    next two votes: the maximum of what the ranks propose. So all ranks vote at the same steps.

    Args:
        vote: returns what this rank wants. It has to ask again until its request is met.
        group: the control group, a gloo group.
    """

    def __init__(self, vote: Callable[[], Vote], group: dist.ProcessGroup | None) -> None:
        self._vote = vote
        self._group = group
        self._interval_factor = max(1, dist.get_world_size(group) / RANKS_PER_INTERVAL)
        self._reset()

    def _reset(self) -> None:
        self._steps_between_votes = 1
        self._steps_since_vote = 0
        self._vote_started_at = time.monotonic()
        self._pending_votes: tuple[torch.Tensor, dist.Work | None] | None = None

    def step(self) -> bool:
        """Count a step. If a vote is due, read the earlier vote and start another one.

        All ranks call this in each step of training and of an evaluation.

        Returns:
            Whether the earlier vote asks for a save. The answer is the same on all ranks.

        Raises:
            Stopped: if the ranks have agreed to stop.
        """
        self._steps_since_vote += 1
        if self._steps_since_vote < self._steps_between_votes:
            return False
        now = time.monotonic()
        seconds_per_step = (now - self._vote_started_at) / self._steps_since_vote
        self._vote_started_at = now
        self._steps_since_vote = 0
        is_save_due = self._finish_vote()
        proposed_steps = self._propose_steps_between_votes(seconds_per_step)
        self._start_vote(proposed_steps)
        return is_save_due

    def vote_and_wait(self) -> None:
        """Finish the vote under way, vote again, and wait for all ranks.

        Requests to save are ignored here. They stay due, and a later vote repeats them.

        Raises:
            Stopped: if the ranks have agreed to stop.
        """
        self._finish_vote()
        self._start_vote(steps_between_votes=1)
        self._finish_vote()
        self._reset()

    def _propose_steps_between_votes(self, seconds_per_step: float) -> int:
        steps = min(MAX_STEPS_BETWEEN_VOTES, SECONDS_BETWEEN_VOTES / max(seconds_per_step, 1e-6))
        return max(1, int(self._interval_factor * steps))

    def _start_vote(self, steps_between_votes: int) -> None:
        wish = self._vote()
        votes = torch.tensor([wish.stop, wish.save, steps_between_votes], dtype=torch.int64)
        work = None
        if dist.get_world_size(self._group) > 1:
            work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending_votes = (votes, work)

    def _finish_vote(self) -> bool:
        """Wait for the vote under way, and adopt the number of steps that it agreed on. Returns whether to save."""
        if self._pending_votes is None:
            return False
        votes, work = self._pending_votes
        if work:
            work.wait()
        stop, save, self._steps_between_votes = votes.tolist()
        if stop:
            self._reset()
            raise Stopped
        return bool(save)


def is_every(interval: int, number: int) -> bool:
    """Return whether so many completed steps or epochs are a multiple of the interval. An interval of 0 means never."""
    return interval > 0 and number > 0 and number % interval == 0
