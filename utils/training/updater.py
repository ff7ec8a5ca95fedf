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
    """The optimizer with its tensors, which are the parameters or shards of them, and float16's scale of the loss.

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
        self.zeroes_in_place = False  # else gradients are dropped

        names = {p: name for name, p in model.named_parameters()}
        groups = check_param_groups(hooks.param_groups(model, config), names)
        tensors = strategy.create_optimizer_tensors(names)
        for group in groups:
            group["params"] = [tensors[p] for p in group["params"]]
        # the parameter of each tensor of the optimizer
        self.parameters_by_tensor: dict[nn.Parameter, nn.Parameter] = {}
        for parameter, tensor in tensors.items():
            self.parameters_by_tensor[tensor] = parameter
        self.optimizer = hooks.create_optimizer(groups, config)
        strategy.check_optimizer(self.optimizer)
        self.skips_on_device = prepare_optimizer(self.optimizer)
        self._initial_groups = copy_group_entries(self.optimizer)
        self.scaler = torch.amp.GradScaler(precision.device_type, enabled=precision.has_loss_scaling)

        optimized = set(list_optimizer_tensors(self.optimizer))
        # The names of the tensors that the optimizer updates are in the model's order, which is the same in all
        # processes, while groups may come in any order. The bits of the gradient norm, a sum, depend on the order.
        self._names: dict[Tensor, str] = {}
        self._frozen_names: dict[Tensor, str] = {}
        trainable = []  # also the parameters in no group: they get gradients, and are not updated
        for parameter, name in names.items():
            tensor = tensors[parameter]
            if tensor in optimized:
                self._names[tensor] = name
            if parameter.requires_grad:
                trainable.append(parameter)
            else:
                self._frozen_names[parameter] = name
        # a sharded parameter and the tensor of the optimizer each hold a gradient
        self._with_gradients = list(dict.fromkeys([*trainable, *self._names]))

        # float32 as found_inf must be, even with float64 parameters
        self.zero = torch.zeros((), dtype=torch.float32, device=device)
        self.one = torch.ones((), dtype=torch.float32, device=device)
        first_tensor = next(iter(self._names))
        self._is_offloaded = first_tensor.device != device  # the optimizer's tensors are in host memory
        # fused kernels take a float32 divisor, which is exact enough only for float32
        is_float32 = all(tensor.dtype is torch.float32 for tensor in self._names)
        self._divides_in_step = self.skips_on_device and is_float32

    def zero_gradients(self) -> None:
        """Drop the gradients, or fill them with zeros. Call before the next global batch."""
        if self.zeroes_in_place:
            self.optimizer.zero_grad(set_to_none=False)
            return
        for parameter in self._with_gradients:  # optimizer.zero_grad takes 20 us more, for the profiler
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
            norm: of the divided gradient, before it is clipped: 0-dimensional, on the device.
            is_finite: whether the norm is finite: 0-dimensional bool, on the device.
            skipped: 1 if the step is skipped, else 0: float32, 0-dimensional, where the optimizer's tensors are.
        """
        thawed = [name for parameter, name in self._frozen_names.items() if parameter.requires_grad]
        if thawed:
            raise explain_unfrozen_parameters(thawed, step_number)
        self._strategy.unscale_gradients(self.scaler, self.optimizer, self.parameters_by_tensor)
        gradients = [tensor.grad for tensor in self._names if tensor.grad is not None]
        if len(gradients) < len(self._names) and not self._config.find_unused_parameters:
            unused = [name for tensor, name in self._names.items() if tensor.grad is None]
            raise explain_unused_parameters(unused)

        norm = self._strategy.compute_gradient_norm(gradients) / divisor  # 0 / 0, of an empty global batch, is NaN
        norm = torch.add(norm, loss, alpha=0)  # 0 times a non-finite loss is NaN
        if self._config.clip_grad_norm:
            excess = (norm + 1e-6) / self._config.clip_grad_norm
            divisor = divisor * excess.clamp(min=1)
        is_finite = norm < math.inf  # NaN is not
        skipped = torch.where(is_finite, self.zero, self.one)  # exactly 0 or 1
        if self._is_offloaded:
            divisor = divisor.cpu()
            skipped = skipped.cpu()

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
        """Return the state of the optimizer and of float16's scale for a checkpoint."""
        optimizer = collect_optimizer_state(
            self.optimizer,
            names=self._names,
            parameters_by_tensor=self.parameters_by_tensor,
            initial_groups=self._initial_groups,
        )
        return {"optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, payload: dict[str, Any]) -> None:
        """Load what `state_dict` returned. A checkpoint of a run without float16 has no scale."""
        load_optimizer_state(
            self.optimizer,
            payload["optimizer"],
            names=self._names,
            parameters_by_tensor=self.parameters_by_tensor,
        )
        if self.scaler.is_enabled() and payload["scaler"]:
            self.scaler.load_state_dict(payload["scaler"])
