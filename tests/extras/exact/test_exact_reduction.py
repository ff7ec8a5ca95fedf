"""--reduction exact: the same bits on any number of ranks, in weights, optimizer, statistics, average and records."""

import contextlib
import os
import random
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed, wrap_ddp
from ranks import run_ranks, slow
from tasks import TASKS, EagerConsensus, SmallNet, train_task
from training import TINY, wait_until
from utils import assembly
from utils.report.reporter import Reporter

# 10 micro-batches per step, of which the last step of an epoch has 6, the last of them short; ranks hold 1 to 10
FLAGS = "--global_batch_size 40 --lr 0.05 --clip_grad_norm 1 --log_interval 2".split()
FLAGS += ["--ema_decay", "0.9"]
FLAGS += "--reduction exact --save_every 0".split()
BF16 = "--amp_dtype bf16 --optimizer adamw".split()
SIGNALS = [signal.Signals(number) for number in (9, 15, 9, 9, 15)]  # what ends the attempts but the last


@pytest.mark.guarantee("exact-ranks")
@pytest.mark.parametrize(
    ("task", "flags", "worlds"),
    [
        ("images", ["--no-use_amp"], (3, 5)),
        slow("images", BF16, (2, 3)),
        slow("images", ["--no-use_amp"], (2, 4, 6, 7, 8, 11)),  # the last rank of 11 has no micro-batch
        slow("images", BF16, (4, 5, 6, 7, 8)),
        slow("images", ["--amp_dtype", "fp16"], range(2, 9)),
        slow("lines", ["--no-use_amp", "--optimizer", "adamw"], range(2, 9)),
        slow("blocks", ["--no-use_amp", "--optimizer", "adamw"], range(2, 9)),
        slow("experts", ["--no-use_amp", "--find_unused_parameters"], (3, 4)),
    ],
)
def test_runs_on_any_number_of_ranks_have_the_same_bits(runs, task, flags, worlds):
    for ranks in (1, *worlds):
        runs.train(ranks, f"on-{ranks}", *FLAGS, *flags, "--dataset_size", 142, "--epochs", 2, task=task)
    for ranks in worlds:
        runs.assert_same("on-1", f"on-{ranks}")


def train_until(flags, number, step, victim, task="images"):
    """Train until the victim gets this signal after a step."""
    plain_done = Reporter.record_step

    def done(self, samples, indices):
        plain_done(self, samples, indices)
        at = self._state.progress.step
        if at == step and int(os.environ["RANK"]) == victim:
            saved = Path(flags[flags.index("--run_dir") + 1], "checkpoints", f"step_{(at - 1) // 2 * 2:08d}.pt")
            wait_until(lambda: number != signal.SIGKILL or saved.exists())  # a save in progress would be lost
            os.kill(os.getpid(), number)

    eager = mock.patch.object(assembly, "Consensus", EagerConsensus)
    with mock.patch.object(Reporter, "record_step", done), eager:
        return train_task(task, flags, goes_on=False)


@pytest.mark.guarantee("exact-ranks")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chain", "seed"),
    [
        ((4, 1, 2, 3), 19),
        *(((8, 3, 5, 1, 6), seed) for seed in (1, 2, 3)),
        ((4, 1, 8, 2, 3, 5), 19),
    ],
)
def test_a_run_that_is_killed_and_continues_on_other_ranks_has_the_bits_of_the_uninterrupted_one(runs, chain, seed):
    """These numbers of ranks within one epoch of 21 steps, after SIGKILLs and SIGTERMs."""
    flags = [*FLAGS, "--dataset_size", 810, "--epochs", 1, "--record_samples"]
    words = runs.words("parts", *flags, "--save_every_steps", 2, "--resume_from", "auto")
    clock, step = random.Random(seed), 0
    for ranks, number in zip(chain[:-1], SIGNALS, strict=False):
        step += clock.randint(3, 4)
        victim = clock.randrange(ranks)
        print(f"{ranks} ranks, {number.name} on rank {victim} after step {step}")
        if number == signal.SIGTERM:
            assert run_ranks(ranks, train_until, words, number, step, victim) == ["preempted"] * ranks
        else:
            with pytest.raises(AssertionError, match="exit codes .*-9"):
                run_ranks(ranks, train_until, words, number, step, victim)
    assert run_ranks(chain[-1], train_until, words, number, 0, 0) == ["completed"] * chain[-1]
    assert [record["world_size"] for record in runs.events("parts", "resumed")] == list(chain[1:])
    runs.train(1, "whole", *flags)
    runs.assert_same("whole", "parts")


