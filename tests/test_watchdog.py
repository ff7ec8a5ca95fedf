"""Where each rank is, whose fault a standstill is, and where the time went."""

import json
import subprocess
import sys
import time

import pytest

from ranks import ROOT
from utils import watchdog
from utils.ledger import ACCOUNTS, Ledger, goodput, read_ledger
from utils.watchdog import FIRST_LIMIT, LEAST_LIMIT, Clock, Place, Watch, look_twice, read_place, slowest, verdict

HOSTS = ("a", "a", "b", "b")


def place(step, phase, counter=1, beat=1):
    return Place(beat, 0, counter, step, phase, pid=100)


@pytest.mark.parametrize(
    ("places", "standing", "said", "guilty"),
    [
        ([place(7, "backward")] * 4, {2}, "rank 2 on b stands still in backward of step 7 (process 100: stopped, killed or cut off)", 2),
        ([place(7, "backward")] * 3 + [None], {3}, "rank 3 on b stands still somewhere", 3),
        ([place(7, "backward")] * 3 + [place(7, "data")], set(), "rank 3 on b hangs in data of step 7", 3),
        ([place(8, "data"), place(7, "update"), place(8, "data"), place(8, "data")], set(), "rank 1 on a hangs in update of step 7", 1),
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


def test_others_see_phase_and_step_at_once_and_a_beat_that_moves(tmp_path):
    watch = Watch(tmp_path, 0, HOSTS[:1], 0, lambda *_: None, lambda *_: None)
    watch.begin_step(12)
    watch.enter("data")  # as the loader does
    found = read_place(tmp_path / "rank0")
    assert (found.step, found.phase) == (12, "data")
    watch.enter("forward")
    watch.enter("backward")
    assert read_place(tmp_path / "rank0").phase == "backward" and read_place(tmp_path / "rank0").counter > found.counter
    assert look_twice(tmp_path, 1)[1:] == (set(), False)
    watch.close()
    assert look_twice(tmp_path, 1)[1] == set()  # it has said its end
    assert read_place(tmp_path / "rank1") is None
    (tmp_path / "rank1").write_bytes(b"short")
    assert read_place(tmp_path / "rank1") is None


DEBUGGED = """
import sys, time
from pathlib import Path
from utils.watchdog import Watch, read_place
watch = Watch(Path(sys.argv[1]), 0, ("a",), 1.0, lambda *_: None, lambda *_: print("ended", flush=True))
watch._durations.extend([0.01] * 20)
watch.begin_step(1)
{stand}
print("debugged", read_place(Path(sys.argv[1], "rank0")).is_debugged, flush=True)
watch.close()
"""


@pytest.mark.parametrize(("stand", "is_debugged"), [("breakpoint()", 1), ("time.sleep(5)", 0)])
def test_a_rank_in_a_debugger_is_not_ended_and_one_that_sleeps_is(tmp_path, stand, is_debugged):
    program = subprocess.Popen(
        [sys.executable, "-c", DEBUGGED.format(stand=stand), tmp_path], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    if is_debugged:
        time.sleep(6)
        program.stdin.write("c\n")
    out, _ = program.communicate(timeout=60)
    assert ("ended" in out) is not bool(is_debugged)
    assert f"debugged {is_debugged}" in out


def test_a_rank_that_goes_on_is_never_looked_into_and_one_that_stands_is(tmp_path, monkeypatch):
    """To look at the stacks of threads that run ended real runs with SIGSEGV, at random and rarely."""
    looks = []
    monkeypatch.setattr(watchdog, "SECONDS_BETWEEN_BEATS", 0.001)
    monkeypatch.setattr(watchdog, "is_debugged", lambda: bool(looks.append(1)))
    watch = Watch(tmp_path, 0, ("a",), 0.0, lambda *_: None, lambda *_: None)
    ends = time.monotonic() + 2 * LEAST_LIMIT
    while watch._beat < 1000 and time.monotonic() < ends:
        watch.enter("forward")
        time.sleep(0.001)
    assert watch._beat >= 1000 and not looks
    watch.enter("start")  # where it works, on data say, and is not judged
    time.sleep(0.6 * LEAST_LIMIT)
    assert not looks
    watch.enter("forward")
    ends = time.monotonic() + LEAST_LIMIT
    while not looks and time.monotonic() < ends:
        time.sleep(0.05)
    watch.close()
    assert looks  # before others judge it


def test_the_slowest_rank_and_what_it_is_slow_by():
    even = {"data": 0.1, "compute": 1.0}
    assert slowest([even, even, {"data": 1.5, "compute": 1.0}, even]) == (2, pytest.approx(2.5 / 1.1), "data")
    assert slowest([even, {"data": 0.1, "compute": 3.0}])[::2] == (1, "compute")
    assert slowest([even, even])[1] == 1.0


def account(clock, phases, step):
    for phase in phases:
        clock.begin_step(step) if phase == "data" else clock.enter(phase)
        time.sleep(0.05)


def test_each_second_is_in_one_account_over_restarts(tmp_path):
    """A second attempt: the gap between is down time, a step made again is no training."""
    file, began = tmp_path / "ledger.json", time.time()
    clock = Clock()
    first = Ledger(file, clock, None, began)
    account(clock, ("data", "forward", "backward", "update", "save", "evaluation"), step=1)
    account(clock, ("data", "forward"), step=2)
    first.write()
    time.sleep(0.2)  # killed
    clock = Clock()
    second = Ledger(file, clock, read_ledger(file), time.time())
    account(clock, ("data", "forward"), step=2)
    account(clock, ("data", "forward"), step=3)
    found = second.now()
    assert sum(found[name] for name in ACCOUNTS) == pytest.approx(found["until"] - began, abs=0.02)
    assert 0.2 <= found["down"] < 0.3 and 0.1 <= found["recomputed"] < 0.2
    assert found["step"] == 3 and 0.25 <= found["training"] < 0.45 and 0 < goodput(found) < 1
    file.write_text(json.dumps({"training": "much"}))
    assert read_ledger(file) is None
