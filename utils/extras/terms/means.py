"""What is reported of a loss of several terms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TermMeans:
    """What is reported of a loss of several terms: the sum of their quotients, and each of them as loss/name.

    It is the third entry of such a loss, whose sum and count are tensors [terms].
    """

    names: tuple[str, ...]

    def __call__(self, total: Tensor, count: Tensor) -> dict[str, float]:
        """A term that counted nothing adds nothing, and is NaN by itself."""
        quotients = torch.where(count == 0, total, total / count)  # a sum that is not finite stays so
        loss = quotients.sum() if count.any() else torch.tensor(math.nan)
        each = torch.where(count == 0, math.nan, quotients).tolist()
        return {"loss": loss.item()} | {f"loss/{name}": value for name, value in zip(self.names, each, strict=True)}
