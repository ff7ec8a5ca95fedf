"""`is_saved` of model.py: frozen parameters that checkpoints leave out, since create_model gives them their values.

It costs a digest of each parameter that is left out. The digests are in the provenance of a checkpoint, and are
compared wherever the checkpoint is loaded. Who fine-tunes a large model with small adapters needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from utils.distributed.dtensor import gather_full_tensor
from utils.logger import join_first
from utils.settings.errors import UserError
from utils.training.parts.part import Part

PROVENANCE_KEY = "unsaved"  # in the provenance


class UnsavedParameters(Part):
    """Leaves frozen parameters out of checkpoints.

    Args:
        is_saved: of model.py, if it has one: whether checkpoints hold the parameter of this name.

    Raises:
        UserError: if a parameter that is left out is trained.
    """

    def __init__(self, model: nn.Module, is_saved: Callable[[str], bool] | None) -> None:
        self._model = model
        unsaved_parameters = find_unsaved_parameters(model, is_saved)
        self._fingerprints = fingerprint_values(unsaved_parameters)  # by name
        self.provenance = {}
        if self._fingerprints:
            self.provenance = {PROVENANCE_KEY: self._fingerprints}

    def save(self, state: dict[str, Any]) -> None:
        if not self._fingerprints:
            return
        for kind in ("model", "ema"):
            kept = {}
            for name, value in state[kind].items():
                if name not in self._fingerprints:
                    kept[name] = value
            state[kind] = kept

    def before_load(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Add what the checkpoint has left out. Raises UserError if the values were others in its training."""
        saved = payload.get("provenance", {}).get(PROVENANCE_KEY, {})
        completed = {}
        for kind in ("model", "ema"):
            if payload[kind]:
                completed[kind] = fill_in_unsaved(
                    payload[kind],
                    saved=saved,
                    model=self._model,
                    current=self._fingerprints,
                    source="The checkpoint",
                )
        return payload | completed


def fingerprint_values(values: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of the bytes of each tensor. Gathers sharded tensors, so all ranks have to call it."""
    digests = {}
    for name in sorted(values):
        full_tensor = gather_full_tensor(values[name].detach())
        flat = full_tensor.cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        digests[name] = hashlib.sha256(data).hexdigest()[:16]
    return digests


def find_unsaved_parameters(model: nn.Module, is_saved: Callable[[str], bool] | None) -> dict[str, nn.Parameter]:
    """Return the parameters that checkpoints leave out, by name. Raises UserError if one of them is trained."""
    if is_saved is None:
        return {}
    unsaved = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_saved(name):
            unsaved[name] = parameter
    for name, parameter in unsaved.items():
        if parameter.requires_grad:
            raise UserError(
                f"model.is_saved leaves out {name}, which is trained. Save this parameter, or freeze the parameter in"
                " create_model with requires_grad_(False)."
            )
    return unsaved


def complete_initial_weights(
    weights: dict[str, Any],
    model: nn.Module,
    is_saved: Callable[[str], bool] | None,
    source: str,
) -> tuple[dict[str, Any], dict[str, nn.Parameter]]:
    """Return the weights of `--init_from`, and the parameters that the model has already.

    Raises:
        UserError: if the weights have other values of these parameters.
    """
    unsaved_parameters = find_unsaved_parameters(model, is_saved)
    completed = fill_in_unsaved(
        weights,
        saved={},
        model=model,
        current=fingerprint_values(unsaved_parameters),
        source=source,
    )
    return completed, unsaved_parameters


def fill_in_unsaved(
    weights: dict[str, Any],
    saved: dict[str, str],
    model: nn.Module,
    current: dict[str, str],
    source: str,
) -> dict[str, Any]:
    """Return the weights with the model's own values of those that the checkpoint left out.

    Args:
        saved: digests of what the checkpoint left out, from the checkpoint.
        current: digests of what this model leaves out. The dict is empty if the model leaves out nothing.
        source: where the weights come from, for messages.

    Raises:
        UserError: if the model has other values than the checkpoint was trained with.
    """
    names = saved.keys() | (current.keys() & weights.keys())
    if not names:
        return weights
    state_dict = model.state_dict()
    own_values = {}  # of the model
    weights_to_compare = {}
    for name in names:
        if name in state_dict and name not in current:
            own_values[name] = state_dict[name]
        if name in weights and name in current:
            # an average of 16-bit weights has more bits than the weights
            weights_to_compare[name] = weights[name].to(state_dict[name].dtype)
    model_fingerprints = current | fingerprint_values(own_values)
    expected = fingerprint_values(weights_to_compare) | saved
    wrong = sorted(name for name in names if model_fingerprints.get(name) != expected[name])
    if wrong:
        raise UserError(
            f"{source} was trained with other values of {join_first(wrong, 1)} than create_model gives, and is_saved"
            " left these values out of the checkpoint. Let create_model load the weights that it loaded then."
        )
    return {name: state_dict[name] for name in names} | weights
