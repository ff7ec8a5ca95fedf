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

SUM_ORDER = "natural"  # of the leaves; in checkpoints, so that a resume tells if another version sums in another order
AFTER_LAST_LEAF = 2**40  # larger than any number of a leaf


def rank_leaves(rank: int, world_size: int, leaf_count: int) -> range:
    """The leaves of a rank: equally many for each, except that the last ranks may have fewer, or none."""
    size = math.ceil(leaf_count / world_size)
    return range(min(rank * size, leaf_count), min((rank + 1) * size, leaf_count))


@functools.lru_cache(maxsize=64)
def list_subtree_starts(world_size: int, leaf_count: int) -> list[list[int]]:
    """For each rank, the first leaves of its parts: the largest subtrees that its leaves form."""
    parts: list[list[int]] = []
    for leaves in (rank_leaves(rank, world_size, leaf_count) for rank in range(world_size)):
        begin, end = leaves.start, _next_leaf(leaves.stop, leaf_count)
        parts.append([])
        while begin < leaves.stop:
            parts[-1].append(begin)
            size = begin & -begin or AFTER_LAST_LEAF  # of the largest subtree that begins here
            while begin + size > end:
                size //= 2
            begin += size
    return parts


def _next_leaf(stop: int, leaf_count: int) -> int:
    """The leaf after those of a rank. If there is none, subtrees that reach beyond are complete too."""
    return stop if stop < leaf_count else AFTER_LAST_LEAF


class TreeSum:
    """Sums lists of tensors along the tree. Add the leaves of a run in their order."""

    def __init__(self) -> None:
        self._subtrees: list[tuple[int, list[Tensor]]] = []  # subtrees from left to right, with their first leaf

    def add(self, leaf: int, tensors: list[Tensor]) -> None:
        """Add a leaf, or a subtree by its first leaf. Its tensors are held, and overwritten later."""
        self._add_complete_subtrees(leaf)
        self._subtrees.append((leaf, tensors))

    def pop_for_last_leaf(self, leaf: int, leaf_count: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """For the last leaf, `leaf`, of a run: the parts before its own, and the sums to be added to it, one after
        the other. They are no longer held."""
        self._add_complete_subtrees(leaf)
        after, inner = _next_leaf(leaf + 1, leaf_count), []
        while self._subtrees and _is_complete_subtree(self._subtrees[-1][0], leaf, after):
            inner.append(self._subtrees.pop()[1])
        return self.pop_subtrees(leaf + 1, leaf_count), inner

    def pop_subtrees(self, stop: int, leaf_count: int) -> list[list[Tensor]]:
        """The parts of a run that ends before leaf `stop`. They are no longer held."""
        self._add_complete_subtrees(_next_leaf(stop, leaf_count))
        parts, self._subtrees = [tensors for _, tensors in self._subtrees], []
        return parts

    def _add_complete_subtrees(self, next_leaf: int) -> None:
        """Add up the subtrees that are complete, since the next leaf is `next_leaf`."""
        while len(self._subtrees) > 1 and _is_complete_subtree(self._subtrees[-2][0], self._subtrees[-1][0], next_leaf):
            _, tensors = self._subtrees.pop()
            torch._foreach_add_(self._subtrees[-1][1], tensors)


def _is_complete_subtree(left: int, right: int, next_leaf: int) -> bool:
    """Whether the smallest subtree that has both leaves begins with `left` and ends before `next_leaf`."""
    height = (left ^ right).bit_length()
    return left % 2**height == 0 and left >> height != next_leaf >> height


class TreeAllReduce:
    """Replace a flat tensor by its sum over the ranks, along the tree.

    Each rank sums one chunk: it receives that chunk of all parts, and sends its sum to all. These are the bytes of a
    ring all-reduce if each rank has one part. Every step is a collective, so all ranks must call the methods in the
    same order, relative to other collectives too.

    Args:
        flat: contiguous, 1-dimensional: the last part of this rank. Ignored if it has none.
        subtrees: the parts before it, like `flat`.
        leaf_count: the number of micro-batches, of which each rank has those of `rank_leaves`.
    """

    def __init__(self, flat: Tensor, subtrees: list[Tensor], leaf_count: int) -> None:
        self._flat, self._world_size = flat, dist.get_world_size()
        if self._world_size == 1:
            return
        self._subtree_starts = list_subtree_starts(self._world_size, leaf_count)
        pad_length = -len(flat) % self._world_size
        self._padded_sum = sent = torch.nn.functional.pad(flat, (0, pad_length)) if pad_length else flat
        self._chunk_size = len(sent) // self._world_size
        if subtrees:  # what goes to one rank is contiguous
            padded = [torch.nn.functional.pad(part, (0, pad_length)) for part in subtrees]
            sent = torch.stack([tensor.view(self._world_size, -1) for tensor in (*padded, sent)], dim=1).flatten()
        counts = [max(1, len(rank_parts)) for rank_parts in self._subtree_starts]
        self._receive_buffer = flat.new_empty(sum(counts) * self._chunk_size)
        output_split_sizes = [count * self._chunk_size for count in counts]
        input_split_sizes = [len(sent) // self._world_size] * self._world_size
        self._work: Any = dist.all_to_all_single(
            self._receive_buffer, sent, output_split_sizes, input_split_sizes, async_op=True
        )
        self._send_buffer = sent  # until it has arrived

    def start_all_gather(self) -> None:
        """Sum this rank's chunk, and begin to exchange the sums."""
        if self._world_size > 1:
            self._work.wait()
            chunks, tree = self._receive_buffer.split(self._chunk_size), TreeSum()
            # without those of idle ranks
            for begin, chunk in zip(itertools.chain(*self._subtree_starts), chunks, strict=False):
                tree.add(begin, [chunk])
            [[total]] = tree.pop_subtrees(AFTER_LAST_LEAF, AFTER_LAST_LEAF)
            self._work = dist.all_gather_into_tensor(self._padded_sum, total, async_op=True)

    def finish(self) -> None:
        """Wait for the sums. On CUDA only what follows on the current stream waits."""
        if self._world_size > 1:
            self._work.wait()
            if self._padded_sum is not self._flat:
                self._flat.copy_(self._padded_sum[: len(self._flat)])

    def wait(self) -> None:
        """Both steps."""
        self.start_all_gather()
        self.finish()


class TreeRankSum(RankSum):
    """Each rank computes a run of consecutive micro-batches, and the sum is formed along the tree."""

    def __init__(self) -> None:
        self._tree_sum = TreeSum()

    def add(self, values: Tensor, number: int) -> None:
        self._tree_sum.add(number, [values.clone()])
        values.zero_()

    def start_all_reduce(self, values: Tensor, count: int) -> Any:
        stop = rank_leaves(dist.get_rank(), dist.get_world_size(), count).stop
        if parts := [part for [part] in self._tree_sum.pop_subtrees(stop, count)]:
            values.copy_(parts.pop())
        return TreeAllReduce(values, parts, count)
