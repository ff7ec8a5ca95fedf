"""Metrics are sums and counts that stay on the device until a log point, where they are summed over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from config import UserError

Metrics = dict[str, tuple]  # name -> (sum, count) or (sum, count, function of their quotient); tensors or numbers


class MetricTracker:
    """Adds up sums and counts by name, in float64, without reading from the device. `totals` reads, once."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._finish: dict[str, Callable[[float], float]] = {}
        self.reset()

    def reset(self) -> None:
        self._numbers: dict[str, float] = {}  # keyed "<name>/sum" and "<name>/count"
        self._tensors: dict[str, Tensor] = {}  # 0-dimensional, float64, on the device

    def update(self, metrics: Metrics) -> None:
        """Add one micro-batch's metrics: {name: (sum, count)}, each a number or a 0-dimensional tensor.

        A third entry is a function that the mean goes through when it is read: (nll, tokens, math.exp) is a perplexity.
        """
        for name, entry in metrics.items():
            self._add(f"{name}/sum", entry[0])
            self._add(f"{name}/count", entry[1])
            if len(entry) > 2:
                self._finish[name] = entry[2]

    def _add(self, key: str, value: Tensor | float) -> None:
        if not isinstance(value, Tensor):
            self._numbers[key] = self._numbers.get(key, 0.0) + value
        elif (total := self._tensors.get(key)) is not None:
            total.add_(value.detach())
        else:
            self._tensors[key] = value.detach().to(self._device, torch.float64, copy=True)

    def totals(self) -> dict[str, float]:
        """This rank's sums and counts by key; reads from the device once."""
        values = torch.stack(list(self._tensors.values())).tolist() if self._tensors else []
        totals = dict(self._numbers)
        for key, value in zip(self._tensors, values, strict=True):
            totals[key] = totals.get(key, 0.0) + value
        return totals

    def means(self, ranks: list[dict[str, float]] | None = None) -> dict[str, float]:
        """The mean of each name over the totals of all ranks (by default of this one), in order of first update."""
        ranks = [self.totals()] if ranks is None else ranks
        keys = dict.fromkeys(key for totals in ranks for key in totals)
        names = dict.fromkeys(key.rpartition("/")[0] for key in keys)
        means = {}
        for name in names:
            total, count = (sum(totals.get(f"{name}/{part}", 0.0) for totals in ranks) for part in ("sum", "count"))
            mean = total / count if count else math.nan
            try:
                means[name] = self._finish[name](mean) if name in self._finish else mean
            except OverflowError:  # exp of a loss that blew up
                means[name] = math.inf
        return means

    def state(self) -> dict[str, dict[str, float]]:
        """What `load_state` takes. Device and host sums apart, so that a resumed run adds in the same order."""
        return {"tensors": {key: value.item() for key, value in self._tensors.items()}, "numbers": dict(self._numbers)}

    def load_state(self, state: dict[str, dict[str, float]]) -> None:
        self.reset()
        self.add_state(state)

    def add_state(self, state: dict[str, dict[str, float]]) -> None:
        for key, value in state["numbers"].items():
            self._add(key, value)
        for key, value in state["tensors"].items():
            self._add(key, torch.tensor(value, dtype=torch.float64, device=self._device))


def choose_best(asked: str, names: list[str]) -> tuple[str, int]:
    """The name that the best checkpoint is chosen by, and 1 where the highest value is best, -1 where the lowest is.

    Args:
        asked: `best_metric` of the config: auto, NAME, min:NAME or max:NAME. A loss is better when it is lower.
        names: what an evaluation reports.
    """
    direction, _, name = asked.rpartition(":")
    if name == "auto":
        name = "top1" if "top1" in names else "loss"
    if name not in names:
        raise UserError(f"best_metric={asked}: an evaluation reports {', '.join(names)}; choose one of these")
    is_lowest = direction == "min" or (not direction and name == "loss")
    return name, -1 if is_lowest else 1


def count_correct(logits: Tensor, targets: Tensor, k: int = 1) -> Tensor:
    """How many samples have their target among the k largest logits: int64, 0-dimensional, on the logits' device.

    Args:
        logits: [B, classes].
        targets: int64 [B].
        k: above the number of classes it counts as that number.
    """
    if k == 1:
        return (logits.argmax(1) == targets).sum()
    return (logits.topk(min(k, logits.shape[1])).indices == targets[:, None]).sum()


def compute_accuracy(logits: Tensor, targets: Tensor, k: int = 1) -> Tensor:
    """The top-k accuracy as a fraction of 1: float32, 0-dimensional, on the logits' device."""
    return count_correct(logits, targets, k) / max(1, len(targets))


def all_reduce_scalar(value: float, op: str = "mean", group: Any = None) -> float:
    """A number reduced over the ranks: op is mean, sum, min or max. float64, on the CPU where the group is gloo."""
    ops = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    if op not in ops:
        raise ValueError(f"op={op}: is not known; choose {', '.join(ops)}")
    if not dist.is_initialized():
        return float(value)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=ops[op], group=group)
    return tensor.item() / (dist.get_world_size(group) if op == "mean" else 1)
