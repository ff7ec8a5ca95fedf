"""What a run records of an interval in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from utils.metrics import MetricTracker
from utils.training.interval import Read


@dataclass(frozen=True)
class LogPoint:
    """The end of an interval, whose values are on their way to the host."""

    at: dict[str, Any]  # epoch, step and learning rates
    samples: int  # in the interval, of all ranks
    density: tuple[float, float]  # of `GlobalBatchSampler.density`
    steps: int
    read: Read
    take_seconds: Callable[[], tuple[float, float, float]]  # of this rank, from `Clock.take`
    useful_s: float  # of this rank, from `UsefulTime.take`

    def record(self, sums: MetricTracker, ranks: list[list[float]], **more: Any) -> dict[str, Any]:
        """The train record.

        Args:
            ranks: of each rank the seconds in steps, in waits for data and in forward passes, its peak memory, and the
                seconds at the peak of its device.
        """
        seconds, waited, useful = (sum(each[k] for each in ranks) / len(ranks) for k in (0, 1, 4))
        rate = self.samples / seconds if seconds else 0.0
        means, skips = sums.means(), int(sums.sum_of("skipped_steps"))
        del means["skipped_steps"]
        return {
            **self.at,
            **means,
            **({"skipped_steps": skips} if skips else {}),
            "samples_per_s": rate,
            **({"tokens_per_s": rate * self.density[0], "padding": self.density[1]} if self.density[0] else {}),
            **({"mfu": useful / seconds} if useful and seconds else {}),
            "data_wait_s": waited / self.steps,
            "step_s": seconds / self.steps,
            "peak_memory_bytes": int(max(each[3] for each in ranks)),
            **more,
        }
