"""MiniResNet's weights are those of the plain loop: on 1, 2 and 4 ranks, with accumulation, short last windows, idle ranks and workers.

test_exact_*.py does the same with smaller models, for every accumulation, tail, number of ranks and resume.
"""

import functools

import pytest
import torch

from config import TrainingConfig
from plain_loop import plain_loop
from training import TINY

# 42 samples are 11 micro-batches, the last one of 2 samples: with 4 or 8 a step the last window is short, and ranks are idle in it
FLAGS = [*TINY, "--no-use_amp", "--dataset_size", "42", "--epochs", "20", "--ema_decay", "0.9", "--clip_grad_norm", "1"]
FLAGS += ["--label_smoothing", "0.1", "--save_every", "0", "--eval_every", "0", "--num_workers", "1"]
SGD, ADAMW = ("--optimizer", "sgd", "--lr", "0.05"), ("--optimizer", "adamw", "--lr", "0.001")


@functools.cache
def oracle(per_step: int, dtype: torch.dtype, flags: tuple[str, ...]):
    torch.set_default_dtype(dtype)
    steps = list(plain_loop(TrainingConfig.from_args([*FLAGS, *flags]), per_step))
    return *steps[-1][:2], [(loss / weight).item() for *_, loss, weight in steps]


def worst(want: dict, got: dict) -> float:
    """The largest relative distance of two state dicts' tensors."""
    floats = [name for name in want if want[name].is_floating_point()]
    return max(((want[name] - got[name]).norm() / want[name].norm().clamp(min=1e-30)).item() for name in floats)


def check_against_the_oracle(runs, ranks, accumulation, dtype, flags, tolerance):
    runs.train(ranks, "ours", *FLAGS, *flags, "--grad_accum_steps", accumulation, dtype=dtype)
    ours = runs.last("ours")
    model, average, losses = oracle(ranks * accumulation, dtype, flags)
    assert worst(model.state_dict(), ours["model"]) < tolerance
    assert worst(average.state_dict(), ours["ema"]) < tolerance
    counts = [ours[kind][name].item() for kind in ("model", "ema") for name in ours[kind] if name.endswith("num_batches_tracked")]
    assert {ours["progress"]["step"], *counts} == {len(losses)}
    records = runs.records("ours", "train")
    size = 4 * ranks * accumulation
    samples = ([size] * (42 // size) + [42 % size]) * 20
    interval = list(zip(losses, samples, strict=False))[: records[0]["step"]]  # a record weighs steps by their samples
    mean = sum(loss * n for loss, n in interval) / sum(n for _, n in interval)
    assert records[0]["loss"] == pytest.approx(mean, rel=tolerance * 10)


@pytest.mark.parametrize(("ranks", "accumulation", "optimizer"), [(2, 2, SGD), (4, 1, ADAMW)], ids=["2-2-sgd", "4-1-adamw"])
def test_twenty_float64_steps_equal_the_plain_loop(runs, ranks, accumulation, optimizer):
    """Across numbers of ranks only the order of sums differs: 1e-12 is a few hundred roundings."""
    check_against_the_oracle(runs, ranks, accumulation, torch.float64, (*optimizer, "--max_steps", "20"), 1e-12)


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_one_float32_step_equals_the_plain_loop(runs, ranks, accumulation):
    """One step from a common state: rounding of float32 sums, and nothing of a ReLU net's later drift."""
    check_against_the_oracle(runs, ranks, accumulation, torch.float32, (*SGD, "--max_steps", "1"), 1e-5)


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_dropout_draws_by_step_and_micro_batch_not_by_rank(runs, ranks, accumulation):
    flags = ("--model", "squeezenet1_1", "--image_size", "32", "--lr", "0.01", "--max_steps", "4")
    check_against_the_oracle(runs, ranks, accumulation, torch.float64, flags, 1e-12)
