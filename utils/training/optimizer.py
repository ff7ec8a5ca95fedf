"""Optimizer, learning rate and the weights' moving average."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from config import TrainingConfig, UserError


def create_optimizer(groups: list[dict[str, Any]], config: TrainingConfig) -> torch.optim.Optimizer:
    """A fused optimizer: it takes `found_inf` on the device, and so skips a step without the host knowing.

    Args:
        groups: of model.param_groups: each has "params" and may have "lr" and "weight_decay" of its own.
    """
    groups = [group | {"params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise UserError("param_groups: holds no parameter that is trained; return some with requires_grad=True")
    common = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, betas=(config.momentum, 0.999), **common)
    else:
        nesterov = config.nesterov and config.momentum > 0
        optimizer = torch.optim.SGD(groups, momentum=config.momentum, nesterov=nesterov, **common)
        fill_momenta(optimizer)
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]
    return optimizer


def fill_momenta(optimizer: torch.optim.Optimizer) -> None:
    """Fused SGD whose first step is skipped continues from uninitialised momentum; zeros give the same first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if isinstance(optimizer, torch.optim.SGD) and group["momentum"] else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def lr_factor(step: int, total_steps: int, warmup_steps: int) -> float:
    """The factor on the peak learning rate at optimizer step `step` (from 0): linear warm-up, then a cosine to zero.

    Loshchilov and Hutter, "SGDR", 2017, equation 5 with one cycle; Goyal et al., 2017, arXiv:1706.02677, section 2.2.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class WeightAverage:
    """An exponential moving average of the weights and the running statistics, in a copy of the model.

    The rule of torch.optim.swa_utils.get_ema_multi_avg_fn, whose first update copies. That function takes its decay
    from the host; here a skipped step must leave the average as it was without a read by the host.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._averages = _floats(self.model)
        self._sources = _floats(model)
        self._rate = torch.full_like(self._sources[0].flatten()[0], 1.0 - decay)
        self._is_first = torch.ones_like(self._rate)  # 1 until the first step is taken
        pairs = zip(self.model.buffers(), model.buffers(), strict=True)
        self._counters = [(mine, its) for mine, its in pairs if not mine.is_floating_point()]

    def has_begun(self, has_begun: bool) -> None:
        """Whether a step was taken already; for a state that is loaded."""
        self._is_first.fill_(not has_begun)

    @torch.no_grad()
    def update(self, taken: Tensor) -> None:
        """taken: float, 0-dimensional, on the device, 1 where the step was taken and 0 where it was skipped."""
        gaps = torch._foreach_sub(self._sources, self._averages)
        torch._foreach_mul_(gaps, taken * torch.maximum(self._is_first, self._rate))
        torch._foreach_add_(self._averages, gaps)
        self._is_first.mul_(1 - taken)
        for mine, its in self._counters:
            mine.copy_(its)


def _floats(model: nn.Module) -> list[Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
