"""Where each rank is: a small file of its own that all others read, a thread that looks, and one report when a rank
stands still.

A rank's loop writes a counter, its step and its phase; its thread writes a beat twice a second. Who looks compares
numbers, never
clocks of other machines. A beat that stands is a rank that was stopped, killed or cut off; a counter that stands beside
a moving
beat is a rank that waits or hangs. Guilty is the first of these, else the rank that is least far.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from utils.clock import PHASES, Clock

UNJUDGED = ("start", "end")  # a rank may stay there, at work, without a word
# of the thread: beat, is debugged; of the loop: counter, step, phase, pid
BEAT, PLACE = (
    struct.Struct("=qq"),
    struct.Struct("=qqqq"),
)
SECONDS_BETWEEN_BEATS = 0.5
SECONDS_OF_A_LOOK = 1.5  # in which a living rank's beat moves
SECONDS_FOR_STACKS, SECONDS_OF_A_LAST_WORD = 2.0, 10.0
LEAST_LIMIT, FIRST_LIMIT = 5.0, 60.0  # seconds without progress before a report; FIRST: before steps were measured
STEPS_TO_LEARN, STEPS_KEPT = 8, 512
DEBUGGERS = (b'/pdb.py"', b'/bdb.py"', b'/pydevd.py"')


class Place(NamedTuple):
    """Where a rank is, as its file says."""

    beat: int
    is_debugged: int
    counter: int
    step: int  # the optimizer step under way, from 1
    phase: str
    pid: int


def read_place(file: Path) -> Place | None:
    """None where there is none."""
    try:
        data = file.read_bytes()
        beat, is_debugged = BEAT.unpack_from(data, 0)
        counter, step, phase, pid = PLACE.unpack_from(data, BEAT.size)
        return Place(beat, is_debugged, counter, step, PHASES[phase], pid)
    except (OSError, struct.error, IndexError):
        return None


class Watch(Clock):
    """A clock that others can read, and the thread that looks after all ranks.

    Args:
        folder: of all ranks' files; on storage that all nodes see.
        hosts: of each rank.
        hang_timeout: seconds without progress after which `end` is called; 0: never.
        report: takes the sentence and the stacks, once a hang, on the lowest rank that is alive.
        end: takes the sentence, the stacks and the rank that holds up the others, None where another rank reports it;
            does not return.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        hosts: tuple[str, ...],
        hang_timeout: float,
        report: Callable[[str, str], None],
        end: Callable[[str, str, int | None], None],
    ) -> None:
        super().__init__()
        self._folder, self._rank, self._hosts, self._hang_timeout = folder, rank, hosts, hang_timeout
        self._report, self._end = report, end
        self.every_second: Callable[[], None] | None = None  # for the thread to call
        self._beat, self._stop, self._pid = 0, threading.Event(), os.getpid()
        self._counter_of_beat, self._stands_since, self._is_held = -1, 0.0, False  # held: by a debugger
        self._answered = ""  # the last question after this rank's stacks
        self._file = -1
        with contextlib.suppress(OSError):  # a full disk: the run goes on unwatched
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank{rank}"
            path.write_bytes(bytes(BEAT.size + PLACE.size))
            self._file = os.open(path, os.O_WRONLY)
        self.enter("start")
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        """As a clock's; others see it at once, and so where a rank is that is stopped, its thread too. About 2 us."""
        super().enter(phase)
        try:  # noqa: SIM105 -- contextlib.suppress takes 1 us more, four times a step
            os.pwrite(self._file, PLACE.pack(self.counter, self.step, self._phase, self._pid), BEAT.size)
        except OSError:  # a full disk; no file
            pass

    def close(self) -> None:
        """This rank is done, or has said what it failed of: nobody is to look for it."""
        if self._file >= 0:
            self.enter("end")
            self._stop.set()
            if threading.current_thread() is not self._thread:
                self._thread.join()
            os.close(self._file)
            self._file = -1
        self.every_second = self.on_enter = None  # what they hold, process groups among it, goes with the run

    def _write_beat(self) -> None:
        now = time.monotonic()
        if self.counter != self._counter_of_beat:
            self._counter_of_beat, self._stands_since = self.counter, now
        long = min(LEAST_LIMIT, self._hang_timeout or LEAST_LIMIT) / 2  # others look later
        self._is_held = now - self._stands_since > long and PHASES[self._phase] not in UNJUDGED and is_debugged()
        self._beat += 1
        self._write(BEAT.pack(self._beat, self._is_held), 0)

    def _write(self, data: bytes, offset: int) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, data, offset)

    @property
    def limit(self) -> float:
        """Seconds without progress that call for a report: 5 times the slowest hundredth of this run's steps, and never
        under 5."""
        durations = sorted(self._durations)
        if len(durations) < STEPS_TO_LEARN:
            return FIRST_LIMIT
        return max(LEAST_LIMIT, 5 * durations[int(0.99 * (len(durations) - 1))])

    # ---- the thread's side ----

    def _watch(self) -> None:
        counter, moved_at, reported = -1, time.monotonic(), -1
        is_second = False
        while not self._stop.wait(SECONDS_BETWEEN_BEATS):
            self._write_beat()
            is_second = not is_second
            if is_second and self.every_second:
                self.every_second()
            if self.counter != counter or self._is_held:
                counter, moved_at = self.counter, time.monotonic()
                continue
            if PHASES[self._phase] in UNJUDGED:
                continue
            standing = time.monotonic() - moved_at
            if standing > 2 * SECONDS_BETWEEN_BEATS:
                self._answer()
            if standing > self.limit and reported != counter and self._look(standing, is_end=False):
                reported = counter
            if 0 < self._hang_timeout < standing and not self._look(standing, is_end=True):
                moved_at = time.monotonic()

    def _answer(self) -> None:
        """Leave this rank's stacks where another rank asks for them."""
        with contextlib.suppress(OSError):
            asked = (self._folder / "ask").read_text()
            if asked != self._answered:
                self._answered = asked
                with (self._folder / f"stack{self._rank}").open("w") as file:
                    file.write(asked + "\n")
                    file.flush()
                    faulthandler.dump_traceback(file)

    def _look(self, standing: float, is_end: bool) -> bool:
        """Report, or end. False: nothing is to be ended, since somebody goes on, or looks at a rank with a debugger."""
        places, standing_ranks, is_moving = look_twice(self._folder, len(self._hosts), self._beats_on)
        if is_moving or any(place and place.is_debugged for place in places):
            return False
        alive = [rank for rank in range(len(places)) if rank not in standing_ranks]
        is_reporter = not alive or alive[0] == self._rank
        if not is_reporter and not is_end:
            return True
        text, guilty = verdict(places, standing_ranks, self._hosts, standing)
        stacks = self._ask_for_stacks(len(places), alive) if is_reporter else ""
        # the one that reports asks for this rank's stacks; torchrun may end this one meanwhile
        if is_end and not is_reporter:
            ends = time.monotonic() + SECONDS_OF_A_LAST_WORD
            while time.monotonic() < ends:
                time.sleep(SECONDS_BETWEEN_BEATS / 2)
                self._beats_on()
        if is_end:
            self._end(text, stacks, guilty if is_reporter else None)
        else:
            self._report(text, stacks)
        return True

    def _beats_on(self) -> None:
        """While this thread waits: it beats on, and answers."""
        self._write_beat()
        self._answer()

    def _ask_for_stacks(self, ranks: int, alive: list[int]) -> str:
        question, found = f"{self._rank}-{self._beat}-{os.getpid()}", []
        with contextlib.suppress(OSError):
            (self._folder / "ask").write_text(question)
            self._answer()
            ends, is_answered = time.monotonic() + SECONDS_FOR_STACKS, False
            while time.monotonic() < ends and not is_answered:
                is_answered = all(self._stack_of(rank, question) for rank in alive)
                time.sleep(SECONDS_BETWEEN_BEATS / 2)  # in which a stack that was begun is written
                self._beats_on()
        for rank in range(ranks):
            found.append(
                f"--- rank {rank} on {self._hosts[rank]}\n{self._stack_of(rank, question) or 'gives no stack'}".rstrip()
            )
        return "\n".join(found)

    def _stack_of(self, rank: int, question: str) -> str:
        """What the rank answered; empty where it has not."""
        try:
            asked, _, stack = (self._folder / f"stack{rank}").read_text().partition("\n")
        except OSError:
            return ""
        return stack if asked == question else ""


