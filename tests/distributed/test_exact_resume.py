"""A run that stops and resumes at any step, any number of times, is bitwise equal to the uninterrupted run."""

import random

import pytest

from ranks import slow
from training import assert_same_state
from utils.checkpoint import format as checkpoint

FLAGS = "--epochs 2 --ema_decay 0.9 --num_workers 1 --log_interval 3 --lr 0.02 --record_samples --keep_last 99".split()
FLAGS += "--clip_grad_norm 1 --save_every 0 --patience 9".split()
SGD, ADAMW = "--optimizer sgd", "--optimizer adamw --lr 0.002"
FP32, BF16, FP16 = "--no-use_amp", "--amp_dtype bf16", "--amp_dtype fp16"


@pytest.mark.parametrize(
    ("ranks", "task", "accumulation", "optimizer", "precision"),
    [
        (2, "images", 1, SGD, FP16),
        slow(3, "images", 2, ADAMW, FP32),
        slow(2, "lines", 2, SGD, BF16),
        slow(1, "images", 2, SGD, BF16),
        slow(1, "lines", 1, ADAMW, FP32),
        slow(4, "images", 2, ADAMW, BF16),
        slow(4, "images", 1, SGD, FP32),
        slow(4, "lines", 2, SGD, FP32),
    ],
)
def test_stops_and_resumes_within_an_epoch_change_nothing(runs, ranks, task, accumulation, optimizer, precision):
    """Three stops by a signal, at seeded steps, two of them in one epoch; a persistent worker; a short last step."""
    global_batch = 4 * ranks * accumulation
    samples = 7 * global_batch + global_batch // 2 + 1  # 8 steps per epoch; the last micro-batch has one sample
    flags = [*FLAGS, *f"{optimizer} {precision} --grad_accum_steps {accumulation} --dataset_size {samples}".split()]
    runs.train(ranks, "whole", *flags, task=task)
    draw = random.Random(f"{ranks}{task}{accumulation}")
    stops = (*sorted(draw.sample((1, 3, 5), 2)), draw.choice((9, 11, 13)))
    runs.train_with_stops(ranks, "parts", *flags, task=task, stops=stops)
    assert [record["step"] for record in runs.events("parts", "resumed")] == [stop + 1 for stop in stops]
    assert runs.last("whole")["progress"]["step"] == 16 and len(runs.samples("whole")) == 16
    assert runs.json("whole", "summary.json")["best_value"] > 0
    runs.assert_same("whole", "parts")


@pytest.mark.parametrize("ranks", [slow(1), slow(2), 3, slow(4)])
def test_a_resume_from_any_step_gives_the_same_next_checkpoint(runs, ranks):
    """A save changes nothing, and a resume works from any step, also from an epoch's last one before its evaluation.

    On 3 ranks: a sum of two numbers does not depend on their order, so 2 ranks would not detect rebuilt DDP buckets.
    """
    flags = [*FLAGS, *f"--no-use_amp --dataset_size 22 --batch_size {16 // ranks}".split()]
    runs.train(ranks, "unsaved", *flags)
    runs.train(ranks, "whole", *flags, "--save_every_steps", 1)
    runs.assert_same("unsaved", "whole")
    paths = runs.checkpoints("whole")
    assert len(paths) == 4  # two steps per epoch
    for k, path in enumerate(paths[:-1], start=1):
        runs.train(ranks, f"from{k}", *flags, "--save_every_steps", 1, "--resume_from", path)
        for later in paths[k:]:
            resumed = runs.folder(f"from{k}") / "checkpoints" / later.name
            assert_same_state(checkpoint.read(later)[0], checkpoint.read(resumed)[0])
