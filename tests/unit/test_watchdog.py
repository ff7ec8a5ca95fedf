"""The phase of each rank, the rank that holds up the others, and the account of time."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import utils.clock
import utils.run.watchdog
from config import TrainingConfig
from test_run_folder import open_run, with_
from training import wait_until
from utils.clock import BEAT, INDEX, PLACE, Clock, Place, read_place, slowest
from utils.distributed.collectives import is_of_a_peer
from utils.report import goodput
from utils.report.goodput import ACCOUNTS, Goodput, share_in_training
from utils.run.folder import Run
from utils.run.watchdog import Watchdog, look_twice, verdict
from utils.signals import StopSignals

HOSTS = ("a", "a", "b", "b")
HERE = socket.gethostname()


def place(step, phase, counter=1, beat=1):
    return Place(beat, counter, step, phase, pid=100)


WAITING = [place(7, "backward")] * 4


@pytest.mark.parametrize(
    ("places", "standing", "text", "hanging"),
    [
        (WAITING, {2}, "rank 2 on b was stopped, killed or cut off in backward of step 7 (process 100)", 2),
        ([*WAITING[:3], None], {3}, "rank 3 on b was stopped, killed or cut off", 3),
        ([*WAITING[:3], place(7, "data")], set(), "rank 3 on b hangs in data of step 7 (process 100)", 3),
        (
            [place(8, "data"), place(7, "update"), *[place(8, "data")] * 2],
            set(),
            "rank 1 on a hangs in update of step",
            1,
        ),
        (WAITING, set(), "all ranks wait in backward of step 7: the network", 0),
    ],
)
def test_the_rank_that_holds_up_the_others_is_named(places, standing, text, hanging):
    found, rank = verdict(places, standing, HOSTS, 6.2)
    assert found.startswith(f"no progress for 6 s: {text}") and rank == hanging


@pytest.fixture
def clock(tmp_path):
    """The clock of rank 0, with its file in the test's folder."""
    clock = Clock(tmp_path / "rank0")
    yield clock
    clock.close()


def watch(clock, folder, hang_timeout=0.0, end=lambda *_: None, hosts=("a",), every_second=lambda: None, **calls):
    return Watchdog(clock, folder, 0, hosts, hang_timeout, every_second, lambda *_: None, end, **calls)


@pytest.fixture
def quick(monkeypatch):
    """The watchdog waits a fifth of its usual times."""
    for name in vars(utils.run.watchdog).copy():
        if name.startswith("SECONDS_"):
            monkeypatch.setattr(utils.run.watchdog, name, getattr(utils.run.watchdog, name) / 5)
    monkeypatch.setattr(utils.run.watchdog, "SECONDS_OF_SILENCE", 1.2)


def test_a_run_shorter_than_a_second_is_recorded_too(clock, tmp_path):
    calls = []
    watch(clock, tmp_path, every_second=lambda: calls.append(clock.step)).close()
    assert len(calls) == 1


def test_the_limit_is_learned_from_the_steps_and_is_at_least_five_seconds(clock, tmp_path):
    watchdog, limits = watch(clock, tmp_path), []
    for durations in ([], [0.1] * 200, [3.0] * 4, [60.0]):  # one slow step in hundreds does not raise the limit
        clock.durations.extend(durations)
        limits.append(watchdog.limit)
    watchdog.close()
    assert limits == [60.0, 5.0, 15.0, 15.0]


def test_other_ranks_see_the_phase_and_the_step_at_once_and_a_heartbeat(clock, tmp_path):
    file = tmp_path / "rank0"
    clock.begin_step(12)
    clock.enter("data")  # as the loader calls it
    first = read_place(file)
    assert (first.step, first.phase) == (12, "data")
    clock.enter("backward")
    assert read_place(file).phase == "backward" and read_place(file).counter > first.counter
    assert look_twice(tmp_path, ("a",))[1:] == ({0}, False)  # no heartbeat
    assert look_twice(tmp_path, ("a",), lambda: clock.beat() or clock.enter("update"))[1:] == (set(), True)
    clock.close()
    assert look_twice(tmp_path, ("a",))[1] == set()  # the rank has ended
    assert read_place(tmp_path / "rank1") is None
    file.write_bytes(b"short")
    assert read_place(file) is None


