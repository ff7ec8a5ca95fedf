"""Tracks the phase, optimizer step and time per phase of this process."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

import torch

PHASES = ("start", "data", "forward", "backward", "update", "save", "evaluation", "end")
STEP_PHASES = ("data", "forward", "backward", "update")
STEPS_KEPT = 512
NO_FUNCTION = "-"


class PhaseClock:
    """The phase and step of this rank's loop, and the seconds spent in each phase.

    Args:
        device: if it is an accelerator, forward passes are timed on the device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._seconds, self._seconds_taken = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)  # taken: by `take`
        self.counter = self.step = 0
        self.durations: deque[float] = deque(maxlen=STEPS_KEPT)  # seconds of the latest steps
        self.phase, self._counted_until, self._step_began = "start", time.perf_counter(), 0.0
        self.function = NO_FUNCTION  # of model.py, in which an evaluation is
        self._events: list[tuple[str, torch.Event]] | None = [] if device and device.type != "cpu" else None
        self.enter("start")

    @property
    def last_completed_step(self) -> int:
        """The last optimizer step that is complete; that of this phase may be."""
        return self.step - (self.phase in STEP_PHASES)

    def enter_function(self, function: str) -> None:
        """Show that the evaluation is in this function of model.py, until a phase is entered."""
        self.function = function
        self.counter += 1

    def enter(self, phase: str) -> None:
        """Enter a phase."""
        self._count_time()
        self.phase, self.function = phase, NO_FUNCTION
        self.counter += 1
        if phase in ("forward", "backward"):
            self._mark_device(phase)

    def begin_step(self, step: int) -> None:
        """Begin optimizer step `step` (from 1), in the data phase."""
        now = self._count_time()  # belongs to the previous step
        if self._step_began:
            self.durations.append(now - self._step_began)
        else:
            self._mark_device("update")
        self._step_began = now
        self.step, self.phase, self.counter = step, "data", self.counter + 1

    def pause_steps(self) -> None:
        """Leave the training steps, for an evaluation or the end of an epoch."""
        self._step_began = 0.0
        self._mark_device("pause")

    def seconds_by_phase(self) -> dict[str, float]:
        """The seconds so far in each phase."""
        self._count_time()
        return dict(self._seconds)

    def take_step_times(self) -> Callable[[], tuple[float, float, float]]:
        """The seconds of this rank since the last call in training steps, in waits for data and in forward passes, as a
        function. Those of an accelerator are its own, and the function waits until it has reached this call."""
        spent, before = self.seconds_by_phase(), self._seconds_taken
        self._seconds_taken = spent
        data, forward, *other_phases = (spent[phase] - before[phase] for phase in STEP_PHASES)
        if self._events is None:
            return lambda: (data + forward + sum(other_phases), data, forward)
        self._mark_device("update")
        events, self._events = self._events, self._events[-1:]  # which is where the next interval begins

        def on_the_device() -> tuple[float, float, float]:
            events[-1][1].synchronize()
            pieces = [
                (a, then, begin.elapsed_time(end) / 1000) for (a, begin), (then, end) in itertools.pairwise(events)
            ]
            in_steps = sum(seconds for name, _, seconds in pieces if name != "pause")
            return in_steps, data, sum(seconds for *names, seconds in pieces if names == ["forward", "backward"])

        return on_the_device

    def _count_time(self) -> float:
        """Count the time up to now for the current phase. Returns the time."""
        before, self._counted_until = self._counted_until, time.perf_counter()
        self._seconds[self.phase] += self._counted_until - before
        return self._counted_until

    def _mark_device(self, phase: str) -> None:
        """Queue a time stamp on an accelerator, at which this phase begins."""
        if self._events is not None:
            event = torch.Event(enable_timing=True)
            event.record()
            self._events.append((phase, event))

    def close(self) -> None:
        """Call when this rank has finished, or has reported its failure."""
        self.enter("end")
        self._events = None
