"""The gradient of an optimizer step equals that of the plain loop, for every accumulation and every length of the last
global batch."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import model
import plain_loop
import train
from ddp_utils import cleanup_distributed, setup_distributed, wrap_ddp
from ranks import run_ranks
from tasks import config_of, image_loss, using
from utils.clock import Clock
from utils.data.loader import create_distributed_dataloader
from utils.distributed.consensus import Consensus, Vote
from utils.training.first_passes import train_twice
from utils.training.precision import Precision
from utils.training.schedule import Progress
from utils.training.seams import Seams

BATCH = 2
FLAGS = f"--batch_size {BATCH} --backend gloo --num_workers 0 --warmup_epochs 0 --epochs 1".split()
OF_TASK = {
    "images": ["--clip_grad_norm", "0.5"],
    "plain": [],
    "terms": ["--clip_grad_norm", "0.5"],
    "lines": ["--clip_grad_norm", "0.5", "--optimizer", "adamw"],
}
SCALE = 1024.0


class ScaledPrecision(Precision):
    """Scales gradients as for float16, but computes in float64: the scale is a power of two and changes nothing."""

    is_scaled = True


@contextlib.contextmanager
def gradients_into(found):
    """Record the gradients of each optimizer step; with a learning rate of 0 the weights do not change."""

    def note(optimizer, *_):
        divisor = getattr(optimizer, "grad_scale", None)  # fused kernels divide in the step
        divisor = 1.0 if divisor is None else divisor
        found.append([p.grad / divisor for group in optimizer.param_groups for p in group["params"]])
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    handle = register_optimizer_step_pre_hook(note)
    yield
    handle.remove()


def gradients(task, accumulations, tails, precision, dtype):
    """{(accumulation, length): gradients} of one global batch of each length, for each accumulation."""
    found, silent = {}, mock.Mock(is_due=False)  # replaces the reporter and the checkpoints
    with using(task), mock.patch.object(Precision, "choose", lambda *_: precision):
        for accumulation in accumulations:
            flags = [*FLAGS, *OF_TASK[task], "--grad_accum_steps", str(accumulation), "--dataset_size"]
            config = config_of([*flags, "10"], dtype)
            ctx = setup_distributed(config)
            seams = Seams.of(model)
            state = train.create_state(seams, config, ctx)
            wrapped = wrap_ddp(state.model, config, ctx)
            loader, _ = create_distributed_dataloader(train.your_data.create_dataset(config, "train"), config, ctx)
            train_twice(wrapped, loader.sample_batch(), state, seams.compute_loss)
            for tail in (tail for tail in tails if tail <= BATCH * accumulation * ctx.world_size):
                config = config_of([*flags, str(tail)], dtype)
                loader, sampler = create_distributed_dataloader(
                    train.your_data.create_dataset(config, "train"), config, ctx
                )
                state.schedule.progress = Progress()
                state.plan(sampler)
                attempt, consensus = mock.Mock(config=config, ctx=ctx, clock=Clock()), Consensus(Vote, ctx.control)
                parts = (attempt, seams, loader, {}, state, wrapped, consensus, silent, silent)
                parts += (mock.Mock(run=lambda stream, compute: compute(stream)),)
                with gradients_into(taken := []):
                    train.train_one_epoch(train.Training(*parts, silent))
                assert len(taken) == 1 and state.progress.samples_seen == tail
                found[accumulation, tail] = [g.numpy() for g in taken[0]]
            cleanup_distributed()
    return found


@functools.cache
def oracle(task, tail):
    """The plain loop's gradient of one global batch of `tail` samples, in float64."""
    config = config_of([*FLAGS, *OF_TASK[task], "--dataset_size", str(tail)], torch.float64)
    with using(task), gradients_into(taken := []):
        list(plain_loop.plain_loop(config, -(-tail // BATCH)))
    torch.set_default_dtype(torch.float32)
    return taken[0]


def distance(got, want):
    got, want = (torch.cat([torch.as_tensor(g).flatten().double() for g in each]) for each in (got, want))
    return ((got - want).norm() / want.norm()).item()


SLOW = [(ranks, task, (1, 2, 4)) for ranks in (1, 2, 4) for task in OF_TASK]


@pytest.mark.guarantee("ranks-alike", "gradient", "terms")
@pytest.mark.parametrize(
    ("ranks", "task", "accumulations"),
    [
        (1, "plain", (4,)),
        (2, "lines", (1, 2)),
        (4, "terms", (2,)),
        (4, "images", (1, 2)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_gradients_equal_the_plain_loops_for_every_length_of_the_last_global_batch(ranks, task, accumulations):
    """BatchNorm and dropout with a gradient scale; no batch statistics; samples that count differently, with clipping.
    1e-12: rounding of float64 sums."""
    precision = ScaledPrecision("cpu", None) if task == "images" else Precision("cpu", None)
    tails = range(1, BATCH * max(accumulations) * ranks + 1)
    each = run_ranks(ranks, gradients, task, accumulations, tails, precision, torch.float64)
    assert len(each[0]) == BATCH * ranks * sum(accumulations)
    for case, got in each[0].items():
        assert distance(got, oracle(task, case[1])) < 1e-12, case
        for other in each[1:]:
            assert all((a == b).all() for a, b in zip(got, other[case], strict=True)), case


def half_precision_oracle(tail):
    """The plain loop with its loss in float16, scaled by hand."""

    def loss(net, batch):
        with torch.autocast("cpu", torch.float16):
            metrics = image_loss(net, batch)
        return metrics | {"loss": (metrics["loss"][0] * SCALE, metrics["loss"][1])}

    with using("plain"), mock.patch.object(plain_loop, "compute_loss", loss), gradients_into(taken := []):
        list(plain_loop.plain_loop(config_of([*FLAGS, "--dataset_size", str(tail)]), -(-tail // BATCH)))
    return [g / SCALE for g in taken[0]]


@pytest.mark.guarantee("gradient")
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_float16_gradients_are_scaled_and_unscaled(ranks):
    """Each micro-batch rounds to float16 as in the plain loop under the same scale; float32 sums over them may differ
    by 1e-5."""
    for case, got in run_ranks(ranks, half_gradients)[0].items():
        assert distance(got, half_precision_oracle(case[1])) < 1e-5, case


def half_gradients():
    with mock.patch("torch.amp.GradScaler", functools.partial(torch.amp.GradScaler, init_scale=SCALE)):
        return gradients("plain", (1, 2), (1, 3, 4), Precision("cpu", torch.float16), torch.float32)
