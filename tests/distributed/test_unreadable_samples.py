"""A sample that cannot be read ends the run, and costs no step before its own."""

import json

import pytest
import torch

import line_tasks
import tasks
from config import TrainingError, UserError
from ranks import run_ranks, slow
from tasks import BUCKETS
from training import train_flags
from utils.checkpoint import format as checkpoint

FLAGS = "--dataset_size 90 --epochs 2 --no-use_amp --lr 0.02 --save_every 0 --record_samples".split()
FLAGS += ["--ema_decay", "0.9"]  # extra: average
ERRORS = {
    "value": lambda index: ValueError(f"sample {index} has no label"),
    "user": lambda index: UserError(f"sample {index}: cannot be decoded; delete it"),
    "os": lambda index: OSError(5, f"cannot read sample {index}"),
}


def break_samples(place, name, error, split, bad):
    """Let a function of a data set fail for these samples of a split."""
    plain = getattr(place, name)

    def failing(self, *args):
        wanted = {*torch.as_tensor(args[-1]).reshape(-1).tolist()}
        if getattr(self, "split", split) == split and wanted & {*bad}:
            raise ERRORS[error](min(wanted & {*bad}))
        return plain(self, *args)

    setattr(place, name, failing)


def train_broken(flags, task, *broken):
    break_samples(tasks.Images if task != "lines" else line_tasks.Lines, *broken)
    try:
        return train_flags(flags, task=task)["state"]
    except (UserError, TrainingError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def samples_of(runs, name, step):
    files = runs.folder(name).glob("samples/rank*.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [index for each in lines if each["step"] == step for index in each["indices"]]


@pytest.mark.guarantee("bad-sample")
@pytest.mark.parametrize(
    ("ranks", "task", "name", "error", "flags"),
    [
        (2, "images", "__getitems__", "value", "--num_workers 0 --log_interval 3"),
        slow(1, "images", "__getitems__", "user", "--num_workers 0 --log_interval 1"),
        slow(2, "images", "__getitems__", "value", "--num_workers 0 --log_interval 1 --max_skipped_steps 1"),
        slow(4, "images", "device_transform", "value", "--num_workers 1 --log_interval 2"),
        slow(2, "lines", "__getitem__", "os", "--num_workers 1 --save_every_steps 1"),
        slow(2, "lines", "__getitem__", "user", "--num_workers 2 --grad_accum_steps 2"),
        slow(2, "terms", "__getitems__", "value", "--num_workers 0 --reduction exact"),  # extra: terms
        slow(2, "images", "__getitems__", "user", "--num_workers 1 --sharding zero3 --log_interval 4"),
    ],
)
def test_the_state_before_the_step_is_saved_and_a_resume_equals_the_uninterrupted_run(
    runs, ranks, task, name, error, flags
):
    """The other ranks wait in a collective of that step by then."""
    flags = [*FLAGS, *flags.split()]
    runs.train(ranks, "whole", *flags, task=task)
    step = runs.json("whole", "summary.json")["steps"] // 2 - 1  # the last but one of the first epoch
    bad = samples_of(runs, "whole", step)[-1]
    words = runs.words("run", *BUCKETS, *flags)
    run_ranks(ranks, train_broken, words, task, name, error, "train", [bad])
    status, saved = runs.json("run", "status.json"), runs.checkpoints("run")[-1]
    assert (status["state"], status["step"], status["checkpoint"]) == ("failed", step - 1, str(saved)), status
    assert checkpoint.step_of(saved) == step - 1
    assert f"sample {bad}" in status["error"]
    runs.train(ranks, "run", *flags, "--resume_from", "auto", task=task)
    assert not runs.events("run", "skipped_step")
    runs.assert_same("whole", "run")


@pytest.mark.guarantee("bad-sample")
@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), slow(1, 1), slow(4, 1)])
def test_an_evaluation_that_cannot_read_a_sample_costs_no_step(runs, ranks, workers):
    flags = [*FLAGS, "--eval_every_steps", "3", "--num_workers", str(workers), "--log_interval", "2"]
    runs.train(ranks, "whole", *flags)
    words = runs.words("run", *BUCKETS, *flags)
    run_ranks(ranks, train_broken, words, "images", "__getitems__", "user", "val", [5])
    status, saved = runs.json("run", "status.json"), runs.checkpoints("run")[-1]
    assert (status["state"], status["step"], status["checkpoint"]) == ("failed", 3, str(saved)), status
    assert "sample 5: cannot be decoded" in status["error"]
    runs.train(ranks, "run", *flags, "--resume_from", "auto")
    runs.assert_same("whole", "run")
