"""Evaluation on all ranks: each sample counts once, and the sums are reduced once, in float64."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from utils.clock import PhaseClock
from utils.data.loader import GlobalBatchLoader
from utils.data.sets import choose_split_name
from utils.distributed.collectives import require_equal
from utils.distributed.consensus import Consensus
from utils.distributed.context import DistributedContext
from utils.logger import LOGGER_NAME, show_progress_bar
from utils.metrics import MetricTracker, all_reduce_scalar, check_metrics
from utils.rng import preserve_rng_state, seed_evaluation
from utils.training.hooks import ModelHooks
from utils.training.parts.part import Part
from utils.training.precision import Precision
from utils.training.schedule import Progress


@dataclass(frozen=True)
class Evaluation:
    """Evaluates a model on held-out sets, on all ranks.

    The methods raise Stopped if the ranks agree to stop.
    """

    model: nn.Module  # not wrapped in DDP
    hooks: ModelHooks
    precision: Precision
    ctx: DistributedContext
    parts: Sequence[Part] = ()
    consensus: Consensus | None = None  # None: the evaluation cannot be stopped
    clock: PhaseClock = field(default_factory=PhaseClock)  # shows in which function of model.py the evaluation is

    def evaluate_all_weights(
        self,
        split: str,
        loader: GlobalBatchLoader,
        weights: dict[str, AbstractContextManager],
        progress: Progress,
    ) -> list[dict[str, Any]]:
        """Return an eval record for each kind of weights.

        Args:
            weights: for each kind, the context in which the model has them.
            progress: of the step at which the weights were made.
        """
        split = choose_split_name(loader.dataset, split)
        logger = logging.getLogger(LOGGER_NAME)
        eval_records = []
        for kind, context in weights.items():
            label = split
            if kind == "ema":
                label += " (ema)"
            show = partial(show_progress_bar, logger, label=label)
            with context, preserve_rng_state(self.ctx.device):
                means = self.evaluate(loader, show, split)
            record = {
                "kind": "eval",
                "epoch": progress.epoch_number,
                "step": progress.step,
                "split": split,
                "weights": kind,
            }
            eval_records.append(record | means)
        return eval_records

    @torch.no_grad()
    def evaluate(
        self,
        loader: GlobalBatchLoader,
        report_progress: Callable[[int, int], None] | None = None,
        split: str = "val",
    ) -> dict[str, float]:
        """Return the mean loss and metrics over a set, and its "count".

        Every rank makes the same number of passes, some of them over padding.

        Args:
            report_progress: is called with the number of a pass, from 1, and the number of all passes.
            split: decides what `compute_loss` and `predict` draw.
        """
        ctx = self.ctx
        sampler = loader.sampler
        tracker = MetricTracker(ctx.device)
        rank_sum = sampler.assignment.create_rank_sum()
        samples = 0  # of this rank

        def seed_hook(function: str, indices: Sequence[int]) -> None:
            seed_evaluation(
                ctx.device,
                seed=sampler.seed,
                hook=function,
                split=split,
                indices=indices,
            )

        self.model.eval()
        for part in self.parts:
            part.begin_evaluation(seed_hook, self.clock)
        for number, micro_batch in enumerate(loader.micro_batches(epoch=0), start=1):
            self.clock.enter_hook("compute_loss")
            seed_hook("compute_loss", micro_batch.indices)
            with self.precision.autocast():
                metrics = self.hooks.compute_loss(self.model, micro_batch.batch)
                for part in self.parts:
                    part.evaluate(self.model, micro_batch)
            self.clock.enter_phase("evaluation")
            if not tracker.shapes:
                tracker.allocate(check_metrics(metrics))
            if not micro_batch.is_padding:
                tracker.update(metrics)
                samples += len(micro_batch.indices)
                rank_sum.add(tracker.values, micro_batch.number)
            if report_progress:
                report_progress(number, sampler.passes_per_epoch)
            if self.consensus:
                self.consensus.step()
        if self.consensus:
            self.consensus.vote_and_wait()

        count = int(all_reduce_scalar(samples, "sum", ctx.control_group))
        dataset_size = len(loader.dataset)
        if count != dataset_size:
            raise RuntimeError(
                f"The evaluation counted {count} samples of {dataset_size}. This is a bug in the loader."
            )
        sentence = (
            "compute_loss reports different metrics on {first} and {other}. Report the same metrics for every batch."
        )
        require_equal(tracker.shapes, sentence, ctx)
        work = rank_sum.start_all_reduce(tracker.values, sampler.micro_batches_per_epoch)
        if work:
            work.wait()
        means = tracker.means()
        for part in self.parts:
            means |= part.finish_evaluation(means, count, ctx)
        return means | {"count": count}
