"""SIGKILL in every phase of one run: no sample of a committed step is lost or repeated, on any number of ranks."""

import contextlib
import itertools
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from ranks import WarmLaunch, finish, run_ranks
from scripts.runs import RunInfo  # extra: reports
from tasks import train_task
from training import assert_same_state, relative
from utils.checkpoint.format import list_step_checkpoints
from utils.checkpoint.layouts import FileLayout
from utils.clock import PhaseClock
from utils.report.goodput import parse_time

PHASES = ("data", "forward", "backward", "update", "save", "written", "evaluation")  # written: by the thread
FLAGS = "--dataset_size 66 --global_batch_size 16 --lr 0.02 --no-use_amp --record_samples".split()
FLAGS += ["--ema_decay", "0.9"]
FLAGS += "--num_workers 1 --save_every_steps 3 --timeout 30".split()


@contextlib.contextmanager
def killed_in(phase, steps, delay, folder):
    """Kill this process `delay` seconds after it first enters the phase in or after step `steps` of this attempt.

    An attempt of more than three steps has saved. It is killed when the checkpoint is on the disk, so that the next
    attempt resumes from it, unless the kill is to hit the write.
    """
    plain_step, plain_enter, plain_write, begun = PhaseClock.begin_step, PhaseClock.enter_phase, FileLayout.write, []
    old_checkpoints = {*list_step_checkpoints(folder)}

    def kill():
        deadline = time.monotonic() + 30
        while len(begun) > 3 and phase not in ("save", "written") and time.monotonic() < deadline:
            if {*list_step_checkpoints(folder)} - old_checkpoints:
                break
            time.sleep(0.01)
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    def begin_step(self, step):
        plain_step(self, step)
        begun.append(step)

    def enter(self, name):
        plain_enter(self, name)
        if name == phase and len(begun) >= steps:
            threading.Thread(target=kill).start() if delay else kill()

    def write(*args, **rest):
        if phase == "written" and len(begun) >= steps:
            threading.Thread(target=kill).start() if delay else kill()
        plain_write(*args, **rest)

    writing = mock.patch.object(FileLayout, "write", write)
    with mock.patch.multiple(PhaseClock, begin_step=begin_step, enter_phase=enter), writing:
        yield


def train_and_be_killed(flags, dtype, victim, *when):
    folder = Path(flags[flags.index("--run_dir") + 1], "checkpoints")
    with killed_in(*when, folder) if int(os.environ["RANK"]) == victim else contextlib.nullcontext():
        return train_task("lines", flags, dtype)


def kill_again_and_again(runs, epochs, kills, clock, dtype):
    """Each kill: (ranks, phase, step of the attempt, seconds into the phase). The last number of ranks completes it."""
    flags = runs.words("killed", *FLAGS, "--epochs", epochs, "--resume_from", "auto")
    for ranks, phase, *when in kills:
        victim = 0 if phase in ("save", "written") else clock.randrange(ranks)
        with pytest.raises(AssertionError, match="exit codes .*-9"):
            run_ranks(ranks, train_and_be_killed, flags, dtype, victim, phase, *when)
    assert run_ranks(kills[-1][0], train_and_be_killed, flags, dtype, -1) == ["completed"] * kills[-1][0]
    whole = kills[0][0] if len({kill[0] for kill in kills}) == 1 else 1
    runs.train(whole, "whole", *FLAGS, "--epochs", epochs, "--save_every_steps", 0, dtype=dtype, task="lines")
    assert runs.samples("killed") == runs.samples("whole") and len(runs.samples("whole")) == 5 * epochs
    begun = [*runs.events("killed", "started"), *runs.events("killed", "resumed")]
    assert len(begun) <= len(kills) + 1 and runs.json("killed", "summary.json")["restarts"] == len(kills)
    assert begun[-1]["event"] == "resumed"  # attempts that were killed before the first record of the run left none
    resumed_at = [record["step"] for record in begun]
    print("resumed at", resumed_at)
    assert any(step % 5 for step in resumed_at)  # within an epoch
    times, ended = (runs.json("killed", name)["time"] for name in ("summary.json", "status.json"))
    wall_s = parse_time(ended) - parse_time(begun[0]["time"]) + begun[0]["seconds"]
    assert sum(times.values()) == pytest.approx(wall_s, abs=1) and times["recomputed_s"] > 0 < times["training_s"]


