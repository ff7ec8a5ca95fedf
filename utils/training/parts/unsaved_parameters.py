"""`is_saved` of model.py: frozen parameters that checkpoints leave out, since create_model gives them their values.

It costs a digest of each, which is in the provenance of a checkpoint and is compared wherever that is loaded. Who
fine-tunes a large model with small adapters needs it.
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
    """Leaves frozen parameters out of checkpoints. Raises UserError if one of them is trained."""

    def __init__(self, model: nn.Module, is_saved: Callable[[str], bool] | None) -> None:
        self._model = model
        self._fingerprints = fingerprint_values(find_unsaved_parameters(model, is_saved))  # by name
        self.provenance = {}
        if self._fingerprints:
            self.provenance = {PROVENANCE_KEY: self._fingerprints}

    def save(self, state: dict[str, Any]) -> None:
        for kind in ("model", "ema"):
            if self._fingerprints:
                state[kind] = {name: value for name, value in state[kind].items() if name not in self._fingerprints}

    def before_load(self, payload: dict[str, Any]) -> dict[str, Any]:
        """With what the checkpoint has left out. Raises UserError if it had other values of that."""
        saved = payload.get("provenance", {}).get(PROVENANCE_KEY, {})
        completed = {}
        for kind in ("model", "ema"):
            if payload[kind]:
                completed[kind] = fill_in_unsaved(
                    payload[kind], saved, self._model, self._fingerprints, "the checkpoint"
                )
        return payload | completed


def fingerprint_values(values: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of the bytes of each tensor. Gathers sharded ones: call it on all ranks."""
    by_name = {}
    for name in sorted(values):
        data = gather_full_tensor(values[name].detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
        by_name[name] = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
    return by_name


def find_unsaved_parameters(model: nn.Module, is_saved: Callable[[str], bool] | None) -> dict[str, Tensor]:
    """The parameters that checkpoints leave out, by name. Raises UserError if one of them is trained."""
    if is_saved is None:
        return {}
    named = model.named_parameters(remove_duplicate=False)
    unsaved: dict[str, Tensor] = {name: parameter for name, parameter in named if not is_saved(name)}
    if trained := [name for name, parameter in unsaved.items() if parameter.requires_grad]:
        raise UserError(
            f"model.is_saved: leaves out {trained[0]}, which is trained; save it, or freeze it in create_model with"
            " requires_grad_(False)"
        )
    return unsaved


def complete_initial_weights(
    weights: dict[str, Any], model: nn.Module, is_saved: Callable[[str], bool] | None, source: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The weights of `--init_from`, and what the model has already. Raises UserError if they have other values."""
    unsaved_parameters = find_unsaved_parameters(model, is_saved)
    return fill_in_unsaved(weights, {}, model, fingerprint_values(unsaved_parameters), source), unsaved_parameters


def fill_in_unsaved(
    weights: dict[str, Any], saved: dict[str, str], model: nn.Module, current: dict[str, str], source: str
) -> dict[str, Any]:
    """The weights, and the model's own values of those that the checkpoint left out.

    Args:
        saved: digests, from the checkpoint; of what it left out.
        current: digests of what this model leaves out; empty if it leaves out nothing.
        source: where the weights come from, for messages.

    Raises UserError if the model has other values than the checkpoint was trained with.
    """
    names = saved.keys() | (current.keys() & weights.keys())
    if not names:
        return weights
    state_dict = model.state_dict()
    model_fingerprints = current | fingerprint_values(
        {name: state_dict[name] for name in names & state_dict.keys() - current.keys()}
    )
    # an average of 16-bit weights has more bits
    expected = (
        fingerprint_values({name: weights[name].to(state_dict[name].dtype) for name in current.keys() & weights.keys()})
        | saved
    )
    wrong = sorted(name for name in names if model_fingerprints.get(name) != expected[name])
    if wrong:
        raise UserError(
            f"{source}: was trained with other values of {join_first(wrong, 1)} than create_model gives, which is_saved"
            " left out of it; let create_model load the weights that it loaded then"
        )
    return {name: state_dict[name] for name in names} | weights
