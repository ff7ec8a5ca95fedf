"""--minutes: a budget of time becomes a number of optimizer steps, measured once, before the first step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from utils.batch import map_tensors
from utils.distributed.collectives import broadcast_json
from utils.run.attempt import Attempt

SHARE, LONGEST = 0.025, 30.0  # the steps that count take at least this part of the budget, or so many seconds
UNLIMITED = 10**9


def with_measured_steps(parts: Any, passes: Callable[[Any, Iterator], tuple[int, list[int]]]) -> Attempt:
    """The attempt with `max_steps` optimizer steps, which take `minutes` without evaluations and saves. Collective.

    Takes real steps, whose effects are undone as by a resume from step 0, so that the run equals one that was given
    this max_steps. Needs memory for a second state.

    Args:
        parts: the attempt, seams, loader, state and model of `train.Training`.
        passes: `train.compute_gradient`.
    """
    attempt, state, config = parts.attempt, parts.state, parts.attempt.config
    before = map_tensors(torch.clone, state.state_dict())
    state.schedule.end_after(UNLIMITED)
    state.plan(parts.loader.sampler)
    steps = taken_steps(parts, passes)
    next(steps)  # workers start, kernels are chosen
    budget, number, seconds = 60 * config.minutes, 1, 0.0
    while seconds < min(SHARE * budget, LONGEST):
        number, began = 2 * number, perf_counter()
        for _ in range(number):
            next(steps)
        state.norm.item()  # waits for the device
        seconds = broadcast_json(perf_counter() - began, attempt.ctx)
    state.load_state_dict(before)
    for forget in (state.interval.begin_read, attempt.clock.take, state.sums.take_useful_time):  # of these steps
        forget()
    max_steps = max(1, int(budget * number / seconds))
    text = "minutes=%g: a step takes %.4g ms, so max_steps=%d"
    attempt.logger.info(text, config.minutes, 1000 * seconds / number, max_steps)
    state.schedule.end_after(max_steps)
    return replace(attempt, config=replace(config, max_steps=max_steps))


def taken_steps(parts: Any, passes: Callable[[Any, Iterator], tuple[int, list[int]]]) -> Iterator[None]:
    """Take a step for each item, in one epoch after the other."""
    state = parts.state
    state.model.train()
    state.sums.running_stats.begin_epoch()
    for epoch in itertools.count():
        stream = parts.seams.counted(parts.loader.micro_batches(epoch))
        while not state.schedule.is_epoch_complete:
            samples, _ = passes(parts, stream)
            state.update_if_finite(samples)
            state.advance(samples)
            yield
        state.progress.epoch, state.progress.samples_in_epoch = epoch + 1, 0
