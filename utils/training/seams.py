"""The functions of model.py that the training loop uses: three required ones, and others with a default here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from utils.data.sampler import MicroBatch
from utils.metrics import Metrics
from utils.settings.errors import UserError
from utils.training.blocks import find_blocks
from utils.training.optimizer import create_optimizer, lr_factor
from utils.training.parts.loss_terms import Terms
from utils.training.parts.step_progress import StepView, seeing
from utils.training.parts.summary import Summary

ComputeLoss = Callable[[nn.Module, Any], Metrics]
REQUIRED = ("create_model", "param_groups", "compute_loss")
MADE = {"progress", "terms"}  # fields that are no functions of model.py
CPU = torch.device("cpu")


def example_inputs(batch: Any) -> tuple[Tensor, ...]:
    """The default: the batch itself, or its first entry, as the only argument of the model. Raises UserError."""
    first = first_tensor(batch)
    if first is None:
        raise UserError("model.py: has no example_inputs(batch); add it, to return the model's arguments")
    return (first,)


def predict(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The default: the output of the model for the batch itself, or its first entry. Raises UserError."""
    first = first_tensor(batch)
    output = None if first is None else model(first)
    if not isinstance(output, Tensor):
        raise UserError("model.py: has no predict(model, batch); add it, to return {name: tensor [B, ...]}")
    return {"output": output}


def first_tensor(batch: Any) -> Tensor | None:
    """The batch itself, or its first entry, if that is a tensor."""
    first = batch if isinstance(batch, Tensor) else batch[0] if isinstance(batch, tuple | list) and batch else None
    return first if isinstance(first, Tensor) else None


@dataclass(frozen=True)
class Seams:
    """The functions of model.py. docs/reference.md says what each gets and returns, and when it is called."""

    create_model: Callable[..., nn.Module]
    param_groups: Callable[..., list[dict[str, Any]]]
    compute_loss: ComputeLoss
    lr_factor: Callable[..., float | dict[str, float]] = lr_factor
    create_optimizer: Callable[..., Any] = create_optimizer
    initial_weights: Callable[..., dict[str, Tensor]] | None = None  # None: those of a file
    blocks: Callable[[nn.Module], list[nn.Module]] = find_blocks
    log_images: Callable[[nn.Module, Any], dict[str, Tensor]] | None = None
    predict: Callable[[nn.Module, Any], dict[str, Tensor]] = predict
    example_inputs: Callable[[Any], tuple] = example_inputs
    summarize: Callable[[dict[str, Any]], dict[str, float]] | None = None
    is_saved: Callable[[str], bool] | None = None
    after_step: Callable[[nn.Module, StepView, Tensor], None] | None = None
    loss_counts: Callable[[Any], dict[str, Any]] | None = None
    terms: Terms | None = None
    progress: StepView | None = None

    @property
    def summary(self) -> Summary | None:
        return Summary(self.predict, self.summarize) if self.summarize else None

    def counted(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches as `train_one_epoch` gets them: an extra may look at those of a step before."""
        if self.terms:
            stream = self.terms.ahead(stream)
        return stream

    @classmethod
    def of(cls, module: ModuleType, device: torch.device = CPU) -> Seams:
        """The functions of model.py, with defaults for missing ones. Raises UserError if a required one is missing.

        device: of the tensors that an extra gives them.
        """
        names = cls.__dataclass_fields__.keys()
        found: dict[str, Any] = {name: getattr(module, name) for name in names - MADE if hasattr(module, name)}
        missing = [name for name in REQUIRED if name not in found]
        if missing:
            raise UserError(f"model.py: lacks {', '.join(missing)}; define it, see docs/reference.md")
        given = [name for name in ("compute_loss", "log_images") if found.get(name)]
        asking = [name for name in given if "progress" in inspect.signature(found[name]).parameters]
        found |= seeing(found, asking, device)
        if "loss_counts" in found:
            found["terms"] = Terms(found["compute_loss"], found["loss_counts"], device)
            found["compute_loss"] = found["terms"].compute_loss
        return cls(**found)
