"""A loader that cannot feed the device is reported once, with the number of workers that would."""

import re
import time
from unittest import mock

import pytest

from ranks import run_ranks
from tasks import Images
from training import train_flags


def train_slowly(flags, of_batch, of_step):
    """Train, where a micro-batch and a step take so many seconds."""

    def late(plain, seconds):
        def call(*args):
            time.sleep(seconds)
            return plain(*args)

        return call

    slow = {"__getitems__": late(Images.__getitems__, of_batch), "device_transform": late(Images.device_transform, of_step)}
    with mock.patch.multiple(Images, in_memory=False, **slow):
        train_flags(flags)


@pytest.mark.parametrize(("of_batch", "of_step", "is_told"), [(0.2, 0.0, True), pytest.param(0.0, 0.3, False, marks=pytest.mark.slow)])
def test_a_run_is_told_at_its_first_log_line_and_a_fast_one_is_not(runs, of_batch, of_step, is_told):
    """Two ranks with a worker each; the same set, slow to read or quick beside the step."""
    flags = "--dataset_size 64 --epochs 1 --num_workers 1 --log_interval 4 --eval_every 0".split()
    run_ranks(2, train_slowly, runs.words("run", *flags), of_batch, of_step)
    lines = runs.log("run").splitlines()
    told = [k for k, line in enumerate(lines) if "the loader cannot feed the device" in line]
    first = next(k for k, line in enumerate(lines) if "step 4/8" in line)
    assert told == ([first + 1] if is_told else [])
    said = r"1 worker\(s\) a rank bring \d+ samples/s in all, and \d+ would be taken; that takes \d+ worker\(s\) a rank.*; --cache ram"
    assert all(re.search(said, lines[k]) for k in told), lines
