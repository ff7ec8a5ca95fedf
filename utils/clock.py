"""Tracks the phase, optimizer step and time per phase of this process, in a file that other processes can read."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import struct
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch

PHASES = ("start", "data", "forward", "backward", "update", "save", "evaluation", "end")
INDEX = {phase: index for index, phase in enumerate(PHASES)}
STEP_PHASES = ("data", "forward", "backward", "update")
BEAT, PLACE = struct.Struct("=q"), struct.Struct("=qqqq")  # PLACE: counter, step, phase, pid
STEPS_KEPT = 512


class Place(NamedTuple):
    """The position of a rank, as read from its file."""

    beat: int  # of the watchdog thread
    counter: int  # number of phases entered
    step: int  # the current optimizer step, from 1
    phase: str
    pid: int


def read_place(file: Path) -> Place | None:
    """The position in the file; None if there is none."""
    try:
        data = file.read_bytes()
        counter, step, phase, pid = PLACE.unpack_from(data, BEAT.size)
        return Place(*BEAT.unpack_from(data), counter, step, PHASES[phase], pid)
    except (OSError, struct.error, IndexError):
        return None


class Clock:
    """The phase and step of this rank's loop, and the seconds spent in each phase.

    Args:
        file: shows the position to other processes, even while this one is stopped. None: no file.
        device: if it is CUDA, forward passes are timed on the device.
    """

    def __init__(self, file: Path | None = None, device: torch.device | None = None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)  # of this attempt
        self.seconds_again = dict.fromkeys(STEP_PHASES, 0.0)  # of these, in steps that an earlier attempt made
        self.counter = self.step = 0
        self.durations: deque[float] = deque(maxlen=STEPS_KEPT)  # seconds of the latest steps
        self._reached = 0  # the last step of earlier attempts
        self._phase, self._mark, self._step_began = 0, time.perf_counter(), 0.0
        self._events: list[tuple[str, torch.cuda.Event]] | None = [] if device and device.type == "cuda" else None
        self._forward_seen = 0.0
        self._beat, self._pid, self._path, self._file = 0, os.getpid(), file, -1
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk: the run continues without a watchdog
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(bytes(BEAT.size + PLACE.size))
                self._file = os.open(file, os.O_WRONLY)
        self.enter("start")

    @property
    def phase(self) -> str:
        return PHASES[self._phase]

    @property
    def completed(self) -> int:
        """The last optimizer step that is complete; that of this phase may be."""
        return self.step - (self.phase in STEP_PHASES)

    def enter(self, phase: str) -> None:
        """Enter a phase."""
        now = time.perf_counter()
        self._account(now - self._mark, self.seconds, self.seconds_again)
        self._mark, self._phase = now, INDEX[phase]
        self.counter += 1
        if self._events is not None and phase in ("forward", "backward"):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((phase, event))
        if self._file >= 0:
            try:  # noqa: SIM105 -- contextlib.suppress takes 1 us more, four times a step
                os.pwrite(self._file, PLACE.pack(self.counter, self.step, self._phase, self._pid), BEAT.size)
            except OSError:  # a full disk
                pass

    def begin_step(self, step: int) -> None:
        """Begin optimizer step `step` (from 1), in the data phase."""
        now = time.perf_counter()
        if self._step_began:
            self.durations.append(now - self._step_began)
        self._step_began = now
        self._account(now - self._mark, self.seconds, self.seconds_again)  # belongs to the previous step
        self._mark, self.step = now, step
        self._phase, self.counter = INDEX["data"], self.counter + 1

    def leave_steps(self) -> None:
        """Leave the training steps, for an evaluation or the end of an epoch."""
        self._step_began = 0.0

    def mark_reached(self, step: int) -> None:
        """Set the last step of earlier attempts; time in steps up to it is counted as recomputed."""
        self._reached = step

    def spent(self) -> tuple[dict[str, float], dict[str, float]]:
        """`seconds` and `seconds_again` up to now, including the current phase."""
        by_phase, again = dict(self.seconds), dict(self.seconds_again)
        self._account(max(0.0, time.perf_counter() - self._mark), by_phase, again)
        return by_phase, again

    def take_forward_seconds(self) -> float:
        """Seconds in forward passes since the last call. On CUDA this waits for the device."""
        if self._events is None:
            before, self._forward_seen = self._forward_seen, self.spent()[0]["forward"]
            return self._forward_seen - before
        events, self._events = self._events, []
        if events:
            events[-1][1].synchronize()
        pairs = [
            (a, b) for (phase, a), (then, b) in itertools.pairwise(events) if (phase, then) == ("forward", "backward")
        ]
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000

    def beat(self) -> None:
        """Show that the watchdog thread of this process is alive."""
        self._beat += 1
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, BEAT.pack(self._beat), 0)

    def publish(self) -> None:
        """Show the file to other hosts: NFS promises them what was written before a close. May wait for the storage."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(os.open(self._path, os.O_WRONLY))

    def close(self) -> None:
        """Call when this rank has finished, or has reported its failure."""
        self.enter("end")
        self._events = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _account(self, seconds: float, by_phase: dict[str, float], again: dict[str, float]) -> None:
        phase = PHASES[self._phase]
        by_phase[phase] += seconds
        if self.step <= self._reached and phase in again:
            again[phase] += seconds


def slowest(ranks: list[dict[str, float]]) -> tuple[int, float, str]:
    """The slowest rank of an interval, its time as a multiple of the median, and the cause: data or compute.

    Args:
        ranks: the seconds of each rank in "data" and "compute", without waits for other ranks.
    """
    totals = [each["data"] + each["compute"] for each in ranks]
    rank = max(range(len(totals)), key=totals.__getitem__)
    excess = {
        part: ranks[rank][part] - statistics.median_low(each[part] for each in ranks) for part in ("data", "compute")
    }
    return rank, totals[rank] / max(1e-9, statistics.median_low(totals)), max(excess, key=excess.get)
