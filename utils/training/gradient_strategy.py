"""How gradients are shared among the ranks: one object, chosen once. Nothing else asks which one it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from config import TrainingConfig
from utils.distributed.collectives import RankSum
from utils.distributed.context import DistributedContext
from utils.settings.errors import UserError
from utils.training.ddp_model import (
    DDPModel,
    SingleProcessModel,
    WrappedModel,
    create_ddp_options,
    register_comm_hook,
)

CreateModel = Callable[[torch.device], nn.Module]
FindBlocks = Callable[[nn.Module], list[nn.Module]]


class GradientStrategy:
    """The strategy for one rank, where there is nothing to share. The other strategies override what they change."""

    gradient_divisor = 1  # by which the wrapped model divides the sum of the gradients of all ranks
    banner_note = ""  # for the banner
    provenance: dict[str, Any] = {}
    has_whole_gradients = True  # whether each rank has all gradients, the same on all ranks

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        self._config = config
        self._ctx = ctx

    @staticmethod
    def create(config: TrainingConfig, ctx: DistributedContext) -> GradientStrategy:
        """Create the strategy that the settings ask for."""
        strategy = GradientStrategy
        if ctx.world_size > 1:
            strategy = DDPStrategy
        if config.reduction == "exact":  # extra: exact
            from utils.extras.exact.reduction import ExactStrategy

            strategy = ExactStrategy
        if config.sharding != "none":  # extra: sharding
            from utils.extras.sharding.fsdp_strategy import FSDPStrategy

            strategy = FSDPStrategy
        return strategy(config, ctx)

    def build_model(self, create_model: CreateModel, find_blocks: FindBlocks) -> nn.Module:
        """Create the model, not wrapped.

        Args:
            create_model: creates the model on a device.

        Raises:
            UserError: if the strategy cannot train the model.
        """
        return create_model(self._ctx.device)

    def wrap_model(self, model: nn.Module) -> WrappedModel:
        """Return the model as compute_loss gets it. A backward pass leaves the gradient of all ranks.

        Raises:
            UserError: if the model cannot be wrapped.
        """
        return SingleProcessModel(model)

    def create_rank_sum(self) -> RankSum:
        """Return what forms the sums of a step over micro-batches and ranks."""
        return RankSum()

    def create_optimizer_tensors(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """Return for each parameter the tensor that the optimizer updates: the memory of the parameter on this rank."""
        return {p: p for p in parameters}

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UserError if the optimizer cannot update the tensors of `create_optimizer_tensors`."""

    def unscale_gradients(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        parameters_by_tensor: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        """Give each tensor of the optimizer the gradient of its parameter, and remove float16's scale."""
        scaler.unscale_(optimizer)

    def compute_gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm over all gradients: 0-dimensional, with the same bits on all ranks."""
        # get_total_norm, which sorts by device, takes five times as long
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


class DDPStrategy(GradientStrategy):
    """DDP, which averages the gradients of the ranks, bucket by bucket, beside the backward pass."""

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        super().__init__(config, ctx)
        self.gradient_divisor = ctx.world_size

    def wrap_model(self, model: nn.Module) -> WrappedModel:
        config = self._config
        ranks = self._ctx.world_size
        # DDP divides a gradient that is in its bucket by the number of ranks, and multiplies another one by 1 / ranks.
        # The bits are equal only for powers of two, and the first step of an attempt has no gradients in the buckets.
        is_power_of_two = ranks.bit_count() == 1
        is_accumulating = config.micro_batches_per_step(ranks) > ranks and is_power_of_two
        options = create_ddp_options(
            model,
            self._ctx.device,
            find_unused_parameters=config.find_unused_parameters,
            bucket_cap_mb=config.bucket_cap_mb,
        )
        wrapped = DDPModel(model, is_accumulating, **options)
        if config.comm_hook != "none":
            register_comm_hook(wrapped, config.comm_hook, self._ctx.device)
        return wrapped


def wrap_ddp(model: nn.Module, config: TrainingConfig, ctx: DistributedContext) -> WrappedModel:
    """Return the model as compute_loss gets it: in DDP, unless there is one rank or the parameters are sharded.

    Raises:
        UserError: if the model has no trainable parameter.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("The model has no trainable parameter. Leave some with requires_grad=True.")
    return GradientStrategy.create(config, ctx).wrap_model(model)
