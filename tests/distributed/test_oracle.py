"""A run's weights equal those of the plain loop: on 1, 2 and 4 ranks, with accumulation, short last global batches,
idle ranks and workers."""

import pytest
import torch

from plain_loop import plain_loop
from ranks import slow
from tasks import config_of, using
from training import relative

# 42 samples are 11 micro-batches, the last one of 2 samples: with 4 or 8 per step the last global batch is short, and
# ranks are idle in it
FLAGS = "--no-use_amp --dataset_size 42 --epochs 20 --clip_grad_norm 1 --num_workers 1".split()
FLAGS += ["--ema_decay", "0.9"]
FLAGS += "--save_every 0 --eval_every 0".split()
SGD, ADAMW = ("--optimizer", "sgd", "--lr", "0.05"), ("--optimizer", "adamw", "--lr", "0.001")


def check_against_the_oracle(runs, ranks, accumulation, dtype, flags, tolerance, task="images"):
    runs.train(ranks, "ours", *FLAGS, *flags, "--grad_accum_steps", accumulation, dtype=dtype, task=task)
    ours = runs.last("ours")
    with using(task):
        steps = list(plain_loop(config_of(runs.words("ours", *FLAGS, *flags), dtype), ranks * accumulation))
    model, average, *_ = steps[-1]
    assert relative(ours["model"], model.state_dict()) < tolerance
    assert relative(ours["ema"], average.state_dict()) < tolerance
    tensors = [*ours["model"].items(), *ours["ema"].items()]
    counts = [value.item() for name, value in tensors if name.endswith("num_batches_tracked")]
    assert {ours["progress"]["step"], *counts} == {len(steps)}
    record = runs.records("ours", "train")[0]
    interval = steps[: record["step"]]
    mean = sum(loss for *_, loss, _ in interval) / sum(count for *_, count in interval)
    assert record["loss"] == pytest.approx(mean.item(), rel=tolerance * 10)


@pytest.mark.guarantee("samples", "weights", "batchnorm")
@pytest.mark.parametrize(
    ("ranks", "accumulation", "optimizer", "task", "schedule"),
    [
        (2, 2, SGD, "left_out", "cosine --min_lr 0.01 --schedule_steps 15 --warmup_steps 3"),
        (4, 1, ADAMW, "plain", "wsd"),
        slow(2, 1, SGD, "plain", "linear"),
        slow(2, 1, SGD, "plain", "constant"),
        slow(2, 1, SGD, "plain", "step"),
    ],
)
def test_twenty_float64_steps_equal_the_plain_loop(runs, ranks, accumulation, optimizer, task, schedule):
    """Between numbers of ranks only the order of sums differs: 1e-12 allows a few hundred roundings.

    AdamW would amplify the rounding of zero gradients, those of biases before a BatchNorm, which "plain" does
    not have.
    """
    flags = (*optimizer, "--max_steps", "20", "--schedule", *schedule.split())
    check_against_the_oracle(runs, ranks, accumulation, torch.float64, flags, 1e-12, task)


@pytest.mark.guarantee(
    "gradient",
    "terms",
)
@pytest.mark.parametrize(
    ("ranks", "accumulation", "task"),
    [
        (2, 2, "terms"),
        slow(4, 2, "terms"),
        slow(4, 1, "images"),
        *(slow(4, 2, task) for task in ("images", "lines")),
        slow(1, 4, "plain"),
    ],
)
def test_a_step_of_every_length_equals_the_plain_loop(runs, ranks, accumulation, task):
    """Where the gradient is most of the weights after the step."""
    for samples in range(1, 2 * ranks * accumulation + 1):
        flags = f"--batch_size 2 --dataset_size {samples} --max_steps 1 --lr 100 --warmup_epochs 0 --overwrite"
        check_against_the_oracle(runs, ranks, accumulation, torch.float64, flags.split(), 1e-12, task)
