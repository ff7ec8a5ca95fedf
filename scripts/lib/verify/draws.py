# extra: verify
"""Random numbers that compute_loss and predict draw, and label smoothing in an evaluation."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lib.values import digest, generators
from lib.verify.fork import Broken, Fork, Subset

DROPS = re.compile("dropout|rrelu|attention")


class Advancing(TorchFunctionMode):
    """Lets each function draw other numbers from the generator that it is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if generator := kwargs.get("generator"):
            torch.rand((), generator=generator, device=generator.device)
        return func(*args, **kwargs)


class Dropping(TorchFunctionMode):
    """Notes the names of torch's dropout functions, and of those with a dropout, that draw random numbers, and whether
    labels are smoothed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.smooths = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "cross_entropy":
            self.smooths |= kwargs.get("label_smoothing", args[7] if len(args) > 7 else 0.0) > 0
        if not DROPS.search(name):
            return func(*args, **kwargs)
        before = generators()
        result = func(*args, **kwargs)
        self.found += [name] * (generators() != before)
        return result


def draws_in_evaluation(fork: Fork, subset: Subset, net: nn.Module) -> str:
    """A note if the result depends on what torch's generators draw, and if labels are smoothed. Raises Broken if a
    dropout draws."""
    with Dropping() as dropping:
        values = [fork.plain_evaluation(subset, net, split=split) for split in ("val", "another")]
    if dropping.found:
        raise Broken(
            f"{dropping.found[0]} drops values in evaluation mode; pass training=self.training to F.dropout and similar"
            " functions, or use nn.Dropout"
        )
    drawn = [name for name in values[0] if digest(values[0][name]) != digest(values[1][name])]
    notes = [f"{name} depends on random numbers: the same ones for each eval_batch_size" for name in drawn[:1]]
    if dropping.smooths:
        notes.append("labels are smoothed in evaluation too; do that only if torch.is_grad_enabled()")
    return "".join(f"; please check: {note}" for note in notes)
