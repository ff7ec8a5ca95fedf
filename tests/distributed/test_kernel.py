# extra: template
"""A run has the weights, BatchNorm statistics, optimizer state and evaluations of the kernel, bit for bit, on the same
ranks: flags x ranks x stops. The kernel is a training program of its own (tests/kernel/loop.py)."""

import math
import random

import pytest

import kernel.loop
from ranks import run_ranks, slow
from tasks import config_of, using
from training import difference

# 61 samples in micro-batches of 4: the last micro-batch of an epoch has one sample
FLAGS = "--dataset_size 61 --epochs 2 --lr 0.02 --save_every 0".split()
FP32, BF16, FP16 = "--no-use_amp", "--amp_dtype bf16", "--amp_dtype fp16"
ADAMW = "--optimizer adamw --lr 0.002"
TO_END = math.inf


def drawn(number):
    """A case at random: one attempt after another, on the same ranks or on others."""
    draw = random.Random(number)
    worlds, count = draw.choice([[1], [2], [3], [4], [4, 2, 1], [1, 3], [2, 4]]), draw.randint(1, 4)
    attempts = [(draw.choice(worlds), stop) for stop in [*sorted(draw.sample(range(1, 12), count)), TO_END]]
    flags = [draw.choice(("--optimizer sgd", "--momentum 0", "--no-nesterov", ADAMW)), draw.choice((FP32, BF16, FP16))]
    flags += [f"--global_batch_size {4 * draw.randint(1, 7)}", f"--num_workers {draw.randint(0, 1)}"]
    flags += [draw.choice(("", "--clip_grad_norm 1")), draw.choice(("", "--drop_last"))]
    flags += [f"--eval_every {draw.randint(0, 2)}", f"--save_every_steps {draw.randint(0, 2)}"]
    return attempts, draw.choice(("images", "lines")), " ".join(flags)


def kernel_run(task, flags, checkpoint, until):
    with using(task):
        return kernel.loop.train(config_of(flags), checkpoint, until)


def check_against_the_kernel(runs, attempts, task, flags):
    """attempts: the ranks of each, and the step after which a signal comes. The kernel stops only for other ranks."""
    following = [ranks for ranks, _ in attempts[1:]] + [0]
    for number, ((ranks, stop), next_ranks) in enumerate(zip(attempts, following, strict=True)):
        more = ["--resume_from", "auto"] if number else []
        runs.train_with_stops(ranks, "run", *flags, *more, stops=(stop,), task=task, goes_on=False)
        if next_ranks != ranks:
            is_stopped = runs.json("run", "status.json")["state"] == "preempted"
            until = runs.last("run")["progress"]["step"] if is_stopped else TO_END
            expected = run_ranks(ranks, kernel_run, task, runs.words("run", *flags), runs.folder("kernel.pt"), until)[0]
    run, where = runs.last("run"), expected["where"]
    evaluated = [record for record in runs.records("run", "eval") if record["weights"] == "model"]
    groups = [[group["lr"] for group in payload["optimizer"]["param_groups"]] for payload in (run, expected)]
    assert groups[0] == groups[1] and run["progress"]["step"] == where["step"]
    for name in ("model", "scaler"):
        assert difference(run[name], expected[name]) == []
    assert difference(run["optimizer"]["state"], expected["optimizer"]["state"]) == []
    means = [{name: record[name] for name in where["evaluations"][0]} for record in evaluated]
    assert means == where["evaluations"]


CASES = [
    ([(1, TO_END)], "images", f"{FP32} --grad_accum_steps 2 --clip_grad_norm 1 --num_workers 1"),
    ([(2, 1), (2, 2), (2, 9), (2, TO_END)], "images", f"{FP16} --log_interval 3"),
    ([(2, 3), (2, TO_END)], "images", f"{FP32} --grad_accum_steps 3 --clip_grad_norm 1 --num_workers 1"),
    ([(2, TO_END)], "lines", f"{BF16} {ADAMW} --drop_last --grad_accum_steps 2 --momentum 0.8 --beta2 0.95"),
    # 3 micro-batches per step: one of 4 ranks is always idle
    ([(4, 5), (4, TO_END)], "lines", f"{FP32} --global_batch_size 12 --num_workers 1"),
    ([(1, 2), (2, 5), (1, TO_END)], "images", f"{FP32} --global_batch_size 12 --clip_grad_norm 1 --schedule_steps 9"),
    # on 3 ranks the order of DDP's buckets changes sums; step 3 is an epoch's last one, before its evaluation
    ([(3, stop) for stop in (1, 2, 3, 4, TO_END)], "images", f"{FP32} --grad_accum_steps 2 --save_every_steps 1"),
    # evaluations within an epoch; at steps 3 and 6 they are due when the run stops, and the resumed run makes them
    (
        [(2, stop) for stop in (2, 5, 10, TO_END)],
        "images",
        f"{FP32} --eval_every_steps 3 --ema_decay 0.9 --patience 9",
    ),
    ([(2, 6), (2, TO_END)], "images", f"{FP32} --max_steps 13 --epochs 9 --warmup_steps 3 --eval_batch_size 3"),
    *(slow(*drawn(number)) for number in range(24)),
]


@pytest.mark.guarantee("order", "samples", "dropout", "resume", "weights", "batchnorm", "elastic", "gradient")
@pytest.mark.guarantee("evaluation-means", "evaluation-counts", "evaluation-by-steps")
@pytest.mark.parametrize(("attempts", "task", "flags"), CASES)
def test_runs_equal_the_kernel_bit_for_bit(runs, attempts, task, flags):
    check_against_the_kernel(runs, attempts, task, [*FLAGS, *flags.split()])
