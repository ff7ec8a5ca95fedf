"""Exact: an optimizer step gets the gradient of the plain loop, for every accumulation and every length of the last
global_batch."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import plain_loop
import train
from ddp_utils import setup_distributed, wrap_ddp
from lib.verify.fork import record_updates
from ranks import run_ranks
from tasks import config_of, image_loss, using
from train import Consensus, Decision, Precision, TrainState
from utils.clock import Clock
from utils.data.loader import create_distributed_dataloader
from utils.training.first_passes import train_twice
from utils.training.state import Progress

BATCH = 2
FLAGS = f"--batch_size {BATCH} --image_size 8 --backend gloo --num_workers 0 --warmup_epochs 0 --epochs 1".split()
OF_TASK = {
    "images": ["--clip_grad_norm", "0.5"],
    "plain": [],
    "lines": ["--clip_grad_norm", "0.5", "--optimizer", "adamw"],
}
SCALE = 1024.0


class ScaledPrecision(Precision):
    """Gradients are scaled as for float16, while everything is computed in float64: a scale is a power of two and must
    not be seen."""

    is_scaled = True


def gradients(task, accumulations, tails, precision, dtype):
    """The gradient of one global batch of each length, for each accumulation: {(accumulation, length): gradients}."""
    found, silent = {}, mock.Mock(**{"is_due.return_value": False})  # in place of the reporter and the saver
    with using(task):
        for accumulation in accumulations:
            flags = [*FLAGS, *OF_TASK[task], "--grad_accum_steps", str(accumulation)]
            config = config_of([*flags, "--dataset_size", "10"], dtype)
            ctx = setup_distributed(config)
            torch.manual_seed(config.seed)
            net = train.create_model(config, ctx.device)
            state = TrainState(net, train.param_groups(net, config), config, precision)
            model = wrap_ddp(net, config, ctx)
            loader, _ = create_distributed_dataloader(train.create_dataset(config, "train"), config, ctx)
            train_twice(model, loader.sample_batch(), state, train.compute_loss)
            for tail in (tail for tail in tails if tail <= BATCH * accumulation * ctx.world_size):
                config = config_of([*flags, "--dataset_size", str(tail)], dtype)
                loader, sampler = create_distributed_dataloader(train.create_dataset(config, "train"), config, ctx)
                state.progress = Progress()
                state.plan(sampler, config)
                parts = {"config": config, "ctx": ctx, "state": state, "loader": loader, "model": model}
                consensus = Consensus(Decision, ctx.control)
                with record_updates(taken := []):
                    train.train_one_epoch(
                        SimpleNamespace(**parts, consensus=consensus, clock=Clock(), reporter=silent, saver=silent)
                    )
                assert len(taken) == 1 and state.progress.samples_seen == tail
                found[accumulation, tail] = [g.numpy() for g in taken[0].gradients.values()]
            train.cleanup_distributed()
    return found


@functools.cache
def oracle(task, tail):
    """The plain loop's gradient of one global batch of so many samples, float64."""
    with using(task), record_updates(taken := []):
        list(
            plain_loop.plain_loop(
                config_of([*FLAGS, *OF_TASK[task], "--dataset_size", str(tail)], torch.float64), -(-tail // BATCH)
            )
        )
    torch.set_default_dtype(torch.float32)
    return list(taken[0].gradients.values())


def distance(got, want):
    got, want = (torch.cat([torch.as_tensor(g).flatten().double() for g in each]) for each in (got, want))
    return ((got - want).norm() / want.norm()).item()


SLOW = [(ranks, task, (1, 2, 4)) for ranks in (1, 2, 4) for task in OF_TASK]


@pytest.mark.parametrize(
    ("ranks", "task", "accumulations"),
    [
        (1, "plain", (4,)),
        (2, "lines", (1, 2)),
        (4, "images", (1, 2)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_every_tail_from_one_sample_to_a_global_batch(ranks, task, accumulations):
    """BatchNorm and dropout under a gradient scale; no batch statistics; weights per sample with clipping. 1e-12:
    rounding of float64 sums."""
    precision = ScaledPrecision("cpu", None) if task == "images" else Precision("cpu", None)
    tails = range(1, BATCH * max(accumulations) * ranks + 1)
    each = run_ranks(ranks, gradients, task, accumulations, tails, precision, torch.float64)
    assert len(each[0]) == BATCH * ranks * sum(accumulations)
    for (accumulation, tail), got in each[0].items():
        assert distance(got, oracle(task, tail)) < 1e-12, (accumulation, tail)
        for other in each[1:]:
            assert all((a == b).all() for a, b in zip(got, other[accumulation, tail], strict=True)), (
                accumulation,
                tail,
            )


def half_precision_oracle(tail):
    """The plain loop with its loss in float16, scaled by hand."""

    def loss(net, batch):
        with torch.autocast("cpu", torch.float16):
            loss_sum, metrics = image_loss(net, batch)
        return loss_sum * SCALE, metrics

    with using("plain"), mock.patch.object(plain_loop, "compute_loss", loss), record_updates(taken := []):
        list(plain_loop.plain_loop(config_of([*FLAGS, "--dataset_size", str(tail)]), -(-tail // BATCH)))
    return [g / SCALE for g in taken[0].gradients.values()]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_float16_is_scaled_and_unscaled(ranks):
    """Each micro-batch rounds to float16 as in the plain loop under the same scale; float32 sums over them may differ
    by 1e-5."""
    got = run_ranks(ranks, half_gradients)[0]
    for (accumulation, tail), each in got.items():
        assert distance(each, half_precision_oracle(tail)) < 1e-5, (accumulation, tail)


def half_gradients():
    with mock.patch("torch.amp.GradScaler", functools.partial(torch.amp.GradScaler, init_scale=SCALE)):
        return gradients("plain", (1, 2), (1, 3, 4), Precision("cpu", torch.float16), torch.float32)
