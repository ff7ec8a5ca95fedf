"""The order and the content of samples do not depend on ranks, workers or restarts."""

import functools

import pytest
import torch

import plain_loop
from ranks import run_ranks
from tasks import config_of, train_task, using
from training import TINY

# 46 samples are 12 micro-batches, the last one of 2: with 5 per step, 2 or 4 ranks have an idle one in every step
FLAGS = [*TINY, *"--dataset_size 46 --epochs 3 --no-use_amp --save_every 0 --eval_every 0".split()]
FLAGS += ["--global_batch_size", "20"]


def observed(ranks, task, flags, stops=()):
    """{(epoch, step, number): (indices, digest of the batch, seed of the device's stream)} of all ranks, each
    once."""
    found = {}
    for state, entries in run_ranks(ranks, train_task, task, flags, torch.float32, stops, True):
        assert state == "completed"
        for epoch, step, number, *rest in entries:
            key = epoch, step, number
            assert key not in found or (stops and found[key] == rest), key
            found[key] = rest
    return found


@functools.cache
def expected(task, flags):
    """{(epoch, step, number): (indices, seed)} by the rules of the oracle."""
    found, step, number = {}, 0, plain_loop.number
    with using(task):
        config = config_of(flags)
        size = len(plain_loop.create_dataset(config, "train"))
    for epoch in range(config.epochs):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(number("order", config.seed, epoch)))
        for global_batch in order.split(config.global_batch_size):
            for m, chosen in enumerate(global_batch.split(config.batch_size)):
                found[epoch, step, m] = tuple(chosen.tolist()), number("step", config.seed, step, m)
            step += 1
    return found


WORLDS = ((1, 0, ()), (2, 2, ()), (3, 1, ()), (4, 2, (2, 5)))  # ranks, workers, steps after which it is resumed


@pytest.mark.parametrize(
    ("task", "worlds"),
    [
        ("images", ((1, 0, ()), (3, 2, ()))),
        ("lines", ((2, 0, ()), (4, 1, (2, 5)))),
        *(pytest.param(task, WORLDS, marks=pytest.mark.slow) for task in ("images", "lines")),
    ],
)
def test_order_content_and_streams_do_not_depend_on_ranks_workers_or_restarts(runs, task, worlds):
    """1 to 4 ranks, 0 to 2 workers, two restarts within an epoch; transforms of batches and of samples."""
    reference = None
    for ranks, workers, stops in worlds:
        flags = [*FLAGS, "--run_dir", runs.folder(f"{ranks}"), "--num_workers", workers]
        found = observed(ranks, task, flags, stops)
        assert {key: (indices, seed) for key, (indices, _, seed) in found.items()} == expected(task, tuple(FLAGS))
        reference = reference or found
        assert found == reference
    digests = [digest for _, digest, _ in reference.values()]
    assert len(set(digests)) == len(digests)  # no two micro-batches are equal


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_drop_last_drops_different_samples_in_each_epoch_and_the_banner_counts_them(runs, ranks):
    found = observed(ranks, "images", [*FLAGS, "--drop_last", "--run_dir", runs.folder("run")])
    dropped = [set(range(46)) for _ in range(3)]
    for (epoch, _, _), (indices, *_) in found.items():
        dropped[epoch] -= set(indices)
    assert [len(each) for each in dropped] == [6, 6, 6] and len(set(map(frozenset, dropped))) == 3
    assert "46 training samples (6 dropped, different ones in each epoch)" in runs.log("run")
