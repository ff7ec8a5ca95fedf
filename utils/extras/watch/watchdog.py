"""Finds ranks that hang or are gone: a thread of each rank, from the moment the ranks have met.

Twice a second it sets this rank's status in the process group's store: a heartbeat, a counter of phases entered, the
step and the phase. If the heartbeat of a rank stops, it was stopped, killed or cut off; if only the counter stops, it
waits or hangs. Ranks whose heartbeat has stopped are reported as the cause, else the rank that is furthest behind. The
lowest live rank reads the statuses of all ranks.

A rank that is paused in a debugger counts phases as if it made progress, which all ranks see, so that none ends.

A rank whose peer died may wait in C, for the GPU or in a collective: no exception is raised, and no signal handler of
Python runs. So a rank without progress looks once a second, in every phase, at the next rank, at the next one on its
own host and at the first failure. It ends if the run has failed or such a rank is gone: its process has ended, is
stopped for `hang_timeout`, or is on another host and has no heartbeat for six seconds.

A store that does not answer is evidence about the process that hosts it, and about nobody else. If that is torchrun's
agent, it may be stopped: training goes on. Seconds are counted in ticks of this thread: time in which this process was
suspended does not count. This thread does not touch the storage, which may hang.
"""

from __future__ import annotations

import faulthandler
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch.distributed as dist

from utils.clock import NO_HOOK, STEP_PHASES, PhaseClock
from utils.distributed.context import DistributedContext
from utils.extras.watch.debuggers import is_in_debugger
from utils.extras.watch.heartbeat import NO_STACK, RankStatus, describe_hang, read_process_state
from utils.settings.errors import TrainingError
from utils.signals import STOP_HANDLER

T = TypeVar("T")
STOP_REASON = "A stop signal came before."
UNTIMED_PHASES = ("start", "end")  # phases that may take long: a rank with a heartbeat is not ended
SECONDS_BETWEEN_HEARTBEATS = 0.5
SECONDS_BETWEEN_CHECKS = 1.0
SECONDS_PER_TICK = 1.0  # at most: after a longer one this process was suspended
SECONDS_TO_OBSERVE = 2.0  # in which the heartbeat of a live rank changes
SECONDS_FOR_STORE_ANSWER = 2.0  # for the store
SECONDS_TO_CONNECT = 10.0  # to its host
SECONDS_TO_FIND_LOST_RANK = 20.0  # for which a rank that has failed waits
SECONDS_BETWEEN_SEARCHES = 0.01  # ranks look for lost ones one after the other, since each reads the statuses of all
SECONDS_UNTIL_LOST = 6.0  # of a rank on another host or of the store, until it is lost
SECONDS_BEFORE_PEER_CHECK = 1.0  # without progress, before this rank looks at the next one
SECONDS_BEFORE_PEERS_EXIT = 4.0  # the rank that reports a hang ends this much earlier: torchrun blames the first
SECONDS_TO_STOP, STEPS_TO_STOP = 20.0, 3  # the longer one may pass after a stop signal: torchrun waits 30 s
SECONDS_TO_REPORT_FAILURE = 60.0  # for a rank that has failed and reports it, on storage that may hang
# seconds without progress before a report; INITIAL: before steps were measured
MIN_REPORT_SECONDS = 5.0
INITIAL_REPORT_SECONDS = 60.0
MIN_STEPS_MEASURED = 8
HOOK_TIMEOUT_FACTOR = 10  # hang_timeout, for a function of model.py in an evaluation
GONE_STATES, SUSPENDED_STATES = ("Z", "X"), ("T", "t")  # states of a process


