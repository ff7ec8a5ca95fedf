"""Loader workers may be forked, come from a server (Python 3.14) or be new processes (macOS): the bits are the same."""

import multiprocessing

import pytest

from ranks import run_ranks
from training import train_flags

FLAGS = "--dataset_size 40 --epochs 2 --lr 0.02 --no-use_amp --num_workers 1 --log_interval 1".split()


def train_with(method, words):
    multiprocessing.set_start_method(method, force=True)
    return train_flags(words)


@pytest.mark.guarantee("samples")
def test_each_way_of_starting_workers_trains_with_the_same_bits(runs):
    for method in ("fork", "forkserver", "spawn"):
        run_ranks(2, train_with, method, runs.words(method, *FLAGS))
    runs.assert_same("fork", "forkserver")
    runs.assert_same("fork", "spawn")
