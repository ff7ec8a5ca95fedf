"""A run that is resumed on other numbers of ranks is the same run, up to the order of sums."""

import math

import pytest
import torch

import plain_loop
from tasks import config_of, using
from training import relative

# 24 steps of 5 micro-batches, which do not divide evenly among 2, 3 or 4 ranks; the last step has 2 samples
FLAGS = "--dataset_size 462 --epochs 1 --global_batch_size 20 --lr 0.05 --ema_decay 0.9 --clip_grad_norm 1".split()
FLAGS += "--no-use_amp --save_every 0 --num_workers 1 --record_samples --log_interval 3".split()
CHAIN = ((4, 3), (2, 8), (1, 11), (3, 0))  # ranks, and the step after which a signal comes


@pytest.mark.guarantee("elastic")
@pytest.mark.parametrize("task", ["images", pytest.param("lines", marks=pytest.mark.slow)])
def test_four_two_one_and_three_ranks_in_one_epoch_equal_the_plain_loop(runs, task):
    """The same samples in the same global batches, each once; float64 within 1e-12 of the oracle after 24 steps."""
    for ranks, stop in CHAIN:
        flags = (*FLAGS, "--resume_from", "auto")
        runs.train_with_stops(ranks, "run", *flags, stops=(stop,), dtype=torch.float64, task=task, goes_on=False)
    with using(task):
        steps = list(plain_loop.plain_loop(config_of(runs.words("run", *FLAGS), torch.float64), 5))
    net, average, *_ = steps[-1]
    saved, events = runs.last("run"), runs.events("run", "resumed")
    assert [(record["step"], record["world_size"]) for record in events] == [(4, 2), (9, 1), (12, 3)]
    assert all(record["changed"] == [] for record in events) and saved["progress"]["step"] == len(steps) == 24
    assert relative(saved["model"], net.state_dict()) < 1e-12
    assert relative(saved["ema"], average.state_dict()) < 1e-12
    order = torch.randperm(462, generator=torch.Generator().manual_seed(plain_loop.number("order", 42, 0)))
    expected = {step: sorted(global_batch.tolist()) for step, global_batch in enumerate(order.split(20), start=1)}
    assert runs.samples("run") == expected
    runs.train(1, "whole", *FLAGS, dtype=torch.float64, task=task)
    accuracy = "top1" if task == "images" else "accuracy"
    for name in ("loss", "grad_norm", accuracy):  # intervals of 3 steps, in which the number of ranks changed
        whole, parts = ([record[name] for record in runs.records(run, "train")] for run in ("whole", "run"))
        assert parts == pytest.approx(whole, rel=1e-9), name
    rates = [record["lr"] for record in runs.records("run", "train")]
    assert rates == pytest.approx([0.05 * factor(step) for step in range(2, 24, 3)], rel=1e-12)


def factor(step):
    """The schedule of the whole run: 24 steps, 12 of them warm-up."""
    return (step + 1) / 12 if step < 12 else 0.5 + 0.5 * math.cos(math.pi * (step - 12) / 12)


@pytest.mark.guarantee("global-batch")
def test_without_global_batch_size_a_changed_global_batch_is_a_warning(runs):
    """It is in the log and in the record of the resume; the epoch continues at the same sample."""
    flags = "--dataset_size 46 --epochs 1 --no-use_amp --record_samples".split()
    runs.train_with_stops(2, "run", *flags, stops=(2,), goes_on=False)
    runs.train_with_stops(1, "run", *flags, "--resume_from", "auto", stops=())
    change = "global batch: 4 samples per optimizer step, the checkpoint has 8"
    assert f"WARNING changed: {change}" in runs.log("run")
    jump = "the learning rate of step 3 was 0.1 and would be 0.05 now: it jumps there"  # more steps per epoch
    assert runs.events("run", "resumed")[0]["changed"] == [change, jump]
    samples = runs.samples("run")
    assert [len(samples[step]) for step in sorted(samples)] == [8, 8, 8, 4, 4, 4, 4, 4, 2]
    assert sorted(k for indices in samples.values() for k in indices) == list(range(46))
