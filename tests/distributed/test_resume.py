"""A run that is asked to stop: all ranks stop after the same step and save. Signals: faults/stopping.py."""

import os
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import train
from ranks import run_ranks
from tasks import train_task
from test_run_folder import contents
from training import train_flags
from utils.report.reporter import Reporter
from utils.run.saver import Saver


def train_until_time_is_up(flags):
    """On rank 1 an hour passes after step 7."""
    clock, plain = SimpleNamespace(monotonic=time.monotonic, perf_counter=time.perf_counter), Reporter.step_done

    def done(self, samples, step):
        plain(self, samples, step)
        if step == 7 and os.environ["RANK"] == "1":
            clock.monotonic = lambda: time.monotonic() + 3600

    with mock.patch.object(train, "time", clock), mock.patch.object(Reporter, "step_done", done):
        outcome = train_flags(flags)
        return outcome["state"], outcome["steps"]


def test_all_ranks_stop_after_the_same_step_when_the_time_of_one_is_up(runs):
    words = runs.words("run", *"--dataset_size 400 --no-use_amp --max_time 30".split())
    (state, step), other = run_ranks(2, train_until_time_is_up, words)
    assert other == (state, step) and state == "preempted"
    assert 7 < step <= 100 and step == runs.last("run")["progress"]["step"]


@pytest.mark.parametrize(("asked", "stopped"), [(2, 3), (4, 4)])
def test_a_request_stops_the_run_one_step_later_and_in_the_last_step_of_an_epoch_there(runs, asked, stopped):
    """The vote that is under way when the epoch ends is flushed; else the run would stop in the next epoch."""
    flags = runs.words("run", *"--dataset_size 32 --epochs 2 --eval_every 0 --no-use_amp".split())
    assert run_ranks(2, train_task, "images", flags, torch.float32, [asked], False, False) == [("preempted", [])] * 2
    assert runs.last("run")["progress"]["step"] == stopped


def train_with_a_quick_disk(flags):
    """The previous save is always on the disk when the next one is requested."""
    plain = Saver.is_due

    def is_due(self):
        if self._writer:
            self._look(60.0)
        return plain(self)

    with mock.patch.object(Saver, "is_due", is_due):
        return train_flags(flags)


def test_a_request_from_before_a_save_does_not_cause_another_one(runs):
    """A save is always due here: requested at one step, done at the next. A stale request would bring one more."""
    flags = "--dataset_size 80 --epochs 1 --save_every 0 --eval_every 0 --save_every_minutes 1e-9".split()
    run_ranks(2, train_with_a_quick_disk, runs.words("often", *flags))
    assert [record["step"] for record in runs.events("often", "checkpoint")] == [2, 4, 6, 8, 10]


def test_a_completed_run_is_left_as_it_is(runs):
    flags = "--dataset_size 16 --epochs 1".split()
    runs.train(2, "done", *flags)
    before = contents(runs.folder("done"))
    assert runs.train(2, "done", *flags, "--resume_from", "auto")[0]["state"] == "completed"
    assert contents(runs.folder("done")) == before
