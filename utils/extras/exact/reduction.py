"""`--reduction exact`: weights, records and evaluations have the same bits on any number of ranks.

All sums over micro-batches are formed along one binary tree (tree.py). It costs memory for the gradients of several
micro-batches, and traffic where the micro-batches per rank are no power of two. Who compares runs on different numbers
of ranks bit by bit needs it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.data.sampler import Assignment, MicroBatch
from utils.distributed.collectives import RankSum
from utils.extras.exact.tree import SUM_ORDER, TreeAllReduce, TreeRankSum, TreeSum, rank_leaves
from utils.settings.errors import UserError
from utils.training.ddp_model import DDPModel, WrappedModel, create_ddp_options, explain_unused_parameters
from utils.training.gradient_strategy import GradientStrategy

__all__ = ["SUM_ORDER", "ContiguousAssignment", "ExactStrategy", "list_exact_resume_rules"]


class ContiguousAssignment(Assignment):
    """Each rank computes consecutive micro-batches of a global batch. An evaluation is one global batch."""

    def micro_batch_numbers(self, rank: int, count: int) -> Sequence[int]:
        return rank_leaves(rank, self.world_size, count)

    def evaluation_group_size(self, count: int) -> int:
        return max(1, count)

    def create_rank_sum(self) -> RankSum:
        return TreeRankSum()


class ExactStrategy(GradientStrategy):
    """DDP with sums along a tree over micro-batches, which have the same bits on any number of ranks."""

    banner_note = ", summed in one order on any number of ranks"
    provenance = {"exact_sums": SUM_ORDER}

    def create_rank_sum(self) -> RankSum:
        return TreeRankSum()

    def wrap_model(self, model: nn.Module) -> WrappedModel:
        config = self._config
        if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            text = "--reduction exact does not work with SyncBatchNorm, which sums over the ranks by itself."
            raise UserError(f"{text} Leave out --sync_bn.")
        if self._ctx.device.type != "cpu" and not config.deterministic:
            raise UserError("--reduction exact needs deterministic kernels on a GPU. Add --deterministic.")
        is_static = False
        is_static = config.compile == "reduce-overhead"  # extra: compile
        options = create_ddp_options(
            model,
            self._ctx.device,
            find_unused_parameters=config.find_unused_parameters,
            bucket_cap_mb=config.bucket_cap_mb,
        )
        return ExactDDPModel(model, is_static, **options)


class ExactDDPModel(DDPModel):
    """DDP that sums gradients along the tree over micro-batches (tree.py), one process included.

    The gradients of each micro-batch but the rank's last are held apart from DDP's. In the last backward pass, DDP's
    hook adds them bucket by bucket, and begins the sum over ranks. A collective that is started in the callback of a
    future would run in another order on each rank, so the hook of a bucket continues the exchange of the one before.
    It does so in a stream of its own, for whose futures DDP waits at the end of the backward pass; buckets and held
    gradients, of the other stream, live longer.

    Args:
        has_static_gradients: gradients stay where they are, as with CUDA graphs; what is held is a copy. So it is with
            find_unused_parameters: DDP demands a gradient of what an earlier micro-batch used.
    """

    def __init__(self, module: nn.Module, has_static_gradients: bool, **options: Any) -> None:
        super().__init__(module, **options)
        self._has_static_gradients = has_static_gradients or self.find_unused_parameters
        self._micro_batch_count = dist.get_world_size()
        self._tree_sum = TreeSum()
        self._subtrees: list[dict[nn.Parameter, Tensor]] = []
        self._inner_sums: list[dict[nn.Parameter, Tensor]] = []
        self._exchanges: list[tuple[TreeAllReduce, Tensor, torch.futures.Future]] = []
        device = next(iter(self._trainable_names)).device
        self._side_stream = torch.Stream(device) if device.type != "cpu" else None
        hook = weakref.WeakMethod(self._reduce_bucket)  # DDP's C++ would keep this object, and its groups
        self.register_comm_hook(None, lambda state, bucket: hook()(state, bucket))  # type: ignore[misc]

    @contextmanager
    def accumulate(self, micro_batch: MicroBatch) -> Iterator[None]:
        if not micro_batch.is_last:
            with self.no_sync():
                yield
            self._tree_sum.add(micro_batch.number, self._take_gradients())
            return
        self._micro_batch_count = micro_batch.micro_batches_in_step
        self._subtrees, self._inner_sums = (
            [dict(zip(self._trainable_names, gradients, strict=True)) for gradients in gradient_lists]
            for gradient_lists in self._tree_sum.pop_for_last_leaf(
                micro_batch.number, micro_batch.micro_batches_in_step
            )
        )
        yield
        self._subtrees, self._inner_sums = [], []

    def _take_gradients(self) -> list[Tensor]:
        if not self.find_unused_parameters and any(p.grad is None for p in self._trainable_names):
            raise explain_unused_parameters([name for p, name in self._trainable_names.items() if p.grad is None])
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trainable_names]
        if self._has_static_gradients:
            gradients = [gradient.clone() for gradient in gradients]
        self.zero_grad(set_to_none=not self._has_static_gradients)
        return gradients

    def _reduce_bucket(self, state, bucket):  # DDP rejects annotations that are strings
        """DDP's hook: None and a dist.GradBucket -> torch.futures.Future of its summed buffer."""
        if self._side_stream:
            self._side_stream.wait_stream(torch.accelerator.current_stream())
        with self._side_stream or nullcontext():
            return self._exchange_bucket(bucket.buffer(), bucket.parameters(), bucket.is_last())

    def _exchange_bucket(self, flat: Tensor, parameters: list[nn.Parameter], is_last: bool) -> torch.futures.Future:
        for gradients in self._inner_sums:
            torch._foreach_add_(
                _create_gradient_views(flat, parameters), [gradients[parameter] for parameter in parameters]
            )
        parts = [torch.empty_like(flat) for _ in self._subtrees]
        for part, gradients in zip(parts, self._subtrees, strict=True):
            torch._foreach_copy_(
                _create_gradient_views(part, parameters), [gradients[parameter] for parameter in parameters]
            )
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        self._exchanges.append((TreeAllReduce(flat, parts, self._micro_batch_count), flat, future))
        if len(self._exchanges) > 1:
            self._exchanges[-2][0].start_all_gather()
        if is_last:
            self._exchanges[-1][0].start_all_gather()
        while len(self._exchanges) > (0 if is_last else 2):
            exchange, result, done = self._exchanges.pop(0)
            exchange.finish()
            done.set_result(result)
        return future


def _create_gradient_views(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The gradients in a flat bucket; those of GradBucket.gradients() have the wrong strides for channels_last."""
    offsets = itertools.accumulate([p.numel() for p in parameters], initial=int(flat.storage_offset()))
    return [flat.as_strided(p.shape, p.stride(), offset) for p, offset in zip(parameters, offsets, strict=False)]


def list_exact_resume_rules(payload: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """How values of the provenance are compared if this run has exact sums, and the line about a difference."""
    is_exact = payload["config"].get("reduction") == "exact"
    threads = "With --reduction exact OMP_NUM_THREADS must be {before}, as in the checkpoint, got {here}."
    sums = "With --reduction exact this version sums in another order than the checkpoint's, so the bits change."
    return {
        "cpu_threads": ("must" if is_exact else "free", threads),
        "exact_sums": ("may" if is_exact else "free", sums),
    }
