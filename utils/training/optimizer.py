"""Optimizer and learning rate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from config import TrainingConfig, UserError
from utils.distributed.dtensor import local, shard_of, wrap

SHAPES = {  # schedules after the warm-up: fraction done (0 to 1) -> factor
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
    "wsd": lambda done: min(1.0, (1 - done) / 0.2),
    "step": lambda done: 0.1 ** ((done >= 0.5) + (done >= 0.75)),
}


def create_optimizer(groups: list[dict[str, Any]], config: TrainingConfig) -> torch.optim.Optimizer:
    """The fused optimizer for `--optimizer`: it reads `found_inf` on the device and skips a step there.

    Args:
        groups: from model.param_groups: each has "params" and may have its own "lr", "weight_decay" and "name".
    """
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=(config.momentum, config.beta2), **common)
    nesterov = config.nesterov and config.momentum > 0
    return torch.optim.SGD(groups, momentum=config.momentum, nesterov=nesterov, **common)


def checked_groups(groups: Any, names: Mapping[Any, str]) -> list[dict[str, Any]]:
    """The groups with only the trainable parameters. Raises UserError if they cannot be trained.

    Args:
        names: of the model's parameters.
    """
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, dict) and "params" in group for group in groups
    ):
        raise UserError('param_groups: returned no list of groups; return e.g. [{"params": list(model.parameters())}]')
    groups = [group | {"params": list(group["params"])} for group in groups]
    seen: set[Tensor] = set()
    for group in groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UserError(
                    "param_groups: holds a parameter that is not in the model, so ranks would not share its gradient;"
                    " register it in the model"
                )
            if parameter in seen:
                raise UserError(
                    f"param_groups: lists {names[parameter]} twice, which would be updated twice (a tied weight has two"
                    " names and is one parameter); list each parameter once, as model.parameters() does"
                )
            seen.add(parameter)
    trained = [group | {"params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    trained = [group for group in trained if group["params"]]
    if not trained:
        raise UserError("param_groups: has no trainable parameter; return some with requires_grad=True")
    return trained


def prepare(optimizer: torch.optim.Optimizer) -> bool:
    """Prepare an optimizer for steps that may be skipped. Returns whether it skips them on the device (`found_inf`).

    Raises UserError if its `step` needs a closure.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"create_optimizer: {type(optimizer).__name__} needs a closure that computes the loss again, which a global"
            " batch on many ranks does not have; use another optimizer"
        )
    fill_momenta(optimizer)
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]
    return skips_on_device(optimizer)


def fill_momenta(optimizer: torch.optim.Optimizer) -> None:
    """Fused SGD whose first step is skipped continues from uninitialised momentum; zeros give the same first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if isinstance(optimizer, torch.optim.SGD) and group["momentum"] else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str], owners: Mapping[Any, nn.Parameter]
) -> dict[str, Any]:
    """Its state dict, with the names of its parameters in its order.

    names, owners: of each of its tensors: the name, and the parameter, which is the tensor itself or sharded.
    """
    held, saved = _held(optimizer), optimizer.state_dict()
    states = {}
    for number, state in saved["state"].items():
        p = held[number]
        states[number] = {
            key: wrap(value, owners[p]) if _is_tensor(value) and value.shape == p.shape else value
            for key, value in state.items()
        }
    return saved | {"state": states, "names": [names[p] for p in held]}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    names: Mapping[Any, str],
    owners: Mapping[Any, nn.Parameter],
) -> None:
    """Give each parameter the state saved under its name, whole or sharded, whatever the order of the groups.

    saved, names, owners: as for `optimizer_state`. Raises UserError if it is of other parameters.
    """
    held = _held(optimizer)
    before = {name: saved["state"].get(number, {}) for number, name in enumerate(saved.get("names", []))}
    is_other = before.keys() != {names[p] for p in held}
    states: dict[int, dict[str, Any]] = {}
    for number, p in enumerate([] if is_other else held):
        mine = {key: local(shard_of(value, owners[p])) for key, value in before[names[p]].items()}
        if skips_on_device(optimizer):  # fused kernels do not check
            is_other |= any(value.shape != p.shape for key, value in mine.items() if key != "step")
        states |= {number: mine} if mine else {}
    if is_other:
        remedy = "use the model.py it was made with, or load its weights with --init_from"
        raise UserError(f"the checkpoint's optimizer has different parameters; {remedy}")
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    for p in held:
        state = optimizer.state.get(p, {})
        for key, value in state.items():  # fused kernels iterate over memory: the layout must be the parameter's
            if key != "step" and _is_tensor(value) and value.shape == p.shape:
                state[key] = torch.empty_like(p).copy_(value)
            elif _is_tensor(value):
                state[key] = value.clone()  # not the file's memory
    fill_momenta(optimizer)  # if the checkpoint was made without


def _held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that it updates, in the order in which it numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it skips a step itself where `found_inf` is 1."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def lr_factor(config: TrainingConfig, step: int, total_steps: int, warmup_steps: int, progress: Any) -> float:
    """The factor on the peak learning rate at optimizer step `step` (from 0): linear warm-up, then `--schedule`.

    cosine: to zero (Loshchilov and Hutter, "SGDR", 2017, equation 5 with one cycle); linear: to zero; constant;
    wsd (warm-up, stable, decay): constant, and linear to zero over the last 20 % (Hu et al., "MiniCPM", 2024);
    step: divided by 10 after 50 % and after 75 %. With `--min_lr` the factors of 1 to 0 become those of lr to min_lr.
    The warm-up is that of Goyal et al., 2017, arXiv:1706.02677, section 2.2.

    Args:
        total_steps: at which the schedule ends: those of the run, or `--schedule_steps`.
        progress: of the run; a schedule of your own may read it, and keep its state in `progress.user`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    least = config.min_lr / config.lr
    return least + (1 - least) * SHAPES[config.schedule](done)


def factors_of(groups: list[dict[str, Any]], factor: float | dict[str, float]) -> list[float]:
    """The factor of each group. Raises UserError if the names of groups and factors do not fit.

    factor: what `lr_factor` returned: one for all groups, or one for each name of a group.
    """
    if not isinstance(factor, dict):
        return [factor] * len(groups)
    names: list[Any] = [group.get("name") for group in groups]
    if None in names:
        number = names.index(None)
        raise UserError(
            f'lr_factor: returned a factor per group, and group {number} has no "name"; add it in param_groups'
        )
    if wrong := sorted(set(names) ^ factor.keys()):
        fault = "has no factor" if wrong[0] in names else "is the name of no group with trainable parameters"
        raise UserError(
            f"lr_factor: {wrong[0]} {fault}; return one factor for each of {', '.join(dict.fromkeys(names))}"
        )
    return [factor[name] for name in names]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