@pytest.mark.guarantee("kills", "records-once", "goodput")
def test_one_kill_in_each_phase_with_one_two_or_four_ranks(runs):
    """In float64 only the order of sums differs, over 30 steps."""
    kills = [(ranks, phase, 4, 0) for ranks, phase in zip(itertools.cycle((2, 1, 4)), PHASES, strict=False)]
    kill_again_and_again(runs, 6, kills, random.Random(1), torch.float64)
    assert relative(runs.last("killed")["model"], runs.last("whole")["model"]) < 1e-10


@pytest.mark.guarantee("order", "kills")
@pytest.mark.slow
@pytest.mark.parametrize("choices", [(1, 2, 4), (4,)])
def test_twenty_one_kills_at_random_moments(runs, choices):
    """Three in each phase, up to 10 ms later; always on 4 ranks, the run is bitwise equal to the uninterrupted one."""
    clock, dtype = random.Random(11), torch.float32 if choices == (4,) else torch.float64
    kills = [
        (clock.choice(choices), phase, clock.randint(1, 5), clock.choice((0, clock.uniform(0, 0.01))))
        for phase in 3 * PHASES
    ]
    clock.shuffle(kills)
    kill_again_and_again(runs, 24, kills, clock, dtype)
    if choices == (4,):
        assert_same_state(runs.last("killed"), runs.last("whole"))
    else:
        assert relative(runs.last("killed")["model"], runs.last("whole")["model"]) < 1e-10


# ---- ranks that die by a signal of their own ----


CRASHES = """
plain_loss, calls = train.your_model.compute_loss, []
def compute_loss(net, batch):
    calls.append(net.training)
    rank, victims, folder = os.environ.get('RANK', '0'), {!r}[:int(os.environ.get('WORLD_SIZE', 1))], {!r}
    if len(calls) == 20 and rank in victims and not os.path.exists(folder + '/fixed'):
        open(folder + '/at-' + rank, 'w').close()
        while not all(os.path.exists(folder + '/at-' + each) for each in victims):
            time.sleep(0.001)  # so that none is left that could report the other
        os.kill(os.getpid(), signal.{})
    return plain_loss(net, batch)
train.your_model.compute_loss = compute_loss
"""


def crash(runs, ranks, victims, name, *flags):
    """Launch a run of which these ranks end by the signal, unless there is a file "fixed". Returns how it ended."""
    program = runs.program(CRASHES.format(victims, str(runs.root), name))
    words = runs.words("run", *"--dataset_size 120 --epochs 1 --num_workers 0 --save_every_steps 3".split(), *flags)
    return finish(WarmLaunch(ranks, program, words), 60)


def test_a_rank_that_crashes_is_named_by_the_others(runs):  # extra: watch
    ended = crash(runs, 2, "1", "SIGSEGV")
    status = runs.json("run", "status.json")
    assert (ended.code, ended.left) == (1, 0) and (status["state"], status["rank"]) == ("failed", 1), ended.text
    assert re.match(r"Rank 1 on \S+ was killed or cut off, last seen in ", status["error"])


@pytest.mark.guarantee("rank-killed")
@pytest.mark.parametrize(
    ("ranks", "name"), [(0, "SIGSEGV"), (0, "SIGKILL"), (0, "SIGABRT"), (0, "SIGBUS"), (2, "SIGSEGV")]
)
def test_a_run_whose_ranks_have_all_crashed_does_not_run_and_the_next_start_says_so(runs, ranks, name):
    ended = crash(runs, ranks, "01", name)
    assert (ended.code, ended.left) == (1 if ranks else -getattr(signal, name), 0), ended.text
    assert runs.json("run", "status.json")["state"] == "running"  # nobody was left to write it
    assert RunInfo(runs.folder("run")).status["state"] == "killed"  # extra: reports
    if ranks or name == "SIGSEGV":
        assert "holds a run already" in crash(runs, ranks, "01", name).text  # a start that is rejected
        status, host = runs.json("run", "status.json"), os.uname().nodename
        assert [status[key] for key in ("state", "error", "host")] == ["failed", "Every rank was killed.", host]
        (runs.root / "fixed").touch()
        ended = crash(runs, ranks, "01", name, "--resume_from", "auto")
        assert ended.code == 0 and runs.json("run", "status.json")["state"] == "completed", ended.text
        assert "Every rank was killed." not in ended.text  # which the rejected start has reported
