"""How gradients are averaged: all options of DDP are set here."""

from __future__ import annotations

import inspect
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from config import TrainingConfig, TrainingError, UserError
from utils.distributed.collectives import is_of_a_peer
from utils.distributed.context import DistributedContext


class SingleProcess(nn.Module):
    """Stands for DDP on one rank: DDP's buckets would be a second copy of the gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def no_sync(self) -> AbstractContextManager:
        return nullcontext()


Wrapped = DistributedDataParallel | SingleProcess


class Replicated(DistributedDataParallel):
    """DDP whose error names the parameters that the last pass on this rank did not use."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        try:
            return super().forward(*inputs, **options)
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if not found:
                raise
            trained = [name for name, p in self.module.named_parameters() if p.requires_grad]
            raise unused_error([trained[int(index)] for index in found[1].split()]) from None


def unused_error(names: list[str]) -> TrainingError:
    """The error for parameters that got no gradient in a step."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return TrainingError(
        f"model: {', '.join(names[:3])}{more} got no gradient in this step, while other batches use it, and other ranks"
        " wait for it; use every parameter in every forward pass (add 0 * its sum to the loss), or freeze it"
    )


def wrap_ddp(model: nn.Module, config: TrainingConfig, ctx: DistributedContext) -> Wrapped:
    """Wrap the model in DDP, with all of its options; on one rank there is nothing to share."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("model: has no trainable parameter; leave some with requires_grad=True")
    if ctx.world_size == 1:
        return SingleProcess(model)
    # running statistics are handled in utils/training/batchnorm.py; torch 2.15 renamed the argument
    is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    no_buffers = {"forward_sync_buffers" if is_new else "broadcast_buffers": False}
    wrapped = Replicated(
        model,
        device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None,
        **no_buffers,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_megabytes(model, config),
    )
    if config.comm_hook != "none":
        _compress(wrapped, config.comm_hook, ctx.device)
    return wrapped


def bucket_megabytes(model: nn.Module, config: TrainingConfig) -> float:
    """The size of DDP's buckets in MB: a quarter of the gradients, so that several overlap, between 1 and 25."""
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return config.bucket_cap_mb or min(25.0, max(1.0, size / 2**20 / 4))


def _compress(model: DistributedDataParallel, name: str, device: torch.device) -> None:
    """All-reduce gradients rounded to 16 bits; weights and optimizer keep their type. Raises UserError."""
    hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[name]
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    try:
        model.register_comm_hook(None, hook)  # raises if this build of torch has no bfloat16
        dist.all_reduce(torch.zeros(1, dtype=dtype, device=device))  # raises if the backend has not
    except (TypeError, ValueError, RuntimeError) as error:
        if is_of_a_peer(error):
            raise
        backend, other = dist.get_backend(), "none" if name == "fp16" else "fp16 or none"
        reason = f"torch {torch.__version__} cannot all-reduce {name} over {backend} ({str(error).splitlines()[0]})"
        raise UserError(f"comm_hook={name}: {reason}; give --comm_hook {other}") from None


def unwrap(model: nn.Module) -> nn.Module:
    """The model without DDP."""
    return model.module if isinstance(model, Wrapped) else model
