"""A process that is paused in a debugger is no hang: neither for its own watchdog nor for those of other ranks."""

import bdb
import io
import os
import pdb
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

import utils.extras.watch.watchdog
from ranks import DEADLINE, launch_variables
from training import says, wait_until
from utils.clock import PhaseClock
from utils.extras.watch.debuggers import is_in_debugger
from utils.extras.watch.heartbeat import Heartbeats
from utils.extras.watch.watchdog import Watchdog


class Stop(threading.Event):
    """Where a thread waits, as a person's next command would let it go on."""

    def __init__(self):
        super().__init__()
        self.is_reached = threading.Event()

    def wait_here(self):
        self.is_reached.set()
        self.wait(DEADLINE)


class Commands(io.StringIO):
    """The commands of a person who waits before the first one."""

    def __init__(self, stop):
        super().__init__()
        self._stop = stop

    def readline(self, *_):
        self._stop.wait_here()
        return "continue\n"


class OwnDebugger(bdb.Bdb):
    """A debugger of one's own, as of IDLE or pudb."""

    def __init__(self, stop):
        super().__init__()
        self._stop = stop

    def user_line(self, frame):
        self._stop.wait_here()
        self.set_continue()


class PyDB:
    """As in pydevd, of VS Code and PyCharm."""

    def do_wait_suspend(self, stop):
        stop.wait_here()


