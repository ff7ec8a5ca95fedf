"""The terms of a loss and their counts.

What divides a term must be known before the backward pass, so `loss_counts` of model.py counts it in each batch. The
sums over the micro-batches of all ranks are formed while the step before is computed.
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
    """`compute_loss` and `loss_counts` of model.py, with the terms in one tensor, in the order of their names."""

    def __init__(self, compute_loss: Callable[..., Metrics], loss_counts: Callable[[Any], dict], device: torch.device):
        self._compute_loss = compute_loss
        self._loss_counts = loss_counts
        self.replaced_functions = {"compute_loss": self.compute_loss}
        self._tensor_options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._means = TermMeans(())  # with the names, once they are known
        self._counts = self._divisors = self._mean_count = torch.ones((), **self._tensor_options)  # of the global batch
        self._steps: list[Tensor] = []  # since the last check: the counts of loss_counts and of compute_loss

    @classmethod
    def create(cls, functions: dict[str, Callable], device: torch.device) -> LossTerms | None:
        """None if model.py has no loss_counts."""
        if "loss_counts" not in functions:
            return None
        return cls(functions["compute_loss"], functions["loss_counts"], device)

    def compute_loss(self, model: nn.Module, batch: Any) -> Metrics:
        """The metrics, with "loss" as (weighted sums [terms], counts [terms], TermMeans). Raises UserError."""
        metrics = self._compute_loss(model, batch)
        terms = metrics.get("loss") if isinstance(metrics, dict) else None
        if not isinstance(terms, dict) or not all(isinstance(e, tuple | list) and len(e) == 3 for e in terms.values()):
            raise UserError(
                f"model.compute_loss: returned no terms, but model.py has loss_counts; return {LOSS_TERMS_EXAMPLE}"
            )
        is_first, names = not self._means.names, self._check_term_names(terms)
        sums = torch.stack([weight * total for total, _, weight in map(terms.__getitem__, names)])
        counts = self._stack_counts([terms[name][1] for name in names])
        if is_first and torch.is_grad_enabled():
            self.check_counts(self.count_terms(batch), counts)
        return metrics | {"loss": (sums, counts, self._means)}

    def count_terms(self, batch: Any) -> Tensor:
        """What `loss_counts` counts in a micro-batch: float64 [terms], on the device."""
        term_counts = self._loss_counts(batch)
        return self._stack_counts([term_counts[name] for name in self._check_term_names(term_counts)])

    def micro_batches(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Those of a step when `compute_mean` knows its counts. The next step's are fetched before, so that none
        waits for the sums over the ranks."""
        begun = self._start_count_reduces(stream)
        latest = next(begun, None)
        while latest:
            (fetched, counts, work), latest = latest, next(begun, None)
            if work:
                work.wait()
            self.set_divisors(counts.sum(0))
            yield from fetched

    def set_divisors(self, counts: Tensor) -> None:
        """counts: of the global batch. What counted nothing adds nothing."""
        self._counts, self._divisors = counts, torch.where(counts > 0, counts, math.inf)
        self._mean_count = counts.any().double()

    def after_forward(self, metrics: Metrics, number: int) -> Metrics:
        """In what it returns "loss" is the micro-batch's part of the loss, with a count of 1 for the whole global
        batch, or 0 if that counts nothing. Each term is a metric."""
        sums, counts, means = metrics["loss"]
        terms = {f"loss/{name}": (sums[k], counts[k]) for k, name in enumerate(means.names)}
        return metrics | {"loss": (self.compute_mean(sums), self._mean_count if number == 0 else 0.0)} | terms

    def compute_mean(self, sums: Tensor) -> Tensor:
        """What the sums of a micro-batch add to the loss of the global batch: 0-dimensional."""
        return (sums / self._divisors).sum()

    def before_update(self, model: nn.Module, sums: MetricTracker) -> None:
        """Keep the counts that compute_loss returned for the global batch, for `check_counts`."""
        counts = torch.stack([sums.count_view(f"loss/{name}") for name in self._means.names])
        self._steps.append(torch.stack([self._counts, counts]))

    def begin_read(self, is_log_point: bool) -> Tensor | None:
        """The counts of the steps since the last call, the same on all ranks: float64 [steps, 2, terms]."""
        steps = self._steps
        self._steps = []
        return torch.stack(steps) if steps else None

    def finish_read(self, values: Tensor) -> dict[str, float]:
        """Raises UserError if loss_counts is wrong."""
        for counted, actual in values:
            self.check_counts(counted, actual)
        return {}

    def check_counts(self, counted: Tensor, actual: Tensor) -> None:
        """Raises UserError if loss_counts has counted something else than compute_loss has found."""
        pairs = zip(counted.tolist(), actual.tolist(), strict=True)
        for name, (count, count_in_loss) in zip(self._means.names, pairs, strict=True):
            if not math.isclose(count, count_in_loss, rel_tol=1e-6, abs_tol=1e-6):
                raise UserError(
                    f"model.loss_counts: counts {count:.9g} for {name}, and compute_loss {count_in_loss:.9g}, so the"
                    " gradient would have a wrong divisor; count the same in both"
                )

    def _start_count_reduces(
        self, stream: Iterator[MicroBatch]
    ) -> Iterator[tuple[list[MicroBatch], Tensor, dist.Work | None]]:
        """This rank's micro-batches of each step, whose counts are being exchanged: float64 [micro-batches, terms]."""
        fetched: list[MicroBatch] = []
        for micro_batch in stream:
            fetched.append(micro_batch)
            if micro_batch.is_last:
                # rows of other ranks are 0, so the sum rounds nothing: the same bits on any number of ranks
                counts = torch.zeros(micro_batch.count, len(self._means.names), **self._tensor_options)
                for fetched_batch in fetched:
                    if not fetched_batch.is_padding:
                        counts[fetched_batch.number] = self.count_terms(fetched_batch.batch)
                work = dist.all_reduce(counts, async_op=True) if dist.get_world_size() > 1 else None
                yield fetched, counts, work
                fetched = []

    def _check_term_names(self, terms: dict[str, Any]) -> tuple[str, ...]:
        names = tuple(sorted(terms))
        if not self._means.names:
            self._means = TermMeans(names)
        if names != self._means.names:
            raise UserError(
                f"model.py: the loss has the terms {', '.join(names)}, earlier {', '.join(self._means.names)}; let"
                " loss_counts and compute_loss always return the same ones, with a count of 0 if there is nothing"
            )
        return names

    def _stack_counts(self, counts: list[Tensor | float]) -> Tensor:
        to = self._tensor_options  # torch.full copies nothing from the host
        return torch.stack([c.to(**to) if isinstance(c, Tensor) else torch.full((), c, **to) for c in counts])
