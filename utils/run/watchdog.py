"""Finds ranks that hang: a thread reads the files in which all ranks publish their phase and step.

A rank's loop writes a counter, its step and its phase; its thread writes a heartbeat twice a second. The reader
compares numbers, never clocks of other machines. If the heartbeat stops, the rank was stopped, killed or cut off; if
only the counter stops, the rank waits or hangs. Ranks without a heartbeat are reported as the cause, else the rank
that is furthest behind. The lowest live rank reads the files of all ranks. Under a debugger use --hang_timeout 0.

A rank whose peer died may wait in C, for the GPU or in a collective: no exception is raised, and no signal handler of
Python runs. So a rank without progress looks once a second, in every phase, at the next rank, at the next one on its
own host and at status.json. It ends if the run has failed or such a rank is gone: its process has ended, is stopped
for `hang_timeout`, or its launcher has reported its end. The beats of another host only prove life: a stalled storage
hides them, so they may be absent for two minutes. The number of these reads does not depend on the number of ranks.

Seconds are counted in ticks of this process's own loop: time in which it was suspended does not count.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from utils.clock import PHASES, STEP_PHASES, Clock, Place, read_place
from utils.signals import has_arrived

STOPPED = "after a stop signal"
UNJUDGED = ("start", "end")  # phases that may take long: a rank that beats is not ended
SECONDS_BETWEEN_BEATS = 0.5
SECONDS_BETWEEN_PUBLISHED = 1.0
SECONDS_OF_A_TICK = 1.0  # at most: after a longer one this process was suspended, or its storage was stalled
SECONDS_OF_A_LOOK = 1.5  # in which the beat of a live rank on this host changes
SECONDS_OF_A_LONG_LOOK = 4.0  # the same for another host, which sees it later
SECONDS_OF_SILENCE = 120.0  # of another host, until its ranks are lost: an NFS client repeats a request after 60 s
SECONDS_TO_PUBLISH = 2.5
SECONDS_TO_SUSPECT = 1.0  # without progress, before this rank looks at the next one
SECONDS_FOR_BLAME = 4.0  # the rank that reports a hang ends this much earlier: torchrun blames the first
SECONDS_TO_STOP, STEPS_TO_STOP = 20.0, 3  # the longer one may pass after a stop signal: torchrun waits 30 s
LEAST_LIMIT, FIRST_LIMIT = 5.0, 60.0  # seconds without progress before a report; FIRST: before steps were measured
STEPS_TO_LEARN = 8
GONE, SUSPENDED = ("Z", "X"), ("T", "t")  # states of a process


class Watchdog:
    """A thread that watches all ranks. A rank without progress writes its stacks to `stack<rank>`.

    Args:
        clock: of this rank; its file is in `folder`.
        folder: holds the files of all ranks; on storage that all nodes share.
        hosts: of each rank.
        hang_timeout: seconds without progress after which `end` is called; 0: never.
        every_second: called by a second thread, which may wait for the storage; once more at the end.
        report: called with the message and the stacks, once per hang, on the lowest live rank.
        end: called with the message, the stacks and the rank that hangs (None: another rank reports it); never returns.
        failure: returns the error that another rank has reported, or an empty string.
        lose: called when the next rank is gone; returns if it is not.
        preempt: called if this rank does not end after a stop signal before the first step.
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
        failure: Callable[[], str] = str,
        lose: Callable[[int], None] = lambda _: None,
        preempt: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock, self._folder, self._rank, self._hosts = clock, folder, rank, hosts
        self._hang_timeout, self._every_second, self._report, self._end = hang_timeout, every_second, report, end
        self._failure, self._lose, self._preempt = failure, lose, preempt
        here = [each for each, host in enumerate(hosts) if host == hosts[rank]]
        # each live rank is seen by the one before it, also if a whole host is gone
        self._next = {(rank + 1) % len(hosts), here[(here.index(rank) + 1) % len(here)]} - {rank}
        self._beats: dict[int, tuple[int, float]] = {}  # of these ranks: the latest beat, and since when it stands
        self._time, self._ticked_at = 0.0, time.monotonic()  # seconds in which this process ran
        self._published_at, self._looked_at, self._asked_at = 0.0, 0.0, math.inf
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._watch, self._publish)]
        for thread in self._threads:
            thread.start()

    def stand_down(self) -> None:
        """End nothing from now on: this rank has failed and looks for the cause. The heartbeat continues."""
        self._hang_timeout = 0.0

    def close(self) -> None:
        """Stop watching: this rank has finished or has reported its failure."""
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._clock.close()

    @property
    def completed(self) -> int:
        return self._clock.completed

    @property
    def limit(self) -> float:
        """Seconds without progress before a report: 5 times the 99th percentile of the step times, at least 5."""
        durations = sorted(self._durations)
        if len(durations) < STEPS_TO_LEARN:
            return FIRST_LIMIT
        return max(LEAST_LIMIT, 5 * durations[int(0.99 * (len(durations) - 1))])

    @property
    def _durations(self) -> list[float]:
        """Of the latest steps; one that took longer than hang_timeout was suspended."""
        return [min(each, self._hang_timeout or each) for each in self._clock.durations]

    def _beat(self) -> None:
        """Count the time since the last call, and show that this process runs."""
        now = time.monotonic()
        self._time += min(SECONDS_OF_A_TICK, now - self._ticked_at)
        self._ticked_at = now
        self._clock.beat()

    def _publish(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN_PUBLISHED):
            self._clock.publish()
            self._published_at = self._time
            self._every_second()
        self._every_second()  # the last values, also of a run that is shorter than a second

    def _watch(self) -> None:
        counter, moved_at, dumped, reported = -1, 0.0, -1, -1
        while not self._stop.wait(SECONDS_BETWEEN_BEATS):
            self._beat()
            if has_arrived():
                self._asked_at = min(self._asked_at, self._time)
            if self._clock.counter != counter:
                counter, moved_at = self._clock.counter, self._time
                continue
            standing, limit = self._time - moved_at, self.limit
            # the last save counts, however long it takes
            is_over = self._clock.phase != "save" and self._time - max(moved_at, self._asked_at) > self._seconds_to_stop
            if self._hang_timeout and is_over:
                if self._clock.step == 0:
                    self._preempt()
                elif not self._look(standing, is_end=True, reason=STOPPED):
                    moved_at = self._time
            if self._hang_timeout and standing > SECONDS_TO_SUSPECT:
                self._look_at_peers()
            if self._clock.phase in UNJUDGED:
                continue
            shortest = min(limit, self._hang_timeout or limit)
            if standing > shortest / 2 and dumped != counter:
                self._dump_stacks()
                dumped = counter
            if standing > limit and reported != counter and self._look(standing, is_end=False):
                reported = counter
            is_over = 0 < self._hang_timeout < standing
            if is_over and not self._look(standing, is_end=True, reason=f"hang_timeout={self._hang_timeout:g}"):
                moved_at = self._time

    @property
    def _seconds_to_stop(self) -> float:
        """How long a rank may stand after a stop signal; before the first step there is nothing to save."""
        longest = max(self._durations, default=FIRST_LIMIT / STEPS_TO_STOP) if self._clock.step else 0.0
        return max(SECONDS_TO_STOP, STEPS_TO_STOP * longest)

    def _look_at_peers(self) -> None:
        """Once a second: end this process if the run has failed or one of the next ranks is gone."""
        now = self._time
        if now - self._looked_at < SECONDS_BETWEEN_PUBLISHED or not self._next:
            return
        if now - self._looked_at > 2 * SECONDS_OF_A_LOOK or now - self._published_at > SECONDS_TO_PUBLISH:
            self._beats.clear()  # this rank did not look, or its storage is slow and may hide what the others wrote
        self._looked_at = now
        if text := self._failure():
            if not self._stop.wait(SECONDS_FOR_BLAME / 2):
                self._end(text, "", None)
            return
        for peer in sorted(self._next):
            self._look_at(peer)

    def _look_at(self, peer: int) -> None:
        place, now = read_place(self._folder / f"rank{peer}"), self._time
        beat = place.beat if place else -1
        if peer not in self._beats or beat != self._beats[peer][0]:
            self._beats[peer] = beat, now
            return
        silent, is_here = now - self._beats[peer][1], self._hosts[peer] == socket.gethostname()
        if place is None:
            is_gone = silent > SECONDS_OF_SILENCE and (self._folder / f"rank{self._rank}").exists()
        elif place.phase == "end":
            is_gone = self._clock.phase in STEP_PHASES  # otherwise this rank may only be the last to finish
        elif is_here:
            state = state_of(place.pid)
            is_gone = state in GONE
            is_asked = now - self._asked_at > SECONDS_TO_STOP
            if state in SUSPENDED and (is_asked or silent > self._hang_timeout):
                self._end_for_stopped(silent, STOPPED if is_asked else f"hang_timeout={self._hang_timeout:g}")
        else:
            # a rank that loads its data with the GIL held does not beat
            longest = max(SECONDS_OF_SILENCE, self._hang_timeout * (place.phase == "start"))
            is_gone = silent > longest or has_reported(self._folder / f"ended-{self._hosts[peer]}", place.pid)
        if is_gone:
            self._lose(peer)

    def _end_for_stopped(self, silent: float, reason: str) -> None:
        """End the run if ranks are stopped, also in a phase in which they may take any time."""
        places, standing, _ = look_twice(self._folder, self._hosts, self._beat)
        if standing:
            text, hanging = verdict(places, standing, self._hosts, silent)
            self._end(f"{text} ({reason})", self._stacks(), hanging)

    def _dump_stacks(self) -> None:
        """Call only if the loop hangs: dumping the stacks of running threads (gloo's) can crash the process."""
        with contextlib.suppress(OSError), (self._folder / f"stack{self._rank}").open("w") as file:
            faulthandler.dump_traceback(file)

    def _look(self, standing: float, is_end: bool, reason: str = "") -> bool:
        """Report or end, or leave it to a lower rank. Returns False if some rank may still make progress."""
        is_moving = self._lower_rank_moves()
        if is_moving is not None:
            if is_end and not is_moving and reason == STOPPED:  # no signal may have reached the lower rank
                time.sleep(SECONDS_FOR_BLAME)
                self._end(f"no progress for {standing:.0f} s ({reason})", "", None)
            return not is_end
        places, standing_ranks, is_moving = look_twice(self._folder, self._hosts, self._beat)
        if is_moving or (is_end and self._time - self._published_at > SECONDS_TO_PUBLISH):
            return False
        text, hanging = verdict(places, standing_ranks, self._hosts, standing)
        if is_end:
            self._end(f"{text} ({reason})", self._stacks(), hanging)
        else:
            self._report(text, self._stacks())
        return True

    def _lower_rank_moves(self) -> bool | None:
        """Whether a lower live rank makes progress; None if there is none. Reads rank 0, then up to 15, 255, ..."""
        first, end = 0, 1
        while first < self._rank:
            ranks = range(first, min(end, self._rank))
            places, standing, is_moving = look_twice(self._folder, self._hosts, self._beat, ranks)
            if any(rank not in standing and places[rank].phase not in UNJUDGED for rank in ranks):
                return is_moving
            first, end = end, 16 * end
        return None

    def _stacks(self) -> str:
        found = []
        for rank, host in enumerate(self._hosts):
            try:
                stack = (self._folder / f"stack{rank}").read_text()
            except OSError:
                stack = "wrote no stack"
            found.append(f"--- rank {rank} on {host}\n{stack}".rstrip())
        return "\n".join(found)


