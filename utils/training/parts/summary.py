"""`summarize` of model.py: metrics of the outputs of a whole set that are no sums over samples, such as AUC and mAP.

It costs a second forward pass in each evaluation, and memory for the outputs of the set on rank 0. Who selects the best
checkpoint by such a metric needs it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.clock import PhaseClock
from utils.data.sampler import MicroBatch
from utils.distributed.collectives import all_gather_json, broadcast_json, on_rank_0, require_equal
from utils.distributed.context import DistributedContext
from utils.logger import NAME
from utils.metrics import NOT_A_NAME, is_metric_name
from utils.settings.errors import UserError
from utils.training.outputs import OTHER_NAMES, OutputCollector, sort_by_sample
from utils.training.parts.part import Part
from utils.training.precision import Precision

MAX_BYTES = 2**30  # of a set that is summarized, on rank 0, where gathering and sorting take up to four times as much


def check_output_bytes(size: float) -> None:
    """Raises UserError if outputs of so many bytes cannot be summarized."""
    if size > MAX_BYTES:
        raise UserError(
            f"model.summarize: the outputs of the set take {size / 2**30:.3g} GiB or more on rank 0, where the limit is"
            f" {MAX_BYTES / 2**30:.3g} GiB; return less per sample from predict, or sums from compute_loss"
        )


def count_bytes(outputs: OutputCollector) -> int:
    return sum(batch.nbytes for batches in outputs.batches.values() for batch in batches)


class OutputSummary(Part):
    """Metrics that are no sums over samples: `summarize` is called with what `predict` returned for a whole set."""

    def __init__(
        self,
        predict: Callable[[nn.Module, Any], dict[str, Tensor]],
        summarize: Callable[[dict[str, Tensor | list[Tensor]]], dict[str, float]],
    ) -> None:
        self._predict = predict
        self._summarize = summarize
        self._outputs = OutputCollector(predict, lambda _: None)  # of this rank in the current evaluation
        self._bytes = 0
        self._clock = PhaseClock()

    @classmethod
    def create(cls, functions: dict[str, Callable], device: torch.device) -> OutputSummary | None:
        """None if model.py has no summarize."""
        if "summarize" not in functions:
            return None
        return cls(functions["predict"], functions["summarize"])

    def summarize_outputs(self, outputs: OutputCollector) -> dict[str, float]:
        """The metrics of the outputs of one process. Raises UserError."""
        return self._numbers([outputs.collected()], len(outputs.indices))

    def try_evaluation(self, model: nn.Module, precision: Precision, batch: Any, size: int, samples: int) -> list[str]:
        """Raises UserError if the outputs of the set would take too much memory, or summarize fails."""
        outputs = OutputCollector(self._predict, seed=lambda _: None)
        with torch.no_grad(), precision.autocast():
            outputs.add(model.eval(), batch, range(size))
        check_output_bytes(count_bytes(outputs) / size * samples)
        return list(self.summarize_outputs(outputs))

    def begin_evaluation(self, seed: Callable[[str, Sequence[int]], object], clock: PhaseClock) -> None:
        self._outputs = OutputCollector(self._predict, functools.partial(seed, "predict"))
        self._bytes = 0
        self._clock = clock

    def evaluate(self, model: nn.Module, micro_batch: MicroBatch) -> None:
        """Raises UserError if the outputs of this rank become too large."""
        self._clock.enter_function("predict")
        self._outputs.add(model, micro_batch.batch, micro_batch.indices, micro_batch.is_padding)
        if not micro_batch.is_padding:
            self._bytes += sum(batches[-1].nbytes for batches in self._outputs.batches.values())
        check_output_bytes(self._bytes)

    def finish_evaluation(self, means: dict[str, float], samples: int, ctx: DistributedContext) -> dict[str, float]:
        """The metrics of the outputs of all ranks, computed on rank 0."""
        outputs = self._outputs
        require_equal(sorted(outputs.batches), f"{OTHER_NAMES} ({{first}} and {{other}})", ctx)
        check_output_bytes(sum(all_gather_json(count_bytes(outputs), ctx)))
        parts = [outputs.collected()] * (ctx.world_size if ctx.is_main else 0)
        if ctx.world_size > 1:
            dist.gather_object(outputs.collected(), parts or None, group=ctx.control_group)
        if ctx.is_main:
            self._clock.enter_function("summarize")
        metrics = broadcast_json(on_rank_0(lambda: self._numbers(parts, samples), ctx), ctx)
        self._clock.enter("evaluation")
        if both := sorted(means.keys() & metrics.keys()):
            raise UserError(f"model.summarize: compute_loss has {both[0]} too; give one of them another name")
        return metrics

    def _numbers(self, parts: list[dict[str, Any]], samples: int) -> dict[str, float]:
        outputs = sort_by_sample(parts, samples)
        try:
            metrics = {name: float(value) for name, value in self._summarize(outputs).items()}
        except UserError:
            raise
        except Exception as error:
            logging.getLogger(NAME).info("summarize failed", exc_info=True)
            raise UserError(
                f"model.summarize: {type(error).__name__}: {error}; return {{name: number}} for any number of samples,"
                " NaN where it is not defined: before the first step it gets a single batch"
            ) from error
        for name in metrics:
            if not is_metric_name(name):
                raise UserError(f"model.summarize: returned a number named {name!r}, {NOT_A_NAME}")
        return metrics
