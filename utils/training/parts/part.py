"""What takes part in the steps, the checkpoints and the evaluations of an attempt, and when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor, nn

from utils.clock import Clock
from utils.data.sampler import MicroBatch
from utils.distributed.context import DistributedContext
from utils.metrics import Metrics, MetricTracker
from utils.training.precision import Precision
from utils.training.schedule import Progress


class Part:
    """Takes part in the steps, the checkpoints and the evaluations of one attempt of a run.

    Each method is a moment, and does nothing here. It is called on all ranks, unless its docstring says otherwise, so
    it may use collectives. Between two log points it must not read from the device. `create_parts` lists the parts: at
    each moment they are called in the order of that list.
    """

    functions: dict[str, Callable] = {}  # of model.py, which this part calls in their place
    provenance: dict[str, Any] = {}  # more entries of provenance.json and of checkpoints

    # ---- before the first step ----

    def measure(self, passes: Callable[[], object], batch: Any) -> None:
        """Before the state of a checkpoint is loaded.

        Args:
            passes: makes two forward and backward passes with the batch, and drops their gradients.
            batch: the first training micro-batch, as compute_loss gets it.
        """

    def start(self) -> None:
        """Directly before the first step of the attempt, when the state is that of step 0 or of the checkpoint."""

    # ---- a step ----

    def micro_batches(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """At the beginning of an epoch. Returns this rank's micro-batches as the loop gets them; it must neither change
        their order nor leave one out."""
        return stream

    def see_progress(self, progress: Progress, total_steps: int) -> None:
        """Before each step and each evaluation. progress: the steps before it. total_steps: of the whole run."""

    def divide_loss(self, metrics: Metrics, number: int) -> Metrics:
        """After the forward pass of a training micro-batch, padding too. Returns the metrics that the step sums; their
        "loss" is what the backward pass begins with.

        Args:
            metrics: the output of compute_loss.
            number: of the micro-batch in its global batch, from 0.
        """
        return metrics

    def after_reduce(self, sums: MetricTracker) -> None:
        """Before the update, when the sums of the global batch are those of all ranks."""

    def after_update(self, model: nn.Module, skipped: Tensor) -> None:
        """After the update of the weights, without gradients.

        Args:
            model: not wrapped in DDP.
            skipped: 1 if the step was skipped, else 0: float32, 0-dimensional, where the optimizer's tensors are.
        """

    # ---- a log point ----

    def begin_read(self, is_log_point: bool) -> Tensor | None:
        """At a log point, and before each save. Returns what the host should read: float64 or int64, on the device."""
        return None

    def finish_read(self, values: Tensor) -> None:
        """Some steps later. values: what `begin_read` returned, on the CPU. May raise UserError on all ranks."""

    def log_values(self, seconds: float) -> dict[str, float]:
        """At a log point, after `finish_read`. Returns numbers of this rank for the train record, with the same names
        on all ranks. The record has their mean over the ranks, weighted by the seconds, and leaves out NaN.

        seconds: of this rank in the steps since the last log point.
        """
        return {}

    # ---- a checkpoint ----

    def save(self, state: dict[str, Any]) -> None:
        """Before the state is copied. It may add, replace or delete entries, but not change a tensor in place. Ranks
        that write call it once more before the first step, to allocate the copy, so it must use no collectives.

        state: what the checkpoint will hold, with the weights as "model" and averaged ones, or {}, as "ema".
        """

    def before_load(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Before weights of a checkpoint are loaded. Returns its content as it is to be loaded. Raises UserError."""
        return payload

    def after_load(self, payload: dict[str, Any], progress: Progress) -> None:
        """When model, optimizer and progress are those of the checkpoint."""

    # ---- an evaluation ----

    def weights(self) -> dict[str, AbstractContextManager]:
        """More weights to evaluate: for each kind the context in which the model has them. The last kind of all parts
        selects the best checkpoint."""
        return {}

    def try_evaluation(self, model: nn.Module, precision: Precision, batch: Any, size: int, samples: int) -> list[str]:
        """Before the first step. Returns the names of metrics that `finish_evaluation` will add. Raises UserError. No
        collectives here.

        Args:
            batch: a micro-batch of `size` samples.
            samples: in the set.
        """
        return []

    def begin_evaluation(self, seed: Callable[[str, Sequence[int]], object], clock: Clock) -> None:
        """Before the first pass over a set.

        Args:
            seed: call it with the name of a function of model.py and the samples of a micro-batch, before the function.
            clock: shows which function of model.py is called.
        """

    def evaluate(self, model: nn.Module, micro_batch: MicroBatch) -> None:
        """After compute_loss of each pass over the set, in its precision and without gradients."""

    def finish_evaluation(self, means: dict[str, float], samples: int, ctx: DistributedContext) -> dict[str, float]:
        """After the last pass. Returns more metrics, the same on all ranks. Raises UserError.

        Args:
            means: of the metrics of compute_loss.
            samples: in the set.
        """
        return {}

    # ---- the end ----

    def close(self) -> None:
        """After the last step, or a failure; it may be called again."""


P = TypeVar("P", bound=Part)


def find_part(parts: Sequence[Part], kind: type[P]) -> P | None:
    """The part of this class, if there is one."""
    for part in parts:
        if isinstance(part, kind):
            return part
    return None