@pytest.fixture(autouse=True)
def imported_pydevd(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydevd", SimpleNamespace(PyDB=PyDB))
    is_in_debugger()  # as the watchdog's first look, before any pause


def in_pdb(stop):
    pdb.Pdb(stdin=Commands(stop), stdout=io.StringIO()).set_trace()
    return 1


def in_subclass_of_pdb(stop):
    class Colourful(pdb.Pdb):
        pass

    Colourful(stdin=Commands(stop), stdout=io.StringIO()).set_trace()
    return 1


def in_post_mortem(stop):
    try:
        raise ValueError
    except ValueError as error:
        debugger = pdb.Pdb(stdin=Commands(stop), stdout=io.StringIO())
        debugger.reset()
        debugger.interaction(None, error.__traceback__)


def in_own_debugger(stop):
    OwnDebugger(stop).set_trace()
    return 1


def in_pydevd(stop):
    PyDB().do_wait_suspend(stop)


def under_bdb_without_a_breakpoint(stop):
    bdb.Bdb().runcall(stop.wait_here)


def under_coverage(stop):
    def trace(frame, event, value):
        return trace

    sys.settrace(trace)
    stop.wait_here()
    sys.settrace(None)


def under_a_profiler(stop):
    sys.setprofile(lambda *_: None)
    stop.wait_here()
    sys.setprofile(None)


def under_monitoring(stop):
    if not hasattr(sys, "monitoring"):  # before Python 3.12 nothing of the kind exists: the same as nothing
        stop.wait_here()
        return
    tool = sys.monitoring.COVERAGE_ID
    sys.monitoring.use_tool_id(tool, "coverage")
    sys.monitoring.set_events(tool, sys.monitoring.events.LINE)
    stop.wait_here()
    sys.monitoring.set_events(tool, 0)
    sys.monitoring.free_tool_id(tool)


def in_a_function_of_the_model_with_such_a_name(stop):
    def interaction():
        stop.wait_here()

    interaction()


def in_nothing(stop):
    stop.wait_here()


@pytest.mark.guarantee("hang")
@pytest.mark.parametrize(
    ("situation", "is_paused"),
    [
        (in_pdb, True),
        (in_subclass_of_pdb, True),
        (in_post_mortem, True),
        (in_own_debugger, True),
        (in_pydevd, True),
        (under_bdb_without_a_breakpoint, False),
        (under_coverage, False),
        (under_a_profiler, False),
        (under_monitoring, False),
        (in_a_function_of_the_model_with_such_a_name, False),
        (in_nothing, False),
    ],
)
def test_only_a_debugger_that_waits_for_commands_is_a_pause(situation, is_paused):
    stop = Stop()
    thread = threading.Thread(target=situation, args=[stop])
    thread.start()
    assert stop.is_reached.wait(DEADLINE)
    assert is_in_debugger() == is_paused
    stop.set()
    thread.join(DEADLINE)
    assert not thread.is_alive() and not is_in_debugger()


def test_looking_for_a_pause_walks_no_stack_of_another_thread(monkeypatch):
    """Doing so has ended a run with a segmentation fault while torch.compile worked."""
    monkeypatch.setattr(sys, "_current_frames", mock.Mock(side_effect=AssertionError))
    assert not is_in_debugger()


@pytest.mark.guarantee("hang")
@pytest.mark.parametrize("situation", [in_pdb, in_pydevd, under_coverage])
def test_a_pause_ends_no_rank_and_is_said_once_and_a_hang_after_it_ends_the_run(monkeypatch, situation):
    for name in [name for name in vars(utils.extras.watch.watchdog) if name.startswith("SECONDS_")]:
        monkeypatch.setattr(utils.extras.watch.watchdog, name, getattr(utils.extras.watch.watchdog, name) / 10)
    store, stop, clocks, ended, warnings = dist.HashStore(), Stop(), [PhaseClock(), PhaseClock()], [], []
    watchdogs = []
    for rank, clock in enumerate(clocks):
        ctx = SimpleNamespace(
            rank=rank, hosts=("a", "a"), host="a", heartbeats=Heartbeats(store, rank, os.getpid(), "", True)
        )
        calls = mock.Mock(exit_hung=lambda *text: ended.append(text), warn=warnings.append)
        clock.begin_step(1)
        clock.enter_phase("forward")
        watchdogs.append(Watchdog(clock, ctx, 0.6, calls))
    # the two watchdogs are in one process, whose pause is that of rank 1
    plain = is_in_debugger
    monkeypatch.setattr(
        utils.extras.watch.watchdog,
        "is_in_debugger",
        lambda: threading.current_thread() is watchdogs[1]._thread and plain(),
    )
    thread = threading.Thread(target=situation, args=[stop])
    thread.start()
    assert stop.is_reached.wait(DEADLINE)
    if situation is under_coverage:
        wait_until(lambda: ended, DEADLINE)
    else:
        time.sleep(3)
        assert not ended
        pauses = [text for text in warnings if "paused" in text]
        assert pauses == ["Rank 1 is paused in a debugger. No rank is ended until this rank continues."]
        stop.set()
        thread.join(DEADLINE)
        wait_until(lambda: ended, DEADLINE)  # neither rank makes progress now
    stop.set()
    for watchdog in watchdogs:
        watchdog.close()
    assert "--hang_timeout 0.6." in ended[0][0]


BREAKPOINT = """
plain = train.your_model.compute_loss
calls = []
def compute_loss(*given):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 4:
        breakpoint()
    return plain(*given)
train.your_model.compute_loss = compute_loss
"""


@pytest.mark.slow
@pytest.mark.guarantee("hang")
def test_a_run_goes_on_after_a_breakpoint_that_was_longer_than_hang_timeout(runs):
    flags = "--dataset_size 64 --batch_size 4 --epochs 1 --num_workers 0 --hang_timeout 3 --backend gloo".split()
    words = [sys.executable, runs.program(BREAKPOINT), *runs.words("run", *flags)]
    common = os.environ | launch_variables(2) | {"PYTHONBREAKPOINT": ""}
    ranks, outputs = [], [runs.root / f"rank{rank}.txt" for rank in range(2)]
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONUNBUFFERED": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": file, "stderr": file}
            ranks.append(subprocess.Popen([*map(str, words)], env=env, text=True, **pipes))
    try:
        wait_until(lambda: "(Pdb)" in outputs[1].read_text(), DEADLINE)
        time.sleep(6)
        assert [rank.poll() for rank in ranks] == [None, None], outputs[0].read_text()
        ranks[1].communicate("continue\n", timeout=DEADLINE)
        assert [rank.wait(DEADLINE) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    says(outputs[1].read_text(), "Rank 1 is paused in a debugger")
    assert runs.json("run", "status.json")["state"] == "completed"
    assert not list(runs.folder("run").glob("hang-*"))
