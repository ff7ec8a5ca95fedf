"""SIGKILL at every system call of one save: whole checkpoints only, and the resumed run ends in the uninterrupted run's bits."""

import contextlib
import math
import os
import re
import subprocess
import threading
from pathlib import Path
from unittest import mock

import pytest

import ddp_utils
import utils.saving
from ranks import need, run_ranks
from tasks import train_task
from training import Runs, assert_same_state, wait_until
from utils import checkpoint
from utils.writer import Writer

FLAGS = (
    "--dataset_size 20 --no-use_amp --ema_decay 0.9 --record_samples --num_workers 0 --save_every 0 --keep_last 2 --eval_every 20".split()
)
CHEAP = ("fsync:1", "rename:1")


def attach(pid, log, *words):
    """strace on a process, from when this returns."""
    strace = subprocess.Popen(["strace", "-y", "-o", log, *words, "-p", str(pid)], stderr=subprocess.DEVNULL)
    with contextlib.suppress(OSError):  # the process is gone
        wait_until(lambda: strace.poll() is not None or "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text())
        assert strace.poll() is None, "strace cannot attach"
    return strace


def count_whole(folder):
    """How many files have a checkpoint's name; each of them is whole."""
    return len([checkpoint.verify(path) for path in Path(folder).glob("*.pt")])


@contextlib.contextmanager
def cut_at(calls, log, is_alone, folder):
    """The saves are cut, one after the other, each at the next of these system calls of the writer.

    A writer's first save is not cut: it imports, and the save of the one before was cut.

    Args:
        calls: "rename:1" is the first rename of a save; "": none.
        is_alone: only the writer is killed, and the run continues; else this rank is killed with it.
    """
    plain_send, plain_wait, plain_start, calls = Writer.send, Writer.wait, Writer._start, list(calls)
    traced, killed, warm = [], [], []

    def send(self, *args):
        if traced and traced[-1].poll() is None:
            traced[-1].terminate()  # it detaches
            traced[-1].wait()
        if calls and self.pid in warm:
            name, _, number = calls.pop(0).partition(":")
            words = ["-e", f"inject={name}:signal=SIGKILL:when={number}"] if name else []
            traced.append(attach(self.pid, log, *words))
            if not is_alone:
                threading.Thread(target=follow, args=(traced[-1],), daemon=True).start()
        plain_send(self, *args)

    def follow(strace):
        strace.wait()
        if "killed by SIGKILL" in Path(log).read_text():
            os.kill(os.getpid(), 9)

    def wait(self, *args):
        outcome = plain_wait(self, *args)
        if outcome and not outcome.problem:
            warm.append(self.pid)
        return outcome

    def start(self):
        if self._job:  # the one before was killed
            killed.append(count_whole(folder))
        plain_start(self)

    with mock.patch.multiple(Writer, send=send, wait=wait, _start=start):
        yield killed


def train_and_cut(flags, calls, log, is_alone, folder):
    """Train on one rank. Returns the state in the end, and how many whole checkpoints there were after each kill."""
    with (
        mock.patch.object(ddp_utils, "MOST_STRIKES", 10**6),
        mock.patch.object(utils.saving, "MOST_FAILURES", 10**6),
        cut_at(calls, log, is_alone, folder) as killed,
    ):
        return train_task("images", flags)[0], killed


class Ordeal:
    """A run that is killed and resumed again and again. Completed, it is compared with the uninterrupted one, and another begins."""

    def __init__(self, root, steps, *flags):
        self.runs, self.number, self.log = Runs(root), 0, root / "strace"
        self.flags = [*FLAGS, "--epochs", math.ceil(steps / 5), *flags]
        self.runs.train(1, "whole", *self.flags, "--save_every_steps", 0)

    def attempt(self, calls, is_alone):
        """Resume it: how many checkpoints were whole after each kill where it was completed, else None."""
        name = f"killed{self.number}"
        folder = self.runs.folder(name) / "checkpoints"
        words = self.runs.words(name, *self.flags, "--resume_from", "auto")
        try:
            state, whole = run_ranks(1, train_and_cut, words, calls, self.log, is_alone, folder)[0]
        except AssertionError as error:
            if not re.match(r"exit codes \[-9", str(error)):
                raise
            assert count_whole(folder) >= 0
            return None
        assert state == "completed"
        assert_same_state(self.runs.last(name), self.runs.last("whole"))
        assert self.runs.samples(name) == self.runs.samples("whole")
        assert not list(self.runs.folder(name).rglob("*.tmp"))
        self.number += 1
        return whole


def calls_of_one_save(root):
    """The lines of strace for one save of a run, from when the writer has the job to when it has said that it is done."""
    need("strace")
    runs, log = Runs(root), root / "strace"
    flags = runs.words("counted", *FLAGS, *"--epochs 1 --save_every_steps 1".split())
    run_ranks(1, train_and_cut, flags, [""] * 3, log, True, runs.folder("counted") / "checkpoints")
    return log.read_text().splitlines()[:-1]  # the last is the wait for the next job


def all_calls(root):
    """The system calls to kill at, each by its name and its number among those of its name."""
    names = [line.split("(")[0] for line in calls_of_one_save(root)]
    calls = [f"{name}:{names[: number + 1].count(name)}" for number, name in enumerate(names)]
    assert len(calls) > 30 and {"fsync:2", "rename:1", "unlink:1"} <= {*calls}
    return calls


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_counts(tmp_path):
    """The order of the system calls: the file is written and flushed, the claim read, the file renamed, the folder flushed, that said."""
    calls = calls_of_one_save(tmp_path)
    folder = str(tmp_path / "counted/checkpoints")

    def first(pattern):
        found = [number for number, line in enumerate(calls) if re.match(pattern, line)]
        assert found, f"no {pattern} in\n" + "\n".join(calls)
        return found[0]

    file = rf"\d+<{folder}/step_\d+\.pt\.\d+\.tmp>"
    order = [
        max(number for number, line in enumerate(calls) if re.match(rf"write\({file}", line)),
        first(rf"fsync\({file}\) += 0"),
        first(r'openat\(.*/claim\.json"'),
        first(r"rename\w*\("),
        first(rf"fsync\(\d+<{folder}>\) += 0"),
        first(r"write\(\d+<socket"),
    ]
    assert order == sorted(order), "\n".join(calls)


@pytest.mark.parametrize("calls", [CHEAP, pytest.param((), marks=pytest.mark.slow)], ids=["fsync-rename", "all"])
def test_the_writer_killed_at_a_system_call_of_a_save(tmp_path, calls):
    """The run itself continues. Each save that is cut is followed by its repetition, whose writer lives."""
    need("strace")
    calls = calls or all_calls(tmp_path)
    whole = Ordeal(tmp_path, 2 * len(calls) + 10, "--save_every_steps", 1).attempt(calls, True)
    assert len(whole) == len(calls) and min(whole[2:], default=2) >= 2, whole


@pytest.mark.slow
def test_the_writer_and_rank_0_killed_at_every_system_call_of_a_save(tmp_path):
    calls, ordeal = all_calls(tmp_path), Ordeal(tmp_path, 60, "--save_every_steps", 3)
    for call in calls:
        ordeal.log.write_text("")
        while "killed by SIGKILL" not in ordeal.log.read_text():  # a run that is completed gives way to another
            killed_in = ordeal.number
            is_completed = ordeal.attempt([call], False) is not None
            assert is_completed or "killed by SIGKILL" in ordeal.log.read_text()
    if killed_in == ordeal.number:
        ordeal.attempt([], False)
