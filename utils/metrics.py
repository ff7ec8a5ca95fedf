"""Metrics are sums and counts of any shape. They stay on the device until a log point reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Computes what is reported of a loss of several terms: the sum of their quotients, and each of them as loss/name.

    An object of this class is the third entry of such a loss, whose sum and count are tensors [terms].
    """

    names: tuple[str, ...]

    def __call__(self, total: Tensor, count: Tensor) -> dict[str, float]:
        """Return the means by name. A term that counted nothing adds nothing to the loss, and is NaN by itself."""
        quotients = torch.where(count == 0, total, total / count)  # a sum that is not finite stays so
        means = {"loss": math.nan}
        if count.any():
            means["loss"] = quotients.sum().item()
        term_means = torch.where(count == 0, math.nan, quotients).tolist()
        for name, mean in zip(self.names, term_means, strict=True):
            means[f"loss/{name}"] = mean
        return means


def is_metric_name(name: Any) -> bool:
    """Return whether a metric may have this name. The name may have slashes, as "rewards/margin" has."""
    if not isinstance(name, str) or name in RESERVED_NAMES or name.startswith("loss/"):
        return False
    return {"", ".", ".."}.isdisjoint(name.split("/"))  # trackers take the name for a path


def check_metrics(metrics: Any) -> Metrics:
    """Check and return the output of compute_loss. Raises UserError if it is not a dict of sums and counts."""
    problem = _find_metrics_problem(metrics)
    if problem:
        raise UserError(f"model.compute_loss {problem}. Return sums and their counts, e.g. {METRICS_EXAMPLE}.")
    return metrics


def _find_metrics_problem(metrics: Any) -> str:
    """Return what is wrong with the output of compute_loss, or "" if nothing is."""
    if not isinstance(metrics, dict):
        return f"returned a {type(metrics).__name__}"
    if "loss" not in metrics:
        return "returned no loss"
    if isinstance(metrics["loss"], dict):
        return "returned a loss of several terms, for which model.py must define loss_counts(batch) -> {term: count}"
    problem = ""
    for name, entry in metrics.items():
        if not is_metric_name(name):
            problem = f"returned a metric named {name!r}, {INVALID_NAME_REASON}"
        elif not _is_metric_entry(entry):
            problem = f"returned no (sum, count) or (sum, count, function) for {name}"
    if problem:
        return problem
    total, count, *transform = metrics["loss"]
    has_terms = len(transform) > 0 and isinstance(transform[0], TermMeans)
    return _find_loss_problem(total, count, ndim=1 if has_terms else 0)


def _is_metric_entry(entry: Any) -> bool:
    """Return whether this is (sum, count) or (sum, count, function)."""
    if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
        return False
    if len(entry) == 3 and not callable(entry[2]):
        return False
    return _is_number_or_tensor(entry[0]) and _is_number_or_tensor(entry[1])


def _is_number_or_tensor(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, Tensor | int | float)


def _find_loss_problem(total: Any, count: Any, ndim: int) -> str:
    """Return what is wrong with the sum and the count of the loss, or "" if nothing is.

    Args:
        ndim: how many dimensions both must have.
    """
    if not isinstance(total, Tensor) or total.ndim != ndim or not total.is_floating_point():
        return "returned a loss whose sum is not a 0-dimensional float tensor"
    count = torch.as_tensor(count)
    if count.ndim != ndim:
        return "returned a loss whose count is not one number"
    counts = count.reshape(-1).tolist()
    if not all(math.isfinite(number) and number >= 0 for number in counts):
        return f"returned a loss with a count of {', '.join(map(str, counts))}"
    return ""


