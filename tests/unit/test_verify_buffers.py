# extra: verify
"""The buffers that verify compares with those of the plain loop."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lib.verify.fork import BrokenInvariant
from lib.verify.model_checks import compare_buffers


def with_buffer(value, is_persistent):
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.register_buffer("own", torch.tensor(value), persistent=is_persistent)
    return module


@pytest.mark.parametrize("values", [(3, 4), (3.0, 4.0), ([3.0], [3.0, 3.0])])
def test_persistent_buffers_have_to_be_equal_and_others_may_differ(values):
    ours, reference = (with_buffer(value, is_persistent=False) for value in values)
    # BatchNorm's mean and variance
    assert compare_buffers(ours, reference, rounding=1e-6) == "Both also agree on 2 buffers."
    ours, reference = (with_buffer(value, is_persistent=True) for value in values)
    with pytest.raises(BrokenInvariant, match="^own has "):
        compare_buffers(ours, reference, rounding=1e-6)
    assert compare_buffers(ours, ours, rounding=1e-6) == "Both also agree on 3 buffers."


@pytest.mark.parametrize(("mean", "is_found"), [(1e-9, False), (1e-3, True)])
def test_a_mean_that_is_zero_but_for_rounding_is_no_difference(mean, is_found):
    ours, reference = nn.Sequential(nn.BatchNorm1d(2)), nn.Sequential(nn.BatchNorm1d(2))
    ours[0].running_mean += mean
    with pytest.raises(BrokenInvariant, match="running_mean has ") if is_found else nullcontext():
        compare_buffers(ours, reference, rounding=1e-6)


def test_the_counter_of_batchnorm_is_left_out():
    ours, reference = nn.Sequential(nn.BatchNorm1d(2)), nn.Sequential(nn.BatchNorm1d(2))
    ours[0].num_batches_tracked += 1
    compare_buffers(ours, reference, rounding=1e-6)
