"""SIGKILL at every system call of one save, and at random moments: the run is gone on with to the uninterrupted run's bits."""

import faulthandler
import json
import math
import os
import random
import re
import time
from collections import Counter

import pytest

from cutter import are_whole, strike, train_and_cut, train_to_be_struck
from killer import Place
from ranks import CONTEXT, need, run_ranks
from tasks import train_task
from training import STATE, TINY, Runs, difference

STEPS_PER_EPOCH = 5
FLAGS = [*TINY, "--dataset_size", 40, "--no-use_amp", "--ema_decay", 0.9, "--record_samples", "--num_workers", 1, "--timeout", 30]
FLAGS += ["--save_every", 0, "--keep_last", 2, "--eval_every", 20]
SEED = os.environ.get("DRILL_SEED", time.strftime("%Y-%m-%d"))

pytestmark = pytest.mark.fault


@pytest.fixture
def is_drill(request):
    """Whether all are wanted, which takes longer than a test may; each launch has a deadline of its own."""
    if request.config.getoption("--drills"):
        faulthandler.cancel_dump_traceback_later()
    return request.config.getoption("--drills")


class Ordeal:
    """A run that is killed again and again and gone on with. Completed, it is compared with the one that nothing befell, and another begins."""

    def __init__(self, root, steps, *flags):
        self.runs, self.number = Runs(root), 0
        self.flags = [*FLAGS, "--epochs", math.ceil(steps / STEPS_PER_EPOCH), *flags]
        run_ranks(2, train_task, "images", [*self.flags, "--run_dir", self.runs.folder("whole"), "--save_every_steps", 0])

    @property
    def checkpoints(self):
        return self.runs.folder(f"killed{self.number}") / "checkpoints"

    def attempt(self, function, *args):
        """Go on with it: what rank 0 returned where that was its completion, else None."""
        flags = [*self.flags, "--run_dir", self.checkpoints.parent, "--resume_from", "auto"]
        try:
            returned = run_ranks(2, function, "images", flags, *args)[0]
        except AssertionError as error:
            if not re.match(r"exit codes \[.*-9", str(error)):
                raise
            assert are_whole(self.checkpoints) >= 0
            return None
        name = self.checkpoints.parent.name
        got, want = self.runs.last(name), self.runs.last("whole")
        assert {key: difference(want[key], got[key]) for key in STATE} == {key: [] for key in STATE}
        assert self.runs.samples(name) == self.runs.samples("whole")
        assert not list(self.runs.folder(name).rglob("*.tmp"))
        self.number += 1
        return returned


def calls_of_one_save(root):
    """The lines of strace for one save of a run, from when the writer has the job to when it has said that it is done."""
    need("strace")
    log, folder = root / "strace", root / "counted"
    flags = [*FLAGS, "--epochs", 1, "--save_every_steps", 1, "--run_dir", folder]
    run_ranks(2, train_and_cut, "images", flags, [""] * 3, log, True, folder / "checkpoints")
    return log.read_text().splitlines()[:-1]  # the last is the wait for the next job


def chosen(root, is_drill):
    """The system calls to kill at, each by its name and its number among those of its name: all, or some."""
    names = [line.split("(")[0] for line in calls_of_one_save(root)]
    calls = [f"{name}:{names[: number + 1].count(name)}" for number, name in enumerate(names)]
    assert len(calls) > 30 and {"fsync:2", "rename:1", "unlink:1"} <= {*calls}
    return calls if is_drill else random.Random(SEED).sample(calls, 4)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_counts(tmp_path):
    """The order of the system calls: the file is filled and flushed, the claim read, the file renamed, the folder flushed, that said."""
    calls = calls_of_one_save(tmp_path)
    folder = str(tmp_path / "counted/checkpoints")

    def first(pattern):
        found = [number for number, line in enumerate(calls) if re.match(pattern, line)]
        assert found, f"no {pattern} in\n" + "\n".join(calls)
        return found[0]

    file = rf"\d+<{folder}/step_\d+\.pt\.\d+\.tmp>"
    filled = max(number for number, line in enumerate(calls) if re.match(rf"write\({file}", line))
    order = [
        filled,
        first(rf"fsync\({file}\) += 0"),
        first(r'openat\(.*/claim\.json"'),
        first(r"rename\w*\("),
        first(rf"fsync\(\d+<{folder}>\) += 0"),
        first(r"write\(\d+<socket"),
    ]
    assert order == sorted(order), "\n".join(calls)


def test_the_writer_killed_at_every_system_call_of_a_save(tmp_path, is_drill):
    """The run itself goes on. Each save that is cut is followed by its repetition, whose writer lives."""
    calls = chosen(tmp_path, is_drill)
    ordeal = Ordeal(tmp_path, 2 * len(calls) + 10, "--save_every_steps", 1)
    state, whole = ordeal.attempt(train_and_cut, calls, tmp_path / "strace", True, ordeal.checkpoints)
    assert state == "completed" and len(whole) == len(calls)
    print(f"killed at {len(whole)} calls; whole checkpoints after each: {whole}")
    assert min(whole[2:]) >= 2


def test_the_writer_and_rank_0_killed_at_every_system_call_of_a_save(tmp_path, is_drill):
    log, calls = tmp_path / "strace", chosen(tmp_path, is_drill)
    ordeal = Ordeal(tmp_path, 60, "--save_every_steps", 3)
    for call in calls:
        log.write_text("")
        while "killed by SIGKILL" not in log.read_text():  # a run that has come to its end gives way to another
            killed_in = ordeal.number
            is_completed = ordeal.attempt(train_and_cut, [call], log, False, ordeal.checkpoints) is not None
            assert is_completed or "killed by SIGKILL" in log.read_text()
    if killed_in == ordeal.number:
        ordeal.attempt(train_and_cut, [], log, False, ordeal.checkpoints)
    print(f"{len(calls)} kills in {ordeal.number} runs")


def test_random_processes_killed_at_random_moments(tmp_path, is_drill):
    """A rank or the writer, again and again; who goes on is whoever comes next."""
    kills, clock = [], random.Random(SEED)
    ordeal = Ordeal(tmp_path, 100, "--save_every_steps", 3)
    most = 100 if is_drill else 10
    while len(kills) < most:
        report = tmp_path / "report"
        report.write_text("[]")
        for number in range(3):
            Place(tmp_path, number).write(pid=0, steps=0)  # nothing of the attempt before
        striker = CONTEXT.Process(target=strike, args=(tmp_path, 2, clock.random(), report, most - len(kills)))
        striker.start()
        try:
            is_completed = ordeal.attempt(train_to_be_struck, tmp_path, 2) is not None
        finally:
            striker.kill()
            striker.join()
        struck = json.loads(report.read_text())
        assert is_completed or (struck and struck[-1][0] < 2), "a rank ended that nobody killed"
        kills += struck
    ordeal.attempt(train_to_be_struck, tmp_path, 2)
    print(
        f"{len(kills)} kills in {ordeal.number} runs, of (rank or writer, phase of the rank): {sorted(Counter(map(tuple, kills)).items())}"
    )
    assert {victim for victim, _ in kills} == {0, 1, 2} or not is_drill