class MetricTracker:
    """Accumulates sums and counts by name in one float64 vector on the device. Only `means` reads from it, once.

    The first update fixes the names and shapes. Counts are exact up to 2^53.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._transforms: dict[str, Callable[[Any], Any]] = {}
        self._shapes: dict[str, tuple[torch.Size, torch.Size]] = {}  # of the sum and the count of each name
        self._views: dict[str, tuple[Tensor, Tensor]] = {}  # the sum and the count of each name in `values`
        self._size = 0  # of all sums and counts, which are the first numbers of `values`
        self.values = torch.zeros(0, dtype=torch.float64, device=self._device)
        self._zero = torch.zeros((), dtype=torch.float64, device=self._device)

    def sum_view(self, name: str) -> Tensor:
        """Return the sum of this name, as a view: float64, on the device."""
        return self._views[name][0]

    def count_view(self, name: str) -> Tensor:
        """Return the count of this name, as a view: float64, on the device."""
        return self._views[name][1]

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each sum and count."""
        return {key: list(tensor.shape) for key, tensor in self.state().items()}

    def allocate(self, metrics: Metrics, extra_size: int = 0) -> None:
        """Allocate zeros for metrics of these names and shapes, followed by `extra_size` more numbers."""
        self._shapes = {}
        self._transforms = {}
        self._size = 0
        for name, entry in metrics.items():
            total, count, *transform = entry
            sum_shape = _shape_of(total)
            count_shape = _shape_of(count)
            self._shapes[name] = (sum_shape, count_shape)
            self._size += sum_shape.numel() + count_shape.numel()
            if transform:
                self._transforms[name] = transform[0]
        self.values = torch.zeros(self._size + extra_size, dtype=torch.float64, device=self._device)
        self._views = self._create_views(self.values)

    def _create_views(self, values: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the sum and the count of each name as views of a vector of the same layout as `self.values`."""
        views = {}
        begin = 0
        for name, (sum_shape, count_shape) in self._shapes.items():
            middle = begin + sum_shape.numel()
            end = middle + count_shape.numel()
            sum_view = values[begin:middle].view(sum_shape)
            count_view = values[middle:end].view(count_shape)
            views[name] = (sum_view, count_view)
            begin = end
        return views

    def update(self, metrics: Metrics) -> None:
        """Add one micro-batch's metrics: {name: (sum, count)}, numbers or tensors of any one shape.

        A third entry is a function that is applied to the quotient when the quotient is read: (nll, tokens, math.exp)
        gives the perplexity.

        Raises:
            UserError: if names or shapes differ from the first update.
        """
        if not self._views:
            self.allocate(metrics)
        if metrics.keys() != self._views.keys():
            raise self._explain_other_metrics(metrics)
        for name, entry in metrics.items():
            for accumulator, value in zip(self._views[name], entry[:2], strict=True):
                if isinstance(value, Tensor):
                    if value.shape != accumulator.shape:
                        raise self._explain_other_metrics(metrics)
                    accumulator.add_(value.detach())
                else:
                    accumulator.add_(value)

    def _explain_other_metrics(self, metrics: Metrics) -> UserError:
        shapes = {}
        for name, entry in metrics.items():
            shapes[name] = [list(_shape_of(value)) for value in entry[:2]]
        return UserError(
            f"model.compute_loss returned metrics of names and shapes {shapes}, and earlier {self.shapes}. Return"
            " the same metrics for every batch, with a count of 0 if there is nothing to count."
        )

    def add(self, other: MetricTracker, is_added: Tensor) -> None:
        """Add the sums of another tracker, whose metrics are the first ones of this one, or nothing.

        Args:
            is_added: 0-dimensional bool, on the device. torch.where, not a product, since NaN * 0 is NaN.
        """
        size = other._size
        self.values[:size].add_(torch.where(is_added, other.values[:size], self._zero))

    def means(self) -> dict[str, float]:
        """Return each sum divided by its count, passed through its function if it has one, or NaN if the count is 0.

        A function may return a dict of numbers, which are reported as `name/key`. Reads from the device once.
        """
        host_views = self._create_views(self.values.cpu())
        means: dict[str, float] = {}
        for name, (total, count) in host_views.items():
            transform = self._transforms.get(name)
            if isinstance(transform, TermMeans):
                means |= transform(total, count)
                continue
            quotient = torch.where(count == 0, math.nan, total / count)
            entries = _create_record_entries(name, quotient, transform)
            in_both = means.keys() & entries
            if in_both:
                raise UserError(f"model.compute_loss reports two metrics as {min(in_both)}. Rename one of the two.")
            means |= entries
        return means

    def state(self) -> dict[str, Tensor]:
        """Return the sums and counts for `load_state`, keyed "<name>/sum" and "<name>/count": views, not copies."""
        state = {}
        for name, (sum_view, count_view) in self._views.items():
            state[f"{name}/sum"] = sum_view
            state[f"{name}/count"] = count_view
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load sums and counts. Metrics whose name or shape changed start at 0."""
        self.values.zero_()
        for key, tensor in self.state().items():
            if key in state and state[key].shape == tensor.shape:
                tensor.copy_(state[key])


def _shape_of(value: Any) -> torch.Size:
    """Return the shape of a tensor or a number."""
    return value.shape if isinstance(value, Tensor) else torch.Size()


def _create_record_entries(name: str, quotient: Tensor, transform: Callable[[Any], Any] | None) -> dict[str, float]:
    """Return the entries of one metric in a record."""
    if quotient.ndim == 0 and (transform is None or quotient.isnan()):
        return {name: quotient.item()}
    if transform is None:
        raise UserError(
            f"{name} of model.compute_loss has the shape {list(quotient.shape)}. Give this metric a third entry, a"
            " function from the tensor of quotients to a number or a dict of numbers, e.g. lambda iou: iou.nanmean()."
        )
    try:
        value = transform(quotient if quotient.ndim else quotient.item())
    except OverflowError:  # exp of a loss that blew up
        value = math.inf
    if isinstance(value, dict):
        return {f"{name}/{key}": float(number) for key, number in value.items()}
    return {name: float(value)}


class BestMetric(NamedTuple):
    """The metric that selects the best checkpoint."""

    name: str
    sign: int  # 1 if the highest value is the best one, -1 if the lowest is


def choose_best_metric(best_metric: str, names: list[str]) -> BestMetric:
    """Return the metric that selects the best checkpoint.

    Args:
        best_metric: `best_metric` of the config: auto, min:NAME, max:NAME, or NAME alone if its direction is known.
        names: the metrics that an evaluation reports. The list is empty if there is no held-out set.

    Raises:
        UserError: if no evaluation reports the metric, or its direction is not known.
    """
    if not names:
        return BestMetric("loss", KNOWN_DIRECTIONS["loss"])
    direction, _, name = best_metric.rpartition(":")
    if name == "auto":
        name = "top1" if "top1" in names else "loss"
    if name not in names:
        raise UserError(
            f"--best_metric must be a metric that evaluations report ({', '.join(names)}), got {best_metric}."
        )
    if not direction and name not in KNOWN_DIRECTIONS:
        raise UserError(f"--best_metric {best_metric} needs a direction. Give min:{name} or max:{name}.")
    if direction == "max":
        return BestMetric(name, sign=1)
    if direction == "min":
        return BestMetric(name, sign=-1)
    return BestMetric(name, KNOWN_DIRECTIONS[name])


def count_correct(logits: Tensor, targets: Tensor, k: int = 1) -> Tensor:
    """Return the number of samples whose target is among the k largest logits.

    Args:
        logits: [B, classes].
        targets: int64 [B], or the share of each class, float [B, classes], of which the largest counts.
        k: capped at the number of classes.

    Returns:
        int64, 0-dimensional, on the logits' device.

    Raises:
        UserError: for targets of two dimensions that are not such shares.
    """
    if logits.ndim == targets.ndim == 2:
        if targets.shape != logits.shape or not targets.is_floating_point():
            raise UserError(
                f"count_correct got targets {targets.dtype} {list(targets.shape)} for logits {list(logits.shape)}."
                " Give classes, int64 [B], or the share of each class, float [B, classes]."
            )
        targets = targets.argmax(1)
    if k == 1:
        return (logits.argmax(1) == targets).sum()
    k = min(k, logits.shape[1])
    return (logits.topk(k).indices == targets[:, None]).sum()


def compute_accuracy(logits: Tensor, targets: Tensor, k: int = 1) -> Tensor:
    """Return the top-k accuracy as a fraction of 1: float32, 0-dimensional, on the logits' device."""
    return count_correct(logits, targets, k) / max(1, len(targets))


def all_reduce_scalar(value: float, op: str = "mean", group: Any = None) -> float:
    """Reduce a number over the ranks, in float64.

    Args:
        op: mean, sum, min or max.
    """
    ops = {
        "mean": dist.ReduceOp.SUM,
        "sum": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }
    if op not in ops:
        raise ValueError(f"op must be one of {', '.join(ops)}, got {op}.")
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return float(value)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=ops[op], group=group)
    if op == "mean":
        return tensor.item() / dist.get_world_size(group)
    return tensor.item()
