"""Metrics are sums and counts of any shape. They stay on the device until a log point reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.logger import RESERVED_NAMES
from utils.settings.errors import UserError

Metrics = dict[str, tuple]  # name -> (sum, count) or (sum, count, function of their quotient); numbers or tensors
KNOWN_DIRECTIONS = {"loss": -1, "accuracy": 1, "top1": 1, "top5": 1}
INVALID_NAME_REASON = "which is not allowed (reserved, of a term of the loss, or with an empty part)"
METRICS_EXAMPLE = '{"loss": (loss_sum, len(labels)), "accuracy": (correct, len(labels))}'


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
        means = torch.where(count == 0, math.nan, quotients).tolist()
        return {"loss": loss.item()} | {f"loss/{name}": value for name, value in zip(self.names, means, strict=True)}


def is_metric_name(name: Any) -> bool:
    """Whether a metric may have this name. It may have slashes, as "rewards/margin" has."""
    if not isinstance(name, str) or name in RESERVED_NAMES or name.startswith("loss/"):
        return False
    return not {"", ".", ".."} & {*name.split("/")}  # trackers take the name for a path


def check_metrics(metrics: Any) -> Metrics:
    """Check and return the output of compute_loss. Raises UserError if it is not a dict of sums and counts."""

    def is_value(value: Any) -> bool:
        return isinstance(value, Tensor) or (isinstance(value, int | float) and not isinstance(value, bool))

    problem = ""
    if not isinstance(metrics, dict):
        problem = f"returned a {type(metrics).__name__}"
    elif "loss" not in metrics:
        problem = "returned no loss"
    else:
        for name, entry in metrics.items():
            is_entry = isinstance(entry, tuple | list) and len(entry) in (2, 3) and all(map(is_value, entry[:2]))
            if not is_metric_name(name):
                problem = f"returned a metric named {name!r}, {INVALID_NAME_REASON}"
            elif not is_entry or (len(entry) == 3 and not callable(entry[2])):
                problem = f"returned no (sum, count) or (sum, count, function) for {name}"
        if isinstance(metrics["loss"], dict):
            problem = "returned a loss of several terms, for which model.py must define"
            problem += " loss_counts(batch) -> {term: count}"
        if not problem:
            total, count, *transform = metrics["loss"]
            counts, ndim = torch.as_tensor(count).reshape(-1).tolist(), 0
            if any(isinstance(function, TermMeans) for function in transform):
                ndim = 1
            if not isinstance(total, Tensor) or total.ndim != ndim or not total.is_floating_point():
                problem = "returned a loss whose sum is not a 0-dimensional float tensor"
            elif torch.as_tensor(count).ndim != ndim:
                problem = "returned a loss whose count is not one number"
            elif not all(math.isfinite(number) and number >= 0 for number in counts):
                problem = f"returned a loss with a count of {', '.join(map(str, counts))}"
    if problem:
        raise UserError(f"model.compute_loss: {problem}; return sums and their counts, e.g. {METRICS_EXAMPLE}")
    return metrics


class MetricTracker:
    """Accumulates sums and counts by name in one float64 vector on the device. Only `means` reads from it, once.

    The first update fixes the names and shapes. Counts are exact up to 2^53.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._transforms: dict[str, Callable[[Any], Any]] = {}
        self._slices: dict[str, tuple[Tensor, Tensor]] = {}  # the sum and the count of each name: views of `values`
        self.values = torch.zeros(0, dtype=torch.float64, device=self._device)
        self._zero = torch.zeros((), dtype=torch.float64, device=self._device)

    def sum_view(self, name: str) -> Tensor:
        """A view: float64, on the device."""
        return self._slices[name][0]

    def count_view(self, name: str) -> Tensor:
        """A view: float64, on the device."""
        return self._slices[name][1]

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each sum and count."""
        return {key: list(tensor.shape) for key, tensor in self.state().items()}

    def allocate(self, metrics: Metrics, extra_size: int = 0) -> None:
        """Allocate zeros for metrics of these names and shapes, followed by `extra_size` more numbers."""
        shapes = [
            value.shape if isinstance(value, Tensor) else torch.Size()
            for entry in metrics.values()
            for value in entry[:2]
        ]
        sizes = [shape.numel() for shape in shapes]
        self.values = torch.zeros(sum(sizes) + extra_size, dtype=torch.float64, device=self._device)
        parts = self.values[: sum(sizes)].split(sizes)
        views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._slices = dict(zip(metrics, zip(views[::2], views[1::2], strict=True), strict=True))
        self._transforms = {name: entry[2] for name, entry in metrics.items() if len(entry) > 2}

    def update(self, metrics: Metrics) -> None:
        """Add one micro-batch's metrics: {name: (sum, count)}, numbers or tensors of any one shape.

        A third entry is a function that is applied to the quotient when it is read: (nll, tokens, math.exp) gives the
        perplexity. Raises UserError if names or shapes differ from the first update.
        """
        if not self._slices:
            self.allocate(metrics)
        is_same = metrics.keys() == self._slices.keys()
        for name, entry in metrics.items() if is_same else ():
            for accumulator, value in zip(self._slices[name], entry[:2], strict=True):
                is_same = is_same and (not isinstance(value, Tensor) or value.shape == accumulator.shape)
                if is_same:
                    accumulator.add_(value.detach() if isinstance(value, Tensor) else value)
        if not is_same:
            shapes = {name: [list(getattr(part, "shape", ())) for part in entry[:2]] for name, entry in metrics.items()}
            raise UserError(
                f"model.compute_loss: returned metrics of names and shapes {shapes}, earlier {self.shapes}; return"
                " the same for every batch, with a count of 0 if there is nothing to count"
            )

    def add(self, other: MetricTracker, is_added: Tensor) -> None:
        """Add the sums of another tracker, whose metrics are the first ones of this one, or nothing.

        is_added: 0-dimensional bool, on the device. torch.where, not a product, since NaN * 0 is NaN.
        """
        size = sum(tensor.numel() for pair in other._slices.values() for tensor in pair)
        self.values[:size].add_(torch.where(is_added, other.values[:size], self._zero))

    def means(self) -> dict[str, float]:
        """Each sum divided by its count, passed through its function if it has one; NaN if the count is 0.

        A function may return a dict of numbers, which are reported as `name/key`. Reads from the device once.
        """
        tensors = [tensor for pair in self._slices.values() for tensor in pair]
        parts = self.values.cpu()[: sum(tensor.numel() for tensor in tensors)].split(
            [tensor.numel() for tensor in tensors]
        )
        host_tensors = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        means: dict[str, float] = {}
        for name, total, count in zip(self._slices, host_tensors[::2], host_tensors[1::2], strict=True):
            transform = self._transforms.get(name)
            if isinstance(transform, TermMeans):
                means |= transform(total, count)
                continue
            reported = _create_record_entries(name, torch.where(count == 0, math.nan, total / count), transform)
            if twice := means.keys() & reported:
                raise UserError(f"model.compute_loss: two metrics are reported as {min(twice)}; rename one of them")
            means |= reported
        return means

    def state(self) -> dict[str, Tensor]:
        """The sums and counts for `load_state`, keyed "<name>/sum" and "<name>/count": views, not copies."""
        pairs = self._slices.items()
        return {f"{name}/{part}": pair[k] for name, pair in pairs for k, part in enumerate(("sum", "count"))}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load sums and counts; metrics whose name or shape changed start at 0."""
        self.values.zero_()
        for key, tensor in self.state().items():
            if key in state and state[key].shape == tensor.shape:
                tensor.copy_(state[key])


