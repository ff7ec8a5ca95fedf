"""Optimizer and learning rate."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from config import TrainingConfig
from utils.batch import map_leaves, map_tensors
from utils.distributed.dtensor import create_dtensor, local_shard, shard_like
from utils.settings.errors import UserError

# entries of a parameter group that come from the config or the machine at each start
KEYS_SET_AT_START = {"params", "lr", "base_lr", "foreach", "fused", "capturable"}
SCHEDULE_SHAPES = {  # schedules after the warm-up: fraction done (0 to 1) -> factor
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


def check_param_groups(groups: Any, names: Mapping[Any, str]) -> list[dict[str, Any]]:
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


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Prepare an optimizer for steps that may be skipped. Returns whether it skips them on the device (`found_inf`).

    Raises UserError if its `step` needs a closure.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"create_optimizer: {type(optimizer).__name__} needs a closure that computes the loss again, which a global"
            " batch on many ranks does not have; use another optimizer"
        )
    has_parts = optimizer.state_dict().keys() >= {"state", "param_groups"}
    if not has_parts or any("lr" not in group for group in optimizer.param_groups):
        raise UserError(
            f"create_optimizer: {type(optimizer).__name__} has no 'lr' in its groups, or no 'state' and 'param_groups'"
            " in its state_dict, as torch's optimizers have; use another optimizer"
        )
    fill_momentum_buffers(optimizer)
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]
    return can_skip_on_device(optimizer)


def fill_momentum_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Fused SGD whose first step is skipped continues from uninitialised momentum; zeros give the same first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if isinstance(optimizer, torch.optim.SGD) and group["momentum"] else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def collect_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Any, str],
    parameters_by_tensor: Mapping[Any, nn.Parameter],
    initial_groups: list[dict[str, Any]],
) -> dict[str, Any]:
    """The optimizer's state dict, with the names of its parameters in its order, and what has changed in its groups.

    Args:
        names: the name of each tensor of the optimizer.
        parameters_by_tensor: the parameter of each of these tensors, which is the tensor itself or sharded.
        initial_groups: `copy_group_entries` when it was created.
    """
    tensors, saved = _list_tensors(optimizer), optimizer.state_dict()
    states: dict[Any, Any] = {}
    for number, state in saved["state"].items():
        states[number] = state
        if isinstance(number, int):  # else a value of all parameters, such as the count of MADGRAD
            p = tensors[number]
            states[number] = dict(state)
            for key, value in state.items():
                if _is_tensor(value) and value.shape == p.shape:
                    states[number][key] = create_dtensor(value, parameters_by_tensor[p])
    return saved | {
        "state": states,
        "names": [names[p] for p in tensors],
        "changed_in_groups": find_changed_entries(optimizer, initial_groups, names),
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    names: Mapping[Any, str],
    parameters_by_tensor: Mapping[Any, nn.Parameter],
) -> None:
    """Give each parameter the state saved under its name, whole or sharded, whatever the order of the groups.

    saved, names, parameters_by_tensor: as for `collect_optimizer_state`. Raises UserError if it is of other parameters.
    """
    tensors = _list_tensors(optimizer)
    before = {name: saved["state"].get(number, {}) for number, name in enumerate(saved.get("names", []))}
    is_other = before.keys() != {names[p] for p in tensors}
    shared = {key: value for key, value in saved["state"].items() if not isinstance(key, int)}
    states: dict[Any, Any] = map_tensors(Tensor.clone, shared)
    for number, p in enumerate([] if is_other else tensors):
        local_state = {
            key: local_shard(shard_like(value, parameters_by_tensor[p])) for key, value in before[names[p]].items()
        }
        if can_skip_on_device(optimizer):  # fused kernels do not check
            is_other |= any(value.shape != p.shape for key, value in local_state.items() if key != "step")
        states |= {number: local_state} if local_state else {}
    if is_other:
        remedy = "use the model.py it was made with, or load its weights with --init_from"
        raise UserError(f"the checkpoint's optimizer has different parameters; {remedy}")
    state_dict = optimizer.state_dict()
    other_entries = {key: saved[key] for key in state_dict.keys() & saved.keys() if key != "param_groups"}
    optimizer.load_state_dict(state_dict | other_entries | {"state": states})
    restore_group_entries(optimizer, saved.get("changed_in_groups", []), names)
    for number, p in enumerate(tensors):
        state = optimizer.state.get(p, {})
        # load_state_dict may have rounded to the type of the parameter, which fused kernels need
        exact = state if can_skip_on_device(optimizer) else states.get(number, {})
        for key, loaded in state.items():
            value = exact.get(key, loaded)
            if not (_is_tensor(value) and _is_tensor(loaded)):
                continue
            if key != "step" and value.shape == p.shape:
                # fused kernels iterate over memory: the layout must be the parameter's
                state[key] = torch.empty_like(p, dtype=value.dtype, device=loaded.device).copy_(value)
            else:
                state[key] = value.to(loaded.device, copy=True)  # not the file's memory
    fill_momentum_buffers(optimizer)  # if the checkpoint was made without


def copy_group_entries(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of each parameter group, without the entries that are set at each start."""
    groups = []
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key not in KEYS_SET_AT_START})
    return map_tensors(Tensor.clone, groups)


def find_changed_entries(
    optimizer: torch.optim.Optimizer, initial_groups: list[dict[str, Any]], names: Mapping[Any, str]
) -> list[dict[str, Any]]:
    """What has changed in each parameter group since the optimizer was created.

    Optimizers outside torch keep counts and estimates there, for example Adan, Lamb and Prodigy.

    Args:
        initial_groups: `copy_group_entries` of that time.
        names: of the parameters.

    Returns:
        For each group {"names": those of its parameters, "entries": the values by key}.
    """
    records = []
    for group, now, before in zip(optimizer.param_groups, copy_group_entries(optimizer), initial_groups, strict=False):
        entries = {key: value for key, value in now.items() if key not in before or not _is_same(value, before[key])}
        records.append({"names": [names[p] for p in group["params"]], "entries": entries})
    return records


def restore_group_entries(
    optimizer: torch.optim.Optimizer, records: list[dict[str, Any]], names: Mapping[Any, str]
) -> None:
    """Restore the saved entries of each parameter group. Entries that were not saved keep their new values.

    Groups are matched by the names of their parameters.

    Args:
        records: of `find_changed_entries`.
        names: of the parameters.

    Raises:
        UserError: if there is no such group for an entry.
    """
    groups = {frozenset(names[p] for p in group["params"]): group for group in optimizer.param_groups}
    for record in records:
        group = groups.get(frozenset(record["names"]))
        for key, value in record["entries"].items():
            if group is None:
                raise UserError(
                    f"the checkpoint's optimizer has {key!r} for the group of {record['names'][0]}, and no group has"
                    " the same parameters now; divide them as before in param_groups, or start a new run with"
                    " --init_from"
                )
            device = _list_tensors(optimizer)[0].device
            group[key] = map_tensors(functools.partial(Tensor.to, device=device, copy=True), value)


def _is_same(left: Any, right: Any) -> bool:
    return bool(map_leaves(_to_comparable, left) == map_leaves(_to_comparable, right))


def _to_comparable(value: Any) -> Any:
    """The numbers of a tensor or an array, or another value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _list_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that it updates, in the order in which it numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
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
    fraction_done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    least = config.min_lr / config.lr
    return least + (1 - least) * SCHEDULE_SHAPES[config.schedule](fraction_done)


def list_group_lr_factors(groups: list[dict[str, Any]], factor: float | dict[str, float]) -> list[float]:
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
