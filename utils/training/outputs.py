"""The outputs of model.predict for a whole set, in the order of its samples, and what model.summarize makes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import UserError
from utils.clock import Clock
from utils.distributed.collectives import all_gather_json, broadcast_json, on_rank_0, require_equal
from utils.distributed.context import DistributedContext
from utils.logger import NAME, RESERVED

MAX_BYTES = 2**30  # of a set that is summarized, on rank 0, where gathering and sorting take up to four times as much
OTHER_NAMES = "model.predict: returned different names for different batches; return the same names for every batch"


class Outputs:
    """What `predict` returned for this rank's samples, on the CPU.

    seed: called with the indices of a micro-batch before `predict`, which may draw random numbers.
    """

    def __init__(
        self,
        predict: Callable[[nn.Module, Any], dict[str, Tensor]],
        seed: Callable[[Sequence[int]], object],
        is_bounded: bool = False,
    ) -> None:
        self._predict, self._seed, self._is_bounded = predict, seed, is_bounded
        self.bytes = 0
        self.indices: list[int] = []
        self.batches: dict[str, list[Tensor]] = {}  # by name

    def add(self, model: nn.Module, batch: Any, indices: Sequence[int], is_padding: bool = False) -> None:
        """Compute the outputs for a micro-batch of these samples. Raises UserError if they are invalid or too large."""
        self._seed(indices)
        found = self._predict(model, batch)
        check_outputs(found, len(indices))
        if self.batches and found.keys() != self.batches.keys():
            raise UserError(OTHER_NAMES)
        for name, output in found.items():
            kept = self.batches.setdefault(name, [])
            if not is_padding:
                kept.append(output.detach().to("cpu", copy=True))  # a view would keep all of its tensor
                self.bytes += kept[-1].nbytes
        self.indices += [] if is_padding else indices
        if self._is_bounded:
            check_size(self.bytes)

    def part(self) -> dict[str, Any]:
        return {"indices": self.indices, "outputs": self.batches}


def check_outputs(found: object, samples: int) -> None:
    """Raises UserError if this is not a dict of tensors with one row per sample."""
    named = found.items() if isinstance(found, dict) else [("the result", found)]
    for name, each in named:
        if not isinstance(found, dict) or not isinstance(each, Tensor):
            raise UserError(f"model.predict: {name} is a {type(each).__name__}; return {{name: tensor [B, ...]}}")
        if each.shape[:1] != (samples,):
            raise UserError(
                f"model.predict: {name} has the shape {list(each.shape)} for {samples} samples; return one row per"
                " sample"
            )


def check_size(size: float) -> None:
    """Raises UserError if outputs of so many bytes cannot be summarized."""
    if size > MAX_BYTES:
        raise UserError(
            f"model.summarize: the outputs of the set take {size / 2**30:.3g} GiB or more on rank 0, where the limit is"
            f" {MAX_BYTES / 2**30:.3g} GiB; return less per sample from predict, or sums from compute_loss"
        )


def in_order(parts: list[dict[str, Any]], samples: int) -> dict[str, Tensor | list[Tensor]]:
    """The parts of all ranks in the order of the samples; a list of rows where shapes differ between batches."""
    order = torch.tensor([index for part in parts for index in part["indices"]]).argsort()
    if len(order) != samples:
        raise RuntimeError(f"{len(order)} outputs for {samples} samples; this is a bug in the loader")
    merged: dict[str, Tensor | list[Tensor]] = {}
    for name in parts[0]["outputs"]:
        batches = [batch for part in parts for batch in part["outputs"][name]]
        if len({batch.shape[1:] for batch in batches}) == 1:
            merged[name] = torch.cat(batches)[order]
        else:
            rows = [row for batch in batches for row in batch]
            merged[name] = [rows[k] for k in order.tolist()]
    return merged


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
        check_size(sum(all_gather_json(outputs.bytes, ctx)))
        parts = [outputs.part()] * (ctx.world_size if ctx.is_main else 0)
        if ctx.world_size > 1:
            dist.gather_object(outputs.part(), parts or None, group=ctx.control)
        if ctx.is_main:
            clock.call("summarize")
        found = broadcast_json(on_rank_0(lambda: self._numbers(parts, samples), ctx), ctx)
        clock.enter("evaluation")
        return found

    def names(self, model: nn.Module, batch: Any, size: int, samples: int) -> list[str]:
        """The names of the metrics, from a first batch of `size` samples of a set of `samples`. Raises UserError."""
        outputs = Outputs(self.predict, seed=lambda _: None)
        outputs.add(model, batch, range(size))
        check_size(outputs.bytes / size * samples)
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
            if not isinstance(name, str) or name in RESERVED or "/" in name:
                raise UserError(f"model.summarize: the name {name!r} is not allowed (reserved, or with a slash)")
        return found