class Watchdog:
    """A thread that watches this rank and the next ones.

    Args:
        clock: of this rank.
        hang_timeout: seconds without progress after which the run is ended; 0: never.
        supervisor: a `RankSupervisor`, which reports and ends this process.
    """

    def __init__(self, clock: PhaseClock, ctx: DistributedContext, hang_timeout: float, supervisor: Any) -> None:
        self._clock, self._hang_timeout, self._supervisor = clock, hang_timeout, supervisor
        # a live rank that stands is reported as slow until then, and as hanging after it
        self._hang_report_after = hang_timeout / 2 or INITIAL_REPORT_SECONDS
        self._rank, self._hosts, self._heartbeats = ctx.rank, ctx.hosts, cast(Any, ctx.heartbeats)
        host_ranks = [rank for rank, host in enumerate(ctx.hosts) if host == ctx.host]
        # each live rank is seen by the one before it, also if a whole host is gone
        self._peers = {
            (ctx.rank + 1) % len(ctx.hosts),
            host_ranks[(host_ranks.index(ctx.rank) + 1) % len(host_ranks)],
            0,
        } - {ctx.rank}
        if self._heartbeats is None:
            self._peers = set()
        self._heartbeat, self._pid = 0, os.getpid()
        self._statuses: dict[int, RankStatus] = {}  # the latest status of each rank that was read
        # of the next ranks: the latest heartbeat, and since when it stands
        self._peer_heartbeats: dict[int, tuple[int, float]] = {}
        self._reported_failure: dict[str, Any] = {}  # the first one
        self._pending_call: Future | None = None  # of the store, awaited
        self._store_silent_since = math.inf  # since when the store does not answer
        self._is_store_gone = self._has_warned = False
        self._stack = NO_STACK
        self._lost_rank_request: Future[TrainingError | None] | None = None  # by the main thread
        self._running_time, self._ticked_at = 0.0, time.monotonic()  # seconds in which this process ran
        self._checked_at, self._stop_requested_at, self._failed_at = -math.inf, math.inf, math.inf
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        # pydevd pauses all other threads with the one that has reached a breakpoint
        self._thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
        self._thread.start()

    def disarm(self) -> None:
        """End nothing from now on: this rank has failed and looks for the cause. The heartbeats continue."""
        self._hang_timeout, self._failed_at = 0.0, self._running_time

    def close(self) -> None:
        """Stop watching: this rank has finished or has reported its failure."""
        self._stop_event.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._clock.close()
        self._tick()  # the status that the others see from now on
        if self._heartbeats:
            self._heartbeats.close()

    @property
    def seconds_before_report(self) -> float:
        """Seconds without progress before a report: 5 times the 99th percentile of the step times, at least 5."""
        durations = sorted(self._step_durations)
        if len(durations) < MIN_STEPS_MEASURED:
            return INITIAL_REPORT_SECONDS
        return max(MIN_REPORT_SECONDS, 5 * durations[int(0.99 * (len(durations) - 1))])

    @property
    def _step_durations(self) -> list[float]:
        """Of the latest steps; one that took longer than hang_timeout was suspended."""
        # a copy, since the deque may grow meanwhile
        return [min(step_s, self._hang_timeout or step_s) for step_s in tuple(self._clock.step_durations)]

    def _create_status(self) -> RankStatus:
        clock = self._clock
        return RankStatus(self._heartbeat, clock.progress_count, clock.step, clock.phase, self._pid, clock.hook)

    def _tick(self) -> None:
        """Count the time since the last call, and show that this process runs."""
        now = time.monotonic()
        self._running_time += min(SECONDS_PER_TICK, now - self._ticked_at)
        self._ticked_at = now
        self._heartbeat += 1
        if self._heartbeats:
            with suppress(dist.DistError):  # the store is gone: reading it shows the same
                self._heartbeats.set_status(self._create_status())

    def _watch(self) -> None:
        progress_count, progressed_at, dumped_at_count, reported_stage, paused_at_count = -1, 0.0, -1, (-1, False), -1
        while not self._stop_event.wait(SECONDS_BETWEEN_HEARTBEATS):
            self._tick()
            if STOP_HANDLER.received:
                self._stop_requested_at = min(self._stop_requested_at, self._running_time)
            if self._running_time - self._failed_at > SECONDS_TO_REPORT_FAILURE:
                self._supervisor.exit_unreported()
            if self._lost_rank_request and not self._lost_rank_request.done():
                self._lost_rank_request.set_result(self._find_lost_rank())
            if self._clock.progress_count == progress_count and is_in_debugger():
                if paused_at_count != progress_count:  # since the last look
                    self._supervisor.warn(
                        f"Rank {self._rank} is paused in a debugger. No rank is ended until this rank continues."
                    )
                paused_at_count = self._clock.progress_count = progress_count + 1
            if self._clock.progress_count != progress_count:
                progress_count, progressed_at = self._clock.progress_count, self._running_time
                continue
            seconds_standing, limit = self._running_time - progressed_at, self.seconds_before_report
            # the last save counts, however long it takes
            is_over = (
                self._clock.phase != "save"
                and self._running_time - max(progressed_at, self._stop_requested_at) > self._seconds_to_stop
            )
            if self._hang_timeout and is_over:
                if self._clock.step == 0:
                    self._supervisor.exit_preempted()
                elif not self._handle_stall(seconds_standing, ends_run=True, reason=STOP_REASON):
                    progressed_at = self._running_time
            if self._hang_timeout and seconds_standing > SECONDS_BEFORE_PEER_CHECK:
                self._check_peers()
            if self._clock.phase in UNTIMED_PHASES:
                continue
            shortest = min(limit, self._hang_timeout or limit)
            if seconds_standing > shortest / 2 and dumped_at_count != progress_count:
                self._dump_stacks()
                dumped_at_count = progress_count
            stage = progress_count, seconds_standing > self._hang_report_after
            if (
                seconds_standing > limit
                and reported_stage != stage
                and self._handle_stall(seconds_standing, ends_run=False)
            ):
                reported_stage = stage
            is_over = 0 < self._hang_timeout < seconds_standing
            if is_over and not self._handle_stall(seconds_standing, ends_run=True, reason=self._timeout_reason):
                progressed_at = self._running_time

    @property
    def _timeout_reason(self) -> str:
        return f"The limit is --hang_timeout {self._hang_timeout:g}."

    @property
    def _seconds_to_stop(self) -> float:
        """How long a rank may stand after a stop signal; before the first step there is nothing to save."""
        longest = max(self._step_durations, default=INITIAL_REPORT_SECONDS / STEPS_TO_STOP) if self._clock.step else 0.0
        return max(SECONDS_TO_STOP, STEPS_TO_STOP * longest)

    def _wait(self, seconds: float, answer: Future | None = None) -> None:
        """Wait for the seconds, or for the answer, and show meanwhile that this process runs."""
        ends = self._running_time + seconds
        while self._running_time < ends and not self._stop_event.is_set() and not (answer and answer.done()):
            wait_for([answer or Future()], SECONDS_BETWEEN_HEARTBEATS / 2)
            self._tick()

    def _is_answered(self, probe: Future[bool]) -> bool:
        self._wait(SECONDS_TO_CONNECT, probe)
        return probe.done() and probe.result()

    # ---- the store ----

    def _call_store(self, call: Callable[[], T]) -> T | None:
        """The answer of a call of `Heartbeats`; None if the store does not answer in time."""
        is_late = self._pending_call is not None
        answer = self._pending_call = self._pending_call or self._heartbeats.submit(call)
        self._wait(SECONDS_FOR_STORE_ANSWER, answer)
        if not answer.done():
            self._store_silent_since = min(self._store_silent_since, self._running_time)
            self._peer_heartbeats.clear()
            return None
        self._pending_call, self._store_silent_since = None, math.inf
        try:
            return None if is_late else answer.result()
        except dist.DistNetworkError:
            self._is_store_gone = True
        except dist.DistStoreError:  # after a suspension, although the key exists
            pass
        return None

    def _read_statuses(self, ranks: Iterable[int]) -> dict[int, RankStatus] | None:
        """The statuses of these ranks; None if the store does not answer in time."""
        if self._heartbeats is None:
            return {self._rank: self._create_status()}
        answer = self._call_store(lambda: self._heartbeats.read_statuses(ranks))
        if answer is None:
            return None
        self._statuses |= answer[0]
        self._reported_failure = answer[1]
        return answer[0]

    def _check_store(self, silent_seconds: float) -> None:
        """It does not answer: rank 0, torchrun's agent on its host or that host may be stopped or gone."""
        if self._is_store_gone:
            self._exit_for_lost_peer(0)
        elif silent_seconds < SECONDS_UNTIL_LOST:
            return
        elif self._hosts[0] != self._hosts[self._rank] and not self._is_answered(self._heartbeats.ping_store_host()):
            self._exit_for_lost_peer(0)
        elif self._heartbeats.is_hosted_by_rank_0:
            if reason := self._find_exit_reason(silent_seconds):
                text, _ = describe_hang(self._statuses, {0}, self._hosts, silent_seconds)
                self._supervisor.exit_hung(f"{text} {reason}", 0)
        elif not self._has_warned:
            self._has_warned = True
            text = f"torchrun on {self._hosts[0]} does not answer, so it may be stopped."
            self._supervisor.warn(f"{text} Training continues, but hangs are not found.")

    # ---- other ranks ----

    def find_lost_rank(self) -> TrainingError | None:
        """After a collective failed because a peer is gone: the error for a rank that ended without reporting one.

        Called by the main thread after `disarm`.
        """
        self._lost_rank_request = Future()
        with suppress(TimeoutError):
            return self._lost_rank_request.result(SECONDS_TO_FIND_LOST_RANK)
        return None

    def _find_lost_rank(self) -> TrainingError | None:
        self._wait(self._rank * SECONDS_BETWEEN_SEARCHES)  # the first answer is for all
        observed = (
            self._read_statuses(range(1))
            and not self._reported_failure
            and self._observe_ranks(range(len(self._hosts)))
        )
        if self._reported_failure:
            failure = self._reported_failure
            return TrainingError(failure["text"], failure["rank"], failure["host"]) if failure["is_lost"] else None
        lost = observed[1] if observed else {0} if self._is_store_gone else set()
        return self._explain_lost_ranks(lost) if lost else None

    def _explain_lost_ranks(self, lost_ranks: set[int]) -> TrainingError:
        rank, status = min(lost_ranks), self._statuses.get(min(lost_ranks))
        last_seen = f", last seen in {status.phase} of step {status.step}" if status else ""
        text = f"Rank {rank} on {self._hosts[rank]} was killed or cut off{last_seen}."
        if len(lost_ranks) > 1:
            text += f" {len(lost_ranks)} ranks are lost."
        text += " Look for out-of-memory kills (dmesg) or the state of the node, then start again with"
        text += " --resume_from auto."
        if status and status.phase == "end":
            text = f"Rank {rank} on {self._hosts[rank]} has ended. See the log of that rank."
        return TrainingError(text, rank, self._hosts[rank])

    def _exit_for_lost_peer(self, peer: int) -> None:
        """End this process: a rank is gone. All that are gone are named, if the store answers."""
        error = self._find_lost_rank() or self._explain_lost_ranks({peer})
        if self._hang_timeout and not self._stop_event.is_set():
            self._supervisor.exit_peer_lost(error)

    def _check_peers(self) -> None:
        """Once a second: end this process if the run has failed or one of the next ranks is gone."""
        now = self._running_time
        if now - self._checked_at < SECONDS_BETWEEN_CHECKS or not self._peers:
            return
        if now - self._checked_at > 2 * SECONDS_TO_OBSERVE:
            self._peer_heartbeats.clear()  # this rank did not look
        self._checked_at = now
        statuses = self._read_statuses(sorted(self._peers))
        if statuses is None:
            self._check_store(self._running_time - self._store_silent_since)
        elif self._reported_failure:
            self._wait(SECONDS_BEFORE_PEERS_EXIT / 2)
            if not self._stop_event.is_set():
                self._supervisor.exit_hung(self._reported_failure["text"], None)
        else:
            for peer, status in statuses.items():
                self._check_peer(peer, status)

    def _check_peer(self, peer: int, status: RankStatus) -> None:
        if peer not in self._peer_heartbeats or status.heartbeat != self._peer_heartbeats[peer][0]:
            self._peer_heartbeats[peer] = status.heartbeat, self._running_time
            return
        silent = self._running_time - self._peer_heartbeats[peer][1]
        if status.phase == "end":
            if self._clock.phase in STEP_PHASES:  # otherwise this rank may only be the last to finish
                self._exit_for_lost_peer(peer)
        elif self._hosts[peer] == self._hosts[self._rank]:
            state = read_process_state(status.pid)
            if state in GONE_STATES:
                self._exit_for_lost_peer(peer)
            elif state in SUSPENDED_STATES and (reason := self._find_exit_reason(silent)):
                observed = self._observe_ranks(range(len(self._hosts)))
                if observed and observed[1]:
                    text, stopped = describe_hang(*observed[:2], self._hosts, silent)
                    self._supervisor.exit_hung(f"{text} {reason}", stopped, self._read_stacks())
        else:
            limit = SECONDS_UNTIL_LOST
            if status.phase == "start":  # a rank may hold the GIL for long
                limit = max(limit, self._hang_timeout)
            if silent > limit:
                self._exit_for_lost_peer(peer)

    def _find_exit_reason(self, silent_seconds: float) -> str:
        """Why the run is ended for a rank that is stopped; empty if it is not."""
        if self._running_time - self._stop_requested_at > SECONDS_TO_STOP:
            return STOP_REASON
        return self._timeout_reason if silent_seconds > self._hang_timeout else ""

    def _dump_stacks(self) -> None:
        """Call only if the loop hangs: dumping the stacks of running threads (gloo's) can crash the process."""
        with suppress(OSError, dist.DistError), tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            self._stack = file.read().decode()
            if self._heartbeats:
                self._heartbeats.set_stack(self._stack)

    def _handle_stall(self, seconds: float, ends_run: bool, reason: str = "") -> bool:
        """Report a stall or end the run, or leave it to a lower rank.

        Returns:
            Whether all is done for this stall. False if some rank may still make progress.
        """
        text = f"There was no progress for {seconds:.0f} s. {reason}"
        views = [range(len(self._hosts))]
        if self._rank > 0:
            views.insert(0, range(1))  # most ranks read one status: rank 0 lives, and they leave the stall to it
        for ranks in views:
            observed = self._observe_ranks(ranks)
            if observed is None:  # the store does not answer
                if reason == STOP_REASON:
                    self._supervisor.exit_hung(text, None)
                return False
            statuses, silent, is_moving = observed
            if self._is_lower_rank_alive(statuses, silent):
                if ends_run and not is_moving and reason == STOP_REASON:  # no signal may have reached the lower rank
                    self._wait(SECONDS_BEFORE_PEERS_EXIT)
                    self._supervisor.exit_hung(text, None)
                return not ends_run
        if is_moving:
            return False
        text, hanging = describe_hang(statuses, silent, self._hosts, seconds)
        is_in_hook = not silent and statuses[hanging].hook != NO_HOOK
        if ends_run and is_in_hook and reason != STOP_REASON:
            if seconds <= HOOK_TIMEOUT_FACTOR * self._hang_timeout:
                return True
            limit = f"{HOOK_TIMEOUT_FACTOR} times --hang_timeout {self._hang_timeout:g}"
            reason = f"The limit for this function is {limit}."
        if ends_run:
            self._supervisor.exit_hung(f"{text} {reason}", hanging, self._read_stacks())
        elif silent or (seconds > self._hang_report_after and not is_in_hook):
            self._supervisor.report_hang(text, self._read_stacks())
        else:
            self._supervisor.warn(describe_hang(statuses, silent, self._hosts, seconds, "is slow")[0])
        return True

    def _is_lower_rank_alive(self, statuses: dict[int, RankStatus], silent: set[int]) -> bool:
        """Whether a rank below this one has a heartbeat and is in a phase that the watchdog times: it reports."""
        for rank, status in statuses.items():
            if rank < self._rank and rank not in silent and status.phase not in UNTIMED_PHASES:
                return True
        return False

    def _observe_ranks(self, ranks: range) -> tuple[dict[int, RankStatus], set[int], bool] | None:
        """The statuses of these ranks, those whose heartbeat has stopped, and whether any counter moves. None: no
        answer."""
        before = self._read_statuses(ranks)
        self._wait(SECONDS_TO_OBSERVE)
        after = self._read_statuses(ranks)
        if before is None or after is None:
            return None
        silent = {
            rank for rank in after if after[rank].heartbeat == before[rank].heartbeat and after[rank].phase != "end"
        }
        return after, silent, any(after[rank].progress_count != before[rank].progress_count for rank in after)

    def _read_stacks(self) -> str:
        stacks = self._heartbeats and self._call_store(lambda: self._heartbeats.read_stacks(len(self._hosts)))
        rank_stacks = enumerate(stacks) if stacks else [(self._rank, self._stack)]
        return "\n".join(f"--- rank {rank} on {self._hosts[rank]}\n{stack}".rstrip() for rank, stack in rank_stacks)