def test_stacks_are_read_only_when_a_rank_hangs_and_then_it_ends(clock, tmp_path):
    """Reading the stacks of running threads rarely ended real runs with SIGSEGV."""
    ended, stack = [], tmp_path / "stack0"
    watchdog = watch(clock, tmp_path, hang_timeout=1.5, end=lambda *said: ended.append(said))
    for phase in ("forward", "backward") * 8:
        clock.enter(phase)
        time.sleep(0.1)
    clock.enter("start")  # no limit applies here, for example while data is prepared
    time.sleep(1.6)
    assert not stack.exists() and not ended
    clock.enter("forward")
    text, stacks, hanging = wait_until(lambda: ended, 10)[0]
    watchdog.close()
    assert "in forward of step 0" in text and hanging == 0
    assert "--- rank 0 on a" in stacks and "wait_until" in stacks and "wait_until" in stack.read_text()


def test_beats_and_phases_are_visible_to_other_hosts_within_seconds(tmp_path, monkeypatch):
    """NFS promises other hosts only what was written before a close."""
    unsent = []

    def close(descriptor):
        for data, offset in unsent:
            os.pwrite(descriptor, data, offset)
        unsent.clear()
        os.close(descriptor)

    nfs = SimpleNamespace(pwrite=lambda _, data, offset: unsent.append((data, offset)), close=close)
    monkeypatch.setattr(utils.clock, "os", SimpleNamespace(**{**vars(os), **vars(nfs)}))
    clock = Clock(tmp_path / "rank0")
    watchdog = watch(clock, tmp_path)
    clock.begin_step(3)
    clock.enter("backward")
    first = wait_until(lambda: (seen := read_place(tmp_path / "rank0")).phase == "backward" and seen, 5)
    assert first.step == 3
    wait_until(lambda: read_place(tmp_path / "rank0").beat > first.beat, 5)
    watchdog.close()


def test_a_silent_host_is_lost_only_after_two_requests_of_its_file_system():
    assert utils.run.watchdog.SECONDS_OF_SILENCE >= 2 * 60


@pytest.mark.parametrize(
    ("host", "phase", "own", "is_alive", "is_lost"),
    [
        (HERE, "backward", "backward", False, True),  # killed
        (HERE, "start", "start", False, True),
        (HERE, "evaluation", "save", False, True),
        (HERE, "backward", "backward", True, False),  # it holds the GIL
        (HERE, "end", "backward", True, True),
        (HERE, "end", "save", True, False),  # this rank is the last to finish
        ("elsewhere", "backward", "backward", True, True),  # its process cannot be seen
        ("elsewhere", "save", "start", True, True),
        ("elsewhere", "start", "start", True, False),  # silent for less than hang_timeout: it may hold the GIL
    ],
)
def test_a_rank_without_progress_ends_when_the_next_rank_is_gone(
    clock, tmp_path, quick, host, phase, own, is_alive, is_lost
):
    pid = os.getpid()
    if not is_alive:
        pid = subprocess.Popen(["true"]).pid  # nobody waits for it
    (tmp_path / "rank1").write_bytes(BEAT.pack(7) + PLACE.pack(9, 3, INDEX[phase], pid))
    lost = []
    clock.enter(own)
    watchdog = watch(clock, tmp_path, 60.0, hosts=(HERE, host), lose=lost.append)
    if is_lost:
        assert wait_until(lambda: lost, 5)[0] == 1
    else:
        time.sleep(2.2)
        assert not lost
    watchdog.close()


