"""What the host reads at a log point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from utils.metrics import Metrics, MetricTracker
from utils.training.parts.part import Part
from utils.training.schedule import Progress

EMPTY_STEP = "empty"


class SkippedStep(NamedTuple):
    """A skipped optimizer step, and its global batch: entries of the epoch's order."""

    step: int
    epoch: int
    first_sample: int
    samples: int
    reason: str = ""  # "non-finite" loss or gradient; EMPTY_STEP: the loss counted nothing


def are_all_steps_empty(skipped: list[SkippedStep]) -> bool:
    """Whether some steps were skipped, and all because their loss counted nothing."""
    return {skip.reason for skip in skipped} == {EMPTY_STEP}


class PendingRead:
    """What a log window held after a step, on its way to the host in one copy, for which only `result` waits.

    Args:
        tensors: float64 or int64, of any shapes, on one device, as they are now.
        steps: since the read before.
        parts: parts, each with one of the tensors, in this order.
    """

    def __init__(self, tensors: list[Tensor], steps: list[SkippedStep], parts: list[Part]) -> None:
        self.steps = steps
        self.parts = parts
        self._shapes_and_dtypes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._host_copy = torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in tensors])
        self._event: torch.Event | None = None
        if self._host_copy.device.type != "cpu":
            pinned = torch.empty(self._host_copy.shape, dtype=torch.int64, pin_memory=True)
            self._host_copy = pinned.copy_(self._host_copy, non_blocking=True)
            self._event = torch.accelerator.current_stream().record_event()

    def result(self) -> list[Tensor]:
        """The tensors, on the CPU. Waits until the device has reached the copy, not for what was queued later."""
        if self._event:
            self._event.synchronize()
        pieces = self._host_copy.split([shape.numel() for shape, _ in self._shapes_and_dtypes])
        return [
            piece.view(dtype).view(shape) for piece, (shape, dtype) in zip(pieces, self._shapes_and_dtypes, strict=True)
        ]


class LogWindowValues(NamedTuple):
    """What was read of a log window, on the host."""

    sums: MetricTracker  # of the steps with a finite loss, with the norms of these steps
    skipped: list[SkippedStep]  # without those of float16's search for a scale
    other_tensors: list[Tensor]  # as given to `begin_read`
    entries: dict[str, float]  # of the parts, for the train record


class LogWindow(MetricTracker):
    """The sums of the metrics since the last log point, and what each step since the last read may have skipped.

    Args:
        scaler: of float16, or disabled.
        parts: what they want to read is read with it.
    """

    def __init__(self, device: torch.device, scaler: torch.amp.GradScaler, parts: Sequence[Part] = ()) -> None:
        super().__init__(device)
        self._scaler = scaler
        self._parts = parts
        self._one = torch.ones((), device=device)
        self._host_sums = MetricTracker()  # what was read last, on the host
        self.norms: list[Tensor] = []  # of the gradient, one per step; not finite if it was skipped
        self._divisors: list[Tensor] = []  # one per step: 0 if the loss counted nothing
        self._losses: list[Tensor] = []  # with float16: the summed loss of each step
        self._pending_steps: list[SkippedStep] = []  # a record of each step, used if it was skipped

    def allocate(self, metrics: Metrics, extra_size: int = 0) -> None:
        super().allocate(metrics, extra_size)
        self._host_sums.allocate(metrics, extra_size)

    def record_step(self, step: SkippedStep, norm: Tensor, divisor: Tensor, loss: Tensor | None) -> None:
        """Keep what tells whether a step was skipped: 0-dimensional, on the device. loss: with float16."""
        self._pending_steps.append(step)
        self.norms.append(norm)
        self._divisors.append(divisor)
        self._losses += [] if loss is None else [loss.clone()]

    def begin_read(self, *other_tensors: Tensor, is_log_point: bool = False) -> PendingRead:
        """Begin to copy the sums, and what each step since the last read may have skipped, to the host.

        other_tensors: float64 or int64 values to copy too.
        """
        values_by_step = [self.norms, self._divisors, self._losses]
        stacks = [torch.stack(series).double() if series else self.values.new_empty(0) for series in values_by_step]
        tensors = [self.values, *stacks, self._scaler.scale(self._one).double()]
        readers = []
        for part in self._parts:
            values = part.begin_read(is_log_point)
            if values is not None:
                tensors.append(values.to(self.values.device))
                readers.append(part)
        read = PendingRead([*tensors, *other_tensors], self._pending_steps, readers)
        self.norms, self._divisors, self._losses, self._pending_steps = [], [], [], []
        return read

    def finish_read(self, read: PendingRead, progress: Progress) -> LogWindowValues:
        """Count in `progress` the steps that were skipped, the same on all ranks. Waits for the copy.

        Raises:
            UserError: if a part finds that what it has read is wrong.
        """
        values, norms, divisors, losses, scale, *other_tensors = read.result()
        entries: dict[str, float] = {}
        for part in read.parts:
            entries |= part.finish_read(other_tensors.pop(0))
        sums = self._host_sums
        sums.values.copy_(values)
        norm_sum, finite = sums.sum_view("grad_norm").item(), [norm for norm in norms.tolist() if math.isfinite(norm)]
        for norm in finite:  # not sum(), so that the bits do not depend on where a resume divides the log window
            norm_sum += norm
        sums.sum_view("grad_norm").fill_(norm_sum)
        sums.count_view("grad_norm").add_(len(finite))
        sums.sum_view("skipped_steps").add_(len(norms) - len(finite))
        skipped = []
        rows = (norms.tolist(), divisors.tolist(), losses.tolist() or [math.nan] * len(norms))
        for step, norm, divisor, loss in zip(read.steps, *rows, strict=True):
            if math.isfinite(norm):
                progress.skipped_in_row = 0
            elif scale >= 1 and divisor and math.isfinite(loss):  # skipped in float16's search for this scale
                progress.overflow_steps += 1
            else:
                skipped.append(step._replace(reason="non-finite" if divisor else EMPTY_STEP))
                progress.skipped_in_row += 1
        progress.skipped_steps += len(skipped)
        return LogWindowValues(sums, skipped, other_tensors, entries)

    def add_read_norms(self) -> None:
        """Add the norms that were read last to the sums, in the middle of a log window, and the skipped steps."""
        for name in ("grad_norm", "skipped_steps"):
            self.sum_view(name).fill_(self._host_sums.sum_view(name).item())
            self.count_view(name).fill_(self._host_sums.count_view(name).item())
