"""Exact: which sample is trained on when, and what it looks like, does not depend on ranks, workers or restarts."""

import functools

import pytest
import torch

import plain_loop
from ranks import run_ranks
from tasks import config_of, train_task, using
from training import TINY

# 46 samples are 12 micro-batches, the last one of 2: with 3 a step on 2 or 4 ranks some rank is idle in every step,
# with 5 in the last
FLAGS = [
    *TINY,
    *"--dataset_size 46 --epochs 3 --no-use_amp --save_every 0 --eval_every 0 --global_batch_size 20".split(),
]


def observed(ranks, task, flags, stops=()):
    """{(epoch, step, number): (indices, digest of the batch, seed of the device's stream)} of all ranks together, each
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
    """The same by the plain rules of the oracle, in this process."""
    with using(task):
        config = config_of(flags)
        data, found, step = plain_loop.create_dataset(config, "train"), {}, 0
        for epoch in range(config.epochs):
            order = torch.randperm(
                len(data), generator=torch.Generator().manual_seed(plain_loop.number("order", config.seed, epoch))
            )
            for global_batch in order.split(config.global_batch_size):
                for m, chosen in enumerate(global_batch.split(config.batch_size)):
                    found[epoch, step, m] = tuple(chosen.tolist()), plain_loop.number("step", config.seed, step, m)
                step += 1
    return found


# ranks, workers, steps after which it is stopped and resumed
WORLDS = (
    (1, 0, ()),
    (2, 2, ()),
    (3, 1, ()),
    (4, 2, (2, 5)),
)


@pytest.mark.parametrize(
    ("task", "worlds"),
    [
        ("images", ((1, 0, ()), (3, 2, ()))),
        ("lines", ((2, 0, ()), (4, 1, (2, 5)))),
        *(pytest.param(task, WORLDS, marks=pytest.mark.slow) for task in ("images", "lines")),
    ],
)
def test_order_content_and_streams_are_the_same_however_a_run_is_split(runs, task, worlds):
    """1 to 4 ranks, none to two workers, one run with two restarts within an epoch: the batched transform and a data
    set's own."""
    flags, reference = tuple(FLAGS), None
    for ranks, workers, stops in worlds:
        found = observed(ranks, task, [*flags, "--run_dir", runs.folder(f"{ranks}"), "--num_workers", workers], stops)
        assert {key: (indices, seed) for key, (indices, _, seed) in found.items()} == expected(task, flags)
        reference = reference or found
        assert found == reference
    for epoch in range(3):
        assert sorted(k for (e, _, _), (indices, *_) in reference.items() if e == epoch for k in indices) == list(
            range(46)
        )
    digests = [value[1] for value in reference.values()]
    assert len(set(digests)) == len(digests)  # no micro-batch looks like another


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_drop_last_drops_is_said_in_numbers_and_differs_by_epoch(runs, ranks):
    flags = [*FLAGS, "--drop_last", "--run_dir", runs.folder("run")]
    found = observed(ranks, "images", flags)
    dropped = [
        set(range(46)) - {k for (e, _, _), (indices, *_) in found.items() if e == epoch for k in indices}
        for epoch in range(3)
    ]
    assert [len(each) for each in dropped] == [6, 6, 6] and len(set(map(frozenset, dropped))) == 3
    assert "(6 of them, others in each epoch, dropped)" in runs.log("run")
