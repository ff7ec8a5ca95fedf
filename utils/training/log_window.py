"""What the host reads at a log point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from utils.metrics import Metrics, MetricTracker
from utils.training.parts.part import Part
from utils.training.schedule import Progress

EMPTY_STEP = "empty"


class StepRecord(NamedTuple):
    """An optimizer step with the samples of its global batch, which are consecutive entries of the epoch's order."""

    step: int  # from 1
    epoch: int  # from 0
    first_sample: int  # position in the epoch's order
    samples: int
    skip_reason: str = ""  # of a skipped step: "non-finite" loss or gradient; EMPTY_STEP: the loss counted nothing


def are_all_steps_empty(skipped_steps: list[StepRecord]) -> bool:
    """Return whether some steps were skipped, and all because their loss counted nothing."""
    return {record.skip_reason for record in skipped_steps} == {EMPTY_STEP}


class PendingRead:
    """What a log window held after a step, on its way to the host in one copy, for which only `result` waits.

    Args:
        tensors: float64 or int64, of any shapes, on one device, as they are now.
        steps: the steps since the read before.
        parts: the parts that read something. Each has one of the tensors, in this order.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        steps: list[StepRecord],
        parts: list[Part],
    ) -> None:
        self.steps = steps
        self.parts = parts
        self._shapes_and_dtypes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        bits = [tensor.reshape(-1).view(torch.int64) for tensor in tensors]
        self._host_copy = torch.cat(bits)
        self._event: torch.Event | None = None
        if self._host_copy.device.type != "cpu":
            pinned = torch.empty(self._host_copy.shape, dtype=torch.int64, pin_memory=True)
            self._host_copy = pinned.copy_(self._host_copy, non_blocking=True)
            self._event = torch.accelerator.current_stream().record_event()

    def result(self) -> list[Tensor]:
        """Return the tensors, on the CPU.

        Waits until the device has reached the copy, not for what was queued later.
        """
        if self._event:
            self._event.synchronize()
        sizes = [shape.numel() for shape, _ in self._shapes_and_dtypes]
        pieces = self._host_copy.split(sizes)
        tensors = []
        for piece, (shape, dtype) in zip(pieces, self._shapes_and_dtypes, strict=True):
            tensors.append(piece.view(dtype).view(shape))
        return tensors


@dataclass(frozen=True)
class StepValues:
    """What the device has computed of one step, on the host."""

    record: StepRecord
    norm: float  # of the gradient: not finite if the step was skipped
    divisor: float  # 0 if the loss counted nothing
    loss: float  # with float16 the summed loss, else NaN

    @property
    def is_skipped(self) -> bool:
        return not math.isfinite(self.norm)


@dataclass(frozen=True)
class LogWindowValues:
    """What was read of a log window, on the host."""

    sums: MetricTracker  # of the steps with a finite loss, with the norms of these steps
    skipped_steps: list[StepRecord]  # without those of float16's search for a scale
    other_tensors: list[Tensor]  # as given to `begin_read`
    part_entries: dict[str, float]  # the entries that the parts add to the train record


class LogWindow(MetricTracker):
    """The sums of the metrics since the last log point, and what each step since the last read may have skipped.

    Args:
        scaler: of float16, or disabled.
        parts: what the parts want to read is read with the sums.
    """

    def __init__(
        self,
        device: torch.device,
        scaler: torch.amp.GradScaler,
        parts: Sequence[Part] = (),
    ) -> None:
        super().__init__(device)
        self._scaler = scaler
        self._parts = parts
        self._one = torch.ones((), device=device)
        self._host_sums = MetricTracker()  # what was read last, on the host
        # these four lists have an entry for each step since the last read
        self._pending_steps: list[StepRecord] = []
        self.norms: list[Tensor] = []  # of the gradient: not finite if the step was skipped
        self._divisors: list[Tensor] = []  # 0 if the loss counted nothing
        self._losses: list[Tensor] = []  # the summed loss with float16, else empty

    def allocate(self, metrics: Metrics, extra_size: int = 0) -> None:
        super().allocate(metrics, extra_size)
        self._host_sums.allocate(metrics, extra_size)

    def record_step(
        self,
        record: StepRecord,
        norm: Tensor,
        divisor: Tensor,
        loss: Tensor | None,
    ) -> None:
        """Keep what will tell whether this step was skipped.

        Args:
            norm: of the gradient: 0-dimensional, on the device, as divisor and loss.
            divisor: by which the gradients were divided.
            loss: the summed loss, with float16.
        """
        self._pending_steps.append(record)
        self.norms.append(norm)
        self._divisors.append(divisor)
        if loss is not None:
            self._losses.append(loss.clone())

    def begin_read(self, *other_tensors: Tensor, is_log_point: bool = False) -> PendingRead:
        """Begin to copy the sums, and what each step since the last read may have skipped, to the host.

        Args:
            other_tensors: float64 or int64 values to copy too.
        """
        tensors = [self.values]
        for values_by_step in (self.norms, self._divisors, self._losses):
            if values_by_step:
                tensors.append(torch.stack(values_by_step).double())
            else:
                tensors.append(self.values.new_empty(0))
        tensors.append(self._scaler.scale(self._one).double())

        readers = []
        for part in self._parts:
            values = part.begin_read(is_log_point)
            if values is not None:
                tensors.append(values.to(self.values.device))
                readers.append(part)

        read = PendingRead([*tensors, *other_tensors], self._pending_steps, readers)
        self._pending_steps = []
        self.norms = []
        self._divisors = []
        self._losses = []
        return read

    def finish_read(self, read: PendingRead, progress: Progress) -> LogWindowValues:
        """Count in `progress` the steps that were skipped, the same on all ranks. Waits for the copy.

        Raises:
            UserError: if a part finds that what it has read is wrong.
        """
        # in the order of `begin_read`
        values, norms, divisors, losses, loss_scale, *more_tensors = read.result()
        part_tensors = more_tensors[: len(read.parts)]
        other_tensors = more_tensors[len(read.parts) :]
        steps = _list_steps(read.steps, norms=norms, divisors=divisors, losses=losses)

        part_entries: dict[str, float] = {}
        for part, tensor in zip(read.parts, part_tensors, strict=True):
            part_entries |= part.finish_read(tensor)

        sums = self._host_sums
        sums.values.copy_(values)
        finite_norms = [step.norm for step in steps if not step.is_skipped]
        norm_sum = sums.sum_view("grad_norm").item()
        for norm in finite_norms:  # not sum(), so that the bits do not depend on where a resume divides the log window
            norm_sum += norm
        sums.sum_view("grad_norm").fill_(norm_sum)
        sums.count_view("grad_norm").add_(len(finite_norms))
        sums.sum_view("skipped_steps").add_(len(steps) - len(finite_norms))

        skipped_steps = _count_skipped_steps(steps, loss_scale.item(), progress)
        return LogWindowValues(
            sums=sums,
            skipped_steps=skipped_steps,
            other_tensors=other_tensors,
            part_entries=part_entries,
        )

    def add_read_norms(self) -> None:
        """Add the norms that were read last to the sums, in the middle of a log window, and the skipped steps."""
        for name in ("grad_norm", "skipped_steps"):
            read_sum = self._host_sums.sum_view(name).item()
            read_count = self._host_sums.count_view(name).item()
            self.sum_view(name).fill_(read_sum)
            self.count_view(name).fill_(read_count)


def _list_steps(
    records: list[StepRecord],
    norms: Tensor,
    divisors: Tensor,
    losses: Tensor,
) -> list[StepValues]:
    """Return what was read of each step.

    Args:
        norms, divisors: [steps], on the host.
        losses: [steps], on the host; [0] without float16.
    """
    loss_list = losses.tolist()
    if not loss_list:
        loss_list = [math.nan] * len(records)
    columns = zip(records, norms.tolist(), divisors.tolist(), loss_list, strict=True)
    steps = []
    for record, norm, divisor, loss in columns:
        steps.append(StepValues(record, norm=norm, divisor=divisor, loss=loss))
    return steps


def _count_skipped_steps(steps: list[StepValues], loss_scale: float, progress: Progress) -> list[StepRecord]:
    """Count the skipped steps in `progress`, and return those that float16 did not skip in the search for its scale.

    Args:
        loss_scale: of float16 after the last of the steps; 1 without float16.
    """
    skipped_steps = []
    for step in steps:
        if not step.is_skipped:
            progress.skipped_in_row = 0
        elif loss_scale >= 1 and step.divisor != 0 and math.isfinite(step.loss):
            progress.overflow_steps += 1  # float16 has searched for this scale
        else:
            reason = EMPTY_STEP if step.divisor == 0 else "non-finite"
            skipped_steps.append(step.record._replace(skip_reason=reason))
            progress.skipped_in_row += 1
    progress.skipped_steps += len(skipped_steps)
    return skipped_steps
