"""`summarize` of model.py: metrics of the outputs of a whole set that are no sums over samples, such as AUC and mAP.

It costs a second forward pass in each evaluation, and memory for the outputs of the set on rank 0. Who selects the best
checkpoint by such a metric needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.clock import Clock
from utils.distributed.collectives import all_gather_json, broadcast_json, on_rank_0, require_equal
from utils.distributed.context import DistributedContext
from utils.logger import NAME
from utils.metrics import NOT_A_NAME, is_metric_name
from utils.settings.errors import UserError
from utils.training.outputs import OTHER_NAMES, Outputs, in_order

if TYPE_CHECKING:
    from utils.training.seams import Seams
    from utils.training.state import TrainState

MAX_BYTES = 2**30  # of a set that is summarized, on rank 0, where gathering and sorting take up to four times as much


def check_size(size: float) -> None:
    """Raises UserError if outputs of so many bytes cannot be summarized."""
    if size > MAX_BYTES:
        raise UserError(
            f"model.summarize: the outputs of the set take {size / 2**30:.3g} GiB or more on rank 0, where the limit is"
            f" {MAX_BYTES / 2**30:.3g} GiB; return less per sample from predict, or sums from compute_loss"
        )


def bytes_of(outputs: Outputs) -> int:
    return sum(each.nbytes for batches in outputs.batches.values() for each in batches)


class Summary(NamedTuple):
    """Metrics that are no sums over samples: `summarize` is called with what `predict` returned for a whole set."""

    predict: Callable[[nn.Module, Any], dict[str, Tensor]]
    summarize: Callable[[dict[str, Tensor | list[Tensor]]], dict[str, float]]

    def of(self, outputs: Outputs) -> dict[str, float]:
        """The metrics of the outputs of one process. Raises UserError."""
        return self._numbers([outputs.part()], len(outputs.indices))

    def of_ranks(self, outputs: Outputs, samples: int, ctx: DistributedContext, clock: Clock) -> dict[str, float]:
        """The metrics of the outputs of all ranks, computed on rank 0, on every rank. Raises UserError."""
        require_equal(sorted(outputs.batches), f"{OTHER_NAMES} ({{first}} and {{other}})", ctx)
        check_size(sum(all_gather_json(bytes_of(outputs), ctx)))
        parts = [outputs.part()] * (ctx.world_size if ctx.is_main else 0)
        if ctx.world_size > 1:
            dist.gather_object(outputs.part(), parts or None, group=ctx.control)
        if ctx.is_main:
            clock.call("summarize")
        found = broadcast_json(on_rank_0(lambda: self._numbers(parts, samples), ctx), ctx)
        clock.enter("evaluation")
        return found

    @torch.no_grad()
    def names(self, state: TrainState, batch: Any, size: int, samples: int) -> list[str]:
        """The names of the metrics, from a first batch of `size` samples of a set of `samples`. Raises UserError."""
        outputs = Outputs(self.predict, seed=lambda _: None)
        with state.precision.autocast():
            outputs.add(state.model.eval(), batch, range(size))
        check_size(bytes_of(outputs) / size * samples)
        return list(self.of(outputs))

    def _numbers(self, parts: list[dict[str, Any]], samples: int) -> dict[str, float]:
        outputs = in_order(parts, samples)
        try:
            found = {name: float(value) for name, value in self.summarize(outputs).items()}
        except UserError:
            raise
        except Exception as error:
            logging.getLogger(NAME).info("summarize failed", exc_info=True)
            raise UserError(
                f"model.summarize: {type(error).__name__}: {error}; return {{name: number}} for any number of samples,"
                " NaN where it is not defined: before the first step it gets a single batch"
            ) from error
        for name in found:
            if not is_metric_name(name):
                raise UserError(f"model.summarize: returned a number named {name!r}, {NOT_A_NAME}")
        return found


class Collected(Outputs):
    """The outputs of this rank in one evaluation. `add` raises UserError if they become too large."""

    def __init__(self, summary: Summary, seed: Callable[[Sequence[int]], object]) -> None:
        super().__init__(summary.predict, seed)
        self._summary, self._bytes = summary, 0

    @classmethod
    def of(cls, seams: Seams, seed: Callable[[Sequence[int]], object]) -> Collected | None:
        """None if model.py has no summarize. seed: as for Outputs."""
        return cls(seams.summary, seed) if seams.summary else None

    def add(self, model: nn.Module, batch: Any, indices: Sequence[int], is_padding: bool = False) -> None:
        super().add(model, batch, indices, is_padding)
        self._bytes += sum(kept[-1].nbytes for kept in self.batches.values() if not is_padding)
        check_size(self._bytes)

    def metrics(self, means: dict[str, float], samples: int, ctx: DistributedContext, clock: Clock) -> dict[str, float]:
        """Those of the whole set, on every rank. means: those of compute_loss. Raises UserError."""
        found = self._summary.of_ranks(self, samples, ctx, clock)
        if both := sorted(means.keys() & found.keys()):
            raise UserError(f"model.summarize: compute_loss has {both[0]} too; give one of them another name")
        return found
