"""Ranks whose writer of checkpoints is killed by strace at a given system call, alone or together with rank 0; and random kills."""

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from unittest import mock

import ddp_utils
import train
import utils.saving
from killer import PHASES, Place, saying_where
from tasks import config_of, using
from utils import checkpoint
from utils.writer import Writer


def attach(pid, log, *words):
    """strace on a process, from when this returns."""
    strace = subprocess.Popen(["strace", "-y", "-o", log, *words, "-p", str(pid)], stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 20
    with contextlib.suppress(OSError):  # the process is gone
        while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < ends and strace.poll() is None, "strace cannot attach"
            time.sleep(0.001)
    return strace


def are_whole(folder):
    """How many files have a checkpoint's name; each of them is whole."""
    return len([checkpoint.verify(path) for path in Path(folder).glob("*.pt")])


@contextlib.contextmanager
def cut_at(calls, log, is_alone, folder):
    """In rank 0: the saves are cut, one after the other, each at the next of these system calls of the writer.

    A writer's first save is let be: it imports, and the save of the one before was cut.

    Args:
        calls: "rename:1" is the first rename of a save; "": none.
        is_alone: only the writer is killed, and the run goes on; else rank 0 goes with it.
    """
    plain_send, plain_wait, plain_start, calls = Writer.send, Writer.wait, Writer._start, list(calls)
    traced, killed, warm = [], [], []

    def send(self, *args):
        if traced and traced[-1].poll() is None:
            traced[-1].terminate()  # it lets go
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
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(self, *args):
        outcome = plain_wait(self, *args)
        if outcome and not outcome.problem:
            warm.append(self.pid)
        return outcome

    def start(self):
        if self._job:  # the one before was killed
            killed.append(are_whole(folder))
        plain_start(self)

    patches = {"send": send, "wait": wait, "_start": start}
    with mock.patch.multiple(Writer, **patches):
        yield killed


def train_and_cut(task, flags, calls, log, is_alone, folder):
    """Train in a rank. Returns the state in the end and, on rank 0, how many whole checkpoints there were after each kill."""
    is_main = os.environ["RANK"] == "0"
    with (
        using(task),
        mock.patch.object(ddp_utils, "MOST_STRIKES", 10**6),
        mock.patch.object(utils.saving, "MOST_FAILURES", 10**6),
        cut_at(calls, log, is_alone, folder) if is_main else contextlib.nullcontext() as killed,
    ):
        return train.train(config_of([*map(str, flags)]))["state"], killed


# ---- random kills ----


def train_to_be_struck(task, flags, folder, ranks):
    """Train in a rank that `strike` can find, and rank 0's writer too."""
    place, writer, plain_start = Place(folder, int(os.environ["RANK"])), Place(folder, ranks), Writer._start
    place.write(pid=os.getpid(), phase=0, steps=0)

    def start(self):
        plain_start(self)
        writer.write(pid=self.pid)

    with (
        using(task),
        saying_where(place),
        mock.patch.object(ddp_utils, "MOST_STRIKES", 10**6),
        mock.patch.object(utils.saving, "MOST_FAILURES", 10**6),
        mock.patch.object(Writer, "_start", start),
    ):
        return train.train(config_of([*map(str, flags)]))["state"]


def strike(folder, ranks, seed, report, most):
    """Kill a random process of the run at random moments, until that was a rank or there were so many. Report whose they were, and when.

    Of five first moments one may be before the first step.
    """
    clock, places, struck = random.Random(seed), [Place(folder, number) for number in range(ranks + 1)], []  # the last is the writer
    is_early = clock.random() < 0.2
    while not all(place.read()[0] and (is_early or place.read()[2]) for place in places[:ranks]):
        time.sleep(0.002)
    while len(struck) < most and not (struck and struck[-1][0] < ranks):
        time.sleep(clock.uniform(0.0, 0.5))
        victim = clock.randrange(ranks + 1)
        with contextlib.suppress(OSError):
            pid, phase, _ = places[victim].read()
            if pid and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                os.kill(pid, signal.SIGKILL)
                struck.append((victim, PHASES[phase]))
                Path(report).write_text(json.dumps(struck))