def test_stalled_storage_is_no_evidence_but_the_report_of_a_launcher_is(clock, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(utils.run.watchdog, "SECONDS_OF_SILENCE", 60.0)
    (tmp_path / "rank1").write_bytes(BEAT.pack(7) + PLACE.pack(9, 3, INDEX["backward"], os.getpid()))
    lost = []
    clock.enter("backward")
    watchdog = watch(clock, tmp_path, 60.0, hosts=(HERE, "elsewhere"), lose=lost.append)
    time.sleep(2)  # before, 6 / 5 s were too long
    assert not lost
    file = tmp_path / "ended-elsewhere"  # as in scripts/lib/launching/supervise.py
    file.write_text("1 2")  # of the last attempt
    time.sleep(1)
    assert not lost
    file.write_text(f"1 {os.getpid()}")
    assert wait_until(lambda: lost, 5)[0] == 1
    watchdog.close()


@pytest.mark.parametrize("phase", ["backward", "start"])
def test_time_in_which_the_watching_process_was_suspended_does_not_count(clock, tmp_path, quick, monkeypatch, phase):
    """As it wakes, its own step and the beat of the other host stand since an hour. A later stop is found."""
    ended, jump, plain = [], [0.0], time.monotonic
    monkeypatch.setattr(utils.run.watchdog.time, "monotonic", lambda: plain() + jump[0])
    (tmp_path / "rank1").write_bytes(BEAT.pack(7) + PLACE.pack(9, 3, INDEX[phase], os.getpid()))
    monkeypatch.setattr(utils.run.watchdog, "SECONDS_OF_SILENCE", 4.0)
    clock.enter(phase)
    end = lambda *said: ended.append(said)  # noqa: E731
    watchdog = watch(clock, tmp_path, 4.0, end, (HERE, "elsewhere"), lose=lambda peer: ended.append(peer))
    time.sleep(1.0)
    jump[0] = 3600.0
    time.sleep(1.5)
    assert not ended
    wait_until(lambda: ended, 8)
    watchdog.close()


def test_after_a_stop_signal_a_rank_that_stands_before_the_first_step_ends_as_preempted(clock, tmp_path, quick):
    """Nothing can be lost; it may wait for a rank that does not answer."""
    preempted, ended = [], []
    with StopSignals():
        watchdog = watch(clock, tmp_path, 60.0, ended.append, preempt=lambda: preempted.append(time.monotonic()))
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert 4 <= wait_until(lambda: preempted, 8)[0] - began and not ended
        watchdog.close()


def test_a_rank_without_progress_ends_when_another_one_has_reported_a_failure(clock, tmp_path, quick):
    ended = []
    failure, end = lambda: "rank 2 on b ran out of memory", lambda *said: ended.append(said)
    watchdog = watch(clock, tmp_path, 60.0, end, ("a", "b"), failure=failure)
    assert wait_until(lambda: ended, 5)[0] == ("rank 2 on b ran out of memory", "", None)
    watchdog.close()


@pytest.mark.parametrize(
    ("rank", "dead", "reads"), [(0, 0, 2 * 99), (98, 0, 2), (98, 8, 2 + 2 * 15), (8, 8, 2 + 2 * 7 + 2 * 99)]
)
def test_one_rank_of_99_reads_the_files_of_all(tmp_path, quick, monkeypatch, rank, dead, reads):
    """Otherwise a stall of 1,024 ranks costs two million reads. The lowest rank may be dead."""
    for each in range(99):
        (tmp_path / f"rank{each}").write_bytes(BEAT.pack(7) + PLACE.pack(9, 3, INDEX["backward"], os.getpid()))
    files, reports, plain = [], [], utils.run.watchdog.read_place
    alive = Clock(tmp_path / f"rank{dead}")
    alive.enter("backward")
    monkeypatch.setattr(utils.run.watchdog, "read_place", lambda file: files.append(file) or plain(file))
    beating = watch(alive, tmp_path)
    clock = alive if rank == dead else Clock(tmp_path / f"rank{rank}")
    calls = [lambda: None, lambda *said: reports.append(said), None]
    watchdog = Watchdog(clock, tmp_path, rank, (HERE,) * 99, 0.0, *calls)
    watchdog._look(6.0, is_end=False)
    for each in (watchdog, beating):
        each.close()
    assert len(files) == reads and len(reports) == (rank == dead)


def test_one_rank_looks_for_lost_ranks_and_the_others_read_its_answer(tmp_path, quick, monkeypatch):
    first, files, plain = open_run(TrainingConfig(run_dir=str(tmp_path))), [], utils.run.watchdog.read_place
    live = [Clock(tmp_path / "watch" / f"rank{rank}") for rank in range(3)]
    monkeypatch.setattr(utils.run.watchdog, "read_place", lambda file: files.append(file) or plain(file))
    watchdogs = [watch(clock, tmp_path) for clock in live]
    runs = [Run(first.folder, first.checkpoints, rank, (HERE,) * 4, first.start, None) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(Run.lost_ranks, runs))
    for each in (*watchdogs, first):
        each.close()
    assert len(files) == 2 * 4
    for error in errors:
        assert str(error).startswith(f"rank 3 on {HERE} was killed or cut off") and (error.rank, error.host) == (
            3,
            HERE,
        )


def test_slow_storage_ends_no_rank_and_does_not_stop_the_heartbeat(clock, tmp_path, quick, monkeypatch):
    ended, go = [], threading.Event()
    monkeypatch.setattr(clock, "publish", go.wait)
    watchdog = watch(clock, tmp_path, 0.5, lambda *said: ended.append(said), (HERE, "elsewhere"))
    clock.enter("forward")
    beat = read_place(tmp_path / "rank0").beat
    time.sleep(3)
    assert not ended and read_place(tmp_path / "rank0").beat > beat + 10
    go.set()
    wait_until(lambda: ended, 5)
    watchdog.close()


def test_after_a_stop_signal_a_rank_that_is_blocked_in_c_ends(clock, tmp_path, quick):
    """The handler of the signal runs in Python, and so only when the call in C returns."""
    ended, mutex, libc = [], ctypes.create_string_buffer(64), ctypes.CDLL(None)

    def end(*said):
        ended.append((said, signals.received))
        libc.pthread_mutex_unlock(mutex)

    with StopSignals() as signals:
        watchdog = watch(clock, tmp_path, 60.0, end)
        clock.durations.append(0.1)
        clock.begin_step(1)
        clock.enter("backward")
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began = time.monotonic()
        for _ in range(2):
            libc.pthread_mutex_lock(mutex)
        took = time.monotonic() - began
        assert signals.received == "SIGTERM"
        watchdog.close()
    (text, *_), received = ended[0]
    assert received == "" and text.endswith("(after a stop signal)") and 4 < took < 10


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
    assert is_of_a_peer(RuntimeError(text)) == is_lost


def test_the_slowest_rank_and_the_cause():
    even = {"data": 0.1, "compute": 1.0}
    assert slowest([even, even, {"data": 1.5, "compute": 1.0}, even]) == (2, pytest.approx(2.5 / 1.1), "data")
    assert slowest([even, {"data": 0.1, "compute": 3.0}])[::2] == (1, "compute")
    assert slowest([even, even])[1] == 1.0


def test_each_second_is_counted_once_over_restarts(tmp_path, monkeypatch):
    """A second attempt: the gap counts as down time, a repeated step does not count as training. The system's clock
    jumps by an hour during each attempt, and is right when one starts."""
    fake = SimpleNamespace(now=1000.0, jump=0)
    fake.time, fake.perf_counter = (lambda: fake.now + fake.jump), (lambda: fake.now - 900)
    monkeypatch.setattr(utils.clock, "time", fake)
    monkeypatch.setattr(goodput, "time", fake)
    config = TrainingConfig(run_dir=str(tmp_path))

    def attempt(resume_from, *steps, first=0):
        run, clock = open_run(with_(config, resume_from=resume_from)), Clock()
        fake.jump = 0
        found = Goodput(run, clock, fake.perf_counter())
        found.resume(None, first)
        fake.jump = -3600 if first else 3600
        for step, phases in steps:
            for phase in phases.split():
                clock.begin_step(step) if phase == "data" else clock.enter(phase)
                fake.now += 1
        run.record("train", step=1)
        found.write()
        run.close()
        return found.now()

    attempt("", (1, "data forward backward update save evaluation"), (2, "data forward"))
    fake.now += 4  # killed
    found = attempt("auto", (2, "data forward"), (3, "data forward"), first=1)
    expected = [5, 3, 1, 1, 0, 2, 4]
    assert [found[name] for name in ACCOUNTS] == expected and sum(expected) == found["until"] - 1000
    assert found["step"] == 3 and share_in_training(found) == 5 / 16
    attempts = [[each[name] - 1000 for name in ("started_at", "training_from", "until")] for each in found["attempts"]]
    assert attempts == [[0, 0, 8], [12, 12, 16]]
    assert [(each["resumed_at_step"], each["step"]) for each in found["attempts"]] == [(0, 2), (1, 3)]
    file = tmp_path / "goodput.json"
    assert json.loads(file.read_text()) == found
    file.write_text('{"training": "much"}')
    assert attempt("auto")["training"] == 0
