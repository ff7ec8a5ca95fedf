"""`after_step` of model.py, a function that is called after each step, and `progress` for losses and images.

It costs four small copies to the device for each step. Who trains with a momentum teacher, a codebook, a bound on
weights or a loss that follows the step needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepView:
    """What `compute_loss`, `log_images` and `after_step` may read: 0-dimensional int64 tensors on the device, equal on
    all ranks.

    They are filled in place: a compiled model is compiled again for each new value of a number.
    """

    step: Tensor  # of the run, from 0; in an evaluation, the steps before it
    total_steps: Tensor  # of the run
    epoch: Tensor  # from 0
    samples_seen: Tensor  # by all ranks, before this step

    @classmethod
    def on(cls, device: torch.device) -> StepView:
        return cls(*(torch.full((), number, device=device) for number in (0, 1, 0, 0)))

    def fill(self, progress: Any, total_steps: int) -> None:
        """progress: a Progress."""
        self.step.fill_(progress.step)
        self.total_steps.fill_(total_steps)
        self.epoch.fill_(progress.epoch)
        self.samples_seen.fill_(progress.samples_seen)


def seeing(functions: dict[str, Callable], asking: Iterable[str], device: torch.device) -> dict[str, Any]:
    """The functions of model.py that ask for `progress`, with it, and the view that they and after_step get."""
    asking = [*asking]
    if not asking and not functions.get("after_step"):
        return {}
    view = StepView.on(device)
    return {"progress": view} | {name: functools.partial(functions[name], progress=view) for name in asking}
