"""In which phase of which optimizer step this process is, and where its time went."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

PHASES = ("start", "data", "forward", "backward", "update", "save", "evaluation", "end")
INDEX = {phase: index for index, phase in enumerate(PHASES)}
STEP_PHASES = ("data", "forward", "backward", "update")
STEPS_KEPT = 512


class Clock:
    """In which phase of which step this rank's loop is, and the seconds it spent in each phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)  # of this attempt
        # of these, in steps that an earlier attempt had made already
        self.seconds_again = dict.fromkeys(STEP_PHASES, 0.0)
        self.reached = 0  # the last step of earlier attempts
        self.counter = self.step = 0
        self._phase, self._mark, self._step_began = 0, time.perf_counter(), 0.0
        self._durations: deque[float] = deque(maxlen=STEPS_KEPT)
        self.on_enter: Callable[[str], None] | None = None

    def enter(self, phase: str) -> None:
        """The loop goes on to this phase."""
        now = time.perf_counter()
        if self.step > self.reached:
            self.seconds[PHASES[self._phase]] += now - self._mark
        else:
            self._account(now - self._mark, self.seconds, self.seconds_again)
        self._mark = now
        self._phase = INDEX[phase]
        self.counter += 1
        if self.on_enter:
            self.on_enter(phase)

    def begin_step(self, step: int) -> None:
        """Optimizer step `step` begins here, with the wait for its data, which the loader enters: others hear of it
        then."""
        now = time.perf_counter()
        if self._step_began:
            self._durations.append(now - self._step_began)
        self._step_began = now
        self._account(now - self._mark, self.seconds, self.seconds_again)  # what came before belongs to the step before
        self._mark, self.step = now, step
        self._phase, self.counter = INDEX["data"], self.counter + 1

    def leave_steps(self) -> None:
        """What follows is no step: an evaluation, the end of an epoch."""
        self._step_began = 0.0

    def spent(self) -> tuple[dict[str, float], dict[str, float]]:
        """`seconds` and `seconds_again` up to now, the phase that is open included."""
        by_phase, again = dict(self.seconds), dict(self.seconds_again)
        self._account(max(0.0, time.perf_counter() - self._mark), by_phase, again)
        return by_phase, again

    def _account(self, seconds: float, by_phase: dict[str, float], again: dict[str, float]) -> None:
        phase = PHASES[self._phase]
        by_phase[phase] += seconds
        if phase in again and self.step <= self.reached:
            again[phase] += seconds


def slowest(shares: list[dict[str, float]]) -> tuple[int, float, str]:
    """The rank that took longest for its own part of an interval, how many times the median that was, and what of it:
    data or compute.

    Args:
        shares: of each rank, its seconds in "data" and in "compute"; none of them waits for another rank.
    """
    totals = [share["data"] + share["compute"] for share in shares]
    rank = max(range(len(totals)), key=totals.__getitem__)
    excess = {
        part: shares[rank][part] - statistics.median_low(share[part] for share in shares)
        for part in ("data", "compute")
    }
    return rank, totals[rank] / max(1e-9, statistics.median_low(totals)), max(excess, key=excess.get)
