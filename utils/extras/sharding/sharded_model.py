"""Sharding by torch's FSDP2: a rank keeps a part of each parameter, of its gradient and of its optimizer state.

Each block of the model is a group: its parameters are gathered for its passes, and its gradients are reduce-scattered
after every micro-batch. All other parameters are one more group. A sharded parameter is a DTensor. The optimizer and
the average work on the plain tensors inside, the local shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import TrainingConfig
from utils.cpus import count_usable_cpus
from utils.distributed.collectives import on_all_ranks
from utils.distributed.context import DistributedContext
from utils.distributed.dtensor import is_sharded
from utils.settings.errors import UserError
from utils.training.blocks import check_blocks
from utils.training.precision import Precision

# each element is updated by itself, so that a shard can be
ELEMENTWISE_OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)


def build_sharded_model(
    create_model: Callable[[torch.device], nn.Module],
    find_blocks: Callable[[nn.Module], list[nn.Module]],
    config: TrainingConfig,
    ctx: DistributedContext,
) -> nn.Module:
    """Build the model on the CPU of rank 0, with the weights it has without sharding, and shard it block by block.

    The other ranks build it without memory, on the meta device. No device holds more than its shards and one group.
    Raises UserError on all ranks if the model cannot be built or sharded.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = on_all_ranks(lambda: _build_unsharded(create_model, ctx), ctx)
    kind, mesh = type(model).__name__, _create_mesh(config, ctx)
    blocks = find_blocks(model)
    check_blocks(blocks)
    inner_blocks = [block for block in dict.fromkeys(blocks) if block is not model]
    uses = _count_uses(model)
    # a block that shares a weight with the rest of the model stays in the outermost group
    separate_blocks = [block for block in inner_blocks if _count_uses(block).items() <= uses.items()]
    set_offload_threads(config, ctx)
    offload = CPUOffloadPolicy(pin_memory=ctx.device.type != "cpu") if config.cpu_offload else OffloadPolicy()
    dtype = None  # of the gathered parameters; shards and sums of gradients keep theirs
    if config.amp_dtype.endswith("_params"):
        chosen = Precision.choose(
            use_amp=config.use_amp, amp_dtype=config.amp_dtype, device=ctx.device, fast_bf16=ctx.fast_bf16
        )
        dtype = chosen.dtype
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):  # float32 statistics
            name = config.amp_dtype
            text = f"--amp_dtype {name} does not work with BatchNorm."
            raise UserError(f"{text} Give --amp_dtype {name.removesuffix('_params')}.")
    precision = MixedPrecisionPolicy(dtype, reduce_dtype=dtype and torch.float32)
    # by which a fork forms parameter groups
    parameter_attributes = {name: vars(parameter) for name, parameter in model.named_parameters()}
    reshard_after_forward = None  # all groups but the outermost
    if config.sharding == "zero2":
        reshard_after_forward = False
    for group in [*separate_blocks, model]:
        _broadcast_block(group, ctx.device)
        fully_shard(
            group,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
        )
    for name, parameter in model.named_parameters():
        vars(parameter).update(parameter_attributes[name])
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in groups:  # gradients are summed
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)

    def reshard(*_: Any) -> None:
        if not torch.is_grad_enabled():  # else the backward pass does; weights may change after an evaluation
            for group in groups:
                group.reshard()

    model.register_forward_hook(reshard)
    type(model).__name__ = kind  # not that of FSDP's subclass
    return model


def set_offload_threads(config: TrainingConfig, ctx: DistributedContext) -> None:
    """Let the optimizer of `--cpu_offload` use this rank's part of the node's cores; torchrun sets one thread per rank.

    Its bits do not depend on the number of threads. On a CPU those of the model's passes do, so they keep theirs.
    """
    if config.cpu_offload and ctx.device.type != "cpu" and ctx.launch.omp_num_threads in ("", "1"):
        torch.set_num_threads(max(1, count_usable_cpus() // ctx.local_world_size))


def _build_unsharded(create_model: Callable[[torch.device], nn.Module], ctx: DistributedContext) -> nn.Module:
    if ctx.is_main:
        model = create_model(torch.device("cpu"))
    else:
        try:
            with torch.device("meta"):
                model = create_model(torch.device("meta"))
        except UserError:
            raise
        except Exception:  # it reads values while it is built
            model = create_model(torch.device("cpu"))
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise UserError(f"FSDP cannot shard the parameter {name}, a scalar. Give this parameter the shape (1,).")
    for module_name, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                full_name = f"{module_name}.{name}".lstrip(".")
                text = f"With --sharding other ranks cannot get the tensor {full_name} of rank 0."
                raise UserError(f"{text} Use register_buffer for this tensor.")
    return model


def _count_uses(module: nn.Module) -> Counter[Tensor]:
    """How often the module uses each of its parameters."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _create_mesh(config: TrainingConfig, ctx: DistributedContext) -> Any:
    """All ranks; for hybrid, a row of ranks for each node. Raises UserError if the nodes differ."""
    from torch.distributed.device_mesh import init_device_mesh

    kind, size = ctx.device.type, ctx.local_world_size
    if config.sharding != "hybrid":
        return init_device_mesh(kind, (ctx.world_size,), mesh_dim_names=("shards",))
    rows = [ctx.hosts[first : first + size] for first in range(0, ctx.world_size, size)]
    if any(len(row) < size or len(set(row)) > 1 for row in rows):
        text = "--sharding hybrid needs equally many ranks on every node."
        raise UserError(f"{text} Use --sharding zero3, or start equally many ranks on every node.")
    return init_device_mesh(kind, (len(rows), size), mesh_dim_names=("replicas", "shards"))


def _broadcast_block(block: nn.Module, device: torch.device) -> None:
    """Move what is not sharded yet to the device, contiguous, and give it rank 0's values."""
    new: dict[Tensor, Tensor] = {}  # a tied weight once
    for module in block.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or is_sharded(tensor):
                continue
            if tensor not in new:
                value = tensor.detach()
                value = (torch.empty_like(value, device=device) if value.is_meta else value.to(device)).contiguous()
                dist.broadcast(value, 0)
                is_parameter = isinstance(tensor, nn.Parameter)
                new[tensor] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
            setattr(module, name, new[tensor])
