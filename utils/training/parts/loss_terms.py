"""`loss_counts` of model.py: a loss of several terms, each of which is divided by a count of its own.

What divides a term must be known before the backward pass, so `loss_counts` counts it in each batch. The sums over the
micro-batches of all ranks are formed while the step before is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.data.sampler import MicroBatch
from utils.metrics import Metrics, MetricTracker, TermMeans
from utils.settings.errors import UserError
from utils.training.parts.part import Part

LOSS_TERMS_EXAMPLE = '{"loss": {"boxes": (sum, count, weight), "classes": (sum, count, weight)}}'


class LossTerms(Part):
    """Calls `compute_loss` and `loss_counts` of model.py, and holds the terms in one tensor, ordered by their names."""

    def __init__(
        self,
        compute_loss: Callable[..., Metrics],
        loss_counts: Callable[[Any], dict],
        device: torch.device,
    ) -> None:
        self._compute_loss = compute_loss
        self._loss_counts = loss_counts
        self.replaced_functions = {"compute_loss": self.compute_loss}
        self._tensor_options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._means = TermMeans(())  # has the names, once they are known
        one = torch.ones((), **self._tensor_options)
        self._counts = one  # of the terms in the global batch
        self._divisors = one  # of the terms in the global batch
        self._mean_count = one  # of the loss of the global batch
        self._steps: list[Tensor] = []  # since the last check: the counts of loss_counts and of compute_loss

    @classmethod
    def create(cls, functions: dict[str, Callable], device: torch.device) -> LossTerms | None:
        """Return the part, or None if model.py has no loss_counts."""
        if "loss_counts" not in functions:
            return None
        return cls(functions["compute_loss"], functions["loss_counts"], device)

    def compute_loss(self, model: nn.Module, batch: Any) -> Metrics:
        """Return the metrics, with "loss" as (weighted sums [terms], counts [terms], TermMeans).

        Raises:
            UserError: if compute_loss returned no terms, or others than before, or if loss_counts has counted something
                else in the first batch.
        """
        metrics = self._compute_loss(model, batch)
        terms = None
        if isinstance(metrics, dict):
            terms = metrics.get("loss")
        if not isinstance(terms, dict) or not all(map(is_term, terms.values())):
            raise UserError(
                f"model.compute_loss returned no terms, but model.py has loss_counts. Return {LOSS_TERMS_EXAMPLE}."
            )
        is_first = not self._means.names
        weighted_sums = []
        term_counts = []
        for name in self._check_term_names(terms):
            total, count, weight = terms[name]
            weighted_sums.append(weight * total)
            term_counts.append(count)
        sums = torch.stack(weighted_sums)
        counts = self._stack_counts(term_counts)
        if is_first and torch.is_grad_enabled():
            self.check_counts(self.count_terms(batch), counts)
        return metrics | {"loss": (sums, counts, self._means)}

    def count_terms(self, batch: Any) -> Tensor:
        """Return what `loss_counts` counts in a micro-batch: float64 [terms], on the device."""
        term_counts = self._loss_counts(batch)
        names = self._check_term_names(term_counts)
        return self._stack_counts([term_counts[name] for name in names])

    def micro_batches(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a step when `compute_mean` knows the counts of the step.

        The micro-batches of the next step are fetched before, so that no step waits for the sums over the ranks.
        """
        steps = self._start_count_reduces(stream)
        step = next(steps, None)
        while step is not None:
            next_step = next(steps, None)
            micro_batches, counts, work = step
            if work:
                work.wait()
            self.set_divisors(counts.sum(0))
            yield from micro_batches
            step = next_step

    def set_divisors(self, counts: Tensor) -> None:
        """Set what `compute_mean` divides by. A term that counted nothing adds nothing to the loss.

        Args:
            counts: of the global batch: float64 [terms].
        """
        self._counts = counts
        self._divisors = torch.where(counts > 0, counts, math.inf)
        self._mean_count = counts.any().double()

    def after_forward(self, metrics: Metrics, number: int) -> Metrics:
        """Return the metrics with "loss" as the micro-batch's part of the loss, and with each term as a metric.

        The count of the loss is 1 for the whole global batch, or 0 if the global batch counts nothing.
        """
        sums, counts, means = metrics["loss"]
        loss_count = self._mean_count if number == 0 else 0.0
        changed: Metrics = {"loss": (self.compute_mean(sums), loss_count)}
        for index, name in enumerate(means.names):
            changed[f"loss/{name}"] = (sums[index], counts[index])
        return metrics | changed

    def compute_mean(self, sums: Tensor) -> Tensor:
        """Return what the sums of a micro-batch add to the loss of the global batch: 0-dimensional."""
        return (sums / self._divisors).sum()

    def before_update(self, model: nn.Module, sums: MetricTracker) -> None:
        """Keep the counts that compute_loss returned for the global batch, for `check_counts`."""
        count_views = [sums.count_view(f"loss/{name}") for name in self._means.names]
        both_counts = torch.stack([self._counts, torch.stack(count_views)])
        self._steps.append(both_counts)

    def begin_read(self, is_log_point: bool) -> Tensor | None:
        """Return the counts of the steps since the last call, the same on all ranks: float64 [steps, 2, terms]."""
        if not self._steps:
            return None
        counts = torch.stack(self._steps)
        self._steps = []
        return counts

    def finish_read(self, values: Tensor) -> dict[str, float]:
        """Raise UserError if loss_counts is wrong."""
        for counted, actual in values:
            self.check_counts(counted, actual)
        return {}

    def check_counts(self, counted: Tensor, actual: Tensor) -> None:
        """Raise UserError if loss_counts has counted something else than compute_loss.

        Args:
            counted: by loss_counts: float64 [terms].
            actual: in compute_loss: float64 [terms].
        """
        counts = counted.tolist()
        counts_in_loss = actual.tolist()
        for name, count, count_in_loss in zip(self._means.names, counts, counts_in_loss, strict=True):
            if not math.isclose(count, count_in_loss, rel_tol=1e-6, abs_tol=1e-6):
                raise UserError(
                    f"model.loss_counts counts {count:.9g} for {name}, and compute_loss counts {count_in_loss:.9g}, so"
                    " the gradient would have a wrong divisor. Count the same in both."
                )

    def _start_count_reduces(
        self, stream: Iterator[MicroBatch]
    ) -> Iterator[tuple[list[MicroBatch], Tensor, dist.Work | None]]:
        """Yield this rank's micro-batches of each step, and the counts of all ranks, when their exchange has begun.

        The counts are float64 [micro-batches of the global batch, terms].
        """
        fetched: list[MicroBatch] = []
        for micro_batch in stream:
            fetched.append(micro_batch)
            if micro_batch.is_last:
                # rows of other ranks are 0, so the sum rounds nothing: the same bits on any number of ranks
                counts = torch.zeros(micro_batch.micro_batches_in_step, len(self._means.names), **self._tensor_options)
                for fetched_batch in fetched:
                    if not fetched_batch.is_padding:
                        counts[fetched_batch.number] = self.count_terms(fetched_batch.batch)
                work = None
                if dist.get_world_size() > 1:
                    work = dist.all_reduce(counts, async_op=True)
                yield fetched, counts, work
                fetched = []

    def _check_term_names(self, terms: dict[str, Any]) -> tuple[str, ...]:
        """Return the sorted names of the terms. Raise UserError if other terms were there before."""
        names = tuple(sorted(terms))
        if not self._means.names:
            self._means = TermMeans(names)
        if names != self._means.names:
            raise UserError(
                f"The loss has the terms {', '.join(names)}, and had earlier {', '.join(self._means.names)}. Let"
                " loss_counts and compute_loss of model.py always return the same terms, with a count of 0 if there is"
                " nothing."
            )
        return names

    def _stack_counts(self, counts: list[Tensor | float]) -> Tensor:
        tensors = []
        for count in counts:
            if isinstance(count, Tensor):
                tensors.append(count.to(**self._tensor_options))
            else:
                tensors.append(torch.full((), count, **self._tensor_options))  # copies nothing from the host
        return torch.stack(tensors)


def is_term(entry: Any) -> bool:
    """Return whether this may be a term: (sum, count, weight)."""
    return isinstance(entry, tuple | list) and len(entry) == 3