def _create_record_entries(name: str, quotient: Tensor, transform: Callable[[Any], Any] | None) -> dict[str, float]:
    """The entries of one metric in a record."""
    if quotient.ndim == 0 and (transform is None or quotient.isnan()):
        return {name: quotient.item()}
    if transform is None:
        raise UserError(
            f"model.compute_loss: {name} has the shape {list(quotient.shape)}; give it a third entry, a function from"
            " the tensor of quotients to a number or a dict of numbers, e.g. lambda iou: iou.nanmean()"
        )
    try:
        value = transform(quotient if quotient.ndim else quotient.item())
    except OverflowError:  # exp of a loss that blew up
        value = math.inf
    if isinstance(value, dict):
        return {f"{name}/{key}": float(number) for key, number in value.items()}
    return {name: float(value)}


def choose_best_metric(best_metric: str, names: list[str]) -> tuple[str, int]:
    """The metric that selects the best checkpoint, and 1 if higher is better, -1 if lower is better.

    Args:
        best_metric: `best_metric` of the config: auto, min:NAME or max:NAME; NAME alone if its direction is known.
        names: the metrics that an evaluation reports; none if there is no held-out set.
    """
    if not names:
        return "loss", KNOWN_DIRECTIONS["loss"]
    direction, _, name = best_metric.rpartition(":")
    if name == "auto":
        name = "top1" if "top1" in names else "loss"
    if name not in names:
        raise UserError(
            f"best_metric={best_metric}: is not reported by an evaluation; choose one of {', '.join(names)}"
        )
    if not direction and name not in KNOWN_DIRECTIONS:
        raise UserError(f"best_metric={best_metric}: needs a direction; give min:{name} or max:{name}")
    return name, {"min": -1, "max": 1}.get(direction) or KNOWN_DIRECTIONS[name]


def count_correct(logits: Tensor, targets: Tensor, k: int = 1) -> Tensor:
    """The number of samples whose target is among the k largest logits: int64, 0-dimensional, on the logits' device.

    Args:
        logits: [B, classes].
        targets: int64 [B]; or the share of each class, float [B, classes], of which the largest counts.
        k: capped at the number of classes.

    Raises:
        UserError: for targets of two dimensions that are not such shares.
    """
    if logits.ndim == targets.ndim == 2:
        if targets.shape != logits.shape or not targets.is_floating_point():
            raise UserError(
                f"count_correct: got targets {targets.dtype} {list(targets.shape)} for logits {list(logits.shape)};"
                " give classes, int64 [B], or the share of each class, float [B, classes]"
            )
        targets = targets.argmax(1)
    if k == 1:
        return (logits.argmax(1) == targets).sum()
    return (logits.topk(min(k, logits.shape[1])).indices == targets[:, None]).sum()


def compute_accuracy(logits: Tensor, targets: Tensor, k: int = 1) -> Tensor:
    """The top-k accuracy as a fraction of 1: float32, 0-dimensional, on the logits' device."""
    return count_correct(logits, targets, k) / max(1, len(targets))


def all_reduce_scalar(value: float, op: str = "mean", group: Any = None) -> float:
    """Reduce a number over the ranks, in float64: op is mean, sum, min or max."""
    ops = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    if op not in ops:
        raise ValueError(f"op={op}: is not known; choose {', '.join(ops)}")
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return float(value)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=ops[op], group=group)
    return tensor.item() / (dist.get_world_size(group) if op == "mean" else 1)