def has_reported(file: Path, pid: int) -> bool:
    """Whether the launcher of another host has written to the file that this process of it has ended."""
    with contextlib.suppress(OSError):
        return str(pid) in file.read_text().split()
    return False


def state_of(pid: int) -> str:
    """The state of a process on this host, as in /proc: Z and X are gone, T and t stopped. Empty if it is unknown."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return "X"
    except OSError:  # another user's process, or no /proc
        return ""


def look_twice(
    folder: Path, hosts: tuple[str, ...], meanwhile: Callable[[], None] = lambda: None, ranks: range | None = None
) -> tuple[list[Place | None], set[int], bool]:
    """All ranks' places, the ranks whose beat has stopped, and whether any counter moves. `ranks`: of these only.

    All files are read twice, 1.5 s apart; those of ranks on other hosts without a new beat once more, after 4 s.
    """
    unseen, seen_s = ranks or range(len(hosts)), 0.0
    before = [read_place(folder / f"rank{rank}") if rank in unseen else None for rank in range(len(hosts))]
    after = list(before)
    for seconds in (SECONDS_OF_A_LOOK, SECONDS_OF_A_LONG_LOOK):
        while unseen and seen_s < seconds:  # counted, since this process may be suspended
            time.sleep(SECONDS_BETWEEN_BEATS / 2)
            seen_s += SECONDS_BETWEEN_BEATS / 2
            meanwhile()
        for rank in unseen:
            after[rank] = read_place(folder / f"rank{rank}")
        elsewhere = [rank for rank in unseen if hosts[rank] != socket.gethostname() and before[rank] and after[rank]]
        unseen = [rank for rank in elsewhere if before[rank].beat == after[rank].beat and after[rank].phase != "end"]
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
