"""Persistent buffers that differ between ranks, as a queue that each rank fills: a checkpoint has rank 0's."""

from __future__ import annotations

from torch import nn

from utils.distributed.collectives import broadcast_json, lowest_rank
from utils.distributed.context import DistributedContext
from utils.run.folder import RunFolder
from utils.training.fingerprint import buffers_of, fingerprint_of

MAX_NAMES = 5


class BufferCheck:
    """Compares the buffers of all ranks. `compare` is a collective."""

    def __init__(self, run: RunFolder, model: nn.Module, ctx: DistributedContext) -> None:
        self._run, self._model, self._ctx = run, model, ctx
        self._odd: list[str] | None = None  # names of those that differ; None: not compared yet

    def compare(self, step: int, once: bool = False) -> None:
        """Report buffers that differ. Call it between two steps.

        once: only if this attempt has not compared them yet.
        """
        if self._ctx.world_size == 1 or (once and self._odd is not None):
            return
        buffers = buffers_of(self._model).items()
        mine = {name: [*each.shape, fingerprint_of("buffers", [each])] for name, each in buffers}
        first = broadcast_json(mine, self._ctx)
        rank, before, self._odd = lowest_rank(mine != first, self._ctx), self._odd, []
        if rank is None:
            return
        other = broadcast_json(mine, self._ctx, rank)
        self._odd = odd = sorted(name for name in first | other if first.get(name) != other.get(name))
        self._run.event("buffers_differ", step, names=odd, rank=rank)
        if odd != before:
            self._run.warn(
                "%s: rank %d has other values in these buffers than rank 0, whose are saved; update them with what all"
                " ranks computed (torch.distributed.all_reduce or all_gather), or register them with persistent=False",
                ", ".join(odd[:MAX_NAMES]) + (f" and {len(odd) - MAX_NAMES} more" if len(odd) > MAX_NAMES else ""),
                rank,
            )
