"""Finds ranks that hang: a thread of each rank reads the files in which all ranks publish their phase and step.

A rank's loop writes a counter, its step and its phase; its thread writes a heartbeat twice a second. The reader
compares numbers, never clocks of other machines. If the heartbeat stops, the rank was stopped, killed or cut off; if
only the counter stops, the rank waits or hangs. Ranks without a heartbeat are reported as the cause, else the rank
that is furthest behind. Under a debugger use --hang_timeout 0.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path

from utils.clock import PHASES, Clock, Place, read_place

UNJUDGED = ("start", "end")  # phases that may take long
SECONDS_BETWEEN_BEATS = 0.5
SECONDS_OF_A_LOOK = 1.5  # in which the beat of a live rank changes
SECONDS_FOR_BLAME = 3.0  # the rank that reports a hang ends this much earlier: torchrun blames the first
LEAST_LIMIT, FIRST_LIMIT = 5.0, 60.0  # seconds without progress before a report; FIRST: before steps were measured
STEPS_TO_LEARN = 8


class Watchdog:
    """A thread that watches all ranks. A rank without progress writes its stacks to `stack<rank>`.

    Args:
        clock: of this rank; its file is in `folder`.
        folder: holds the files of all ranks; on storage that all nodes share.
        hosts: of each rank.
        hang_timeout: seconds without progress after which `end` is called; 0: never.
        every_second: called by the thread.
        report: called with the message and the stacks, once per hang, on the lowest live rank.
        end: called with the message, the stacks and the rank that hangs (None: another rank reports it); never returns.
    """

    def __init__(
        self,
        clock: Clock,
        folder: Path,
        rank: int,
        hosts: tuple[str, ...],
        hang_timeout: float,
        every_second: Callable[[], None],
        report: Callable[[str, str], None],
        end: Callable[[str, str, int | None], None],
    ) -> None:
        self._clock, self._folder, self._rank, self._hosts = clock, folder, rank, hosts
        self._hang_timeout, self._every_second, self._report, self._end = hang_timeout, every_second, report, end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching: this rank has finished or has reported its failure."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._clock.close()

    @property
    def limit(self) -> float:
        """Seconds without progress before a report: 5 times the 99th percentile of the step times, at least 5."""
        durations = sorted(self._clock.durations)
        if len(durations) < STEPS_TO_LEARN:
            return FIRST_LIMIT
        return max(LEAST_LIMIT, 5 * durations[int(0.99 * (len(durations) - 1))])

    def _watch(self) -> None:
        counter, moved_at, dumped, reported, is_second = -1, time.monotonic(), -1, -1, False
        while not self._stop.wait(SECONDS_BETWEEN_BEATS):
            self._clock.beat()
            is_second = not is_second
            if is_second:
                self._every_second()
            if self._clock.counter != counter:
                counter, moved_at = self._clock.counter, time.monotonic()
                continue
            if self._clock.phase in UNJUDGED:
                continue
            standing, limit = time.monotonic() - moved_at, self.limit
            shortest = min(limit, self._hang_timeout or limit)
            if standing > shortest / 2 and dumped != counter:
                self._dump_stacks()
                dumped = counter
            if standing > limit and reported != counter and self._look(standing, is_end=False):
                reported = counter
            if 0 < self._hang_timeout < standing and not self._look(standing, is_end=True):
                moved_at = time.monotonic()

    def _dump_stacks(self) -> None:
        """Call only if the loop hangs: dumping the stacks of running threads (gloo's) can crash the process."""
        with contextlib.suppress(OSError), (self._folder / f"stack{self._rank}").open("w") as file:
            faulthandler.dump_traceback(file)

    def _look(self, standing: float, is_end: bool) -> bool:
        """Report or end. Returns False if some rank still makes progress."""
        places, standing_ranks, is_moving = look_twice(self._folder, len(self._hosts), self._clock.beat)
        if is_moving:
            return False
        alive = [rank for rank in range(len(places)) if rank not in standing_ranks]
        is_reporter = not alive or alive[0] == self._rank
        text, hanging = verdict(places, standing_ranks, self._hosts, standing)
        if is_end and not is_reporter:
            time.sleep(SECONDS_FOR_BLAME)
            self._end(text, "", None)
        elif is_end:
            self._end(text, self._stacks(), hanging)
        elif is_reporter:
            self._report(text, self._stacks())
        return True

    def _stacks(self) -> str:
        found = []
        for rank, host in enumerate(self._hosts):
            try:
                stack = (self._folder / f"stack{rank}").read_text()
            except OSError:
                stack = "wrote no stack"
            found.append(f"--- rank {rank} on {host}\n{stack}".rstrip())
        return "\n".join(found)


def look_twice(
    folder: Path, ranks: int, meanwhile: Callable[[], None] = lambda: None
) -> tuple[list[Place | None], set[int], bool]:
    """All ranks' places, the ranks whose beat has stopped, and whether any counter moves: read twice, 1.5 s apart."""
    before = [read_place(folder / f"rank{rank}") for rank in range(ranks)]
    ends = time.monotonic() + SECONDS_OF_A_LOOK
    while time.monotonic() < ends:
        time.sleep(SECONDS_BETWEEN_BEATS / 2)
        meanwhile()
    after = [read_place(folder / f"rank{rank}") for rank in range(ranks)]
    pairs = list(zip(before, after, strict=True))
    standing = {
        rank
        for rank, (old, new) in enumerate(pairs)
        if new is None or (old is not None and new.beat == old.beat and new.phase != "end")
    }
    return after, standing, any(old and new and old.counter != new.counter for old, new in pairs)


def verdict(places: list[Place | None], standing: set[int], hosts: tuple[str, ...], seconds: float) -> tuple[str, int]:
    """One sentence on what blocks the ranks, and the first rank that does.

    Args:
        standing: ranks whose beat has stopped.
    """
    known = [(place.step, PHASES.index(place.phase), rank) for rank, place in enumerate(places) if place]
    if standing:
        hanging = min(standing)
        named = [
            f"rank {rank} on {hosts[rank]} was stopped, killed or cut off"
            + (f" in {place.phase} of step {place.step} (process {place.pid})" if (place := places[rank]) else "")
            for rank in sorted(standing)
        ]
    else:
        step, phase, _ = min(known)
        last = [rank for each, other, rank in known if (each, other) == (step, phase)]
        hanging, where = last[0], f"in {PHASES[phase]} of step {step}"
        named = [f"rank {rank} on {hosts[rank]} hangs {where} (process {places[rank].pid})" for rank in last]
        if len(last) == len(known) > 1:
            named = [f"all ranks wait {where}: the network between them, or a collective that not all of them called"]
    return f"no progress for {seconds:.0f} s: " + "; ".join(named), hanging
