"""What a run records of a log window in metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from utils.metrics import MetricTracker
from utils.training.log_window import PendingRead


@dataclass(frozen=True)
class LogPoint:
    """The end of a log window, whose values are on their way to the host."""

    position: dict[str, Any]  # epoch, step and learning rates
    samples: int  # in the log window, of all ranks
    token_density: tuple[float, float]  # of `GlobalBatchSampler.measure_token_density`
    steps: int
    pending_read: PendingRead
    read_step_times: Callable[[], tuple[float, float, float]]  # of this rank, from `PhaseClock.take_step_times`

    def create_record(
        self, sums: MetricTracker, rank_values: list[list[float]], logged_names: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Create the train record.

        Args:
            rank_values: of each rank the seconds in steps, in waits for data and in forward passes, its peak memory,
                and what the parts log.
            logged_names: of the values that the parts log.
        """
        columns = [list(column) for column in zip(*rank_values, strict=True)]
        step_seconds, wait_seconds, _forward_seconds, peak_memory, *logged_columns = columns
        mean_step_seconds = sum(step_seconds) / len(rank_values)
        mean_wait_seconds = sum(wait_seconds) / len(rank_values)
        samples_per_s = self.samples / mean_step_seconds if mean_step_seconds else 0.0

        record = self.position | sums.means()
        del record["skipped_steps"]
        skipped_steps = int(sums.sum_view("skipped_steps"))
        if skipped_steps:
            record["skipped_steps"] = skipped_steps
        record["samples_per_s"] = samples_per_s
        density, padding = self.token_density
        if density:
            record["tokens_per_s"] = samples_per_s * density
            record["padding"] = padding
        for name, values in zip(logged_names, logged_columns, strict=True):
            mean = weighted_mean(values, weights=step_seconds)
            if not math.isnan(mean):
                record[name] = mean
        record["data_wait_s"] = mean_wait_seconds / self.steps
        record["step_s"] = mean_step_seconds / self.steps
        record["peak_memory_bytes"] = int(max(peak_memory))
        return record


def weighted_mean(values: list[float], weights: list[float]) -> float:
    """Return the mean of the values of all ranks. Equal values are not rounded. Without any weight it is 0."""
    if len(set(values)) == 1:
        return values[0]
    total_weight = sum(weights)
    if total_weight == 0:
        total_weight = math.inf
    weighted_sum = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return weighted_sum / total_weight
