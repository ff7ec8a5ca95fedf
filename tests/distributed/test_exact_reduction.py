"""--reduction exact: the same bits on 1, 2, 4 and 8 ranks, in weights, optimizer, statistics, average and records."""

import os
import random
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import train
from config import UserError
from ranks import run_ranks, slow
from tasks import TASKS, EagerConsensus, SmallNet, train_task
from training import wait_until
from utils.report.reporter import Reporter

# 10 micro-batches per step, of which the last step of an epoch has 6, the last of them short; ranks hold 1 to 10
FLAGS = "--global_batch_size 40 --lr 0.05 --ema_decay 0.9 --clip_grad_norm 1 --log_interval 2".split()
FLAGS += "--reduction exact --save_every 0".split()
BF16 = "--amp_dtype bf16 --optimizer adamw".split()
CHAIN = zip((4, 1, 8, 2, 4), map(signal.Signals, (9, 15, 9, 9, 15)), strict=True)  # ranks, and what ends the attempt


@pytest.mark.parametrize(
    ("task", "flags"),
    [
        ("images", ["--no-use_amp"]),
        slow("images", BF16),
        slow("images", ["--amp_dtype", "fp16"]),
        slow("lines", ["--no-use_amp", "--optimizer", "adamw"]),
    ],
)
def test_runs_on_1_2_4_and_8_ranks_have_the_same_bits(runs, task, flags):
    for ranks in (1, 2, 4, 8):
        runs.train(ranks, f"on-{ranks}", *FLAGS, *flags, "--dataset_size", 142, "--epochs", 4, task=task)
    for ranks in (2, 4, 8):
        runs.assert_same("on-1", f"on-{ranks}")


def train_until(flags, number, step, victim):
    """Train until the victim gets this signal after a step."""
    plain_done = Reporter.step_done

    def done(self, samples, at):
        plain_done(self, samples, at)
        if at == step and int(os.environ["RANK"]) == victim:
            saved = Path(flags[flags.index("--run_dir") + 1], "checkpoints", f"step_{(at - 1) // 2 * 2:08d}.pt")
            wait_until(lambda: number != signal.SIGKILL or saved.exists())  # a save in progress would be lost
            os.kill(os.getpid(), number)

    eager = mock.patch.object(train, "Consensus", EagerConsensus)
    with mock.patch.object(Reporter, "step_done", done), eager:
        return train_task("images", flags, goes_on=False)[0]


def test_a_run_that_is_killed_and_continues_on_other_ranks_has_the_bits_of_the_uninterrupted_one(runs):
    """4, 1, 8, 2 and 4 ranks within one epoch of 21 steps, with three SIGKILLs and two SIGTERMs."""
    flags = [*FLAGS, "--dataset_size", 810, "--epochs", 1, "--record_samples"]
    words = runs.words("parts", *flags, "--save_every_steps", 2, "--resume_from", "auto")
    clock, step = random.Random(19), 0
    for ranks, number in CHAIN:
        step += clock.randint(3, 4)
        victim = clock.randrange(ranks)
        print(f"{ranks} ranks, {number.name} on rank {victim} after step {step}")
        if number == signal.SIGTERM:
            assert run_ranks(ranks, train_until, words, number, step, victim) == ["preempted"] * ranks
        else:
            with pytest.raises(AssertionError, match="exit codes .*-9"):
                run_ranks(ranks, train_until, words, number, step, victim)
    assert run_ranks(4, train_until, words, number, 0, 0) == ["completed"] * 4
    assert len({record["world_size"] for record in runs.events("parts", "resumed")}) == 4
    runs.train(4, "whole", *flags)
    runs.assert_same("whole", "parts")


def rejected(flags):
    with pytest.raises(UserError) as error:
        train_task("images", flags)
    return str(error.value)


@pytest.mark.parametrize(
    ("ranks", "flags", "micro_batches", "fix"),
    [
        (3, ["--grad_accum_steps", 4], 12, "use a power of two up to 12, here 2 or 4 ranks"),
        (4, ["--global_batch_size", 8], 2, "use a power of two up to 2, here 1 or 2 ranks"),
    ],
)
def test_numbers_of_ranks_that_have_no_subtree_are_rejected(runs, ranks, flags, micro_batches, fix):
    words = runs.words("run", "--reduction", "exact", "--dataset_size", 60, *flags)
    expected = f"reduction=exact: {ranks} ranks for {micro_batches} micro-batches per step; {fix}"
    assert run_ranks(ranks, rejected, words) == [expected] * ranks


def sent_bytes(flags):
    """The bytes that this rank gave to all-to-all and all-gather in the last step, and those of its gradients."""
    plain, sent = (dist.all_to_all_single, dist.all_gather_into_tensor, dist.all_reduce), []

    def all_to_all(output, tensor, **options):
        sent.append(tensor.nbytes - tensor.nbytes // dist.get_world_size())
        return plain[0](output, tensor, **options)

    def all_gather(output, tensor, **options):
        sent.append(tensor.nbytes * (dist.get_world_size() - 1))
        return plain[1](output, tensor, **options)

    def all_reduce(tensor, *args, group=None, **options):
        assert group, "another sum over ranks"  # but not on the control group
        return plain[2](tensor, *args, group=group, **options)

    def done(self, samples, step):
        steps.append(sum(sent))
        sent.clear()

    steps = []
    counted = {"all_to_all_single": all_to_all, "all_gather_into_tensor": all_gather, "all_reduce": all_reduce}
    large = mock.patch.dict(TASKS["images"], create_model=lambda config, device: SmallNet(True, 5000).to(device))
    with mock.patch.multiple(dist, **counted), mock.patch.object(Reporter, "step_done", done), large:
        train_task("images", flags)
    return steps[-1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_as_many_bytes_as_a_ring_all_reduce(runs, ranks):
    """2 (W - 1) / W times the size, per rank, within 1 %: gradients, BatchNorm statistics, loss and metrics."""
    flags = [*FLAGS, "--dataset_size", 80, "--epochs", 1, "--no-use_amp"]
    found = run_ranks(ranks, sent_bytes, runs.words("run", *flags))
    size = sum(value.nbytes for key, value in runs.last("run")["model"].items() if "running_" not in key)
    statistics = sum(2 * value.nbytes for key, value in runs.last("run")["model"].items() if "running_" in key)
    ring = 2 * (ranks - 1) / ranks * (size + statistics)
    assert found == pytest.approx([ring] * ranks, rel=0.01)
