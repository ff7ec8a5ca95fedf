"""Sums over the micro-batches of a global batch whose bits do not depend on the number of ranks.

Floating-point addition is not associative, so a sum has the same bits only if it is always formed in the same order.
Here that is one binary tree over the micro-batches in their order: neighbours are added first, then neighbouring pairs,
and so on. A leaf that does not exist is left out, so a larger tree gives the same sum. Each rank computes a run of
consecutive micro-batches. It adds up the subtrees that lie in its run, and the ranks exchange their sums, its parts:
only one if the micro-batches per rank are a power of two.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.distributed.collectives import RankSum

ORDER = "natural"  # of the leaves; in checkpoints, so that a resume tells if another version sums in another order
END = 2**40  # after the last leaf


def rank_leaves(rank: int, ranks: int, leaves: int) -> range:
    """The leaves of a rank: equally many for each, except that the last ranks may have fewer, or none."""
    size = math.ceil(leaves / ranks)
    return range(min(rank * size, leaves), min((rank + 1) * size, leaves))


@functools.lru_cache(maxsize=64)
def subtree_starts(ranks: int, leaves: int) -> list[list[int]]:
    """For each rank, the first leaves of its parts: the largest subtrees that its run consists of."""
    parts: list[list[int]] = []
    for run in (rank_leaves(rank, ranks, leaves) for rank in range(ranks)):
        begin, end = run.start, _after(run.stop, leaves)
        parts.append([])
        while begin < run.stop:
            parts[-1].append(begin)
            size = begin & -begin or END  # of the largest subtree that begins here
            while begin + size > end:
                size //= 2
            begin += size
    return parts


def _after(stop: int, leaves: int) -> int:
    """The leaf after a run. If there is none, subtrees that reach beyond are complete too."""
    return stop if stop < leaves else END


class TreeSum:
    """Sums lists of tensors along the tree. Add the leaves of a run in their order."""

    def __init__(self) -> None:
        self._held: list[tuple[int, list[Tensor]]] = []  # subtrees from left to right, with their first leaf

    def add(self, number: int, tensors: list[Tensor]) -> None:
        """Add a leaf, or a subtree by its first leaf. Its tensors are held, and overwritten later."""
        self._close(number)
        self._held.append((number, tensors))

    def take(self, number: int, leaves: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """For the last leaf, `number`, of a run: the parts before its own, and the sums to be added to it, one after
        the other. They are no longer held."""
        self._close(number)
        after, inner = _after(number + 1, leaves), []
        while self._held and _is_complete(self._held[-1][0], number, after):
            inner.append(self._held.pop()[1])
        return self.take_subtrees(number + 1, leaves), inner

    def take_subtrees(self, stop: int, leaves: int) -> list[list[Tensor]]:
        """The parts of a run that ends before leaf `stop`. They are no longer held."""
        self._close(_after(stop, leaves))
        parts, self._held = [tensors for _, tensors in self._held], []
        return parts

    def _close(self, after: int) -> None:
        """Add up the subtrees that are complete, since the next leaf is `after`."""
        while len(self._held) > 1 and _is_complete(self._held[-2][0], self._held[-1][0], after):
            _, tensors = self._held.pop()
            torch._foreach_add_(self._held[-1][1], tensors)


def _is_complete(left: int, right: int, after: int) -> bool:
    """Whether the smallest subtree that has both leaves begins with `left` and ends before `after`."""
    height = (left ^ right).bit_length()
    return left % 2**height == 0 and left >> height != after >> height


class TreeAllReduce:
    """Replace a flat tensor by its sum over the ranks, along the tree.

    Each rank sums one chunk: it receives that chunk of all parts, and sends its sum to all. These are the bytes of a
    ring all-reduce if each rank has one part. Every step is a collective, so all ranks must call the methods in the
    same order, relative to other collectives too.

    Args:
        flat: contiguous, 1-dimensional: the last part of this rank. Ignored if it has none.
        parts: the parts before it, like `flat`.
        leaves: the number of micro-batches, of which each rank has those of `rank_leaves`.
    """

    def __init__(self, flat: Tensor, parts: list[Tensor], leaves: int) -> None:
        self._flat, self._ranks = flat, dist.get_world_size()
        if self._ranks == 1:
            return
        self._parts = subtree_starts(self._ranks, leaves)
        missing = -len(flat) % self._ranks
        self._sum = sent = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
        self._chunk = len(sent) // self._ranks
        if parts:  # what goes to one rank is contiguous
            padded = [torch.nn.functional.pad(part, (0, missing)) for part in parts]
            sent = torch.stack([tensor.view(self._ranks, -1) for tensor in (*padded, sent)], dim=1).flatten()
        counts = [max(1, len(rank_parts)) for rank_parts in self._parts]
        self._received = flat.new_empty(sum(counts) * self._chunk)
        taken, given = [count * self._chunk for count in counts], [len(sent) // self._ranks] * self._ranks
        self._work: Any = dist.all_to_all_single(self._received, sent, taken, given, async_op=True)
        self._sent = sent  # until it has arrived

    def gather(self) -> None:
        """Sum this rank's chunk, and begin to exchange the sums."""
        if self._ranks > 1:
            self._work.wait()
            chunks, tree = self._received.split(self._chunk), TreeSum()
            for begin, chunk in zip(itertools.chain(*self._parts), chunks, strict=False):  # without those of idle ranks
                tree.add(begin, [chunk])
            [[total]] = tree.take_subtrees(END, END)
            self._work = dist.all_gather_into_tensor(self._sum, total, async_op=True)

    def finish(self) -> None:
        """Wait for the sums. On CUDA only what follows on the current stream waits."""
        if self._ranks > 1:
            self._work.wait()
            if self._sum is not self._flat:
                self._flat.copy_(self._sum[: len(self._flat)])

    def wait(self) -> None:
        """Both steps."""
        self.gather()
        self.finish()


class TreeRankSum(RankSum):
    """Each rank computes a run of consecutive micro-batches, and the sum is formed along the tree."""

    def __init__(self) -> None:
        self._tree = TreeSum()

    def add(self, values: Tensor, number: int) -> None:
        self._tree.add(number, [values.clone()])
        values.zero_()

    def start(self, values: Tensor, count: int) -> Any:
        stop = rank_leaves(dist.get_rank(), dist.get_world_size(), count).stop
        if parts := [part for [part] in self._tree.take_subtrees(stop, count)]:
            values.copy_(parts.pop())
        return TreeAllReduce(values, parts, count)
