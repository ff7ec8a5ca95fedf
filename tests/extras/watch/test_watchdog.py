"""The phase of each rank, hangs, and errors of a lost peer."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

import utils.clock
import utils.extras.watch.watchdog
from training import wait_until
from utils.clock import PhaseClock
from utils.distributed.collectives import is_peer_failure
from utils.extras.watch.heartbeat import Heartbeats, RankStatus
from utils.extras.watch.watchdog import Watchdog
from utils.signals import STOP_HANDLER

HERE = socket.gethostname()


def rank_status(step, phase, counter=1, heartbeat=1, pid=100):
    return RankStatus(heartbeat, counter, step, phase, pid)


def heartbeats_of(store, rank, is_of_rank_0=True):
    return Heartbeats(store, rank, os.getpid(), "", is_of_rank_0)


def watch(clock, hang_timeout=0.0, end=None, heartbeats=None, hosts=("a",), rank=0, **calls):
    """A watchdog. Its calls do nothing, apart from those given."""
    names = ("report_hang", "exit_peer_lost", "exit_preempted", "exit_unreported", "warn")
    supervisor = SimpleNamespace(exit_hung=end or mock.Mock(), **{name: calls.get(name, mock.Mock()) for name in names})
    ctx = SimpleNamespace(rank=rank, hosts=hosts, host=hosts[rank], heartbeats=heartbeats)
    return Watchdog(clock, ctx, hang_timeout, supervisor)


@pytest.fixture
def quick(monkeypatch):
    """The watchdog waits a tenth of its usual times."""
    for name in vars(utils.extras.watch.watchdog).copy():
        if name.startswith("SECONDS_"):
            monkeypatch.setattr(utils.extras.watch.watchdog, name, getattr(utils.extras.watch.watchdog, name) / 10)


@pytest.mark.guarantee("hang")
def test_a_slow_step_is_a_warning_and_a_hang_from_half_of_hang_timeout_on(quick, monkeypatch):
    """Without --hang_timeout, from a minute on (here 2.5 s)."""
    monkeypatch.setattr(utils.extras.watch.watchdog, "INITIAL_REPORT_SECONDS", 2.5)
    monkeypatch.setattr(Watchdog, "seconds_before_report", 0.4)
    clock, logged, watchdogs = PhaseClock(), {5.0: [], 0.0: []}, []
    for hang_timeout, texts in logged.items():
        calls = {
            name: lambda *text, texts=texts, name=name: texts.append((name, text[0]))
            for name in ("warn", "report_hang")
        }
        watchdogs.append(watch(clock, hang_timeout, **calls))
    for seconds in (0.1, 1.2, 0.0):  # three steps; the last one hangs
        clock.begin_step(clock.step + 1)
        clock.enter_phase("forward")
        time.sleep(seconds)
    wait_until(lambda: all(len(texts) == 3 for texts in logged.values()), 10)
    for watchdog in watchdogs:
        watchdog.close()
    for texts in logged.values():
        assert [name for name, _ in texts] == ["warn", "warn", "report_hang"]
        states = [re.search(r"rank 0 on a (.*) in forward of (.*) \(process", text).groups() for _, text in texts]
        assert states == [("is slow", "step 2"), ("is slow", "step 3"), ("hangs", "step 3")]


def test_the_limit_is_learned_from_the_steps_and_is_at_least_five_seconds():
    clock, limits = PhaseClock(), []
    watchdog = watch(clock)
    for durations in ([], [0.1] * 200, [3.0] * 4, [60.0]):  # one slow step in hundreds does not raise the limit
        clock.step_durations.extend(durations)
        limits.append(watchdog.seconds_before_report)
    watchdog.close()
    assert limits == [60.0, 5.0, 15.0, 15.0]


@pytest.mark.guarantee("hang")
def test_other_ranks_see_the_phase_the_step_and_a_beat(quick):
    store, clock = dist.HashStore(), PhaseClock()
    watchdog, other = watch(clock, heartbeats=heartbeats_of(store, 0)), heartbeats_of(store, 1)
    clock.begin_step(12)
    clock.enter_phase("backward")
    first = wait_until(lambda: (seen := other.read_statuses([0])[0][0]).phase == "backward" and seen, 5)
    assert (first.step, first.pid) == (12, os.getpid())
    later = wait_until(lambda: (seen := other.read_statuses([0])[0][0]).heartbeat > first.heartbeat and seen, 5)
    assert later.progress_count == first.progress_count
    watchdog.close()
    assert other.read_statuses([0, 1])[0][0].phase == "end"


@pytest.mark.guarantee("hang")
def test_stacks_are_read_only_when_a_rank_hangs_and_then_it_ends(quick, monkeypatch):
    """Reading the stacks of running threads rarely ended real runs with SIGSEGV."""
    ended, clock, dumped, plain = [], PhaseClock(), [], Watchdog._dump_stacks
    monkeypatch.setattr(Watchdog, "_dump_stacks", lambda self: dumped.append(clock.phase) or plain(self))
    watchdog = watch(clock, 1.0, lambda *args: ended.append(args))
    for phase in ("forward", "backward") * 6:
        clock.enter_phase(phase)
        time.sleep(0.1)
    clock.enter_phase("start")  # no limit applies here, for example while data is prepared
    time.sleep(1.1)
    assert not dumped and not ended
    clock.enter_phase("forward")
    text, hanging, stacks = wait_until(lambda: ended, 10)[0]
    watchdog.close()
    assert "in forward of step 0" in text and hanging == 0 and set(dumped) == {"forward"}
    assert "--- rank 0 on a" in stacks and "wait_until" in stacks


@pytest.mark.guarantee("hang")
def test_a_function_of_an_evaluation_may_take_ten_times_hang_timeout(quick):
    """Rank 0 judges itself and rank 1, which waits for it."""
    store, ended, clocks, watchdogs = dist.HashStore(), [], [PhaseClock(), PhaseClock()], []
    for rank, clock in enumerate(clocks):
        clock.begin_step(12)
        clock.enter_phase("evaluation")
        heartbeats = heartbeats_of(store, rank)
        watchdogs.append(watch(clock, 0.3, lambda *args: ended.append(args), heartbeats, ("a", "a"), rank))
    clocks[0].enter_hook("log_images")
    began = time.monotonic()
    text, hanging, _ = wait_until(lambda: ended, 10)[0]
    assert time.monotonic() - began > 2.9
    for watchdog in watchdogs:
        watchdog.close()
    assert hanging == 0 and "rank 0 on a hangs in evaluation of step 12, in log_images of model.py" in text
    assert text.endswith(" 10 times --hang_timeout 0.3.")


def test_a_rank_without_progress_ends_when_the_next_rank_is_gone(quick):
    killed = subprocess.Popen(["true"]).pid  # nobody waits for it
    alive, lost_ranks, watchdogs = os.getpid(), {}, []
    cases = [  # of the next rank: host, process and phase; the phase of this one; whether the other is lost
        (HERE, killed, "backward", "backward", True),
        (HERE, killed, "start", "start", True),
        (HERE, killed, "evaluation", "save", True),
        (HERE, alive, "backward", "backward", False),  # it holds the GIL
        (HERE, alive, "end", "backward", True),
        (HERE, alive, "end", "save", False),  # this rank is the last to finish
        ("elsewhere", alive, "backward", "backward", True),  # its process cannot be seen
        ("elsewhere", alive, "save", "start", True),
        ("elsewhere", alive, "start", "start", False),  # silent for less than hang_timeout: it may hold the GIL
    ]
    for number, (host, pid, phase, own, _) in enumerate(cases):
        store, clock = dist.HashStore(), PhaseClock()
        heartbeats = heartbeats_of(store, 0)
        heartbeats_of(store, 1).set_status(rank_status(3, phase, pid=pid))
        clock.enter_phase(own)
        lose = lambda error, number=number: lost_ranks.setdefault(number, error.rank)  # noqa: E731
        watchdogs.append(watch(clock, 60.0, heartbeats=heartbeats, hosts=(HERE, host), exit_peer_lost=lose))
    wait_until(lambda: len(lost_ranks) >= sum(is_lost for *_, is_lost in cases), 8)
    time.sleep(1.6)
    assert lost_ranks == {number: 1 for number, (*_, is_lost) in enumerate(cases) if is_lost}
    for watchdog in watchdogs:
        watchdog.close()


def test_time_in_which_the_watching_process_was_suspended_does_not_count(quick, monkeypatch):
    """As it wakes, its own step and the heartbeat of the other host are an hour old. A later stop is found."""
    ended, jump, plain, watchdogs = set(), [0.0], time.monotonic, []
    fake = SimpleNamespace(sleep=time.sleep, monotonic=lambda: plain() + jump[0])
    monkeypatch.setattr(utils.extras.watch.watchdog, "time", fake)
    monkeypatch.setattr(utils.extras.watch.watchdog, "SECONDS_UNTIL_LOST", 2.0)
    for phase in ("backward", "start"):
        store, clock, note = dist.HashStore(), PhaseClock(), lambda *_, phase=phase: ended.add(phase)
        heartbeats = heartbeats_of(store, 0)
        heartbeats_of(store, 1).set_status(rank_status(3, phase))
        clock.enter_phase(phase)
        watchdogs.append(watch(clock, 2.0, note, heartbeats, (HERE, "elsewhere"), exit_peer_lost=note))
    time.sleep(0.5)
    jump[0] = 3600.0
    time.sleep(0.75)
    assert not ended
    wait_until(lambda: len(ended) == 2, 10)
    for watchdog in watchdogs:
        watchdog.close()


class Silent(Heartbeats):
    """The process that hosts the store is stopped: a read returns when it continues."""

    is_there = False

    def __init__(self, *args):
        super().__init__(*args)
        self.goes_on = threading.Event()

    def read_statuses(self, ranks):
        self.goes_on.wait(30)
        return super().read_statuses(ranks)

    def ping_store_host(self):
        future = Future()
        future.set_result(self.is_there)
        return future


def test_steps_may_end_while_the_watchdog_reads_their_durations():
    """An error would end its thread, and with it the heartbeats."""
    clock, is_over, before = PhaseClock(), threading.Event(), sys.getswitchinterval()
    watchdog = watch(clock)

    def train():
        while not is_over.is_set():
            clock.begin_step(clock.step + 1)

    trainer = threading.Thread(target=train)
    trainer.start()
    sys.setswitchinterval(1e-6)
    try:
        assert all(watchdog.seconds_before_report >= 5 for _ in range(2000))
    finally:
        sys.setswitchinterval(before)
        is_over.set()
        trainer.join()
        watchdog.close()


def test_a_store_of_torchrun_that_does_not_answer_ends_nothing(quick):
    """Ctrl-Z stops torchrun and not its ranks."""
    store, clock, warned, called = dist.HashStore(), PhaseClock(), [], mock.Mock()
    heartbeats = Silent(store, 0, os.getpid(), "", False)
    heartbeats_of(store, 1).set_status(rank_status(3, "backward"))
    clock.enter_phase("backward")
    calls = {"exit_peer_lost": called, "report_hang": called, "warn": warned.append}
    watchdog = watch(clock, 0.5, called, heartbeats, (HERE, "elsewhere"), **calls)
    wait_until(lambda: warned, 5)
    time.sleep(1)
    assert len(warned) == 1 and not called.called
    heartbeats.goes_on.set()
    wait_until(lambda: called.called, 8)  # rank 1 is lost
    watchdog.close()


def test_a_store_that_does_not_answer_is_evidence_about_its_host(quick):
    outcomes, watched = {}, []
    # whether its process answers, and whether that is rank 0
    cases = {(False, True): "lost", (False, False): "lost", (True, True): "stopped"}
    for case in cases:
        store, clock = dist.HashStore(), PhaseClock()
        heartbeats_of(store, 0)
        heartbeats = Silent(store, 1, os.getpid(), "", case[1])
        heartbeats.is_there = case[0]
        clock.enter_phase("backward")
        end = lambda text, hanging, stacks="", case=case: outcomes.setdefault(case, ("stopped", hanging))  # noqa: E731
        lose = lambda error, case=case: outcomes.setdefault(case, ("lost", error.rank))  # noqa: E731
        watched.append((watch(clock, 1.0, end, heartbeats, ("elsewhere", HERE), 1, exit_peer_lost=lose), heartbeats))
    wait_until(lambda: len(outcomes) == len(cases), 10)
    assert outcomes == {case: (how, 0) for case, how in cases.items()}
    for watchdog, heartbeats in watched:
        heartbeats.goes_on.set()
        watchdog.close()


def test_a_store_whose_process_is_gone_names_rank_0(quick):
    store, clock, lost = dist.HashStore(), PhaseClock(), []
    heartbeats = heartbeats_of(store, 1)
    with mock.patch.object(Heartbeats, "read_statuses", side_effect=dist.DistNetworkError):
        watchdog = watch(clock, 60.0, heartbeats=heartbeats, hosts=(HERE, HERE), rank=1, exit_peer_lost=lost.append)
        assert wait_until(lambda: lost, 5)[0].rank == 0
        watchdog.close()


def test_after_a_stop_signal_a_rank_that_stands_before_the_first_step_ends_as_preempted(quick):
    """Nothing can be lost; it may wait for a rank that does not answer."""
    preempted, ended = [], []
    with STOP_HANDLER:
        watchdog = watch(PhaseClock(), 60.0, ended.append, exit_preempted=lambda: preempted.append(time.monotonic()))
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert 2 <= wait_until(lambda: preempted, 8)[0] - began and not ended
        watchdog.close()


def test_a_rank_without_progress_ends_when_another_one_has_reported_a_failure(quick):
    store, ended = dist.HashStore(), []
    heartbeats = heartbeats_of(store, 0)
    for rank, text in ((2, "rank 2 on b ran out of memory"), (1, "a later one")):
        heartbeats_of(store, rank).report_failure({"text": text, "rank": rank, "host": "b", "is_lost": False})
    watchdog = watch(PhaseClock(), 60.0, lambda *args: ended.append(args), heartbeats, ("a", "b", "b"))
    assert wait_until(lambda: ended, 5)[0] == ("rank 2 on b ran out of memory", None)
    watchdog.close()


def test_the_lowest_live_rank_reports(quick):
    """One report of a hang, not one of each rank."""
    reports, watchdogs, cases = [], [], [(), (0,), (0, 1)]  # the dead ranks
    with mock.patch.object(Watchdog, "seconds_before_report", 0.5):
        for dead in cases:
            store = dist.HashStore()
            heartbeats = [heartbeats_of(store, rank) for rank in range(3)]
            for rank in set(range(3)) - set(dead):
                clock, report = PhaseClock(), lambda *args, by=(dead, rank): reports.append((*by, args[0]))
                clock.enter_phase("backward")
                calls = {"report_hang": report, "warn": report}  # a warning, as nobody is dead
                watchdogs.append(watch(clock, heartbeats=heartbeats[rank], hosts=(HERE,) * 3, rank=rank, **calls))
        wait_until(lambda: len(reports) >= len(cases), 10)
        time.sleep(1)
    for watchdog in watchdogs:
        watchdog.close()
    assert sorted((dead, rank) for dead, rank, _ in reports) == [(dead, len(dead)) for dead in cases]
    for dead, _, text in reports:
        assert (f"rank {dead[0]} on {HERE} was stopped, killed or cut off" if dead else "all ranks are slow") in text


def test_ranks_whose_collective_has_failed_find_the_one_that_is_lost(quick):
    store, clocks = dist.HashStore(), [PhaseClock() for _ in range(3)]
    heartbeats = [heartbeats_of(store, rank) for rank in range(4)]
    watchdogs = [watch(clocks[k], 60.0, heartbeats=heartbeats[k], hosts=(HERE,) * 4, rank=k) for k in range(3)]

    def find(watchdog):
        watchdog.disarm()
        return watchdog.find_lost_rank()

    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(find, watchdogs))
    for error in errors:
        assert str(error).startswith(f"Rank 3 on {HERE} was killed or cut off") and error.rank == 3
    heartbeats[3].report_failure({"text": "its own error", "rank": 3, "host": HERE, "is_lost": False})
    assert watchdogs[0].find_lost_rank() is None  # it has said why
    for watcher in watchdogs:
        watcher.close()


def test_after_a_stop_signal_a_rank_that_is_blocked_in_c_ends(quick):
    """The handler of the signal runs in Python, and so only when the call in C returns."""
    ended, mutex, libc = [], ctypes.create_string_buffer(64), ctypes.CDLL(None)

    def end(*args):
        ended.append((args, signals.received))
        libc.pthread_mutex_unlock(mutex)

    clock = PhaseClock()
    with STOP_HANDLER as signals:
        watchdog = watch(clock, hang_timeout=60.0, end=end)
        clock.step_durations.append(0.1)
        clock.begin_step(1)
        clock.enter_phase("backward")
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began = time.monotonic()
        for _ in range(2):
            libc.pthread_mutex_lock(mutex)
        took = time.monotonic() - began
        assert signals.received == "SIGTERM"
        watchdog.close()
    (text, *_), received = ended[0]
    assert received == "SIGTERM" and text.endswith(" A stop signal came before.") and 2 < took < 10


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:5814", True),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting", True),
        ("NCCL communicator was aborted on rank 1.", True),
        ("NCCL communicator was aborted after a previous error", True),
        ("Watchdog caught collective operation timeout: NCCL operation timed out", True),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", False),  # of this rank's GPU
    ],
)
def test_errors_of_a_collective_whose_peer_is_gone_do_not_blame_this_rank(text, is_lost):
    assert is_peer_failure(RuntimeError(text)) == is_lost
