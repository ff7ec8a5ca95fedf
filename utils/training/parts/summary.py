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
from utils.logger import LOGGER_NAME
from utils.metrics import INVALID_NAME_REASON, is_metric_name
from utils.settings.errors import UserError
from utils.training.outputs import NAMES_DIFFER, OutputCollector, sort_by_sample
from utils.training.parts.part import Part
from utils.training.precision import Precision

# of a set that is summarized, on rank 0, where gathering and sorting take up to four times as much
MAX_OUTPUT_BYTES = 2**30


def check_output_bytes(size: float) -> None:
    """Raise UserError if outputs of so many bytes cannot be summarized."""
    if size > MAX_OUTPUT_BYTES:
        raise UserError(
            f"The outputs of the set for summarize of model.py take {size / 2**30:.3g} GiB or more on rank 0, where the"
            f" limit is {MAX_OUTPUT_BYTES / 2**30:.3g} GiB. Return less per sample from predict, or sums from"
            " compute_loss."
        )


def count_output_bytes(outputs: OutputCollector) -> int:
    """Return the bytes of all outputs that were collected in this process."""
    total = 0
    for batches in outputs.batches_by_name.values():
        total += sum(batch.nbytes for batch in batches)
    return total


def keep_random_state(indices: Sequence[int]) -> None:
    """Stand for the function that seeds `predict`, where no random numbers have to be repeatable."""


class OutputSummary(Part):
    """Computes metrics that are no sums over samples: `summarize` gets what `predict` returned for a whole set."""

    def __init__(
        self,
        predict: Callable[[nn.Module, Any], dict[str, Tensor]],
        summarize: Callable[[dict[str, Tensor | list[Tensor]]], dict[str, float]],
    ) -> None:
        self._predict = predict
        self._summarize = summarize
        self._outputs = OutputCollector(predict, keep_random_state)  # of this rank in the current evaluation
        self._output_bytes = 0
        self._clock = PhaseClock()

    @classmethod
    def create(cls, functions: dict[str, Callable], device: torch.device) -> OutputSummary | None:
        """Return the part, or None if model.py has no summarize."""
        if "summarize" not in functions:
            return None
        return cls(functions["predict"], functions["summarize"])

    def summarize_outputs(self, outputs: OutputCollector) -> dict[str, float]:
        """Return the metrics of the outputs of one process. Raises UserError if summarize fails."""
        return self._compute_metrics([outputs.to_dict()], len(outputs.indices))

    def try_evaluation(
        self,
        model: nn.Module,
        precision: Precision,
        batch: Any,
        size: int,
        samples: int,
    ) -> list[str]:
        """Raise UserError if the outputs of the set would take too much memory, or if summarize fails."""
        outputs = OutputCollector(self._predict, keep_random_state)
        model.eval()
        with torch.no_grad(), precision.autocast():
            outputs.add(model, batch, range(size))
        check_output_bytes(count_output_bytes(outputs) / size * samples)
        return list(self.summarize_outputs(outputs))

    def begin_evaluation(self, seed: Callable[[str, Sequence[int]], object], clock: PhaseClock) -> None:
        self._outputs = OutputCollector(self._predict, functools.partial(seed, "predict"))
        self._output_bytes = 0
        self._clock = clock

    def evaluate(self, model: nn.Module, micro_batch: MicroBatch) -> None:
        """Raise UserError if the outputs of this rank become too large."""
        self._clock.enter_hook("predict")
        self._outputs.add(
            model,
            micro_batch.batch,
            micro_batch.indices,
            is_padding=micro_batch.is_padding,
        )
        if not micro_batch.is_padding:
            for batches in self._outputs.batches_by_name.values():
                self._output_bytes += batches[-1].nbytes
        check_output_bytes(self._output_bytes)

    def finish_evaluation(
        self,
        means: dict[str, float],
        samples: int,
        ctx: DistributedContext,
    ) -> dict[str, float]:
        """Return the metrics of the outputs of all ranks, computed on rank 0."""
        outputs = self._outputs
        require_equal(sorted(outputs.batches_by_name), f"{NAMES_DIFFER} ({{first}} and {{other}})", ctx)
        bytes_by_rank = all_gather_json(count_output_bytes(outputs), ctx)
        check_output_bytes(sum(bytes_by_rank))
        rank_outputs = self._gather_outputs(ctx)
        if ctx.is_main:
            self._clock.enter_hook("summarize")
        compute_metrics = functools.partial(self._compute_metrics, rank_outputs, samples)
        metrics = broadcast_json(on_rank_0(compute_metrics, ctx), ctx)
        self._clock.enter_phase("evaluation")
        in_both = sorted(means.keys() & metrics.keys())
        if in_both:
            raise UserError(f"model.summarize and compute_loss both report {in_both[0]}. Rename one of the two.")
        return metrics

    def _gather_outputs(self, ctx: DistributedContext) -> list[dict[str, Any]]:
        """Return the outputs of all ranks on rank 0, and an empty list elsewhere."""
        local_outputs = self._outputs.to_dict()
        if ctx.world_size == 1:
            return [local_outputs]
        if not ctx.is_main:
            dist.gather_object(local_outputs, None, group=ctx.control_group)
            return []
        rank_outputs = [local_outputs] * ctx.world_size
        dist.gather_object(local_outputs, rank_outputs, group=ctx.control_group)
        return rank_outputs

    def _compute_metrics(self, rank_outputs: list[dict[str, Any]], samples: int) -> dict[str, float]:
        """Return what `summarize` returns for the outputs of all ranks. Raises UserError if that is invalid."""
        outputs = sort_by_sample(rank_outputs, samples)
        try:
            metrics = {}
            for name, value in self._summarize(outputs).items():
                metrics[name] = float(value)
        except UserError:
            raise
        except Exception as error:
            logging.getLogger(LOGGER_NAME).info("model.summarize failed.", exc_info=True)
            raise UserError(
                f"model.summarize failed ({type(error).__name__}: {error}). Before the first step, summarize gets"
                " a single batch. Return {name: number} for any number of samples, with NaN where a number is not"
                " defined."
            ) from error
        for name in metrics:
            if not is_metric_name(name):
                raise UserError(f"model.summarize returned a number named {name!r}, {INVALID_NAME_REASON}.")
        return metrics
