"""The model as compute_loss gets it: alone or in DDP. All options of DDP are set here."""

from __future__ import annotations

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
from utils.training.signatures import has_parameter


class SingleProcessModel(nn.Module):
    """Stands for DDP on one rank, where DDP's buckets would be a second copy of the gradients."""

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

    With find_unused_parameters, a parameter that no micro-batch of a step used on any rank has no gradient after the
    step. Padding does not count: it repeats a micro-batch of the step, with the same random numbers.

    Args:
        is_accumulating: whether a step has several micro-batches on a rank.
        options: of DistributedDataParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        is_accumulating: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(module, **options)
        self._trainable_names: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._trainable_names[parameter] = name
        self._bucket_views: dict[Tensor, Tensor] = {}  # for each parameter its gradient in the buckets
        if is_accumulating:
            for parameter in self._trainable_names:
                parameter.register_post_accumulate_grad_hook(self._move_into_bucket)

    @contextmanager
    def accumulate(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Return a context for the passes of a micro-batch. The last backward pass of a step exchanges gradients."""
        if not micro_batch.is_last:
            with self.no_sync():
                yield
            return
        yield
        if len(self._bucket_views) < len(self._trainable_names):
            for parameter in self._trainable_names:
                if parameter.grad is not None:
                    self._bucket_views[parameter] = parameter.grad

    def _move_into_bucket(self, parameter: Tensor) -> None:
        """Move a step's first gradient into its bucket, which saves a second copy.

        Buckets are not the gradients from the start, since an unused parameter would then have a gradient of zeros, and
        be updated.
        """
        bucket_view = self._bucket_views.get(parameter)
        gradient = parameter.grad
        if bucket_view is not None and gradient is not None and gradient is not bucket_view:
            parameter.grad = bucket_view.copy_(gradient)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        try:
            return super().forward(*inputs, **options)
        except RuntimeError as error:
            match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if not match:
                raise
            names = list(self._trainable_names.values())
            indices = match[1].split()
            raise explain_unused_parameters([names[int(index)] for index in indices]) from None


WrappedModel = DDPModel | SingleProcessModel
# by the value of --comm_hook: the hook, its type, and the values to give if that does not work
COMM_HOOKS = {
    "fp16": (default_hooks.fp16_compress_hook, torch.float16, "none"),
    "bf16": (default_hooks.bf16_compress_hook, torch.bfloat16, "fp16 or none"),
}


def explain_unused_parameters(names: list[str]) -> TrainingError:
    """Return the error for parameters that got no gradient in a step."""
    return TrainingError(
        f"The model's {join_first(names)} got no gradient in this step, while other batches use it, and other ranks"
        " wait for the gradient. Use every parameter in every forward pass, add --find_unused_parameters, or freeze"
        " the parameter."
    )


def explain_unfrozen_parameters(names: list[str], step: int) -> UserError:
    """Return the error for parameters that are trainable at this step, and were frozen at the start of the training."""
    return UserError(
        f"The model's {join_first(names)} was frozen at the start and got requires_grad_(True) before step {step},"
        " so neither DDP nor the optimizer knows this parameter. Let create_model leave the parameter trainable, in a"
        " parameter group whose learning rate is 0 until then, or train the parameter in a second run that starts with"
        " --init_from."
    )


def create_ddp_options(
    model: nn.Module,
    device: torch.device,
    *,
    find_unused_parameters: bool,
    bucket_cap_mb: float,
) -> dict[str, Any]:
    """Return all options of DDP.

    Args:
        bucket_cap_mb: the size of a bucket in MB, or 0 for a size that fits the model.
    """
    # DDP leaves the buffers alone: running statistics are handled in utils/training/batchnorm.py
    buffer_option = "broadcast_buffers"
    if has_parameter(DistributedDataParallel.__init__, "forward_sync_buffers"):
        buffer_option = "forward_sync_buffers"  # its name since torch 2.15
    device_ids = None
    if device.type != "cpu":
        device_ids = [device.index]
    return {
        buffer_option: False,
        "device_ids": device_ids,
        "gradient_as_bucket_view": True,
        "find_unused_parameters": find_unused_parameters,
        "bucket_cap_mb": choose_bucket_megabytes(model, bucket_cap_mb),
    }


def choose_bucket_megabytes(model: nn.Module, bucket_cap_mb: float) -> float:
    """Return the size of DDP's buckets in MB.

    Args:
        bucket_cap_mb: the size, or 0 for a quarter of the gradients, so that several all-reduces overlap, but at least
            1 and at most 25.
    """
    if bucket_cap_mb:
        return bucket_cap_mb
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    quarter = gradient_bytes / 2**20 / 4
    return min(25.0, max(1.0, quarter))


def register_comm_hook(model: DistributedDataParallel, name: str, device: torch.device) -> None:
    """Let DDP round gradients to 16 bits for the all-reduce. Weights and optimizer keep their type.

    Args:
        name: "fp16" or "bf16".

    Raises:
        UserError: if this build of torch or the backend cannot all-reduce numbers of this type.
    """
    hook, dtype, alternatives = COMM_HOOKS[name]
    try:
        model.register_comm_hook(None, hook)  # raises if this build of torch has no bfloat16
        dist.all_reduce(torch.zeros(1, dtype=dtype, device=device))  # raises if the backend has not
    except (TypeError, ValueError, RuntimeError) as error:
        if is_peer_failure(error):
            raise
        first_line = str(error).splitlines()[0]
        reason = f"torch {torch.__version__} cannot all-reduce {name} over {dist.get_backend()} ({first_line})"
        raise UserError(f"--comm_hook {name} cannot be used: {reason}. Give --comm_hook {alternatives}.") from None


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without DDP."""
    if isinstance(model, WrappedModel):
        return model.module
    return model
