"""Freezing all of a network but its last layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from utils.settings.errors import UserError


class FrozenBatchNorm(nn.Module):
    """A BatchNorm whose statistics never move: it normalizes as in evaluation, in training too.

    Its state dict has the names, shapes and dtypes of the layer that it replaces, whose parameters and buffers it takes
    over: weight and bias (None without affine), running_mean, running_var and num_batches_tracked.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight = norm.weight
        self.bias = norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.register_buffer("num_batches_tracked", norm.num_batches_tracked)

    def forward(self, x: Tensor) -> Tensor:
        """Float [B, C, ...] -> the same shape and dtype."""
        weight = self._with_dtype_of_statistics(self.weight)
        bias = self._with_dtype_of_statistics(self.bias)
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, training=False, eps=self.eps)

    def _with_dtype_of_statistics(self, parameter: Tensor | None) -> Tensor | None:
        """Convert it, since batch_norm refuses another dtype. FSDP may gather parameters in 16 bits."""
        if parameter is None:
            return None
        return parameter.to(self.running_mean.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.running_mean)}, eps={self.eps}"


def freeze_backbone(model: nn.Module, heads: Sequence[nn.Module] = ()) -> None:
    """Train only the heads of a model, and freeze the rest. Its BatchNorm layers keep their statistics.

    Args:
        model: the whole model, which is changed.
        heads: the modules to train. By default the last linear or convolutional layer.

    Raises:
        UserError: for a BatchNorm with a forward of its own, as those of timm that include the activation.
    """
    if not heads:
        heads = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)][-1:]
    model.requires_grad_(False)
    for head in heads:
        head.requires_grad_(True)
    freeze_batchnorm(model)


def freeze_batchnorm(model: nn.Module) -> None:
    """Replace each BatchNorm layer that has statistics by a FrozenBatchNorm. Raises UserError as freeze_backbone."""
    frozen: dict[nn.Module, FrozenBatchNorm] = {}
    for path, layer in list(model.named_modules(remove_duplicate=False)):  # one layer may stand in several places
        if not isinstance(layer, _BatchNorm) or layer.running_mean is None:
            continue
        if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            kind = type(layer).__name__
            raise UserError(
                f"--freeze backbone does not support {kind}, a BatchNorm with a forward method of its own. Freeze this"
                " layer in create_model."
            )
        if layer not in frozen:
            frozen[layer] = FrozenBatchNorm(layer)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, frozen[layer])
