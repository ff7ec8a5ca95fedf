"""The interface of a part: the moments of a step, a checkpoint and an evaluation at which it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor, nn

from utils.clock import PhaseClock
from utils.data.sampler import MicroBatch
from utils.distributed.context import DistributedContext
from utils.metrics import Metrics, MetricTracker
from utils.training.precision import Precision
from utils.training.schedule import Progress


class Part:
    """Takes part in the steps, the checkpoints and the evaluations of one attempt: one start or resume of a run.

    Each method is called at one moment, and does nothing here. A part overrides those that it needs. `create_parts`
    lists the parts of an attempt. At each moment all of them are called, in the order of that list.

    Methods are called on all ranks, so they may use collectives, unless their docstring says otherwise. No method that
    is called in a step or at a log point may read a tensor from the device, which would make the host wait for it;
    `begin_read` is for that.
    """

    # its own functions, by the name of the function of model.py that each replaces
    replaced_functions: dict[str, Callable] = {}
    provenance: dict[str, Any] = {}  # what it adds to provenance.json and to the provenance in checkpoints

    # ---- before the first step ----

    def first_passes(self, run_passes: Callable[[], object], batch: Any) -> None:
        """Look at forward and backward passes.

        This method is called once, before the weights of a checkpoint are loaded.

        Args:
            run_passes: makes two forward and backward passes with the batch, and drops their gradients.
            batch: the first training micro-batch, as compute_loss gets it.
        """

    def start(self) -> None:
        """Act directly before the first step. The state is that of step 0, or that of the checkpoint."""

    # ---- a step ----

    def micro_batches(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Wrap the iterator over this rank's micro-batches, at the beginning of each epoch.

        Returns:
            An iterator over the same micro-batches, in the same order.
        """
        return stream

    def see_progress(self, progress: Progress, total_steps: int) -> None:
        """Note how far the run is, before each step and before each evaluation.

        Args:
            progress: how many steps and samples there were before.
            total_steps: of the whole run.
        """

    def after_forward(self, metrics: Metrics, number: int) -> Metrics:
        """Change the metrics of a training micro-batch.

        This method is called after each forward pass, also for padding. It must use no collectives, since ranks may
        have different numbers of micro-batches in a step.

        Args:
            metrics: what compute_loss returned.
            number: the number of the micro-batch in its global batch, from 0.

        Returns:
            The metrics that the step sums. The backward pass begins at the sum of "loss".
        """
        return metrics

    def before_update(self, model: nn.Module, sums: MetricTracker) -> None:
        """Act directly before the weights are updated, without autograd.

        Args:
            model: not wrapped in DDP. Its gradients are those of the loss summed over all ranks, times
                2 ** -progress.loss_shift and times float16's scale. They are not clipped yet. With FSDP they
                are shards.
            sums: the sums and counts of the metrics over the global batch, of all ranks.
        """

    def after_update(self, model: nn.Module, skipped: Tensor) -> None:
        """Act directly after the weights were updated, without autograd.

        Args:
            model: not wrapped in DDP.
            skipped: 1 if the step was skipped, which left the weights unchanged, else 0. float32, 0-dimensional, on the
                device of the optimizer's tensors.
        """

    # ---- a log point ----

    def begin_read(self, is_log_point: bool) -> Tensor | None:
        """Give a tensor to the host, at each log point and before each save.

        A log point is every `log_interval` steps, and after the last step of the run.

        Returns:
            float64 or int64, of any shape; or None if there is nothing to read. It is copied at once.
        """
        return None

    def finish_read(self, values: Tensor) -> dict[str, float]:
        """Use what `begin_read` returned, when the values are on the host, at most four steps later.

        Args:
            values: the same values, on the CPU.

        Returns:
            Entries of the train record, the same on all ranks. They are ignored if this was no log point.

        Raises:
            UserError: if the values show that the training is wrong; on all ranks alike.
        """
        return {}

    def log_values(self, seconds: float) -> dict[str, float]:
        """Give numbers that differ between the ranks to the train record.

        This method is called once for each log point, up to four steps after it. So `begin_read` has to note what
        belongs to the log point.

        Args:
            seconds: how long the steps between the two latest log points took on this rank.

        Returns:
            The numbers of this rank. All ranks must return the same names. The record has the mean over the ranks,
            weighted by their seconds. A mean that is NaN is left out.
        """
        return {}

    # ---- a checkpoint ----

    def save(self, state: dict[str, Any]) -> None:
        """Change what a checkpoint will hold.

        This method is called before each save on all ranks. Ranks that write files call it once more at the start, to
        allocate memory, so it must use no collectives.

        Args:
            state: the content of the checkpoint. A part may add, replace and delete entries. It may not change a tensor
                in place, since the tensors are those of the training.
        """

    def before_load(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Change what is loaded from a checkpoint, before its weights are loaded.

        Args:
            payload: the content of the checkpoint.

        Returns:
            The content that is to be loaded.

        Raises:
            UserError: if the checkpoint does not fit.
        """
        return payload

    def after_load(self, payload: dict[str, Any], progress: Progress) -> None:
        """Load the part's own state. Model, optimizer and progress are already those of the checkpoint."""

    # ---- an evaluation ----

    def weights(self) -> dict[str, AbstractContextManager]:
        """Give more weights to evaluate, besides those of the model.

        This method is called several times for an evaluation, so it must have no side effect.

        Returns:
            By the name of the weights, a context inside which the model has them. The last weights of the last part
            that returns some are those that select the best checkpoint. `save` puts their state dict into the
            checkpoint under the same name, from which the test at the end of a run loads them.
        """
        return {}

    def try_evaluation(
        self,
        model: nn.Module,
        precision: Precision,
        batch: Any,
        size: int,
        samples: int,
    ) -> list[str]:
        """Try what `evaluate` and `finish_evaluation` will do.

        This method is called before the first step, for several batches. An error on one rank is reported by all, so
        the method must use no collectives.

        Args:
            model: not wrapped in DDP. Put it in evaluation mode.
            precision: has the autocast of the run.
            batch: a micro-batch of the set, as compute_loss gets it.
            size: the samples in the batch.
            samples: the samples in the set; for the smallest micro-batch, the samples in that.

        Returns:
            The names of the metrics that `finish_evaluation` will return.

        Raises:
            UserError: if the evaluation cannot work.
        """
        return []

    def begin_evaluation(self, seed: Callable[[str, Sequence[int]], object], clock: PhaseClock) -> None:
        """Prepare for an evaluation, before the first pass over a set with the model's weights or with those of a part.

        Args:
            seed: seeds the random draws of a function of model.py for the samples with these indices. Call
                `seed("predict", indices)` before `predict`.
            clock: shows in which function of model.py this rank is. Before `predict` call
                `clock.enter_hook("predict")`.
        """

    def evaluate(self, model: nn.Module, micro_batch: MicroBatch) -> None:
        """Evaluate a micro-batch, after compute_loss, with the autocast of compute_loss and without autograd."""

    def finish_evaluation(
        self,
        means: dict[str, float],
        samples: int,
        ctx: DistributedContext,
    ) -> dict[str, float]:
        """Give more metrics of the set, after the last pass over the set.

        Args:
            means: the metrics of compute_loss, and of the parts before.
            samples: the samples in the set.

        Returns:
            The metrics, the same on all ranks.

        Raises:
            UserError: if they cannot be computed; on all ranks alike.
        """
        return {}

    # ---- the end ----

    def close(self) -> None:
        """Clean up after the last step of the attempt, or after a failure.

        This method may be called twice. It must use no collectives, since other ranks may be gone.
        """


P = TypeVar("P", bound=Part)


def find_part(parts: Sequence[Part], kind: type[P]) -> P | None:
    """Return the part of this class, if there is one."""
    for part in parts:
        if isinstance(part, kind):
            return part
    return None
