"""How gradients are shared among the ranks: one object, chosen once. Nothing else asks which one it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import TrainingConfig, UserError
from utils.distributed.context import DistributedContext
from utils.distributed.dtensor import group_of, local, norm_over
from utils.training.replicated import (
    ExactlyReplicated,
    Replicated,
    Sharded,
    SingleProcess,
    Wrapped,
    compress,
    ddp_options,
)
from utils.training.sharding import ELEMENTWISE, build_sharded

Build = Callable[[torch.device], nn.Module]
Blocks = Callable[[nn.Module], list[nn.Module]]


class Sharing:
    """One rank: there is nothing to share. The other ways override what they do differently."""

    divisor = 1  # by which the wrapped model divides the sum of the gradients of all ranks
    sums_in_runs = False  # of consecutive micro-batches, along the tree
    has_whole_gradients = True  # on each rank, the same on all of them

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        self._config, self._ctx = config, ctx

    @staticmethod
    def choose(config: TrainingConfig, ctx: DistributedContext) -> Sharing:
        """The way that the settings ask for."""
        way = Averaged if ctx.world_size > 1 else Sharing
        way = FullySharded if config.sharding != "none" else Exact if config.reduction == "exact" else way
        return way(config, ctx)

    def build(self, build: Build, blocks: Blocks) -> nn.Module:
        """The model, not wrapped. build: creates it on a device. Raises UserError."""
        return build(self._ctx.device)

    def wrap(self, model: nn.Module) -> Wrapped:
        """The model as compute_loss gets it: its backward pass leaves the gradient of all ranks. Raises UserError."""
        return SingleProcess(model)

    def tensors_of(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """For each parameter the tensor that the optimizer updates, which has its memory on this rank."""
        return {p: p for p in parameters}

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UserError if the optimizer cannot update these tensors."""

    def unscale(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, owners: dict[nn.Parameter, nn.Parameter]
    ) -> None:
        """Give the optimizer's tensors their gradients, and remove float16's scale. owners: parameters by tensor."""
        scaler.unscale_(optimizer)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm over all gradients: 0-dimensional, with the same bits on all ranks."""
        # get_total_norm, which sorts by device, takes five times as long
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


class Averaged(Sharing):
    """DDP, which averages the gradients of the ranks, bucket by bucket, beside the backward pass."""

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        super().__init__(config, ctx)
        self.divisor = ctx.world_size

    def wrap(self, model: nn.Module) -> Wrapped:
        config, ranks = self._config, self._ctx.world_size
        # DDP divides a gradient in its bucket by the ranks, and multiplies another one by 1 / ranks: equal bits only
        # for powers of two, and the first step of an attempt has none in the buckets
        accumulates = config.micro_batches_per_step(ranks) > ranks and ranks.bit_count() == 1
        wrapped = Replicated(model, accumulates, **ddp_options(model, config, self._ctx))
        if config.comm_hook != "none":
            compress(wrapped, config.comm_hook, self._ctx.device)
        return wrapped


class Exact(Sharing):
    """DDP with sums along a tree over micro-batches, which have the same bits on any number of ranks."""

    sums_in_runs = True

    def wrap(self, model: nn.Module) -> Wrapped:
        config = self._config
        if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise UserError("reduction=exact: SyncBatchNorm sums over the ranks by itself; leave out --sync_bn")
        if self._ctx.device.type != "cpu" and not config.deterministic:
            raise UserError("reduction=exact: on a GPU needs deterministic kernels; add --deterministic")
        is_static = False
        is_static = config.compile == "reduce-overhead"  # extra: compile
        return ExactlyReplicated(model, is_static, **ddp_options(model, config, self._ctx))


class FullySharded(Sharing):
    """FSDP, which sums gradients: each rank keeps and updates shards, in tensors of its own."""

    has_whole_gradients = False
    _group: dist.ProcessGroup | None = None  # the ranks that hold the shards of a parameter

    def build(self, build: Build, blocks: Blocks) -> nn.Module:
        return build_sharded(build, blocks, self._config, self._ctx)

    def wrap(self, model: nn.Module) -> Wrapped:
        return Sharded(model)

    def tensors_of(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        parameters = list(parameters)
        self._group = group_of(parameters)
        return {p: nn.Parameter(local(p.detach()), p.requires_grad) for p in parameters}

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer may need whole tensors, such as their norms."""
        kind = type(optimizer)
        known = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE
        if not known and not getattr(optimizer, "is_elementwise", False):
            raise UserError(
                f"create_optimizer: {kind.__name__} gets shards of the parameters; if it updates each element by"
                " itself, set is_elementwise = True in its class, else use --sharding none"
            )

    def unscale(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, owners: dict[nn.Parameter, nn.Parameter]
    ) -> None:
        for group in optimizer.param_groups:
            for shard in group["params"]:
                shard.grad = local(owners[shard].grad)
        scaler.unscale_(optimizer)
        if scaler.is_enabled():  # an overflow in any shard counts on all ranks
            for found in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return norm_over(self._group, super().norm(gradients))


def wrap_ddp(model: nn.Module, config: TrainingConfig, ctx: DistributedContext) -> Wrapped:
    """The model as compute_loss gets it, in DDP unless there is one rank or its parameters are sharded."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("model: has no trainable parameter; leave some with requires_grad=True")
    return Sharing.choose(config, ctx).wrap(model)
