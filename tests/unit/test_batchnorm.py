"""BatchNorm's running statistics are updated once per optimizer step, with the mean over the global batch."""

import pytest
import torch
from torch import nn

from config import TrainingConfig
from ddp_utils import DistributedContext, cleanup_distributed, setup_distributed
from utils.data.sampler import Assignment, GlobalBatchSampler
from utils.report.terminal import _format_batchnorm_line
from utils.settings.errors import UserError
from utils.training.batchnorm import RunningStats, check_sync_batchnorm

YES = torch.tensor(True)


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    setup_distributed(TrainingConfig(backend="gloo"))
    yield
    cleanup_distributed()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3))


def images(samples):
    return torch.randn(samples, 2, 9, 9)


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def step(model, stats, *batches, is_finite=YES):
    """One optimizer step with these micro-batches."""
    for batch in batches:
        model(batch)
        stats.add(len(batch))
    stats.commit(sum(map(len, batches)), is_finite)
    stats._sum.zero_()


def test_a_layer_in_evaluation_mode_keeps_its_statistics_bitwise_unchanged():
    ours = net()
    ours[1].running_mean.fill_(0.1)
    stats = RunningStats(ours)
    ours[1].eval()
    stats.begin_epoch()
    before = buffers(ours)
    for samples in (3, 5):
        step(ours, stats, images(samples))
    after = buffers(ours)
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("1."))
    assert not torch.equal(before["3.running_mean"], after["3.running_mean"])


@pytest.mark.parametrize(
    ("momenta", "frozen", "updates", "line"),
    [
        ([], [], 4, ""),
        ([0.1], [], 1, ""),
        ([0.1], [], 4, "Use momentum 0.344 for the memory that 0.1 has in torch"),
        ([0.1, 0.1], [], 2, "Use momentum 0.19 for the memory that 0.1 has in torch"),
        ([0.01], [], 4, "Use momentum 0.0394 for the memory that 0.01 has in torch"),
        (
            [0.1, 0.3],
            [],
            2,
            "Use momentum 0.19 for the memory that 0.1 has in torch, 0.51 for the memory that 0.3 has in torch",
        ),
        ([0.1, 0.3], [0], 2, "Use momentum 0.51 for the memory that 0.3 has in torch"),
        ([0.1], [0], 4, ""),
        ([0.0], [], 4, ""),
    ],
)
def test_the_banner_has_the_momentum_with_the_memory_of_torch(momenta, frozen, updates, line):
    model = nn.Sequential(nn.Linear(2, 2), *(nn.BatchNorm1d(2, momentum=momentum) for momentum in momenta))
    model.append(nn.BatchNorm1d(2, track_running_stats=False))  # has none that could move
    stats = RunningStats(model)
    for number in frozen:
        model[1 + number].eval()
    stats.begin_epoch()
    begin = "The running statistics move once per optimizer step, not per micro-batch. "
    assert _format_batchnorm_line(stats.momenta, updates) == (f"{begin}{line}." if line else "")


@pytest.mark.parametrize(("momentum", "updates"), [(0.1, 4), (0.01, 3), (0.5, 2)])
def test_that_momentum_gives_the_statistics_of_torch_in_as_many_updates(momentum, updates):
    reference = nn.BatchNorm1d(2, momentum=momentum)
    ours = nn.BatchNorm1d(2, momentum=1 - (1 - momentum) ** updates)
    stats, batch = RunningStats(ours), torch.randn(8, 2) + 1
    for _ in range(updates):
        reference(batch)
    step(ours, stats, *[batch] * updates)
    torch.testing.assert_close(ours.running_mean, reference.running_mean)
    torch.testing.assert_close(ours.running_var, reference.running_var)


def test_a_cumulative_average_is_rejected():
    with pytest.raises(UserError, match="momentum=None .* cannot be resumed exactly. Give"):
        RunningStats(nn.BatchNorm1d(3, momentum=None))


def test_sync_batchnorm_needs_cuda_and_the_same_number_of_micro_batches_on_each_rank():
    """It communicates in every forward pass: with an extra pass on one rank, the ranks' collectives would not match."""

    def check(samples, per_step, device="cuda", model=None, drop_last=False):
        sampler = GlobalBatchSampler(
            range(samples),
            batch_size=4,
            micro_batches_per_step=per_step,
            assignment=Assignment(0, 2),
            drop_last=drop_last,
        )
        ctx = DistributedContext(rank=0, local_rank=0, world_size=2, device=torch.device(device))
        check_sync_batchnorm(model or nn.SyncBatchNorm(3), sampler, ctx)

    check(40, 4), check(44, 4, drop_last=True), check(39, 2), check(44, 4, "cpu", net())
    for samples, per_step in ((44, 4), (40, 3)):
        with pytest.raises(UserError, match="SyncBatchNorm needs the same number .*. Add --drop_last"):
            check(samples, per_step)
    with pytest.raises(UserError, match="SyncBatchNorm works on CUDA only. Leave out --sync_bn on the CPU."):
        check(40, 4, "cpu")
