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


def create_optimizer(groups: list[dict[str, Any]], config: TrainingConfig) -> torch.optim.Optimizer:
    """Create the fused optimizer for `--optimizer`. It reads `found_inf` on the device, and skips a step there.

    Args:
        groups: from model.param_groups: each has "params" and may have its own "lr", "weight_decay" and "name".
    """
    if config.optimizer == "adamw":
        return torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.momentum, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov and config.momentum > 0,
        weight_decay=config.weight_decay,
        fused=True,
    )


def check_param_groups(groups: Any, names: Mapping[Any, str]) -> list[dict[str, Any]]:
    """Check the parameter groups, and return new ones with only the trainable parameters.

    Args:
        groups: what model.param_groups returned.
        names: the names of the model's parameters.

    Raises:
        UserError: if the groups cannot be trained.
    """

    def is_group(group: Any) -> bool:
        return isinstance(group, dict) and "params" in group

    if not isinstance(groups, list | tuple) or not all(map(is_group, groups)):
        raise UserError(
            'param_groups returned no list of groups. Return a list, e.g. [{"params": list(model.parameters())}].'
        )
    groups = [group | {"params": list(group["params"])} for group in groups]
    seen: set[Tensor] = set()
    for group in groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UserError(
                    "param_groups holds a parameter that is not in the model, so ranks would not share its gradient."
                    " Register the parameter in the model."
                )
            if parameter in seen:
                raise UserError(
                    f"param_groups lists {names[parameter]} twice, so the parameter would be updated twice (a tied"
                    " weight has two names and is one parameter). List each parameter once, as model.parameters() does."
                )
            seen.add(parameter)

    trained = []
    for group in groups:
        trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
        if trainable:
            trained.append(group | {"params": trainable})
    if not trained:
        raise UserError("param_groups has no trainable parameter. Return some with requires_grad=True.")
    return trained


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Prepare an optimizer for steps that may be skipped.

    Returns:
        Whether the optimizer skips them itself, on the device (`found_inf`).

    Raises:
        UserError: if `step` of the optimizer needs a closure, or the optimizer has no groups or state as in torch.
    """
    step_parameters = inspect.signature(type(optimizer).step).parameters
    closure = step_parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{type(optimizer).__name__} of create_optimizer needs a closure that computes the loss again, which a"
            " global batch on many ranks does not have. Use another optimizer."
        )
    has_state = optimizer.state_dict().keys() >= {"state", "param_groups"}
    if not has_state or any("lr" not in group for group in optimizer.param_groups):
        raise UserError(
            f"{type(optimizer).__name__} of create_optimizer has no 'lr' in its groups, or no 'state' and"
            " 'param_groups' in its state_dict, as torch's optimizers have. Use another optimizer."
        )
    fill_momentum_buffers(optimizer)
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]
    return can_skip_on_device(optimizer)


def fill_momentum_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter of SGD with momentum a buffer of zeros, unless it has one. Call before the first step.

    Fused SGD allocates a missing buffer in its first step, without values. If that step is skipped, the next step
    would go on from uninitialised memory. With zeros the first step is the same as without a buffer: the momentum
    becomes the gradient.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def collect_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Any, str],
    parameters_by_tensor: Mapping[Any, nn.Parameter],
    initial_groups: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the optimizer's state dict, with the names of its parameters in its order, and what changed in its groups.

    Args:
        names: the name of each tensor of the optimizer.
        parameters_by_tensor: the parameter of each of these tensors, which is the tensor itself or sharded.
        initial_groups: what `copy_group_entries` returned when the optimizer was created.
    """
    tensors = list_optimizer_tensors(optimizer)
    saved = optimizer.state_dict()
    states: dict[Any, Any] = {}
    for number, state in saved["state"].items():
        if not isinstance(number, int):
            states[number] = state  # a value of all parameters, such as the count of MADGRAD
            continue
        tensor = tensors[number]
        states[number] = dict(state)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == tensor.shape:
                states[number][key] = create_dtensor(value, parameters_by_tensor[tensor])
    return saved | {
        "state": states,
        "names": [names[tensor] for tensor in tensors],
        "changed_in_groups": find_changed_entries(optimizer, initial_groups, names),
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    names: Mapping[Any, str],
    parameters_by_tensor: Mapping[Any, nn.Parameter],
) -> None:
    """Give each parameter the state saved under its name, whole or sharded, whatever the order of the groups.

    Args:
        saved: what `collect_optimizer_state` returned.
        names: the name of each tensor of the optimizer.
        parameters_by_tensor: the parameter of each of these tensors, which is the tensor itself or sharded.

    Raises:
        UserError: if the saved state is of other parameters.
    """
    tensors = list_optimizer_tensors(optimizer)
    is_fused = can_skip_on_device(optimizer)
    saved_states: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(saved.get("names", [])):
        saved_states[name] = saved["state"].get(number, {})
    if saved_states.keys() != {names[tensor] for tensor in tensors}:
        raise _explain_other_parameters()

    shared = {}  # values of all parameters, such as the count of MADGRAD
    for key, value in saved["state"].items():
        if not isinstance(key, int):
            shared[key] = value
    states: dict[Any, Any] = map_tensors(Tensor.clone, shared)
    for number, tensor in enumerate(tensors):
        local_state = {}
        for key, value in saved_states[names[tensor]].items():
            local_value = local_shard(shard_like(value, parameters_by_tensor[tensor]))
            # fused kernels do not check the shape
            if is_fused and key != "step" and local_value.shape != tensor.shape:
                raise _explain_other_parameters()
            local_state[key] = local_value
        if local_state:
            states[number] = local_state

    state_dict = dict(optimizer.state_dict())
    for key in state_dict:
        if key in saved and key != "param_groups":
            state_dict[key] = saved[key]
    state_dict["state"] = states
    optimizer.load_state_dict(state_dict)
    restore_group_entries(optimizer, saved.get("changed_in_groups", []), names)

    for number, tensor in enumerate(tensors):
        loaded_state = optimizer.state.get(tensor, {})
        exact_state = loaded_state
        if not is_fused:
            # load_state_dict may have rounded to the type of the parameter, which fused kernels need
            exact_state = states.get(number, {})
        for key, loaded in loaded_state.items():
            value = exact_state.get(key, loaded)
            if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                continue
            if key != "step" and value.shape == tensor.shape:
                # fused kernels iterate over memory: the layout must be the parameter's
                target = torch.empty_like(tensor, dtype=value.dtype, device=loaded.device)
                loaded_state[key] = target.copy_(value)
            else:
                loaded_state[key] = value.to(loaded.device, copy=True)  # not the file's memory
    fill_momentum_buffers(optimizer)  # if the checkpoint was made without


