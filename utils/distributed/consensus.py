"""Decisions that all ranks make together in training: to stop or to save. A vote is read a few steps after it began."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

SECONDS_BETWEEN_VOTES = 0.25
MAX_STEPS_BETWEEN_VOTES = 32
RANKS_PER_INTERVAL = 1024  # more ranks vote less often: gloo passes a vote from rank to rank, around all of them


class Vote(NamedTuple):
    """A vote says what one rank wants. All ranks decide by the maximum of their votes."""

    stop: bool = False  # a signal came, or the time is up
    save: bool = False  # a checkpoint is due


class Stopped(Exception):
    """The ranks have agreed to stop. All of them raise this exception at the same step of training or evaluation."""


class Consensus:
    """The ranks agree by one small all-reduce, which starts at one step and is read a few steps later.

    So ranks rarely wait for each other. The number of steps is the same on all ranks (the maximum of theirs); about
    0.25 s pass between votes, or 0.25 s per 1024 ranks. `vote_and_wait` waits for the slowest rank. Both
    `vote_and_wait` and `step` raise Stopped.

    Args:
        vote: returns this rank's vote; called repeatedly until its request is met.
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
        """Count a step, and read or start a vote if one is due. All ranks call it in each step, also of an evaluation.

        Returns:
            Whether to save, by an earlier vote. It is the same on all ranks.

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
        is_save_due = self._read_votes()
        steps = min(MAX_STEPS_BETWEEN_VOTES, SECONDS_BETWEEN_VOTES / max(seconds_per_step, 1e-6))
        steps_between_votes = max(1, int(self._interval_factor * steps))
        self._start_vote(steps_between_votes)
        return is_save_due

    def vote_and_wait(self) -> None:
        """Drop the vote under way, vote again and wait for all ranks.

        Only a request to stop is acted on: a save that is due stays due.

        Raises:
            Stopped: if the ranks have agreed to stop.
        """
        self._read_votes()
        self._start_vote(steps_between_votes=1)
        self._read_votes()
        self._reset()

    def _start_vote(self, steps_between_votes: int) -> None:
        votes = torch.tensor([*self._vote(), steps_between_votes])
        is_single = dist.get_world_size(self._group) == 1
        work = None
        if not is_single:
            work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending_votes = (votes, work)

    def _read_votes(self) -> bool:
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
