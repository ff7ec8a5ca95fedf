"""Evaluation on all ranks: each sample counts once, and the sums are reduced once, in float64."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from config import UserError
from utils.data.loader import GlobalBatchLoader
from utils.data.sets import split_of
from utils.distributed.collectives import require_equal
from utils.distributed.consensus import Consensus
from utils.distributed.context import DistributedContext
from utils.distributed.tree import TreeAllReduce, TreeSum, run_of
from utils.logger import show_progress
from utils.metrics import MetricTracker, all_reduce_scalar, check_metrics
from utils.training.outputs import Outputs, Summary
from utils.training.precision import Precision
from utils.training.seams import ComputeLoss
from utils.training.state import Progress


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: GlobalBatchLoader,
    compute_loss: ComputeLoss,
    precision: Precision,
    ctx: DistributedContext,
    consensus: Consensus | None = None,
    show: Callable[[int, int], None] | None = None,
    summary: Summary | None = None,
) -> dict[str, float] | None:
    """The mean loss and metrics over a set, and its "count". None if the ranks agreed to stop.

    Every rank makes the same number of steps; in a step without a micro-batch for it, a rank computes padding.

    Args:
        show: called with the step, from 1, and the number of steps.
        summary: further metrics, from the outputs for the whole set; they take a second forward pass.
    """
    model.eval()
    tracker, samples = MetricTracker(ctx.device), 0
    tree = TreeSum() if loader.sampler.is_in_runs else None
    outputs = Outputs(summary.predict, is_bounded=True) if summary else None
    for step, global_batch in enumerate(loader.global_batches(epoch=0), start=1):
        for micro_batch in global_batch:
            with precision.autocast():
                metrics = compute_loss(model, micro_batch.batch)
                if outputs:
                    outputs.add(model, micro_batch.batch, micro_batch.indices, micro_batch.is_padding)
            if not tracker.layout:
                tracker.lay_out(check_metrics(metrics))
            if not micro_batch.is_padding:
                tracker.update(metrics)
                samples += len(micro_batch.indices)
                if tree:
                    tree.add(micro_batch.number, [tracker.values.clone()])
                    tracker.reset()
        if show:
            show(step, loader.sampler.steps_per_epoch)
        if consensus and consensus.step().stop:
            consensus.flush()
            return None
    if consensus and consensus.flush().stop:
        return None
    count = int(all_reduce_scalar(samples, "sum", ctx.control))
    if count != len(loader.dataset):
        raise RuntimeError(f"evaluation counted {count} samples of {len(loader.dataset)}; this is a bug in the loader")
    sentence = "compute_loss: {other} and {first} report different metrics; report the same for every batch"
    require_equal(tracker.layout, sentence, ctx)
    if tree:
        leaves = math.ceil(count / loader.sampler.batch_size)
        parts = [values for [values] in tree.parts(run_of(ctx.rank, ctx.world_size, leaves).stop, leaves)]
        if parts:
            tracker.values.copy_(parts.pop())
        TreeAllReduce(tracker.values, parts, leaves).wait()
    elif ctx.world_size > 1:
        dist.all_reduce(tracker.values)
    means = tracker.means()
    summarized = summary.of_ranks(outputs, count, ctx) if summary and outputs else {}
    if both := sorted(means.keys() & summarized.keys()):
        raise UserError(f"model.summarize: compute_loss has {both[0]} too; give one of them another name")
    return means | summarized | {"count": count}


def evaluate_all(
    model: nn.Module,
    weights: dict[str, AbstractContextManager],
    split: str,
    loader: GlobalBatchLoader,
    compute_loss: ComputeLoss,
    progress: Progress,
    precision: Precision,
    ctx: DistributedContext,
    logger: logging.Logger,
    consensus: Consensus | None = None,
    summary: Summary | None = None,
) -> list[dict[str, Any]]:
    """An eval record for each kind of weights; an empty list if the ranks agreed to stop.

    weights: for each kind, the context in which the model has them.
    """
    records = []
    where: dict[str, Any] = {
        "epoch": progress.epoch_number,
        "step": progress.step,
        "split": split_of(loader.dataset, split),
    }
    for kind, context in weights.items():
        show = partial(show_progress, logger, label=where["split"] + " (ema)" * (kind == "ema"))
        with context:
            means = evaluate(model, loader, compute_loss, precision, ctx, consensus, show, summary)
        if means is None:
            return []
        records.append({"kind": "eval", **where, "weights": kind, **means})
    return records
