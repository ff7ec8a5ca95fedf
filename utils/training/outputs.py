"""The outputs of model.predict for a whole set, in the order of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from utils.settings.errors import UserError

NAMES_DIFFER = "model.predict returned different names for different batches. Return the same names for every batch."


class OutputCollector:
    """Collects what `predict` returns for this rank's samples, on the CPU.

    Args:
        seed_predict: is called with the indices of a micro-batch before `predict`, which may draw random numbers.
    """

    def __init__(
        self,
        predict: Callable[[nn.Module, Any], dict[str, Tensor]],
        seed_predict: Callable[[Sequence[int]], object],
    ) -> None:
        self._predict = predict
        self._seed_predict = seed_predict
        self.indices: list[int] = []
        self.batches_by_name: dict[str, list[Tensor]] = {}

    def add(
        self,
        model: nn.Module,
        batch: Any,
        indices: Sequence[int],
        is_padding: bool = False,
    ) -> None:
        """Compute the outputs for a micro-batch, and keep them unless it is padding.

        Args:
            indices: of the samples in the batch.

        Raises:
            UserError: if the outputs are invalid.
        """
        self._seed_predict(indices)
        outputs = self._predict(model, batch)
        check_outputs(outputs, len(indices))
        if self.batches_by_name and outputs.keys() != self.batches_by_name.keys():
            raise UserError(NAMES_DIFFER)
        for name in outputs:
            self.batches_by_name.setdefault(name, [])
        if not is_padding:
            for name, output in outputs.items():
                output_copy = output.detach().to("cpu", copy=True)  # a view would keep all of its tensor
                self.batches_by_name[name].append(output_copy)
            self.indices += indices

    def to_dict(self) -> dict[str, Any]:
        """Return the outputs of this rank, as `sort_by_sample` takes them."""
        return {"indices": self.indices, "outputs": self.batches_by_name}


def check_outputs(outputs: object, samples: int) -> None:
    """Raise UserError if this is not a dict of tensors with one row per sample."""
    if not isinstance(outputs, dict):
        raise UserError(f"model.predict returned a {type(outputs).__name__}. Return {{name: tensor [B, ...]}}.")
    for name, output in outputs.items():
        if not isinstance(output, Tensor):
            raise UserError(
                f"model.predict returned {name} as a {type(output).__name__}. Return {{name: tensor [B, ...]}}."
            )
        if output.shape[:1] != (samples,):
            raise UserError(
                f"model.predict returned {name} with the shape {list(output.shape)} for {samples} samples."
                " Return one row per sample."
            )


def sort_by_sample(rank_outputs: list[dict[str, Any]], samples: int) -> dict[str, Tensor | list[Tensor]]:
    """Return the outputs of all ranks by name, in the order of the samples.

    Args:
        rank_outputs: what `OutputCollector.to_dict` returned on each rank.
        samples: in the set.

    Returns:
        Tensors [samples, ...], or a list of rows where the shapes of the rows differ between batches.
    """
    indices: list[int] = []
    for rank_output in rank_outputs:
        indices += rank_output["indices"]
    order = torch.tensor(indices).argsort()
    if len(order) != samples:
        raise RuntimeError(f"The loader gave {len(order)} outputs for {samples} samples. This is a bug in the loader.")
    merged: dict[str, Tensor | list[Tensor]] = {}
    for name in rank_outputs[0]["outputs"]:
        batches: list[Tensor] = []
        for rank_output in rank_outputs:
            batches += rank_output["outputs"][name]
        row_shapes = {batch.shape[1:] for batch in batches}
        if len(row_shapes) == 1:
            merged[name] = torch.cat(batches)[order]
        else:
            rows: list[Tensor] = []
            for batch in batches:
                rows.extend(batch)
            merged[name] = [rows[index] for index in order.tolist()]
    return merged
