"""What the host reads at a log point."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from utils.metrics import MetricTracker
from utils.training.schedule import Progress


class SkippedStep(NamedTuple):
    """A skipped optimizer step, and its global batch: entries of the epoch's order."""

    step: int
    epoch: int
    first: int
    samples: int
    reason: str = ""  # "non-finite" loss or gradient; "empty": the loss counted nothing


class Interval(MetricTracker):
    """The sums of the metrics since the last log point, and what each step since the last read may have skipped."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.norms: list[Tensor] = []  # of the gradient, one per step; not finite if it was skipped
        self._divisors: list[Tensor] = []  # one per step: 0 if the loss counted nothing
        self._losses: list[Tensor] = []  # with float16: the summed loss of each step
        self._steps: list[SkippedStep] = []  # a record of each step, used if it was skipped

    def note_gradient(self, norm: Tensor, divisor: Tensor, loss: Tensor | None) -> None:
        """Keep what tells whether a step was skipped: 0-dimensional, on the device. loss: with float16."""
        self.norms.append(norm)
        self._divisors.append(divisor)
        self._losses += [] if loss is None else [loss.clone()]

    def note_step(self, step: SkippedStep) -> None:
        self._steps.append(step)

    def read_skips(self, progress: Progress, can_search: bool) -> list[SkippedStep]:
        """Count in `progress` and return the steps that were skipped since the last call, the same on all ranks.

        Reads from the device, and adds the norms of the gradients to the sums.

        can_search: a step with a finite loss was skipped in float16's search for its scale, and is not returned.
        """
        total = self.sum_of("grad_norm")
        kept = ([*self.norms, total], self._divisors, self._losses)
        (*norms, norm_sum), divisors, losses = (torch.stack(each).tolist() if each else [] for each in kept)
        self.norms, self._divisors, self._losses = [], [], []
        finite = [norm for norm in norms if math.isfinite(norm)]
        for norm in finite:  # not sum(), so that the bits do not depend on where a resume divides the interval
            norm_sum += norm
        total.fill_(norm_sum)
        self.count("grad_norm", 0.0, len(finite))
        skipped = []
        losses = losses or [0.0] * len(norms)
        for step, norm, divisor, loss in zip(self._steps, norms, divisors, losses, strict=True):
            if math.isfinite(norm):
                progress.skipped_in_row = 0
            elif can_search and divisor and math.isfinite(loss):
                progress.overflow_steps += 1
            else:
                skipped.append(step._replace(reason="non-finite" if divisor else "empty"))
                progress.skipped_in_row += 1
        progress.skipped_steps += len(skipped)
        self._steps = []
        return skipped
