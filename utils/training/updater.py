"""The optimizer and its step: divide, clip, update, or skip all of it on the device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from config import TrainingConfig
from utils.training.ddp_model import explain_unfrozen_parameters, explain_unused_parameters
from utils.training.gradient_strategy import GradientStrategy
from utils.training.hooks import ModelHooks
from utils.training.optimizer import (
    check_param_groups,
    collect_optimizer_state,
    copy_group_entries,
    load_optimizer_state,
    prepare_optimizer,
)
from utils.training.precision import Precision


class Updater:
    """The optimizer with its tensors, which are the parameters or shards of them, and float16's scale of the loss.

    Args:
        device: that computes; the optimizer's tensors may be in host memory.

    Raises:
        UserError: if the parameter groups cannot be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        hooks: ModelHooks,
        config: TrainingConfig,
        precision: Precision,
        strategy: GradientStrategy,
        device: torch.device,
    ) -> None:
        self._config, self._strategy = config, strategy
        self.zeroes_in_place = False  # else gradients are dropped
        names = {p: name for name, p in model.named_parameters()}
        groups = check_param_groups(hooks.param_groups(model, config), names)
        tensors = strategy.create_optimizer_tensors(names)
        groups = [group | {"params": [tensors[p] for p in group["params"]]} for group in groups]
        # of a tensor of the optimizer: the parameter
        self.parameters_by_tensor = {tensor: p for p, tensor in tensors.items()}
        self.optimizer = hooks.create_optimizer(groups, config)
        strategy.check_optimizer(self.optimizer)
        self.skips_on_device = prepare_optimizer(self.optimizer)
        self._initial_groups = copy_group_entries(self.optimizer)
        self.scaler = torch.amp.GradScaler(precision.device_type, enabled=precision.has_loss_scaling)
        optimized = {p for group in self.optimizer.param_groups for p in group["params"]}
        # in the model's order, which is the same in all processes: the norm is a sum, and groups may come in any order
        self._names = {tensors[p]: name for p, name in names.items() if tensors[p] in optimized}
        trainable = [p for p in names if p.requires_grad]  # those in no group are not trained
        self._frozen_names = {p: name for p, name in names.items() if not p.requires_grad}
        self._with_gradients = [*dict.fromkeys([*trainable, *self._names])]
        scalar: dict[str, Any] = {"dtype": torch.float32, "device": device}  # as found_inf must be, even with float64
        self.zero, self.one = torch.zeros((), **scalar), torch.ones((), **scalar)
        self._is_offloaded = next(iter(self._names)).device != device  # the optimizer's tensors
        # fused kernels take a float32 divisor, which is exact enough only for float32
        self._divides_in_step = self.skips_on_device and all(p.dtype is torch.float32 for p in self._names)

    def zero_gradients(self) -> None:
        """Call before the next global batch."""
        if self.zeroes_in_place:
            self.optimizer.zero_grad(set_to_none=False)
            return
        for parameter in self._with_gradients:  # optimizer.zero_grad takes 20 us more, for the profiler
            parameter.grad = None

    def step(self, divisor: Tensor, loss: Tensor, step_number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Divide the gradients, clip them and update, unless the loss or the gradient is not finite.

        After the all-reduces both are the same on every rank, so all ranks decide alike without communication. Only an
        optimizer that does not support `found_inf` needs a read from the device.

        Args:
            divisor, loss: float64, 0-dimensional, on the device.
            step_number: of the step, from 1.

        Returns:
            The norm of the divided gradient before it is clipped; whether it is finite, bool; and 1 if the step is
            skipped, else 0. 0-dimensional, on the device, the last one where the optimizer's tensors are.
        """
        if thawed := [name for p, name in self._frozen_names.items() if p.requires_grad]:
            raise explain_unfrozen_parameters(thawed, step_number)
        self._strategy.unscale_gradients(self.scaler, self.optimizer, self.parameters_by_tensor)
        gradients = [p.grad for p in self._names if p.grad is not None]
        if len(gradients) < len(self._names) and not self._config.find_unused_parameters:
            raise explain_unused_parameters([name for p, name in self._names.items() if p.grad is None])
        norm = self._strategy.compute_gradient_norm(gradients) / divisor  # 0 / 0, of an empty global batch, is NaN
        norm = torch.add(norm, loss, alpha=0)  # 0 times a non-finite loss is NaN
        if self._config.clip_grad_norm:
            divisor = divisor * ((norm + 1e-6) / self._config.clip_grad_norm).clamp(min=1)
        is_finite = norm < math.inf  # NaN is not
        skipped = torch.where(is_finite, self.zero, self.one)  # exactly 0 or 1
        if self._is_offloaded:
            divisor, skipped = divisor.cpu(), skipped.cpu()
        if self._divides_in_step:
            self.optimizer.grad_scale = divisor.float()
        else:
            torch._foreach_div_(gradients, divisor)
        if self.skips_on_device:
            self.optimizer.found_inf = skipped
        if self.skips_on_device or is_finite:
            self.optimizer.step()
        self.scaler.update()
        self.zero_gradients()
        return norm, is_finite, skipped

    def state_dict(self) -> dict[str, Any]:
        optimizer = collect_optimizer_state(
            self.optimizer, self._names, self.parameters_by_tensor, self._initial_groups
        )
        return {"optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, payload: dict[str, Any]) -> None:
        load_optimizer_state(self.optimizer, payload["optimizer"], self._names, self.parameters_by_tensor)
        if self.scaler.is_enabled() and payload["scaler"]:
            self.scaler.load_state_dict(payload["scaler"])
