"""`after_step` of model.py, a function that is called after each step, and `progress` for losses and images.

It costs four small copies to the device for each step. Who trains with a momentum teacher, a codebook, a bound on
weights or a loss that follows the step needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from utils.training.parts.part import Part
from utils.training.schedule import Progress
from utils.training.signatures import has_parameter

HOOKS_WITH_PROGRESS = ("compute_loss", "log_images")


@dataclass(frozen=True)
class StepView:
    """What `compute_loss`, `log_images` and `after_step` may read: 0-dimensional int64 tensors on the device, equal on
    all ranks.

    The tensors are filled in place, since a compiled model would be compiled again for each new value of a number.
    """

    step: Tensor  # of the run, from 0; in an evaluation, the steps before it
    total_steps: Tensor  # of the run
    epoch: Tensor  # from 0
    samples_seen: Tensor  # by all ranks, before this step

    @classmethod
    def create(cls, device: torch.device) -> StepView:
        """Return the view of a run that has not begun."""
        return cls(
            step=torch.full((), 0, device=device),
            total_steps=torch.full((), 1, device=device),
            epoch=torch.full((), 0, device=device),
            samples_seen=torch.full((), 0, device=device),
        )

    def fill(self, progress: Progress, total_steps: int) -> None:
        """Let the tensors show this progress."""
        self.step.fill_(progress.step)
        self.total_steps.fill_(total_steps)
        self.epoch.fill_(progress.epoch)
        self.samples_seen.fill_(progress.samples_seen)


class AfterStep(Part):
    """Gives functions of model.py the progress of the run, and calls `after_step`.

    Args:
        functions: of model.py, that ask for `progress`.
        after_step: of model.py, if it has one.
    """

    def __init__(
        self,
        functions: dict[str, Callable],
        after_step: Callable[..., None] | None,
        device: torch.device,
    ) -> None:
        self.step_view = StepView.create(device)
        self.replaced_functions = {}
        for name, function in functions.items():
            self.replaced_functions[name] = functools.partial(function, progress=self.step_view)
        self._after_step = after_step

    @classmethod
    def create(cls, functions: dict[str, Callable], device: torch.device) -> AfterStep | None:
        """Return the part, or None if no function of model.py asks for it."""
        asking = {}
        for name in HOOKS_WITH_PROGRESS:
            if has_parameter(functions.get(name), "progress"):
                asking[name] = functions[name]
        after_step = functions.get("after_step")
        if not asking and not after_step:
            return None
        return cls(asking, after_step, device)

    def see_progress(self, progress: Progress, total_steps: int) -> None:
        self.step_view.fill(progress, total_steps)

    def after_update(self, model: nn.Module, skipped: Tensor) -> None:
        if self._after_step:
            self._after_step(model, self.step_view, (1 - skipped).double())
