"""Shapes of real code: soft targets, objects as samples and batches, a frozen reference, an optimizer of timm."""

import pytest
import torch

from port_tasks import PORTS
from ranks import slow
from test_oracle import check_against_the_oracle

FLAGS = "--dataset_size 42 --epochs 3 --no-use_amp --lr 0.01 --num_workers 1 --record_samples".split()
CASES = [(2, "soft"), (2, "graphs"), (2, "preferences"), slow(2, "timm")]
CASES += [slow(4, name) for name in PORTS]


def need_timm(task):
    if task == "timm":
        pytest.importorskip("timm")


@pytest.mark.guarantee("weights")
@pytest.mark.parametrize(("ranks", "task"), CASES)
def test_twenty_steps_equal_the_plain_loop(runs, ranks, task):
    """In float64: between numbers of ranks only the order of sums differs, and 1e-12 allows a few hundred roundings."""
    need_timm(task)
    flags = ["--max_steps", "20", "--lr", "0.01"]
    check_against_the_oracle(runs, ranks, 2, torch.float64, flags, 1e-12, task)


@pytest.mark.guarantee("resume")
@pytest.mark.parametrize(("ranks", "task"), CASES)
def test_stops_and_resumes_within_an_epoch_change_nothing(runs, ranks, task):
    need_timm(task)
    flags = [*FLAGS, "--grad_accum_steps", 2]
    flags += ["--ema_decay", 0.9]
    runs.train(ranks, "whole", *flags, task=task)
    runs.train_with_stops(ranks, "parts", *flags, task=task, stops=(1, 3))
    assert len(runs.events("parts", "resumed")) == 2
    runs.assert_same("whole", "parts")
