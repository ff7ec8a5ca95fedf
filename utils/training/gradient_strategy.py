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
    """One rank: there is nothing to share. The other strategies override what they do differently."""

    gradient_divisor = 1  # by which the wrapped model divides the sum of the gradients of all ranks
    banner_note = ""  # for the banner
    provenance: dict[str, Any] = {}
    has_whole_gradients = True  # on each rank, the same on all of them

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        self._config, self._ctx = config, ctx

    @staticmethod
    def create(config: TrainingConfig, ctx: DistributedContext) -> GradientStrategy:
        """The strategy that the settings ask for."""
        strategy = DDPStrategy if ctx.world_size > 1 else GradientStrategy
        if config.reduction == "exact":  # extra: exact
            from utils.extras.exact.reduction import ExactStrategy

            strategy = ExactStrategy
        if config.sharding != "none":  # extra: sharding
            from utils.extras.sharding.fsdp_strategy import FSDPStrategy

            strategy = FSDPStrategy
        return strategy(config, ctx)

    def build_model(self, create_model: CreateModel, find_blocks: FindBlocks) -> nn.Module:
        """The model, not wrapped. create_model: creates it on a device. Raises UserError."""
        return create_model(self._ctx.device)

    def wrap_model(self, model: nn.Module) -> WrappedModel:
        """The model as compute_loss gets it: its backward pass leaves the gradient of all ranks. Raises UserError."""
        return SingleProcessModel(model)

    def create_rank_sum(self) -> RankSum:
        """Forms the sums of a step over micro-batches and ranks."""
        return RankSum()

    def create_optimizer_tensors(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """For each parameter the tensor that the optimizer updates, which has its memory on this rank."""
        return {p: p for p in parameters}

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UserError if the optimizer cannot update these tensors."""

    def unscale_gradients(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        parameters_by_tensor: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        """Give each tensor of the optimizer the gradient of its parameter, and remove float16's scale."""
        scaler.unscale_(optimizer)

    def compute_gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm over all gradients: 0-dimensional, with the same bits on all ranks."""
        # get_total_norm, which sorts by device, takes five times as long
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


class DDPStrategy(GradientStrategy):
    """DDP, which averages the gradients of the ranks, bucket by bucket, beside the backward pass."""

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        super().__init__(config, ctx)
        self.gradient_divisor = ctx.world_size

    def wrap_model(self, model: nn.Module) -> WrappedModel:
        config, ranks = self._config, self._ctx.world_size
        # DDP divides a gradient in its bucket by the ranks, and multiplies another one by 1 / ranks: equal bits only
        # for powers of two, and the first step of an attempt has none in the buckets
        accumulates = config.micro_batches_per_step(ranks) > ranks and ranks.bit_count() == 1
        options = create_ddp_options(
            model,
            self._ctx.device,
            find_unused_parameters=config.find_unused_parameters,
            bucket_cap_mb=config.bucket_cap_mb,
        )
        wrapped = DDPModel(model, accumulates, **options)
        if config.comm_hook != "none":
            register_comm_hook(wrapped, config.comm_hook, self._ctx.device)
        return wrapped


def wrap_ddp(model: nn.Module, config: TrainingConfig, ctx: DistributedContext) -> WrappedModel:
    """The model as compute_loss gets it, in DDP unless there is one rank or its parameters are sharded."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("model: has no trainable parameter; leave some with requires_grad=True")
    return GradientStrategy.create(config, ctx).wrap_model(model)
