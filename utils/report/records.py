"""What a run records of an interval in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from utils.clock import slowest
from utils.metrics import MetricTracker
from utils.run.folder import RunFolder
from utils.training.interval import Read

STRAGGLES = 1.5  # times the median
LEAST_EXCESS = 0.25  # seconds over the median in an interval; less is noise


@dataclass(frozen=True)
class LogPoint:
    """The end of an interval, whose values are on their way to the host."""

    at: dict[str, Any]  # epoch, step and learning rates
    samples: int  # in the interval, of all ranks
    steps: int
    read: Read
    take_seconds: Callable[[], tuple[float, float, float]]  # of this rank, from `Clock.take`

    def record(self, sums: MetricTracker, ranks: list[list[float]], **more: Any) -> dict[str, Any]:
        """The train record.

        Args:
            ranks: of each rank the seconds in steps, in waits for data and in forward passes, and its peak memory.
        """
        seconds, waited = (sum(each[k] for each in ranks) / len(ranks) for k in (0, 1))
        means, skips = sums.means(), int(sums.sum_of("skipped_steps"))
        del means["skipped_steps"]
        return {
            **self.at,
            **means,
            **({"skipped_steps": skips} if skips else {}),
            "samples_per_s": self.samples / seconds if seconds else 0.0,
            "data_wait_s": waited / self.steps,
            "step_s": seconds / self.steps,
            "peak_memory_bytes": int(max(memory for *_, memory in ranks)),
            **more,
        }


def note_slowest(run: RunFolder, step: int, ranks: list[list[float]]) -> None:
    """Record and name a rank that takes much longer than the median. ranks: as in `LogPoint.record`."""
    rank, ratio, cause = slowest([{"data": data, "compute": own} for _, data, own, _ in ranks])
    if ratio >= STRAGGLES and sum(ranks[rank][1:3]) * (1 - 1 / ratio) > LEAST_EXCESS:
        host = run.hosts[rank]
        run.event("straggler", step, rank=rank, host=host, times=round(ratio, 2), cause=cause)
        text = "rank %d on %s is %.1f times slower than the median rank because of its %s"
        run.warn(text, rank, host, ratio, cause)
