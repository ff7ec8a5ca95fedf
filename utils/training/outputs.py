"""The outputs of model.predict for a whole set, in the order of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from utils.settings.errors import UserError

NAMES_DIFFER = "model.predict: returned different names for different batches; return the same names for every batch"


class OutputCollector:
    """What `predict` returned for this rank's samples, on the CPU.

    seed_predict: called with the indices of a micro-batch before `predict`, which may draw random numbers.
    """

    def __init__(
        self,
        predict: Callable[[nn.Module, Any], dict[str, Tensor]],
        seed_predict: Callable[[Sequence[int]], object],
    ) -> None:
        self._predict, self._seed_predict = predict, seed_predict
        self.indices: list[int] = []
        self.batches_by_name: dict[str, list[Tensor]] = {}  # by name

    def add(self, model: nn.Module, batch: Any, indices: Sequence[int], is_padding: bool = False) -> None:
        """Compute the outputs for a micro-batch of these samples. Raises UserError if they are invalid."""
        self._seed_predict(indices)
        outputs = self._predict(model, batch)
        check_outputs(outputs, len(indices))
        if self.batches_by_name and outputs.keys() != self.batches_by_name.keys():
            raise UserError(NAMES_DIFFER)
        for name, output in outputs.items():
            batches = self.batches_by_name.setdefault(name, [])
            if not is_padding:
                batches.append(output.detach().to("cpu", copy=True))  # a view would keep all of its tensor
        self.indices += [] if is_padding else indices

    def to_dict(self) -> dict[str, Any]:
        return {"indices": self.indices, "outputs": self.batches_by_name}


def check_outputs(outputs: object, samples: int) -> None:
    """Raises UserError if this is not a dict of tensors with one row per sample."""
    named = outputs.items() if isinstance(outputs, dict) else [("the result", outputs)]
    for name, output in named:
        if not isinstance(outputs, dict) or not isinstance(output, Tensor):
            raise UserError(f"model.predict: {name} is a {type(output).__name__}; return {{name: tensor [B, ...]}}")
        if output.shape[:1] != (samples,):
            raise UserError(
                f"model.predict: {name} has the shape {list(output.shape)} for {samples} samples; return one row per"
                " sample"
            )


def sort_by_sample(rank_outputs: list[dict[str, Any]], samples: int) -> dict[str, Tensor | list[Tensor]]:
    """The outputs of all ranks in the order of the samples; a list of rows where shapes differ between batches."""
    order = torch.tensor([index for rank_output in rank_outputs for index in rank_output["indices"]]).argsort()
    if len(order) != samples:
        raise RuntimeError(f"{len(order)} outputs for {samples} samples; this is a bug in the loader")
    merged: dict[str, Tensor | list[Tensor]] = {}
    for name in rank_outputs[0]["outputs"]:
        batches = [batch for rank_output in rank_outputs for batch in rank_output["outputs"][name]]
        if len({batch.shape[1:] for batch in batches}) == 1:
            merged[name] = torch.cat(batches)[order]
        else:
            rows = [row for batch in batches for row in batch]
            merged[name] = [rows[k] for k in order.tolist()]
    return merged
