"""A loss of several terms, each divided by a count of its own over the global batch: boxes per box, pixels per pixel.

What divides a term must be known before the backward pass. So the counts of a global batch are summed over its
micro-batches and the ranks while the step before it is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import UserError
from utils.data.sampler import GlobalBatch
from utils.distributed.tree import TreeAllReduce, TreeSum, run_of
from utils.metrics import Metrics, TermMeans

EXAMPLE = '{"loss": {"boxes": (sum, count, weight), "classes": (sum, count, weight)}}'


class Terms:
    """`compute_loss` and `loss_counts` of model.py, with all terms in one tensor, in the order of their names."""

    def __init__(
        self, compute_loss: Callable[[nn.Module, Any], Metrics], loss_counts: Callable[[Any], dict], device: torch.device
    ) -> None:
        self._compute_loss, self._loss_counts, self._device = compute_loss, loss_counts, device
        self._means: TermMeans | None = None

    def compute_loss(self, model: nn.Module, batch: Any) -> Metrics:
        """The metrics, with "loss" as (weighted sums [terms], counts [terms], TermMeans). Raises UserError."""
        metrics = self._compute_loss(model, batch)
        loss = metrics.get("loss") if isinstance(metrics, dict) else None
        entries = list(loss.values()) if isinstance(loss, dict) else []
        if not entries or not all(isinstance(each, tuple | list) and len(each) == 3 for each in entries):
            raise UserError(
                f"model.compute_loss: returned no terms, though model.py has loss_counts; return {EXAMPLE}, or remove"
                " loss_counts"
            )
        names = self._names(loss)
        sums = [weight * total for total, _, weight in map(loss.get, names)]
        if not all(isinstance(each, Tensor) and each.ndim == 0 and each.is_floating_point() for each in sums):
            raise UserError("model.compute_loss: the sum of each term must be a 0-dimensional float tensor; use .sum()")
        return metrics | {"loss": (torch.stack(sums), self._stack([loss[name][1] for name in names]), self._means)}

    def counts(self, batch: Any) -> Tensor:
        """What `loss_counts` counts in a micro-batch: float64 [terms], on the device."""
        found = self._loss_counts(batch)
        return self._stack([found[name] for name in self._names(found)])

    def _names(self, found: dict) -> tuple[str, ...]:
        names = tuple(sorted(found))
        self._means = self._means or TermMeans(names)
        if names != self._means.names:
            raise UserError(
                f"model.py: the terms are {', '.join(names)}, earlier {', '.join(self._means.names)}; name the same in"
                " loss_counts and compute_loss for every batch, with a count of 0 if there is nothing to count"
            )
        return names

    def _stack(self, counts: list[Tensor | float]) -> Tensor:
        numbers = {"dtype": torch.float64, "device": self._device}  # torch.full copies nothing from the host
        return torch.stack([c.to(**numbers) if isinstance(c, Tensor) else torch.full((), c, **numbers) for c in counts])


def counted(
    global_batches: Iterator[GlobalBatch], counts_of: Callable[[Any], Tensor], is_exact: bool
) -> Iterator[tuple[GlobalBatch, Tensor]]:
    """Each global batch, fetched, with the counts of its terms over all ranks: float64 [terms], on the device.

    One global batch is fetched ahead: its counts are summed during the step before, so that no step waits for them.
    """
    ahead: tuple[GlobalBatch, Tensor, Any] | None = None
    for global_batch in global_batches:
        latest, ahead = ahead, _begin(global_batch, counts_of, is_exact)
        if latest:
            yield _finish(*latest)
    if ahead:
        yield _finish(*ahead)


def _begin(
    global_batch: GlobalBatch, counts_of: Callable[[Any], Tensor], is_exact: bool
) -> tuple[GlobalBatch, Tensor, dist.Work | TreeAllReduce | None]:
    """Fetch this rank's micro-batches, and begin to sum their counts over the ranks."""
    fetched = list(global_batch)
    counts = [(micro_batch, counts_of(micro_batch.batch)) for micro_batch in fetched]
    own = [(micro_batch.number, each) for micro_batch, each in counts if not micro_batch.is_padding]
    global_batch = dataclasses.replace(global_batch, micro_batches=fetched, fetched=None)
    total, tree = torch.zeros_like(counts[0][1]), TreeSum()
    if not is_exact:
        for _, each in own:
            total += each
        return global_batch, total, dist.all_reduce(total, async_op=True) if dist.get_world_size() > 1 else None
    for number, each in own:
        tree.add(number, [each])
    leaves = fetched[0].count
    parts = [each for [each] in tree.parts(run_of(dist.get_rank(), dist.get_world_size(), leaves).stop, leaves)]
    total = parts.pop() if parts else total
    return global_batch, total, TreeAllReduce(total, parts, leaves)


def _finish(
    global_batch: GlobalBatch, total: Tensor, work: dist.Work | TreeAllReduce | None
) -> tuple[GlobalBatch, Tensor]:
    if work:
        work.wait()
    return global_batch, total
