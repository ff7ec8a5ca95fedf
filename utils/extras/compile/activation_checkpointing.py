"""Activation checkpointing: a block keeps only its input and recomputes its activations in the backward pass."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from utils.settings.errors import UserError
from utils.training.blocks import check_blocks


def checkpoint_activations(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Let these blocks recompute their activations. Parameter names and state dict keys stay the same.

    The second pass draws the same random numbers, and leaves in BatchNorm's buffers what the first one did, since their
    momentum is 1 (utils/training/batchnorm.py); it counts its batch twice, which `RunningStats.commit` corrects.
    Raises UserError for a model without blocks.
    """
    if not blocks:
        raise UserError(
            f"--activation_checkpointing needs blocks, but {type(model).__name__} has none (modules with children, in"
            " an nn.Sequential or nn.ModuleList). Leave out --activation_checkpointing, or let blocks(model) of"
            " model.py return some."
        )
    check_blocks(blocks)
    for block in blocks:
        kind: Any = type(block)
        block.__class__ = _create_checkpointed_class(kind)


@functools.cache
def _create_checkpointed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name; not a closure, so that a copy of the module computes with its own weights."""

    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            output = checkpoint(functools.partial(kind.forward, self), *inputs, use_reentrant=False, **options)
            if not torch.compiler.is_compiling():
                torch.clear_autocast_cache()  # else its 16-bit weights stay until the end of the model's forward pass
            return output
        return kind.forward(self, *inputs, **options)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__})
