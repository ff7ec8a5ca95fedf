"""SIGKILL at every system call of one save: whole checkpoints only, and the resumed run ends in the uninterrupted run's
bits."""

import contextlib
import os
import re
import subprocess
import threading
from pathlib import Path
from unittest import mock

import pytest

from ranks import need, run_ranks
from tasks import train_task
from training import Runs, assert_same_state, wait_until
from utils.checkpoint import format as checkpoint
from utils.checkpoint.writer import Writer
from utils.run import folder

FLAGS = (
    "--dataset_size 20 --no-use_amp --ema_decay 0.9 --record_samples --num_workers 0 --save_every 0 --keep_last 2"
    " --eval_every 20".split()
)


def attach(pid, log, *words):
    """strace on a process, from when this returns."""
    strace = subprocess.Popen(["strace", "-y", "-o", log, *words, "-p", str(pid)], stderr=subprocess.DEVNULL)
    with contextlib.suppress(OSError):  # the process is gone
        wait_until(
            lambda: strace.poll() is not None or "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
        )
        assert strace.poll() is None, "strace cannot attach"
    return strace


@contextlib.contextmanager
def cut_at(calls, log, is_alone):
    """The saves are cut, one after the other, each at the next of these system calls of the writer. Yields the writers'
    pids.

    A writer's first save is not cut: it imports, and the save of the one before was cut.

    Args:
        calls: "rename:1" is the first rename of a save; "": none.
        is_alone: only the writer is killed, and the run continues; else this rank is killed with it.
    """
    plain_send, calls, traced, pids = Writer.send, list(calls), [], set()

    def send(self, *args):
        if traced and traced[-1].poll() is None:
            traced[-1].terminate()  # it detaches
            traced[-1].wait()
        if calls and self.pid in pids:
            name, _, number = calls.pop(0).partition(":")
            words = ["-e", f"inject={name}:signal=SIGKILL:when={number}"] if name else []
            traced.append(attach(self.pid, log, *words))
            if not is_alone:
                threading.Thread(target=follow, args=(traced[-1],), daemon=True).start()
        pids.add(self.pid)
        plain_send(self, *args)

    def follow(strace):
        strace.wait()
        if "killed by SIGKILL" in Path(log).read_text():
            os.kill(os.getpid(), 9)

    with mock.patch.object(Writer, "send", send):
        yield pids


def train_and_cut(flags, calls, log, is_alone):
    """Train on one rank. Returns the state in the end, and how many writers there were."""
    with mock.patch.object(folder, "repeated_failures", return_value=[]), cut_at(calls, log, is_alone) as pids:
        return train_task("images", flags)[0], len(pids)


def is_whole(runs, name):
    """The completed run is the one that was never cut."""
    assert_same_state(runs.last(name), runs.last("whole"))
    assert runs.samples(name) == runs.samples("whole")
    assert not list(runs.folder(name).rglob("*.tmp"))
    return True


def calls_of_one_save(root):
    """The lines of strace for one save of a run, from when the writer has the job to when it has said that it is
    done."""
    need("strace")
    runs, log = Runs(root), root / "strace"
    flags = runs.words("counted", *FLAGS, *"--epochs 1 --save_every_steps 1".split())
    run_ranks(1, train_and_cut, flags, [""] * 3, log, True)
    return log.read_text().splitlines()[:-1]  # the last is the wait for the next job


def all_calls(root):
    """The system calls to kill at, each by its name and its number among those of its name."""
    names = [line.split("(")[0] for line in calls_of_one_save(root)]
    calls = [f"{name}:{names[: number + 1].count(name)}" for number, name in enumerate(names)]
    assert len(calls) > 30 and {"fsync:2", "rename:1", "unlink:1"} <= {*calls}
    return calls


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_counts(tmp_path):
    """Of a save: the file is written and flushed, the lock read, the file renamed, the folder flushed, that reported."""
    calls = calls_of_one_save(tmp_path)
    checkpoints = str(tmp_path / "counted/checkpoints")

    def first(pattern):
        found = [number for number, line in enumerate(calls) if re.match(pattern, line)]
        assert found, f"no {pattern} in\n" + "\n".join(calls)
        return found[0]

    file = rf"\d+<{checkpoints}/step_\d+\.pt\.\d+\.tmp>"
    order = [
        max(number for number, line in enumerate(calls) if re.match(rf"write\({file}", line)),
        first(rf"fsync\({file}\) += 0"),
        first(r'openat\(.*/lock\.json"'),
        first(r"rename\w*\("),
        first(rf"fsync\(\d+<{checkpoints}>\) += 0"),
        first(r"write\(\d+<socket"),
    ]
    assert order == sorted(order), "\n".join(calls)


def test_the_writer_killed_at_a_system_call_of_a_save(tmp_path):
    """The run itself continues. Each save that is cut is followed by its repetition, whose writer lives."""
    need("strace")
    runs, calls, flags = Runs(tmp_path), ["fsync:1", "rename:1"], [*FLAGS, "--epochs", 3]
    runs.train(1, "whole", *flags)
    words = runs.words("cut", *flags, "--save_every_steps", 1)
    assert run_ranks(1, train_and_cut, words, calls, tmp_path / "strace", True) == [("completed", 1 + len(calls))]
    assert is_whole(runs, "cut")


@pytest.mark.slow
def test_the_writer_and_rank_0_killed_at_every_system_call_of_a_save(tmp_path):
    """One run is killed and resumed again and again. Once it is completed, another begins."""
    calls, runs, log, flags = all_calls(tmp_path), Runs(tmp_path), tmp_path / "strace", [*FLAGS, "--epochs", 12]
    runs.train(1, "whole", *flags)

    def completes(name, *calls):
        words = runs.words(name, *flags, "--save_every_steps", 3, "--resume_from", "auto")
        try:
            ((state, _),) = run_ranks(1, train_and_cut, words, calls, log, False)
        except AssertionError as error:
            if not (str(error).startswith("exit codes [-9") and "killed by SIGKILL" in log.read_text()):
                raise
            for path in (runs.folder(name) / "checkpoints").glob("*.pt"):
                checkpoint.verify(path)
            return False
        return state == "completed" and is_whole(runs, name)

    number, is_completed = 0, False
    for call in calls:
        log.write_text("")
        while "killed by SIGKILL" not in log.read_text():
            is_completed = completes(f"killed{number}", call)
            number += is_completed
    assert is_completed or completes(f"killed{number}")
