"""Where each rank is, which rank holds up the others, and where the time went."""

import json
import time
from types import SimpleNamespace

import pytest

import utils.clock
from config import TrainingConfig
from test_run_folder import open_run, with_
from training import wait_until
from utils.clock import Clock, Place, read_place, slowest
from utils.report import goodput
from utils.report.goodput import ACCOUNTS, Goodput, share_in_training
from utils.run.watchdog import Watchdog, look_twice, verdict

HOSTS = ("a", "a", "b", "b")


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
    """Of rank 0; its file is in the folder of the test."""
    clock = Clock(tmp_path / "rank0")
    yield clock
    clock.close()


def watch(clock, folder, hang_timeout=0.0, end=lambda *_: None):
    return Watchdog(clock, folder, 0, ("a",), hang_timeout, lambda: None, lambda *_: None, end)


def test_the_limit_is_learned_from_the_steps_and_is_at_least_five_seconds(clock, tmp_path):
    watchdog, limits = watch(clock, tmp_path), []
    for durations in ([], [0.1] * 200, [3.0] * 4, [60.0]):  # one slow step of hundreds is not what steps take
        clock.durations.extend(durations)
        limits.append(watchdog.limit)
    watchdog.close()
    assert limits == [60.0, 5.0, 15.0, 15.0]


def test_others_see_phase_and_step_at_once_and_a_beat_that_moves(clock, tmp_path):
    file = tmp_path / "rank0"
    clock.begin_step(12)
    clock.enter("data")  # as the loader does
    first = read_place(file)
    assert (first.step, first.phase) == (12, "data")
    clock.enter("backward")
    assert read_place(file).phase == "backward" and read_place(file).counter > first.counter
    assert look_twice(tmp_path, 1)[1:] == ({0}, False)  # no beat
    assert look_twice(tmp_path, 1, lambda: clock.beat() or clock.enter("update"))[1:] == (set(), True)
    clock.close()
    assert look_twice(tmp_path, 1)[1] == set()  # it has ended
    assert read_place(tmp_path / "rank1") is None
    file.write_bytes(b"short")
    assert read_place(file) is None


def test_a_rank_that_hangs_ends_with_its_stacks_and_only_then_are_they_looked_at(clock, tmp_path):
    """To look at the stacks of threads that run ended real runs with SIGSEGV, at random and rarely."""
    ended, stack = [], tmp_path / "stack0"
    watchdog = watch(clock, tmp_path, hang_timeout=1.5, end=lambda *said: ended.append(said))
    for phase in ("forward", "backward") * 8:
        clock.enter(phase)
        time.sleep(0.1)
    clock.enter("start")  # where it works, on data say, and is not judged
    time.sleep(1.6)
    assert not stack.exists() and not ended
    clock.enter("forward")
    text, stacks, hanging = wait_until(lambda: ended, 10)[0]
    watchdog.close()
    assert "in forward of step 0" in text and hanging == 0
    assert "--- rank 0 on a" in stacks and "wait_until" in stacks and "wait_until" in stack.read_text()


def test_the_slowest_rank_and_what_it_is_slow_by():
    even = {"data": 0.1, "compute": 1.0}
    assert slowest([even, even, {"data": 1.5, "compute": 1.0}, even]) == (2, pytest.approx(2.5 / 1.1), "data")
    assert slowest([even, {"data": 0.1, "compute": 3.0}])[::2] == (1, "compute")
    assert slowest([even, even])[1] == 1.0


def test_each_second_is_in_one_account_over_restarts(tmp_path, monkeypatch):
    """A second attempt: the gap between is down time, a repeated step is no training."""
    fake = SimpleNamespace(now=1000.0)
    fake.time = fake.perf_counter = lambda: fake.now
    monkeypatch.setattr(utils.clock, "time", fake)
    monkeypatch.setattr(goodput, "time", fake)
    config = TrainingConfig(run_dir=str(tmp_path))

    def attempt(resume_from, *steps):
        run, clock = open_run(with_(config, resume_from=resume_from)), Clock()
        found = Goodput(run, clock, fake.now)
        found.resume(None)
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
    found = attempt("auto", (2, "data forward"), (3, "data forward"))
    expected = [5, 3, 1, 1, 0, 2, 4]
    assert [found[name] for name in ACCOUNTS] == expected and sum(expected) == found["until"] - 1000
    assert found["step"] == 3 and share_in_training(found) == 5 / 16
    file = tmp_path / "goodput.json"
    assert json.loads(file.read_text()) == found
    file.write_text('{"training": "much"}')
    assert attempt("auto")["training"] == 0
