"""A run that stopped and went on is the run that did not: weights, optimizer, averages, records, samples."""

import math
import os
import signal
import sys
import time
from unittest import mock

import pytest

from ranks import finish, run_ranks, start, stop
from training import STATE, TIMES, TINY, difference, train_flags
from utils import checkpoint
from utils.saving import Saver

FLAGS = [
    "--dataset_size",
    "100",
    "--epochs",
    "2",
    "--grad_accum_steps",
    "2",
    "--num_workers",
    "1",
    "--ema_decay",
    "0.9",
    "--log_interval",
    "3",
]


def same_records(runs, a, b):
    for kind in ("train", "eval"):
        left, right = ([{k: v for k, v in record.items() if k not in TIMES} for record in runs.records(name, kind)] for name in (a, b))
        assert left == right and left


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--no-use_amp", "--optimizer", "adamw", "--lr", "0.001"]),
        (4, ["--no-use_amp", "--record_samples"]),
    ],
)
def test_a_run_resumed_within_an_epoch_is_the_uninterrupted_one_to_the_bit(runs, ranks, flags):
    """From a save on the way, at a step that ends no log interval; on 2 ranks also from an epoch's end, before its evaluation."""
    runs.train(ranks, "whole", *FLAGS, *flags)
    runs.train(ranks, "parts", *FLAGS, *flags, "--save_every_steps", 2, "--keep_last", 99)
    steps_per_epoch = math.ceil(100 / (4 * 2 * ranks))
    path = runs.folder("parts") / "checkpoints"
    for step in (steps_per_epoch, 2) if ranks == 2 else (2,):
        runs.train(ranks, "parts", *FLAGS, *flags, "--resume_from", checkpoint.step_path(path, step), "--keep_last", 99)
        whole, parts = runs.last("whole"), runs.last("parts")
        assert [difference(whole[key], parts[key]) for key in STATE] == [[]] * len(STATE)
        same_records(runs, "whole", "parts")
        assert [record["step"] for record in runs.records("parts", "event") if record["event"] == "resumed"] == [step]
    assert runs.samples("whole") == runs.samples("parts")
    assert bool(runs.samples("whole")) is ("--record_samples" in flags)


def test_sigterm_to_the_group_saves_and_the_run_goes_on_to_the_same_weights(runs):
    """torchrun forwards SIGTERM to each rank's process group, workers included; the ranks stop after one step and lose none."""
    flags = ["--dataset_size", "400", "--epochs", "2", "--image_size", "8", "--batch_size", "4", "--num_workers", "1"]
    flags += ["--no-use_amp", "--log_interval", "5", "--record_samples", "--backend", "gloo"]
    runs.train(2, "whole", *flags)
    folder = runs.folder("parts")
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", *flags, "--run_dir", folder]
    program = start(line)
    try:
        ends = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() and time.monotonic() < ends:
            time.sleep(0.05)
        os.kill(program.pid, signal.SIGTERM)
        ended = finish(program, 60)
    finally:
        stop(program)
    status = runs.json("parts", "status.json")
    assert status["state"] == "preempted", ended.text
    assert runs.json("parts", "summary.json")["state"] == "preempted" and "--resume_from auto" in ended.out
    assert 0 < status["step"] < 100 and runs.last("parts")["progress"]["step"] == status["step"] == max(runs.samples("parts"))
    runs.train(2, "parts", *flags, "--resume_from", "auto")
    assert runs.samples("parts") == runs.samples("whole")
    whole, parts = runs.last("whole"), runs.last("parts")
    assert [difference(whole[key], parts[key]) for key in STATE] == [[]] * len(STATE)
    assert runs.json("parts", "summary.json")["restarts"] == 1


def test_the_time_limit_and_the_clock_of_saves(runs):
    """Both are words that rank 0 gives and all ranks follow: one stops the run, the other saves on the way."""
    flags = ["--dataset_size", 400, "--epochs", 50, "--no-use_amp", "--save_every", 0, "--max_time", 0.05, "--save_every_minutes", 0.01]
    outcomes = runs.train(2, "timed", *flags)
    assert [outcome["state"] for outcome in outcomes] == ["preempted"] * 2
    assert outcomes[0]["steps"] == outcomes[1]["steps"] == runs.last("timed")["progress"]["step"]
    assert len([record for record in runs.records("timed", "event") if record["event"] == "checkpoint"]) >= 3


def train_with_a_quick_disk(flags):
    """A save that is asked for finds the one before written."""
    plain = Saver.is_due

    def is_due(self):
        if self._writer:
            self._look(60.0)
        return plain(self)

    with mock.patch.object(Saver, "is_due", is_due):
        return train_flags(flags)


def test_after_a_save_no_older_word_asks_for_another(runs):
    """A save is always due here: asked for at one step, done at the next. A word under way meanwhile would bring one more."""
    flags = ["--dataset_size", 80, "--epochs", 1, "--save_every", 0, "--eval_every", 0, "--save_every_minutes", 1e-9]
    run_ranks(2, train_with_a_quick_disk, [*TINY, *map(str, flags), "--run_dir", str(runs.folder("often"))])
    assert [record["step"] for record in runs.records("often", "event") if record["event"] == "checkpoint"] == [2, 4, 6, 8, 10]


def test_a_completed_run_is_left_as_it_is(runs):
    runs.train(2, "done", "--dataset_size", 16, "--epochs", 1)
    files = {path: path.read_bytes() for path in runs.folder("done").rglob("*") if path.is_file()}
    outcomes = runs.train(2, "done", "--dataset_size", 16, "--epochs", 1, "--resume_from", "auto")
    assert outcomes[0]["state"] == "completed"
    assert files == {path: path.read_bytes() for path in runs.folder("done").rglob("*") if path.is_file()}
