"""--batch_tokens in real runs: the same micro-batches and bits on any number of ranks and after stops."""

import itertools

import pytest
import torch
from packing import micro_batches

from line_tasks import Lines
from plain_loop import plain_loop
from tasks import config_of, using
from training import relative

SIZE, EPOCHS, BUDGET, PER_STEP = 90, 3, 30, 4
FLAGS = f"--batch_tokens {BUDGET} --batch_size 64 --global_batch_size {BUDGET * PER_STEP} --bucket_window 2".split()
FLAGS += f"--no-use_amp --dataset_size {SIZE} --epochs {EPOCHS} --lr 0.05 --clip_grad_norm 1 --record_samples".split()
EXACT = ["--reduction", "exact"]  # extra: exact


def planned():
    """For each epoch the global batches, each a list of micro-batches."""
    lengths, steps = Lines(SIZE, "train").lengths, []
    for epoch in range(EPOCHS):
        found = micro_batches(lengths, BUDGET, seed=42, epoch=epoch, window=2)
        steps.append([found[first : first + PER_STEP] for first in range(0, len(found), PER_STEP)])
    return steps


def check_samples(runs, name):
    wanted = [sorted(itertools.chain(*step)) for step in itertools.chain(*planned())]
    assert runs.samples(name) == dict(enumerate(wanted, 1))


@pytest.mark.guarantee("lengths", "exact-ranks")  # extra: exact
@pytest.mark.parametrize("worlds", [(3,), pytest.param((2, 4, 5), marks=pytest.mark.slow)])
def test_runs_on_any_number_of_ranks_have_the_same_bits(runs, worlds):
    more = ["--num_workers", 1]
    for ranks in (1, *worlds):
        runs.train(ranks, f"on-{ranks}", *FLAGS, *EXACT, *more, task="lines")
        check_samples(runs, f"on-{ranks}")
    for ranks in worlds:
        runs.assert_same("on-1", f"on-{ranks}")
    record = runs.records("on-1", "train")[-1]
    assert record["tokens_per_s"] > 0 and 0 <= record["padding"] < 0.2


@pytest.mark.guarantee("lengths")
def test_two_ranks_equal_the_plain_loop(runs):
    runs.train(2, "ours", *FLAGS, "--num_workers", 1, task="lines", dtype=torch.float64)
    check_samples(runs, "ours")
    packed = [[[torch.tensor(each) for each in step] for step in epoch] for epoch in planned()]
    with using("lines"):
        *_, (model, *_) = plain_loop(config_of(runs.words("ours", *FLAGS), torch.float64), PER_STEP, packed=packed)
    assert relative(runs.last("ours")["model"], model.state_dict()) < 1e-12
