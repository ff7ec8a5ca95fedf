"""The parts of an attempt are in one list, whose order is the order of their effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from config import TrainingConfig
from utils.distributed.context import DistributedContext
from utils.training.parts.after_step import AfterStep
from utils.training.parts.loss_terms import LossTerms
from utils.training.parts.mfu import FlopCounter
from utils.training.parts.part import Part
from utils.training.parts.profiler import Profiler
from utils.training.parts.summary import OutputSummary
from utils.training.parts.unsaved_parameters import UnsavedParameters
from utils.training.parts.weight_average import WeightAverage
from utils.training.precision import Precision


def create_hook_parts(functions: dict[str, Callable[..., Any]], device: torch.device) -> list[Part]:
    """Return the parts that functions of model.py ask for. They are the first ones of the list.

    Args:
        functions: by name. The dict is changed in place, since a part may replace functions.
        device: of the tensors that the functions get.
    """
    parts: list[Part] = []
    for create in (AfterStep.create, LossTerms.create, OutputSummary.create):
        part = create(functions, device)
        if part:
            functions |= part.replaced_functions
            parts.append(part)
    return parts


def create_parts(
    hook_parts: Sequence[Part],
    model: nn.Module,
    is_saved: Callable[[str], bool] | None,
    config: TrainingConfig,
    ctx: DistributedContext,
    precision: Precision,
) -> list[Part]:
    """Return all parts that this attempt uses.

    Args:
        hook_parts: from `create_hook_parts`.
        model: not wrapped in DDP. Create its TrainState before, since that replaces buffers of BatchNorm.
        is_saved: of model.py, if it has one: whether checkpoints hold the parameter of this name.

    Raises:
        UserError: if is_saved leaves out a parameter that is trained.
    """
    parts = [*hook_parts]
    if ctx.device.type == "cuda" and torch.cuda.is_available():
        parts.append(FlopCounter.create(ctx.device, precision.dtype))
    if config.ema_decay:
        parts.append(WeightAverage(model, config.ema_decay))  # after AfterStep, whose changes it averages
    parts.append(UnsavedParameters(model, is_saved))  # after WeightAverage, to leave them out of the average too
    if config.enable_profiling and ctx.is_main:
        parts.append(Profiler(config.run_folder / "traces", ctx.device))
    return parts
