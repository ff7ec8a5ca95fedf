# extra: template
"""SIGKILL to rank 0 at every system call of the thread in one save: only valid checkpoints, and the resumed run is
bitwise equal."""

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
from utils.checkpoint.writer import CheckpointWriter

FLAGS = "--dataset_size 20 --no-use_amp --record_samples --num_workers 0 --save_every 0".split()
FLAGS += ["--ema_decay", "0.9"]
FLAGS += "--keep_last 2 --eval_every 20".split()
KILLED = "killed by SIGKILL"  # printed by strace
SAVES = 99  # more than a run makes
TRACED = "trace=%file,fsync,write,close,lseek,getdents64,statfs"  # of the thread; waits for the interpreter's lock vary


def attach(thread, log, *words):
    """Attach strace to a thread; it is attached when this returns."""
    command = ["strace", "-y", "-o", log, "-e", TRACED, *words, "-p", str(thread)]
    strace, status = subprocess.Popen(command, stderr=subprocess.DEVNULL), Path(f"/proc/{thread}/status")
    wait_until(lambda: strace.poll() is not None or "TracerPid:\t0\n" not in status.read_text())
    assert strace.poll() is None, "strace cannot attach"
    return strace


def train_and_cut(flags, calls, log):
    """Train on one rank, and kill it at the given system call of its second save, or of a later one.

    Args:
        calls: for each save: "rename:1" is its first rename; "" kills nothing.

    Returns:
        The final state.
    """
    plain_start, calls, traced, seen = CheckpointWriter.start, list(calls), [], []

    def start(self, *args):
        for strace in traced:
            strace.terminate()  # it detaches
            strace.wait()
        traced.clear()
        if calls and seen:  # the first save also imports modules
            name, _, number = calls.pop(0).partition(":")
            thread = self._thread.submit(threading.get_native_id).result()
            traced.append(attach(thread, log, *["-e", f"inject={name}:signal=SIGKILL:when={number}"] * bool(name)))
        seen.append(self)
        plain_start(self, *args)

    with mock.patch.object(CheckpointWriter, "start", start):
        return train_task("images", flags)


def calls_of_one_save(root):
    """The lines of strace for one save."""
    need("strace")
    words = Runs(root).words("counted", *FLAGS, *"--epochs 1 --save_every_steps 1".split())
    run_ranks(1, train_and_cut, words, [""] * 3, root / "strace")
    lines = [line for line in (root / "strace").read_text().splitlines() if re.match(r"\w+\(", line)]
    return lines


@pytest.mark.guarantee("whole-file")
def test_a_checkpoint_is_flushed_before_the_rename_and_the_folder_before_it_counts(tmp_path):
    calls, checkpoints = calls_of_one_save(tmp_path), tmp_path / "counted/checkpoints"
    file = rf"\d+<{checkpoints}/step_\d+\.pt\.[^/>]+\.tmp>"
    order = [rf"write\({file}", rf"fsync\({file}\) += 0", r'openat\(.*/lock\.json"', r"rename\w*\("]
    order += [rf"fsync\(\d+<{checkpoints}>\) += 0"]
    positions = [[number for number, line in enumerate(calls) if re.match(pattern, line)] for pattern in order]
    assert all(positions), f"{order}\n" + "\n".join(calls)
    places = [positions[0][-1], *(numbers[0] for numbers in positions[1:])]
    assert places == sorted(places), "\n".join(calls)


def killed_at(runs, calls):
    """A run is killed and resumed until it completes; then another one starts, until each call has killed one."""
    log, flags = runs.root / "strace", [*FLAGS, "--epochs", 12]
    runs.train(1, "whole", *flags)

    def completes(name, *calls):
        words = runs.words(name, *flags, "--save_every_steps", 3, "--resume_from", "auto")
        try:
            run_ranks(1, train_and_cut, words, calls, log)
        except AssertionError as error:
            assert str(error).startswith("exit codes [-9"), error
            for path in runs.checkpoints(name):
                checkpoint.verify_checkpoint(path)
            return False
        assert_same_state(runs.last(name), runs.last("whole"))
        assert runs.samples(name) == runs.samples("whole") and not list(runs.folder(name).rglob("*.tmp"))
        return True

    number, is_completed = 0, False
    for call in calls:
        log.write_text("")
        for _ in range(3):
            is_completed = completes(f"killed{number}", *[call] * SAVES)  # only the third one of a run deletes a file
            number += is_completed
            if KILLED in log.read_text():
                break
        else:
            raise AssertionError(f"no save of three runs makes the system call {call}")
    assert is_completed or completes(f"killed{number}")


@pytest.mark.guarantee("kills", "whole-file")
@pytest.mark.slow
def test_rank_0_killed_at_every_system_call_of_a_save(tmp_path):
    names = [line.split("(")[0] for line in calls_of_one_save(tmp_path)]
    calls = [f"{name}:{names[: number + 1].count(name)}" for number, name in enumerate(names)]
    assert len(calls) > 20 and {"fsync:2", "rename:1", "unlink:1"} <= {*calls}
    killed_at(Runs(tmp_path), calls)
