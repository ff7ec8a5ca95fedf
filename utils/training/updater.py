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
    list_optimizer_tensors,
    load_optimizer_state,
    prepare_optimizer,
)
from utils.training.precision import Precision


class Updater:
    """Owns the optimizer and the GradScaler of float16.

    The optimizer updates tensors. These are the model's parameters or, with FSDP, this rank's shards of them.

    Args:
        device: the device that computes. The optimizer's tensors may be in host memory.

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
        self._config = config
        self._strategy = strategy
        self.zeroes_in_place = False  # False: drop gradients. True: fill them with zeros, which CUDA graphs need

        names = {p: name for name, p in model.named_parameters()}
        groups = check_param_groups(hooks.param_groups(model, config), names)
        tensors = strategy.create_optimizer_tensors(names)
        for group in groups:
            group["params"] = [tensors[p] for p in group["params"]]
        # the model's parameter for each tensor of the optimizer
        self.parameters_by_tensor: dict[nn.Parameter, nn.Parameter] = {}
        for parameter, tensor in tensors.items():
            self.parameters_by_tensor[tensor] = parameter
        self.optimizer = hooks.create_optimizer(groups, config)
        strategy.check_optimizer(self.optimizer)
        self.skips_on_device = prepare_optimizer(self.optimizer)
        self._initial_groups = copy_group_entries(self.optimizer)
        self.scaler = torch.amp.GradScaler(precision.device_type, enabled=precision.has_loss_scaling)

        optimized = set(list_optimizer_tensors(self.optimizer))
        # The tensors are in the model's order, which is the same in all processes. Groups may come in any order, on
        # which the bits of the gradient norm, a sum, would depend.
        self._tensor_names: dict[Tensor, str] = {}
        self._frozen_names: dict[Tensor, str] = {}  # by parameter
        trainable = []
        for parameter, name in names.items():
            tensor = tensors[parameter]
            if tensor in optimized:
                self._tensor_names[tensor] = name
            if parameter.requires_grad:
                trainable.append(parameter)
            else:
                self._frozen_names[parameter] = name
        # what `zero_gradients` drops: also gradients of parameters in no group, and of both a parameter and its shard
        self._with_gradients = list(dict.fromkeys([*trainable, *self._tensor_names]))

        # fused kernels need found_inf in float32, also with float64 parameters
        self.zero = torch.zeros((), dtype=torch.float32, device=device)
        self.one = torch.ones((), dtype=torch.float32, device=device)
        first_tensor = next(iter(self._tensor_names))
        self._is_offloaded = first_tensor.device != device  # the optimizer's tensors are in host memory
        # grad_scale, by which fused kernels divide, is float32: it is too coarse for float64 gradients
        is_float32 = all(tensor.dtype is torch.float32 for tensor in self._tensor_names)
        self._divides_in_step = self.skips_on_device and is_float32

    def zero_gradients(self) -> None:
        """Drop the gradients, or fill them with zeros. Call before the next global batch."""
        if self.zeroes_in_place:
            self.optimizer.zero_grad(set_to_none=False)
            return
        for parameter in self._with_gradients:  # the profiler hooks of optimizer.zero_grad would take 20 us
            parameter.grad = None

    def step(
        self,
        divisor: Tensor,
        loss: Tensor,
        step_number: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Divide the gradients, clip them and update, unless the loss or the gradient is not finite.

        After the all-reduces loss and gradient are the same on every rank, so all ranks decide alike without
        communication. Only an optimizer that does not support `found_inf` needs a read from the device.

        Args:
            divisor, loss: float64, 0-dimensional, on the device.
            step_number: the number of the step, from 1.

        Returns:
            norm: the norm of the divided gradient, before it is clipped: 0-dimensional, on the device.
            is_finite: whether loss and gradient are finite: 0-dimensional bool, on the device.
            skipped: 1 if the step is skipped, else 0: float32, 0-dimensional, where the optimizer's tensors are.
        """
        thawed = [name for parameter, name in self._frozen_names.items() if parameter.requires_grad]
        if thawed:
            raise explain_unfrozen_parameters(thawed, step_number)
        self._strategy.unscale_gradients(self.scaler, self.optimizer, self.parameters_by_tensor)
        gradients = [tensor.grad for tensor in self._tensor_names if tensor.grad is not None]
        if len(gradients) < len(self._tensor_names) and not self._config.find_unused_parameters:
            unused = [name for tensor, name in self._tensor_names.items() if tensor.grad is None]
            raise explain_unused_parameters(unused)

        norm = self._strategy.compute_gradient_norm(gradients) / divisor  # 0 / 0, of an empty global batch, is NaN
        norm = torch.add(norm, loss, alpha=0)  # 0 times a non-finite loss is NaN
        if self._config.clip_grad_norm:  # clipping divides by max(1, norm / clip_grad_norm) too
            excess = (norm + 1e-6) / self._config.clip_grad_norm
            divisor = divisor * excess.clamp(min=1)
        is_finite = norm < math.inf  # NaN is not
        skipped = torch.where(is_finite, self.zero, self.one)  # exactly 0 or 1
        if self._is_offloaded:
            divisor = divisor.cpu()
            skipped = skipped.cpu()

        # Fused optimizers divide the gradients by `grad_scale`, and do nothing where `found_inf` is 1. GradScaler uses
        # the same two attributes.
        if self._divides_in_step:
            self.optimizer.grad_scale = divisor.float()
        else:
            torch._foreach_div_(gradients, divisor)
        if self.skips_on_device:
            self.optimizer.found_inf = skipped
            self.optimizer.step()
        elif is_finite:  # the host waits for the device here
            self.optimizer.step()
        self.scaler.update()
        self.zero_gradients()
        return norm, is_finite, skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of float16's scale for a checkpoint."""
        optimizer = collect_optimizer_state(
            self.optimizer,
            names=self._tensor_names,
            parameters_by_tensor=self.parameters_by_tensor,
            initial_groups=self._initial_groups,
        )
        return {"optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, payload: dict[str, Any]) -> None:
        """Load what `state_dict` returned. A checkpoint of a run without float16 has no scale."""
        load_optimizer_state(
            self.optimizer,
            payload["optimizer"],
            names=self._tensor_names,
            parameters_by_tensor=self.parameters_by_tensor,
        )
        if self.scaler.is_enabled() and payload["scaler"]:
            self.scaler.load_state_dict(payload["scaler"])
