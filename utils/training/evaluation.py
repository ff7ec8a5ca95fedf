"""Evaluation on all ranks: each sample counts once, and the sums are reduced once, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from utils.data.loader import GlobalBatchLoader
from utils.distributed.collectives import all_gather_json
from utils.distributed.consensus import Consensus
from utils.distributed.context import DistributedContext
from utils.metrics import Metrics, MetricTracker
from utils.training.precision import Precision
from utils.training.state import Progress

ComputeLoss = Callable[[nn.Module, Any], tuple[Tensor, Metrics]]  # model.compute_loss


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: GlobalBatchLoader,
    compute_loss: ComputeLoss,
    precision: Precision,
    ctx: DistributedContext,
    consensus: Consensus | None = None,
) -> dict[str, float] | None:
    """The mean loss and metrics over a set, and its "count". None when the ranks agreed to stop meanwhile.

    Every rank makes the same number of steps, some of them empty.
    """
    model.eval()
    tracker, samples = MetricTracker(ctx.device), 0
    for global_batch in loader.global_batches(epoch=0):
        for micro_batch in global_batch:
            if not micro_batch.is_padding:
                with precision.autocast():
                    loss_sum, metrics = compute_loss(model, micro_batch.batch)
                tracker.update({"loss": (loss_sum, global_batch.weight if ctx.is_main else 0.0)} | metrics)
                samples += len(micro_batch.indices)
        if consensus and consensus.step().stop:
            consensus.flush()
            return None
    if consensus and consensus.flush().stop:
        return None
    ranks = all_gather_json({"totals": tracker.totals(), "samples": samples}, ctx)
    count = sum(each["samples"] for each in ranks)
    if count != len(loader.dataset):
        raise RuntimeError(f"evaluation counted {count} samples of {len(loader.dataset)}; this is a bug of the loader")
    means = tracker.means([each["totals"] for each in ranks])
    return all_gather_json(means, ctx)[0] | {"count": count}  # only rank 0 is sure to know each metric's last function


def evaluate_all(
    models: dict[str, nn.Module],
    split: str,
    loader: GlobalBatchLoader,
    compute_loss: ComputeLoss,
    progress: Progress,
    precision: Precision,
    ctx: DistributedContext,
    consensus: Consensus | None = None,
) -> list[dict[str, Any]]:
    """An eval record for each kind of weights; none when the ranks agreed to stop meanwhile."""
    records = []
    where = {"epoch": progress.epoch, "step": progress.step, "split": getattr(loader.dataset, "split", split)}
    for weights, model in models.items():
        means = evaluate(model, loader, compute_loss, precision, ctx, consensus)
        if means is None:
            return []
        records.append({"kind": "eval", **where, "weights": weights, **means})
    return records
