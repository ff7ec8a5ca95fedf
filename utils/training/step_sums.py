"""The sums of one optimizer step over its micro-batches and the ranks, in one vector and one small all-reduce."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from utils.data.sampler import MicroBatch
from utils.distributed.collectives import RankSum
from utils.distributed.dtensor import model_device
from utils.metrics import Metrics, MetricTracker
from utils.training.batchnorm import RunningStats


class StepSums:
    """Sums the loss and the metrics with their counts, and BatchNorm's statistics.

    The sums are float64, so that counts are exact up to 2^53. The all-reduce overlaps the last backward pass. Create
    the object before the model is wrapped or copied.

    Args:
        rank_sum: forms the sum over micro-batches and ranks.
    """

    def __init__(self, model: nn.Module, rank_sum: RankSum) -> None:
        self.running_stats = RunningStats(model)
        self.metrics = MetricTracker(model_device(model))
        self._rank_sum = rank_sum
        self._work: Any = None  # the all-reduce that has begun

    def allocate(self, metrics: Metrics) -> None:
        """Allocate space for metrics of these names and shapes, the same on all ranks."""
        size = self.running_stats.size
        self.metrics.allocate(metrics, extra_size=size)
        begin = len(self.metrics.values) - size  # the running statistics follow the metrics in the same vector
        self.running_stats.use_accumulator(self.metrics.values[begin:])

    @property
    def loss_count(self) -> Tensor:
        """The count of the loss in the global batch, after `wait`: float64, 0-dimensional, on the device."""
        return self.metrics.count_view("loss")

    @property
    def loss(self) -> Tensor:
        """The summed loss of the global batch, after `wait`: float64, 0-dimensional, on the device."""
        return self.metrics.sum_view("loss")

    def add(self, metrics: Metrics, micro_batch: MicroBatch) -> None:
        """Add a micro-batch. Call after its forward pass, unless it is padding."""
        self.metrics.update(metrics)
        self.running_stats.add(len(micro_batch.indices))
        self._rank_sum.add(self.metrics.values, micro_batch.number)

    def start_reduce(self, micro_batch: MicroBatch) -> None:
        """Begin the all-reduce, which overlaps the backward pass.

        Args:
            micro_batch: the last one of this rank in the step, after its forward pass.
        """
        self._work = self._rank_sum.start_all_reduce(self.metrics.values, micro_batch.micro_batches_in_step)

    def wait(self) -> None:
        """Wait for the all-reduce. What follows on the device sees the sums of all ranks."""
        if self._work:
            self._work.wait()
            self._work = None

    def commit(
        self,
        samples: int,
        is_finite: Tensor,
        log_window: MetricTracker,
        is_loss_finite: Tensor,
    ) -> None:
        """Add this step to the running statistics and the log window's sums, and begin the next step.

        Args:
            samples: of all ranks in the global batch.
            is_finite: whether the step is taken: 0-dimensional bool.
            is_loss_finite: whether the metrics of the step count: 0-dimensional bool.
        """
        self.running_stats.commit(samples, is_finite)
        log_window.add(self.metrics, is_loss_finite)
        self.metrics.values.zero_()
