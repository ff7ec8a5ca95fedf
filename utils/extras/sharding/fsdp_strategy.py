"""How gradients are shared if FSDP shards the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import TrainingConfig
from utils.data.sampler import MicroBatch
from utils.distributed.context import DistributedContext
from utils.distributed.dtensor import find_shard_group, local_shard
from utils.extras.sharding.sharded_model import ELEMENTWISE_OPTIMIZERS, build_sharded_model
from utils.settings.errors import UserError
from utils.training.ddp_model import SingleProcessModel, WrappedModel
from utils.training.gradient_strategy import CreateModel, FindBlocks, GradientStrategy


class FSDPModel(SingleProcessModel):
    """Stands for DDP if FSDP shards the parameters: it reduces the gradients of each micro-batch."""

    module: Any

    def accumulate(self, micro_batch: MicroBatch) -> AbstractContextManager:
        self.module.set_requires_all_reduce(micro_batch.is_last)  # between replicas, once per step
        return nullcontext()


class FSDPStrategy(GradientStrategy):
    """FSDP, which sums gradients: each rank keeps and updates shards, in tensors of its own."""

    has_whole_gradients = False

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        super().__init__(config, ctx)
        place = ", in host memory" if config.cpu_offload else ""
        self.banner_note = f", sharded ({config.sharding}{place})"

    _shard_group: dist.ProcessGroup | None = None  # the ranks that hold the shards of a parameter

    def build_model(self, create_model: CreateModel, find_blocks: FindBlocks) -> nn.Module:
        return build_sharded_model(create_model, find_blocks, self._config, self._ctx)

    def wrap_model(self, model: nn.Module) -> WrappedModel:
        return FSDPModel(model)

    def create_optimizer_tensors(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        parameters = list(parameters)
        self._shard_group = find_shard_group(parameters)
        return {p: nn.Parameter(local_shard(p.detach()), p.requires_grad) for p in parameters}

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer may need whole tensors, such as their norms."""
        kind = type(optimizer)
        is_listed = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE_OPTIMIZERS
        if not is_listed and not getattr(optimizer, "is_elementwise", False):
            raise UserError(
                f"The optimizer {kind.__name__} gets shards of the parameters. If it updates each element"
                " from the gradient and the state of that element, as Adam does and Muon does not, set is_elementwise ="
                " True in its class. Otherwise use --sharding none."
            )

    def unscale_gradients(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        parameters_by_tensor: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        for group in optimizer.param_groups:
            for shard in group["params"]:
                shard.grad = local_shard(parameters_by_tensor[shard].grad)
        scaler.unscale_(optimizer)
        if scaler.is_enabled():  # an overflow in any shard counts on all ranks
            for found_inf in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._shard_group)

    def compute_gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        return combine_norms(self._shard_group, super().compute_gradient_norm(gradients))


def combine_norms(group: dist.ProcessGroup | None, norm: Tensor) -> Tensor:
    """The norm over all shards in the group, if there is one, with the same bits on all ranks."""
    if group is None:
        return norm
    norms = norm.new_empty(group.size())
    dist.all_gather_into_tensor(norms, norm.reshape(1), group=group)
    return torch.linalg.vector_norm(norms)
