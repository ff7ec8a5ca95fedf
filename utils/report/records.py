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
        """The train record.

        Args:
            rank_values: of each rank the seconds in steps, in waits for data and in forward passes, its peak memory,
                and what the parts log.
            logged_names: of the values that the parts log.
        """
        seconds = sum(row[0] for row in rank_values) / len(rank_values)
        waited = sum(row[1] for row in rank_values) / len(rank_values)
        logged = {}
        for column, name in enumerate(logged_names, start=4):
            mean = weighted_mean([row[column] for row in rank_values], weights=[row[0] for row in rank_values])
            if not math.isnan(mean):
                logged[name] = mean
        rate = self.samples / seconds if seconds else 0.0
        means, skips = sums.means(), int(sums.sum_view("skipped_steps"))
        del means["skipped_steps"]
        return {
            **self.position,
            **means,
            **({"skipped_steps": skips} if skips else {}),
            "samples_per_s": rate,
            **(
                {"tokens_per_s": rate * self.token_density[0], "padding": self.token_density[1]}
                if self.token_density[0]
                else {}
            ),
            **logged,
            "data_wait_s": waited / self.steps,
            "step_s": seconds / self.steps,
            "peak_memory_bytes": int(max(row[3] for row in rank_values)),
        }


def weighted_mean(values: list[float], weights: list[float]) -> float:
    """The mean of the values of all ranks. Equal values are not rounded."""
    if len(set(values)) == 1:
        return values[0]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / (sum(weights) or math.inf)