def sent_bytes(flags):
    """The bytes that this rank gave to all-to-all and all-gather in the last step, and those of its gradients."""
    plain, sent = (dist.all_to_all_single, dist.all_gather_into_tensor, dist.all_reduce), []

    def all_to_all(output, tensor, *splits, **options):
        sent.append(tensor.nbytes - tensor.nbytes // dist.get_world_size())
        return plain[0](output, tensor, *splits, **options)

    def all_gather(output, tensor, **options):
        sent.append(tensor.nbytes * (dist.get_world_size() - 1))
        return plain[1](output, tensor, **options)

    def all_reduce(tensor, *args, group=None, **options):
        assert group, "another sum over ranks"  # but not on the control group
        return plain[2](tensor, *args, group=group, **options)

    def done(self, samples, indices):
        steps.append(sum(sent))
        sent.clear()

    steps = []
    counted = {"all_to_all_single": all_to_all, "all_gather_into_tensor": all_gather, "all_reduce": all_reduce}
    large = mock.patch.dict(TASKS["images"], create_model=lambda config, device: SmallNet(True, 5000).to(device))
    with mock.patch.multiple(dist, **counted), mock.patch.object(Reporter, "record_step", done), large:
        train_task("images", flags)
    return steps[-1]


@pytest.mark.guarantee("exact-ranks")
@pytest.mark.parametrize(
    ("ranks", "micro_batches", "ratio"),
    [(2, 8, 1), (3, 8, 4 / 3), slow(4, 4, 1), slow(3, 6, 1), slow(5, 20, 1), slow(5, 32, 1.8), slow(6, 32, 17 / 12)],
)
def test_a_step_sends_as_many_bytes_as_a_ring_all_reduce(runs, ranks, micro_batches, ratio):
    """2 (W - 1) / W times the size, per rank, within 1 %: gradients, BatchNorm statistics, loss and metrics.

    If the micro-batches per rank are no power of two, a rank sends several parts: here, their mean over the ranks.
    """
    flags = [*FLAGS, "--global_batch_size", 4 * micro_batches, "--dataset_size", 8 * micro_batches, "--epochs", 1]
    sent = run_ranks(ranks, sent_bytes, runs.words("run", *flags, "--no-use_amp"))
    size = sum(value.nbytes for key, value in runs.last("run")["model"].items() if "running_" not in key)
    statistics = sum(2 * value.nbytes for key, value in runs.last("run")["model"].items() if "running_" in key)
    ring = 2 * (ranks - 1) / ranks * (size + statistics)
    assert sum(sent) / ranks == pytest.approx(ratio * ring, rel=0.01)
    assert ratio > 1 or sent == pytest.approx([ring] * ranks, rel=0.01)


class Side:
    """Replaces the stream of the exchanges: what waits in it, and what waits in the stream of the backward pass."""

    def __init__(self):
        self.is_current, self.waits, self.order = False, {True: 0, False: 0}, []

    def wait_stream(self, other):
        assert not self.is_current
        self.order.append("backward")

    def __enter__(self):
        self.is_current = True

    def __exit__(self, *_):
        self.is_current = False

    def watched(self, name, begin):
        def call(*args, **options):
            work = begin(*args, **options)
            self.order.append(name)
            return mock.Mock(wait=lambda: self.wait(work))

        return call

    def wait(self, work):
        self.waits[self.is_current] += 1
        work.wait()


def waits_by_stream(flags):
    """A step in several buckets: the waits by stream, the collectives in their order, and the gradients."""
    config = TrainingConfig.from_args(flags)
    ctx = setup_distributed(config)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    wrapped, side, grads = wrap_ddp(model, config, ctx), Side(), []
    names = ("all_to_all_single", "all_gather_into_tensor")
    watched = {name: side.watched(name, getattr(dist, name)) for name in names}
    for is_watched in (False, False, True):  # DDP orders its buckets in the first two passes
        wrapped._side_stream = side if is_watched else None
        model.zero_grad(set_to_none=True)
        watching = mock.patch.multiple(dist, **watched) if is_watched else contextlib.nullcontext()
        current = mock.patch.object(torch.accelerator, "current_stream", lambda: None)
        with watching, current:
            wrapped(torch.full((2, 512), 1.0 + ctx.rank)).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    cleanup_distributed()
    return side.waits, side.order, all(map(torch.equal, grads[1], grads[2]))


def test_the_backward_pass_waits_for_no_exchange_and_all_ranks_issue_them_in_one_order():
    """Without a GPU: the waits of the hooks are counted by the stream that is current."""
    flags = [*TINY, "--no-use_amp", "--reduction", "exact", "--bucket_cap_mb", "1"]
    (waits, order, is_equal), other = run_ranks(2, waits_by_stream, flags)
    buckets = order.count("backward")
    assert buckets > 2 and waits == {True: 2 * buckets, False: 0} and is_equal
    assert order == other[1] and order.count("all_gather_into_tensor") == buckets
