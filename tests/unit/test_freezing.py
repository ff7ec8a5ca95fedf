"""A frozen BatchNorm computes as one in evaluation, has its state, and is never moved by training."""

import pytest
import torch
from torch import nn

from utils.example.freezing import FrozenBatchNorm, freeze_backbone, freeze_batchnorm
from utils.settings.errors import UserError


class WithActivation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def trained_norm(**options):
    """A layer whose statistics are unlike those of a new one."""
    norm = nn.BatchNorm2d(3, eps=1e-3, **options)
    for seed in range(3):
        norm(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) * 2 + 1)
    return norm


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_have_the_bits_of_evaluation(affine, dtype):
    norm = trained_norm(affine=affine).to(dtype)
    frozen = FrozenBatchNorm(norm).train()
    norm.eval()
    results = []
    for layer in (norm, frozen):
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(9)).to(dtype).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        results.append((y, x.grad))
    assert all(map(torch.equal, *results))


def test_the_state_has_the_names_and_dtypes_of_the_layer_and_does_not_move():
    norm = trained_norm()
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    frozen = FrozenBatchNorm(norm)
    frozen.train()(torch.randn(4, 3, 5, 5))
    after = frozen.state_dict()
    assert list(after) == list(before) == [*("weight", "bias"), *("running_mean", "running_var", "num_batches_tracked")]
    for name, value in before.items():
        assert torch.equal(after[name], value) and after[name].dtype == value.dtype
    other = trained_norm()
    other.load_state_dict(after)
    frozen.load_state_dict(other.state_dict())


def test_16_bit_parameters_meet_float32_statistics():
    frozen = FrozenBatchNorm(trained_norm())
    frozen.weight.data = frozen.weight.data.bfloat16()
    frozen.bias.data = frozen.bias.data.bfloat16()
    assert frozen(torch.randn(2, 3, 4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_each_layer_with_statistics_is_replaced_once_also_synchronized_ones():
    shared = nn.BatchNorm2d(3)
    without_statistics = nn.BatchNorm2d(3, track_running_stats=False)
    inner = nn.Sequential(shared, nn.SyncBatchNorm(3), without_statistics)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), shared, shared, inner)
    names = list(model.state_dict())
    freeze_batchnorm(model)
    assert list(model.state_dict()) == names
    assert model[1] is model[2] is inner[0] and isinstance(model[1], FrozenBatchNorm)
    assert isinstance(inner[1], FrozenBatchNorm) and inner[2] is without_statistics


@pytest.mark.parametrize("heads", [(), ("1",), ("0", "1")])
def test_the_last_layer_is_trained_or_the_given_heads(heads):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.ReLU())
    freeze_backbone(model, [model.get_submodule(name) for name in heads])
    trained = {name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(heads or "3")


def test_a_batchnorm_with_a_forward_of_its_own_is_refused():
    with pytest.raises(UserError, match="WithActivation, a BatchNorm with a forward method of its own"):
        freeze_backbone(nn.Sequential(nn.Conv2d(3, 3, 1), WithActivation(3)))
