"""The phase and the optimizer step of this process, and the time in each phase."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

import torch

PHASES = ("start", "data", "forward", "backward", "update", "save", "evaluation", "end")
STEP_PHASES = ("data", "forward", "backward", "update")
MAX_STEP_DURATIONS = 512
NO_HOOK = "-"


class PhaseClock:
    """Tracks the phase and step of this rank's loop, and the seconds spent in each phase.

    Args:
        device: if it is an accelerator, forward passes are timed on the device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds_at_last_take = dict.fromkeys(PHASES, 0.0)
        self.progress_count = 0
        self.step = 0
        self.step_durations: deque[float] = deque(maxlen=MAX_STEP_DURATIONS)  # seconds of the latest steps
        self.phase = "start"
        self.hook = NO_HOOK  # of model.py, in which an evaluation is
        self._counted_until = time.perf_counter()
        self._step_started_at = 0.0
        self._events: list[tuple[str, torch.Event]] | None = None  # where phases begin on an accelerator
        if device and device.type != "cpu":
            self._events = []
        self.enter_phase("start")

    @property
    def last_completed_step(self) -> int:
        """Return the last optimizer step that is complete. Within a step it is the one before."""
        if self.phase in STEP_PHASES:
            return self.step - 1
        return self.step

    def enter_hook(self, hook: str) -> None:
        """Show that the evaluation is in this function of model.py, until a phase is entered."""
        self.hook = hook
        self.progress_count += 1

    def enter_phase(self, phase: str) -> None:
        """Enter a phase."""
        self._count_time()
        self.phase = phase
        self.hook = NO_HOOK
        self.progress_count += 1
        if phase in ("forward", "backward"):
            self._record_device_event(phase)

    def begin_step(self, step: int) -> None:
        """Begin optimizer step `step` (from 1), in the data phase."""
        now = self._count_time()  # the time up to now belongs to the previous step
        if self._step_started_at:
            self.step_durations.append(now - self._step_started_at)
        else:
            self._record_device_event("update")
        self._step_started_at = now
        self.step = step
        self.phase = "data"
        self.progress_count += 1

    def pause_steps(self) -> None:
        """Leave the training steps, for an evaluation or the end of an epoch."""
        self._step_started_at = 0.0
        self._record_device_event("pause")

    def seconds_by_phase(self) -> dict[str, float]:
        """Return the seconds so far in each phase."""
        self._count_time()
        return dict(self._seconds)

    def take_step_times(self) -> Callable[[], tuple[float, float, float]]:
        """Return a function that returns the seconds of this rank since the last call.

        The seconds of an accelerator are its own, and the function waits until the accelerator has reached this call.

        Returns:
            A function without arguments. It returns the seconds in training steps, in waits for data and in forward
            passes.
        """
        spent = self.seconds_by_phase()
        before = self._seconds_at_last_take
        self._seconds_at_last_take = spent
        data, forward, *other_phases = [spent[phase] - before[phase] for phase in STEP_PHASES]
        if self._events is None:
            host_times = (data + forward + sum(other_phases), data, forward)
            return lambda: host_times
        self._record_device_event("update")
        events = self._events
        self._events = events[-1:]  # the next log window begins there

        def read_device_times() -> tuple[float, float, float]:
            events[-1][1].synchronize()
            in_steps = 0.0
            forward_seconds = 0.0
            for (phase, begin), (next_phase, end) in itertools.pairwise(events):
                seconds = begin.elapsed_time(end) / 1000
                if phase != "pause":
                    in_steps += seconds
                if (phase, next_phase) == ("forward", "backward"):
                    forward_seconds += seconds
            return in_steps, data, forward_seconds

        return read_device_times

    def _count_time(self) -> float:
        """Count the time up to now for the current phase. Returns the time."""
        before = self._counted_until
        self._counted_until = time.perf_counter()
        self._seconds[self.phase] += self._counted_until - before
        return self._counted_until

    def _record_device_event(self, phase: str) -> None:
        """Queue a time stamp on an accelerator, at which this phase begins."""
        if self._events is not None:
            event = torch.Event(enable_timing=True)
            event.record()
            self._events.append((phase, event))

    def close(self) -> None:
        """Enter the phase "end". Call this when the rank has finished, or has reported its failure."""
        self.enter_phase("end")
        self._events = None
