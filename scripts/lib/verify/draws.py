"""Random numbers that compute_loss and predict draw in an evaluation."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lib.verify.fork import Broken, Fork, Subset
from lib.verify.values import digest

DROPS = re.compile("dropout|rrelu|attention")


class Dropping(TorchFunctionMode):
    """Notes the names of torch's dropout functions, and of those with a dropout, that draw random numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.found: list[str] = []
        self._states = [torch.random.get_rng_state]
        if device.type == "cuda":
            self._states.append(torch.cuda.get_rng_state)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not DROPS.search(name):
            return func(*args, **(kwargs or {}))
        before = digest([state() for state in self._states])
        result = func(*args, **(kwargs or {}))
        self.found += [name] * (digest([state() for state in self._states]) != before)
        return result


def draws_in_evaluation(fork: Fork, subset: Subset, net: nn.Module) -> str:
    """A note if the result depends on what torch's generators draw. Raises Broken if a dropout draws."""
    with Dropping(fork.ctx.device) as dropping:
        values = [fork.plain_evaluation(subset, net, split=split) for split in ("val", "another")]
    if dropping.found:
        raise Broken(
            f"{dropping.found[0]} drops values in evaluation mode; pass training=self.training to F.dropout and similar"
            " functions, or use nn.Dropout"
        )
    drawn = [name for name in values[0] if digest(values[0][name]) != digest(values[1][name])]
    if not drawn:
        return ""
    return f"; please check: {drawn[0]} depends on random numbers: the same ones for each eval_batch_size"