def _explain_other_parameters() -> UserError:
    return UserError(
        "The checkpoint's optimizer has different parameters. Use the model.py of the checkpoint, or load its weights"
        " with --init_from."
    )


def copy_group_entries(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of each parameter group, without the entries that are set at each start."""
    groups = []
    for group in optimizer.param_groups:
        entries = {}
        for key, value in group.items():
            if key not in KEYS_SET_AT_START:
                entries[key] = value
        groups.append(entries)
    return map_tensors(Tensor.clone, groups)


def find_changed_entries(
    optimizer: torch.optim.Optimizer,
    initial_groups: list[dict[str, Any]],
    names: Mapping[Any, str],
) -> list[dict[str, Any]]:
    """Find what has changed in each parameter group since the optimizer was created.

    Optimizers outside torch keep counts and estimates in the groups, for example Adan, Lamb and Prodigy.

    Args:
        initial_groups: what `copy_group_entries` returned then.
        names: the names of the parameters.

    Returns:
        For each group {"names": the names of its parameters, "entries": the changed values by key}.
    """
    records = []
    current_groups = copy_group_entries(optimizer)
    for group, current, initial in zip(optimizer.param_groups, current_groups, initial_groups, strict=False):
        changed = {}
        for key, value in current.items():
            if key not in initial or not _is_same(value, initial[key]):
                changed[key] = value
        group_names = [names[p] for p in group["params"]]
        records.append({"names": group_names, "entries": changed})
    return records


def restore_group_entries(
    optimizer: torch.optim.Optimizer,
    records: list[dict[str, Any]],
    names: Mapping[Any, str],
) -> None:
    """Restore the saved entries of each parameter group. Entries that were not saved keep their new values.

    Groups are matched by the names of their parameters.

    Args:
        records: what `find_changed_entries` returned.
        names: the names of the parameters.

    Raises:
        UserError: if there is no such group for an entry.
    """
    groups = {}
    for group in optimizer.param_groups:
        group_names = frozenset(names[p] for p in group["params"])
        groups[group_names] = group
    device = list_optimizer_tensors(optimizer)[0].device
    copy_to_device = functools.partial(Tensor.to, device=device, copy=True)
    for record in records:
        current_group = groups.get(frozenset(record["names"]))
        for key, value in record["entries"].items():
            if current_group is None:
                raise UserError(
                    f"The checkpoint's optimizer has {key!r} for the group of {record['names'][0]}, and no group has"
                    " the same parameters now. Divide the parameters as before in param_groups, or start a new run"
                    " with --init_from."
                )
            current_group[key] = map_tensors(copy_to_device, value)


def _is_same(left: Any, right: Any) -> bool:
    return bool(map_leaves(_to_comparable, left) == map_leaves(_to_comparable, right))


def _to_comparable(value: Any) -> Any:
    """Return the numbers of a tensor or an array, or another value as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def list_optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that the optimizer updates, in the order in which it numbers them."""
    tensors: list[Tensor] = []
    for group in optimizer.param_groups:
        tensors.extend(group["params"])
    return tensors


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer skips a step itself, on the device, where `found_inf` is 1."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def lr_factor(
    config: TrainingConfig,
    step: int,
    total_steps: int,
    warmup_steps: int,
    progress: Any,
) -> float:
    """Return the factor on the peak learning rate at optimizer step `step` (from 0): linear warm-up, then `--schedule`.

    cosine: to zero (Loshchilov and Hutter, "SGDR", 2017, equation 5 with one cycle); linear: to zero; constant;
    wsd (warm-up, stable, decay): constant, and linear to zero over the last 20 % (Hu et al., "MiniCPM", 2024);
    step: divided by 10 after 50 % and after 75 %. With `--min_lr` the factors of 1 to 0 become those of lr to min_lr.
    The warm-up is that of Goyal et al., 2017, arXiv:1706.02677, section 2.2.

    Args:
        total_steps: the step at which the schedule ends: the length of the run, or `--schedule_steps`.
        progress: of the run; a schedule of your own may read it, and keep its state in `progress.user`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    steps_after_warmup = max(1, total_steps - warmup_steps)
    fraction_done = min(1.0, (step - warmup_steps) / steps_after_warmup)
    least = config.min_lr / config.lr
    return least + (1 - least) * _compute_decay(config.schedule, fraction_done)


def _compute_decay(schedule: str, fraction_done: float) -> float:
    """Return the factor, from 1 to 0, of a schedule after the warm-up. fraction_done: 0 to 1, of these steps."""
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * fraction_done))
    if schedule == "linear":
        return 1 - fraction_done
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        return min(1.0, (1 - fraction_done) / 0.2)
    if schedule == "step":
        if fraction_done < 0.5:
            return 1.0
        return 0.1 if fraction_done < 0.75 else 0.1**2
    raise KeyError(schedule)


def list_group_lr_factors(groups: list[dict[str, Any]], factor: float | dict[str, float]) -> list[float]:
    """Return the factor on the learning rate of each group.

    Args:
        factor: what `lr_factor` returned: one for all groups, or one for each name of a group.

    Raises:
        UserError: if the names of groups and factors do not fit.
    """
    if not isinstance(factor, dict):
        return [factor] * len(groups)
    names: list[Any] = [group.get("name") for group in groups]
    if None in names:
        number = names.index(None)
        raise UserError(
            f'lr_factor returned a factor per group, but group {number} has no "name". Add a name in param_groups.'
        )
    wrong = sorted(set(names) ^ factor.keys())
    if wrong:
        fault = "has no factor" if wrong[0] in names else "has no trainable parameters in param_groups"
        different_names = ", ".join(dict.fromkeys(names))
        raise UserError(f"The group {wrong[0]} of lr_factor {fault}. Return one factor for each of {different_names}.")
    return [factor[name] for name in names]
