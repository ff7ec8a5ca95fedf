"""SIGKILL at every system call of one save: only valid checkpoints, and the resumed run is bitwise equal."""

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

FLAGS = "--dataset_size 20 --no-use_amp --ema_decay 0.9 --record_samples --num_workers 0 --save_every 0".split()
FLAGS += "--keep_last 2 --eval_every 20".split()
KILLED = "killed by SIGKILL"  # printed by strace


def attach(pid, log, *words):
    """Attach strace to a process; it is attached when this returns."""
    command = ["strace", "-y", "-o", log, *words, "-p", str(pid)]
    strace, status = subprocess.Popen(command, stderr=subprocess.DEVNULL), Path(f"/proc/{pid}/status")
    with contextlib.suppress(OSError):  # the process is gone
        wait_until(lambda: strace.poll() is not None or "TracerPid:\t0\n" not in status.read_text())
        assert strace.poll() is None, "strace cannot attach"
    return strace


def train_and_cut(flags, calls, log, is_alone):
    """Train on one rank, and kill each writer in its second save, at the next of the given system calls.

    Args:
        calls: "rename:1" is the first rename of a save; "" kills nothing.
        is_alone: kill only the writer, so that the run continues; else also this rank.

    Returns:
        The final state, and the number of writers.
    """
    plain_send, calls, traced, pids = Writer.send, list(calls), [], set()

    def send(self, *args):
        if traced and traced[-1].poll() is None:
            traced[-1].terminate()  # it detaches
            traced[-1].wait()
        if calls and self.pid in pids:  # the first save of a writer also imports modules
            name, _, number = calls.pop(0).partition(":")
            traced.append(attach(self.pid, log, *(["-e", f"inject={name}:signal=SIGKILL:when={number}"] * bool(name))))
            if not is_alone:
                threading.Thread(target=follow, args=(traced[-1],), daemon=True).start()
        pids.add(self.pid)
        plain_send(self, *args)

    def follow(strace):
        strace.wait()
        if KILLED in Path(log).read_text():
            os.kill(os.getpid(), 9)

    with mock.patch.object(folder, "repeated_failures", return_value=[]), mock.patch.object(Writer, "send", send):
        return train_task("images", flags)[0], len(pids)


def assert_as_whole(runs, name):
    """The completed run equals the one that was never killed."""
    assert_same_state(runs.last(name), runs.last("whole"))
    assert runs.samples(name) == runs.samples("whole") and not list(runs.folder(name).rglob("*.tmp"))


def calls_of_one_save(root):
    """The lines of strace for one save, from receiving the job to reporting its end."""
    need("strace")
    words = Runs(root).words("counted", *FLAGS, *"--epochs 1 --save_every_steps 1".split())
    run_ranks(1, train_and_cut, words, [""] * 3, root / "strace", True)
    return (root / "strace").read_text().splitlines()[:-1]  # the last is the wait for the next job


def test_a_checkpoint_is_flushed_before_the_rename_and_the_folder_before_it_counts(tmp_path):
    calls, checkpoints = calls_of_one_save(tmp_path), tmp_path / "counted/checkpoints"
    file = rf"\d+<{checkpoints}/step_\d+\.pt\.[^/>]+\.tmp>"
    order = [rf"write\({file}", rf"fsync\({file}\) += 0", r'openat\(.*/lock\.json"', r"rename\w*\("]
    order += [rf"fsync\(\d+<{checkpoints}>\) += 0", r"write\(\d+<socket"]
    found = [[number for number, line in enumerate(calls) if re.match(pattern, line)] for pattern in order]
    assert all(found), f"{order}\n" + "\n".join(calls)
    places = [found[0][-1], *(each[0] for each in found[1:])]
    assert places == sorted(places), "\n".join(calls)


def test_the_writer_killed_at_a_system_call_of_a_save(tmp_path):
    """The run continues, and saves again with a new writer."""
    need("strace")
    runs, calls, flags = Runs(tmp_path), ["fsync:1", "rename:1"], [*FLAGS, "--epochs", 3]
    runs.train(1, "whole", *flags)
    words = runs.words("cut", *flags, "--save_every_steps", 1)
    assert run_ranks(1, train_and_cut, words, calls, tmp_path / "strace", True) == [("completed", 1 + len(calls))]
    assert_as_whole(runs, "cut")


@pytest.mark.slow
def test_the_writer_and_rank_0_killed_at_every_system_call_of_a_save(tmp_path):
    """A run is killed and resumed until it completes; then another one starts."""
    names = [line.split("(")[0] for line in calls_of_one_save(tmp_path)]
    calls = [f"{name}:{names[: number + 1].count(name)}" for number, name in enumerate(names)]
    assert len(calls) > 30 and {"fsync:2", "rename:1", "unlink:1"} <= {*calls}
    runs, log, flags = Runs(tmp_path), tmp_path / "strace", [*FLAGS, "--epochs", 12]
    runs.train(1, "whole", *flags)

    def completes(name, *calls):
        words = runs.words(name, *flags, "--save_every_steps", 3, "--resume_from", "auto")
        try:
            run_ranks(1, train_and_cut, words, calls, log, False)
        except AssertionError as error:
            assert str(error).startswith("exit codes [-9") and KILLED in log.read_text(), error
            for path in runs.checkpoints(name):
                checkpoint.verify(path)
            return False
        assert_as_whole(runs, name)
        return True

    number, is_completed = 0, False
    for call in calls:
        log.write_text("")
        for _ in range(3):
            is_completed = completes(f"killed{number}", call)
            number += is_completed
            if KILLED in log.read_text():
                break
        else:
            raise AssertionError(f"no save of three runs makes the system call {call}")
    assert is_completed or completes(f"killed{number}")