def look_twice(
    folder: Path, ranks: int, meanwhile: Callable[[], None] = lambda: None
) -> tuple[list[Place | None], set[int], bool]:
    """The ranks' places, which ranks' beats stand, and whether any rank's counter moves: read twice, 1.5 s apart.

    A rank that has said its end does not stand.
    """
    before = [read_place(folder / f"rank{rank}") for rank in range(ranks)]
    ends = time.monotonic() + SECONDS_OF_A_LOOK
    while time.monotonic() < ends:
        time.sleep(SECONDS_BETWEEN_BEATS / 2)
        meanwhile()
    after = [read_place(folder / f"rank{rank}") for rank in range(ranks)]
    standing = {
        rank
        for rank, (old, new) in enumerate(zip(before, after, strict=True))
        if new is None or (old is not None and new.beat == old.beat and new.phase != "end")
    }
    is_moving = any(old and new and old.counter != new.counter for old, new in zip(before, after, strict=True))
    return after, standing, is_moving


def verdict(
    places: list[Place | None], standing_ranks: set[int], hosts: tuple[str, ...], seconds: float
) -> tuple[str, int]:
    """One sentence on who holds up all others, and the first rank that does."""
    named, guilty = [], min(standing_ranks, default=0)
    for rank in sorted(standing_ranks):
        place = places[rank]
        where = f"in {place.phase} of step {place.step}" if place else "somewhere"
        named.append(
            f"rank {rank} on {hosts[rank]} stands still {where} (process {place.pid if place else '?'}: stopped, killed"
            " or cut off)"
        )
    known = [(place.step, PHASES.index(place.phase), rank) for rank, place in enumerate(places) if place]
    if not named and known:
        least = min(known)[:2]
        last = [rank for step, phase, rank in known if (step, phase) == least]
        guilty = last[0]
        where = f"in {PHASES[least[1]]} of step {least[0]}"
        if len(last) == len(known) and len(known) > 1:
            named = [f"all ranks wait {where}: the network between them, or a collective that not all of them called"]
        else:
            named = [f"rank {rank} on {hosts[rank]} hangs {where} (process {places[rank].pid})" for rank in last]
    return f"no progress for {seconds:.0f} s: " + "; ".join(named or ["no rank can be seen"]), guilty


def is_debugged() -> bool:
    """Whether somebody looks into this process: pdb or an IDE in its main thread, or a tracer (gdb, strace).

    For a thread that stands: to look at the stacks of one that runs crashes the process, once in 150,000 looks, be it
    sys._current_frames
    (CPython 3.11 makes frame objects of what is being torn down) or faulthandler (gloo's threads make thread states
    without the GIL).
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(buffering=0) as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        main = f"{threading.main_thread().ident:016x}".encode()
        stacks = [stack for stack in file.read().split(b"\n\n") if main in stack.partition(b"\n")[0]]
        if any(name in stack for stack in stacks for name in DEBUGGERS):
            return True
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except OSError:
        return False
