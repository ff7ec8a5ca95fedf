"""Where each rank is, whose fault a standstill is, and where the time went."""

import json
from types import SimpleNamespace

import pytest

import utils.clock
from utils.clock import PHASES, Clock, slowest
from utils.report import goodput as ledger
from utils.report.goodput import ACCOUNTS, Ledger, goodput, read_ledger
from utils.run import watchdog
from utils.run.watchdog import BEAT, FIRST_LIMIT, LEAST_LIMIT, PLACE, Place, Watch, look_twice, read_place, verdict

HOSTS = ("a", "a", "b", "b")


def place(step, phase, counter=1, beat=1):
    return Place(beat, 0, counter, step, phase, pid=100)


@pytest.mark.parametrize(
    ("places", "standing", "said", "guilty"),
    [
        (
            [place(7, "backward")] * 4,
            {2},
            "rank 2 on b stands still in backward of step 7 (process 100: stopped, killed or cut off)",
            2,
        ),
        ([place(7, "backward")] * 3 + [None], {3}, "rank 3 on b stands still somewhere", 3),
        ([place(7, "backward")] * 3 + [place(7, "data")], set(), "rank 3 on b hangs in data of step 7", 3),
        (
            [place(8, "data"), place(7, "update"), place(8, "data"), place(8, "data")],
            set(),
            "rank 1 on a hangs in update of step 7",
            1,
        ),
        ([place(7, "backward")] * 4, set(), "all ranks wait in backward of step 7: the network", 0),
    ],
)
def test_who_holds_up_all_others(places, standing, said, guilty):
    text, rank = verdict(places, standing, HOSTS, 6.2)
    assert text.startswith(f"no progress for 6 s: {said}") and rank == guilty


def test_the_limit_is_learned_from_the_steps_and_never_under_five_seconds():
    watch = Watch.__new__(Watch)
    Clock.__init__(watch)
    assert watch.limit == FIRST_LIMIT
    watch._durations.extend([0.1] * 200)
    assert watch.limit == LEAST_LIMIT
    watch._durations.extend([3.0] * 4)
    assert watch.limit == 15.0
    watch._durations.extend([60.0])  # one slow step of hundreds is not what steps take
    assert watch.limit == 15.0


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where the test says so, for watch and ledger."""
    clock = SimpleNamespace(now=1000.0, sleep=lambda seconds: None)
    clock.time = clock.perf_counter = clock.monotonic = lambda: clock.now
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(utils.clock, "time", clock)
    monkeypatch.setattr(ledger, "time", clock)
    return clock


def test_others_see_phase_and_step_at_once_and_a_beat_that_moves(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "SECONDS_OF_A_LOOK", 0.1)
    watch = Watch(tmp_path, 0, HOSTS[:1], 0, lambda *_: None, lambda *_: None)
    watch.begin_step(12)
    watch.enter("data")  # as the loader does
    found = read_place(tmp_path / "rank0")
    assert (found.step, found.phase) == (12, "data")
    watch.enter("forward")
    watch.enter("backward")
    assert read_place(tmp_path / "rank0").phase == "backward" and read_place(tmp_path / "rank0").counter > found.counter
    assert look_twice(tmp_path, 1, watch._write_beat)[1:] == (set(), False)
    assert look_twice(tmp_path, 1, lambda: watch._write_beat() or watch.enter("update"))[1:] == (set(), True)
    watch.close()
    assert look_twice(tmp_path, 1)[1] == set()  # it has said its end
    (tmp_path / "rank0").write_bytes(BEAT.pack(7, 0) + PLACE.pack(9, 5, PHASES.index("backward"), 1))
    assert look_twice(tmp_path, 1)[1] == {0}  # no beat any more
    assert read_place(tmp_path / "rank1") is None
    (tmp_path / "rank1").write_bytes(b"short")
    assert read_place(tmp_path / "rank1") is None


def test_only_the_stacks_of_a_rank_that_stands_still_are_looked_at(tmp_path, monkeypatch, clock):
    """To look at the stacks of threads that run ended real runs with SIGSEGV, at random and rarely."""
    looks = []
    monkeypatch.setattr(watchdog, "is_debugged", lambda: bool(looks.append(1)))
    monkeypatch.setattr(Watch, "_watch", lambda self: None)  # its thread: the test beats itself
    watch = Watch(tmp_path, 0, ("a",), 0.0, lambda *_: None, lambda *_: None)

    def beat(count, phase=None):
        for _ in range(count):
            clock.now += watchdog.SECONDS_BETWEEN_BEATS
            if phase:
                watch.enter(phase)
            watch._write_beat()

    beat(1000, "forward")
    watch.enter("start")  # where it works, on data say, and is not judged
    beat(100)
    assert not looks
    watch.enter("forward")
    beat(int(LEAST_LIMIT / watchdog.SECONDS_BETWEEN_BEATS) - 1)
    assert looks  # before others judge it
    watch.close()


def test_the_slowest_rank_and_what_it_is_slow_by():
    even = {"data": 0.1, "compute": 1.0}
    assert slowest([even, even, {"data": 1.5, "compute": 1.0}, even]) == (2, pytest.approx(2.5 / 1.1), "data")
    assert slowest([even, {"data": 0.1, "compute": 3.0}])[::2] == (1, "compute")
    assert slowest([even, even])[1] == 1.0


def test_each_second_is_in_one_account_over_restarts(tmp_path, clock):
    """A second attempt: the gap between is down time, a step made again is no training."""
    file, began = tmp_path / "ledger.json", clock.now

    def pass_through(watch, phases, step):
        for phase in phases:
            watch.begin_step(step) if phase == "data" else watch.enter(phase)
            clock.now += 1

    watch = Clock()
    first = Ledger(file, watch, None, began)
    pass_through(watch, ("data", "forward", "backward", "update", "save", "evaluation"), step=1)
    pass_through(watch, ("data", "forward"), step=2)
    first.write()
    clock.now += 4  # killed
    watch = Clock()
    second = Ledger(file, watch, read_ledger(file), clock.now)
    pass_through(watch, ("data", "forward"), step=2)
    pass_through(watch, ("data", "forward"), step=3)
    found = second.now()
    expected = {
        "training": 5,
        "data_wait": 3,
        "evaluation": 1,
        "checkpoints": 1,
        "start_up": 0,
        "recomputed": 2,
        "down": 4,
    }
    assert {name: found[name] for name in ACCOUNTS} == expected and sum(expected.values()) == found["until"] - began
    assert found["step"] == 3 and goodput(found) == 5 / 16
    file.write_text(json.dumps({"training": "much"}))
    assert read_ledger(file) is None
