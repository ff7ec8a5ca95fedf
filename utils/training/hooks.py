"""The functions of model.py that the training loop uses: three required ones, and others with a default here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from config import TrainingConfig
from utils.distributed.collectives import on_all_ranks
from utils.distributed.context import DistributedContext
from utils.metrics import Metrics
from utils.settings.errors import UserError
from utils.training.blocks import find_blocks
from utils.training.optimizer import create_optimizer, lr_factor
from utils.training.parts.create import create_hook_parts
from utils.training.parts.part import P, Part, find_part
from utils.training.signatures import has_parameter

ComputeLoss = Callable[[nn.Module, Any], Metrics]
REQUIRED_HOOKS = ("create_model", "param_groups", "compute_loss")
# functions that get the config as an argument anyway, so that it is not bound by its name
HOOKS_WITH_CONFIG = {"check_config", "create_model", "param_groups", "lr_factor", "create_optimizer", "initial_weights"}
CPU = torch.device("cpu")


def example_inputs(batch: Any) -> tuple[Tensor, ...]:
    """Return the batch itself, or its first entry, as the only argument of the model.

    This function is used if model.py has no `example_inputs`.

    Raises:
        UserError: if that is no tensor.
    """
    first = first_tensor(batch)
    if first is None:
        raise UserError(
            "model.py has no example_inputs(batch). Add this function, which returns the model's arguments."
        )
    return (first,)


def predict(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return the output of the model for the batch itself, or its first entry.

    This function is used if model.py has no `predict`.

    Raises:
        UserError: if the batch or the output is no tensor.
    """
    output = None
    first = first_tensor(batch)
    if first is not None:
        output = model(first)
    if not isinstance(output, Tensor):
        raise UserError(
            "model.py has no predict(model, batch). Add this function, which returns {name: tensor [B, ...]}."
        )
    return {"output": output}


def first_tensor(batch: Any) -> Tensor | None:
    """Return the batch itself, or its first entry, if that is a tensor."""
    if isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    return batch if isinstance(batch, Tensor) else None


@dataclass(frozen=True)
class ModelHooks:
    """The functions of model.py. docs/reference.md says what each gets and returns, and when it is called."""

    create_model: Callable[..., nn.Module]
    param_groups: Callable[..., list[dict[str, Any]]]
    compute_loss: ComputeLoss
    check_config: Callable[..., None] | None = None
    lr_factor: Callable[..., float | dict[str, float]] = lr_factor
    create_optimizer: Callable[..., Any] = create_optimizer
    initial_weights: Callable[..., dict[str, Tensor]] | None = None  # None: those of a file
    blocks: Callable[[nn.Module], list[nn.Module]] = find_blocks
    log_images: Callable[[nn.Module, Any], dict[str, Tensor]] | None = None
    predict: Callable[[nn.Module, Any], dict[str, Tensor]] = predict
    example_inputs: Callable[[Any], tuple] = example_inputs
    summarize: Callable[[dict[str, Any]], dict[str, float]] | None = None
    is_saved: Callable[[str], bool] | None = None
    after_step: Callable[..., None] | None = None
    loss_counts: Callable[[Any], dict[str, Any]] | None = None
    parts: tuple[Part, ...] = ()  # the parts that these functions ask for

    @classmethod
    def from_module(
        cls,
        module: ModuleType,
        config: TrainingConfig | None = None,
        device: torch.device = CPU,
    ) -> ModelHooks:
        """Return the functions of model.py, with defaults for missing ones.

        Args:
            config: with the values that the data have resolved, for functions that ask for `config` by name.
            device: of the tensors that the functions get.

        Raises:
            UserError: if a required function is missing.
        """
        functions: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name != "parts" and hasattr(module, field.name):
                functions[field.name] = getattr(module, field.name)
        missing = [name for name in REQUIRED_HOOKS if name not in functions]
        if missing:
            raise UserError(f"model.py lacks {', '.join(missing)}. Define what is missing (see docs/reference.md).")

        if config is not None:
            for name, function in functions.items():
                if name not in HOOKS_WITH_CONFIG and has_parameter(function, "config"):
                    functions[name] = functools.partial(function, config=config)
        functions.setdefault("predict", predict)  # the part of summarize calls the default too
        parts = create_hook_parts(functions, device)
        return cls(**functions, parts=tuple(parts))

    def find_part(self, kind: type[P]) -> P | None:
        """Return the part of this class, if these functions have one."""
        return find_part(self.parts, kind)


def check_model_module(module: ModuleType, config: TrainingConfig, ctx: DistributedContext) -> None:
    """Refuse what model.py cannot do. Call on every rank before the data are loaded, since these may be downloaded.

    Args:
        module: has the functions of model.py.
        config: as the user gave it, with `auto` in fields that the data will resolve.

    Raises:
        UserError: on every rank, if a required function is missing, or if check_config raises it on one of them.
    """
    check_config = ModelHooks.from_module(module).check_config
    if check_config is not None:
        on_all_ranks(functools.partial(check_config, config), ctx)
