"""The model as compute_loss gets it: alone or in DDP. All options of DDP are set here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from utils.data.sampler import MicroBatch
from utils.distributed.collectives import is_peer_failure
from utils.logger import join_first
from utils.settings.errors import TrainingError, UserError


class SingleProcessModel(nn.Module):
    """Stands for DDP on one rank: DDP's buckets would be a second copy of the gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def no_sync(self) -> AbstractContextManager:
        return nullcontext()

    def accumulate(self, micro_batch: MicroBatch) -> AbstractContextManager:
        return nullcontext()


class DDPModel(DistributedDataParallel):
    """DDP whose error names the parameters that the last pass on this rank did not use.

    With find_unused_parameters, those that no micro-batch of a step used on any rank have no gradient after it. Padding
    does not count: it repeats a micro-batch of the step, with the same random numbers.
    """

    def __init__(self, module: nn.Module, is_accumulating: bool = False, **options: Any) -> None:
        super().__init__(module, **options)
        self._trainable_names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self._bucket_views: dict[Tensor, Tensor] = {}  # of gradients in the buckets
        for parameter in self._trainable_names if is_accumulating else ():
            parameter.register_post_accumulate_grad_hook(self._move_into_bucket)

    @contextmanager
    def accumulate(self, micro_batch: MicroBatch) -> Iterator[None]:
        """For the passes of a micro-batch: gradients are exchanged in the last backward pass of a step."""
        with nullcontext() if micro_batch.is_last else self.no_sync():
            yield
        if micro_batch.is_last and len(self._bucket_views) < len(self._trainable_names):
            self._bucket_views |= {p: p.grad for p in self._trainable_names if p.grad is not None}

    def _move_into_bucket(self, parameter: Tensor) -> None:
        """Move a step's first gradient into its bucket, which saves a second copy. Buckets are not the gradients from
        the start, since an unused parameter would then have a gradient of zeros, and be updated."""
        bucket_view, gradient = self._bucket_views.get(parameter), parameter.grad
        if bucket_view is not None and gradient is not None and gradient is not bucket_view:
            parameter.grad = bucket_view.copy_(gradient)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        try:
            return super().forward(*inputs, **options)
        except RuntimeError as error:
            match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if not match:
                raise
            raise explain_unused_parameters(
                [[*self._trainable_names.values()][int(index)] for index in match[1].split()]
            ) from None


WrappedModel = DDPModel | SingleProcessModel


def explain_unused_parameters(names: list[str]) -> TrainingError:
    """The error for parameters that got no gradient in a step."""
    return TrainingError(
        f"model: {join_first(names)} got no gradient in this step, while other batches use it, and other ranks"
        " wait for it; use every parameter in every forward pass, add --find_unused_parameters, or freeze it"
    )


def explain_unfrozen_parameters(names: list[str], step: int) -> UserError:
    """The error for parameters that are trainable at this step, and were not when the training was assembled."""
    return UserError(
        f"model: {join_first(names)} was frozen at the start and got requires_grad_(True) before step {step},"
        " so neither DDP nor the optimizer knows it; let create_model leave it trainable, in a parameter group whose"
        " learning rate is 0 until then, or train it in a second run that starts with --init_from"
    )


def create_ddp_options(
    model: nn.Module, device: torch.device, *, find_unused_parameters: bool, bucket_cap_mb: float
) -> dict[str, Any]:
    """All options of DDP. bucket_cap_mb: 0 for a size that fits the model."""
    # running statistics are handled in utils/training/batchnorm.py; torch 2.15 renamed the argument
    is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    no_buffers = {"forward_sync_buffers" if is_new else "broadcast_buffers": False}
    return no_buffers | {
        "device_ids": None if device.type == "cpu" else [device.index],
        "gradient_as_bucket_view": True,
        "find_unused_parameters": find_unused_parameters,
        "bucket_cap_mb": choose_bucket_megabytes(model, bucket_cap_mb),
    }


def choose_bucket_megabytes(model: nn.Module, bucket_cap_mb: float) -> float:
    """The size of DDP's buckets in MB: as given, or for 0 a quarter of the gradients, so that several overlap, between
    1 and 25."""
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return bucket_cap_mb or min(25.0, max(1.0, size / 2**20 / 4))


def register_comm_hook(model: DistributedDataParallel, name: str, device: torch.device) -> None:
    """All-reduce gradients rounded to 16 bits; weights and optimizer keep their type. Raises UserError."""
    hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[name]
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    try:
        model.register_comm_hook(None, hook)  # raises if this build of torch has no bfloat16
        dist.all_reduce(torch.zeros(1, dtype=dtype, device=device))  # raises if the backend has not
    except (TypeError, ValueError, RuntimeError) as error:
        if is_peer_failure(error):
            raise
        backend, alternatives = dist.get_backend(), "none" if name == "fp16" else "fp16 or none"
        reason = f"torch {torch.__version__} cannot all-reduce {name} over {backend} ({str(error).splitlines()[0]})"
        raise UserError(f"comm_hook={name}: {reason}; give --comm_hook {alternatives}") from None


def unwrap(model: nn.Module) -> nn.Module:
    """The model without DDP."""
    return model.module if isinstance(model, WrappedModel) else model
