"""BatchNorm's running statistics: once per optimizer step, over the whole global batch, to the bit as they were after a
skip."""

import copy

import pytest
import torch
from torch import nn

from config import TrainingConfig, UserError
from ddp_utils import cleanup_distributed, setup_distributed
from utils.training.batchnorm import RunningStats

YES, NO = torch.tensor(True), torch.tensor(False)


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    setup_distributed(TrainingConfig(backend="gloo"))
    yield
    cleanup_distributed()


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3)
    ).train()


def statistics(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def end_step(stats, samples, is_finite=YES):
    """What a step of one micro-batch does with them after its forward pass."""
    stats.add(samples)
    stats.start_reduce()
    stats.commit(samples, is_finite)


def test_one_micro_batch_moves_them_as_the_stock_layer_does():
    stock, ours = net(), net()
    stats = RunningStats(ours)
    for _ in range(3):
        x = torch.randn(4, 2, 9, 9)
        stock(x), ours(x)
        end_step(stats, 4)
    for name, value in statistics(stock).items():
        torch.testing.assert_close(statistics(ours)[name], value)


def test_a_window_moves_them_once_by_the_mean_over_its_samples():
    ours = net()
    stats = RunningStats(ours)
    parts = [torch.randn(n, 2, 9, 9) for n in (4, 4, 1)]
    single = copy.deepcopy(net())
    means = []
    for x in parts:
        ours(x)
        stats.add(len(x))
        first = single[0](x)
        means.append(first.mean((0, 2, 3)) * len(x) / 9)
    stats.start_reduce()
    stats.commit(9, YES)
    torch.testing.assert_close(ours[1].running_mean, 0.1 * sum(means))
    assert ours[1].num_batches_tracked.item() == 1


def test_a_skipped_step_leaves_them_to_the_bit_even_after_nan():
    ours = net()
    stats = RunningStats(ours)
    ours(torch.randn(4, 2, 9, 9))
    end_step(stats, 4)
    before = statistics(ours)
    ours(torch.full((4, 2, 9, 9), float("nan")))
    end_step(stats, 4, NO)
    assert all(torch.equal(before[name], value) for name, value in statistics(ours).items())
    ours(torch.randn(4, 2, 9, 9))
    end_step(stats, 4)
    assert all(value.isfinite().all() for value in statistics(ours).values())


def test_a_layer_in_evaluation_mode_keeps_its_statistics_to_the_bit():
    ours = net()
    ours[1].running_mean.fill_(0.1)
    stats = RunningStats(ours)
    ours[1].eval()
    stats.begin_epoch()
    before = statistics(ours)
    for samples in (3, 5):
        ours(torch.randn(samples, 2, 9, 9))
        end_step(stats, samples)
    after = statistics(ours)
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("1."))
    assert not torch.equal(before["4.running_mean"], after["4.running_mean"])


def test_discard_and_reload():
    ours, other = net(), net()
    stats = RunningStats(ours)
    before = statistics(ours)
    ours(torch.randn(4, 2, 9, 9))
    assert not torch.equal(before["1.running_mean"], ours[1].running_mean)
    stats.discard()
    assert all(torch.equal(before[name], value) for name, value in statistics(ours).items())
    other(torch.randn(4, 2, 9, 9))
    ours.load_state_dict(other.state_dict())
    stats.reload()
    stats.discard()
    assert torch.equal(ours[1].running_mean, other[1].running_mean)


def test_a_cumulative_average_is_refused():
    with pytest.raises(UserError, match="momentum=None .* cannot be resumed exactly; give"):
        RunningStats(nn.BatchNorm1d(3, momentum=None))
