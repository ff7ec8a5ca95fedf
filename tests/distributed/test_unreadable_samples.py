"""A sample that cannot be read ends the run. No step is wrong, and a resume goes on from the last save."""

import re

import pytest

from ranks import WarmLaunch, finish, slow
from tasks import BUCKETS
from utils.checkpoint import format as checkpoint

FLAGS = "--dataset_size 90 --epochs 2 --no-use_amp --lr 0.02 --record_samples".split()
FLAGS += "--save_every 0 --save_every_steps 3 --keep_last 99".split()
FLAGS += ["--ema_decay", "0.9"]
ERRORS = {
    "value": "ValueError(f'sample {index} has no label')",
    "user": "UserError(f'sample {index}: cannot be decoded; delete it')",
    "os": "OSError(5, f'cannot read sample {index}')",
}
BREAK = """
import line_tasks
import torch
from utils.settings.errors import UserError

def break_sample(place, name, bad_split, bad, error):
    plain = getattr(place, name)

    def failing(self, *args):
        is_read = index in torch.as_tensor(args[-1]).reshape(-1).tolist()
        if is_read and getattr(self, 'split', bad_split) == bad_split:
            raise error
        return plain(self, *args)

    setattr(place, name, failing)

index = {index}
break_sample({place}, {name!r}, {split!r}, index, {error})
"""


def train_broken(runs, ranks, task, name, error, split, index, flags):
    """Launch a run in which this function of the data set fails for one sample."""
    place = "line_tasks.Lines" if task == "lines" else "tasks.Images"
    code = BREAK.format(place=place, name=name, split=split, index=index, error=ERRORS[error])
    words = runs.words("run", *BUCKETS, *flags)
    return finish(WarmLaunch(0 if ranks == 1 else ranks, runs.program(code, task), words))


def check_failure(runs, ended, ranks, index, error):
    assert ended.left == 0 and ended.code == (2 if ranks == 1 and error == "user" else 1), ended.text
    status = runs.json("run", "status.json")
    assert status["state"] == "failed" and f"sample {index}" in status["error"], status
    sentence = rf"^(\[rank \d] )?Rank \d( on \S+)? failed: .*sample {index}\b"
    assert len(re.findall(sentence, ended.text, re.MULTILINE)) == 1, ended.text
    return checkpoint.parse_step(runs.checkpoints("run")[-1])


@pytest.mark.guarantee("bad-sample")
@pytest.mark.parametrize(
    ("ranks", "task", "name", "error", "flags"),
    [
        (1, "images", "__getitems__", "value", "--num_workers 0"),
        (2, "images", "__getitems__", "user", "--num_workers 1 --log_interval 3"),
        slow(1, "images", "__getitems__", "user", "--num_workers 1 --log_interval 1"),
        slow(2, "images", "__getitems__", "value", "--num_workers 0 --log_interval 1 --max_skipped_steps 1"),
        slow(4, "images", "device_transform", "value", "--num_workers 1 --log_interval 2"),
        slow(2, "lines", "__getitem__", "os", "--num_workers 1"),
        slow(4, "lines", "__getitem__", "user", "--num_workers 2 --grad_accum_steps 2 --save_every_steps 1"),
        slow(2, "terms", "__getitems__", "value", "--num_workers 0 --reduction exact"),
        slow(2, "images", "__getitems__", "user", "--num_workers 1 --sharding zero3 --log_interval 4"),
    ],
)
def test_a_sample_that_cannot_be_read_costs_at_most_the_steps_since_the_last_save(
    runs, ranks, task, name, error, flags
):
    flags = [*FLAGS, *flags.split()]
    runs.train(ranks, "whole", *flags, task=task)
    step = runs.json("whole", "summary.json")["steps"] // 2 - 1  # the last but one of the first epoch
    bad = runs.samples("whole")[step][-1]
    ended = train_broken(runs, ranks, task, name, error, "train", bad, flags)
    saved = check_failure(runs, ended, ranks, bad, error)
    assert step - 3 <= saved < step
    runs.train(ranks, "run", *flags, "--resume_from", "auto", task=task)
    assert not runs.events("run", "skipped_step")
    runs.assert_same("whole", "run")


@pytest.mark.guarantee("bad-sample")
@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), slow(1, 1), slow(4, 1)])
def test_an_evaluation_that_cannot_read_a_sample_costs_at_most_the_steps_since_the_last_save(runs, ranks, workers):
    flags = [*FLAGS, "--eval_every_steps", "4", "--num_workers", str(workers), "--log_interval", "2"]
    runs.train(ranks, "whole", *flags)
    ended = train_broken(runs, ranks, "images", "__getitems__", "user", "val", 5, flags)
    assert check_failure(runs, ended, ranks, 5, "user") == 3
    runs.train(ranks, "run", *flags, "--resume_from", "auto")
    runs.assert_same("whole", "run")
