"""Sums over the micro-batches of a global batch whose bits do not depend on the number of ranks.

Floating-point addition is not associative, so a sum has the same bits only if it is always formed in the same order.
Here that is one binary tree over the micro-batches. The leaf of micro-batch m is at the place whose bits are those of m
in reverse, and neighbours are added first; a leaf that does not exist is left out. If the number of ranks is a power of
two, the micro-batches of a rank (m % world_size == rank) are a whole subtree, and the ranks are the leaves of the rest.
A larger tree around the same leaves gives the same sums, so nothing here knows how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

BITS = 40


def place(number: int) -> int:
    """The place of a leaf in the tree: its bits in reverse."""
    return int(f"{number:0{BITS}b}"[::-1], 2)


def in_tree_order(numbers: Iterable[int]) -> list[int]:
    """The leaves from left to right: in this order no more than log2(leaves) + 1 partial sums are held at a time."""
    return sorted(numbers, key=place)


class TreeSum:
    """Sums lists of tensors along the tree. Add the leaves in tree order."""

    def __init__(self) -> None:
        self._held: list[tuple[int, list[Tensor]]] = []  # partial sums from left to right, with the place of a leaf

    def add(self, number: int, tensors: list[Tensor]) -> None:
        """Add a leaf. Its tensors are held, and overwritten later."""
        self._close(place(number))
        self._held.append((place(number), tensors))

    def take(self, number: int) -> list[list[Tensor]]:
        """The partial sums to be added to the last leaf, `number`, one after the other. They are no longer held."""
        self._close(place(number))
        held, self._held = self._held, []
        return [tensors for _, tensors in reversed(held)]

    def total(self) -> list[Tensor]:
        """The sum of all leaves; there must be one."""
        *rest, (_, total) = self._held
        self._held = []
        for _, tensors in reversed(rest):
            torch._foreach_add_(total, tensors)
        return total

    def _close(self, next_place: int) -> None:
        """Add up the subtrees that the next leaf is not in."""
        if not self._held:
            return
        height = (self._held[-1][0] ^ next_place).bit_length() - 1  # of the largest such subtree
        while len(self._held) > 1 and self._held[-2][0] >> height == self._held[-1][0] >> height:
            _, tensors = self._held.pop()
            torch._foreach_add_(self._held[-1][1], tensors)


class TreeAllReduce:
    """Replace a flat tensor by its sum over the ranks, along the tree: the bytes of a ring all-reduce.

    Each rank sums one part: it receives that part of all ranks, and sends its sum to all. Every step is a collective,
    so all ranks must call the methods in the same order, relative to other collectives too.

    Args:
        flat: contiguous, 1-dimensional.
        leaves: the number of micro-batches. A rank without one is left out of the sum.
    """

    def __init__(self, flat: Tensor, leaves: int) -> None:
        self._flat, self._leaves, self._ranks = flat, leaves, dist.get_world_size()
        if self._ranks > 1:
            missing = -len(flat) % self._ranks
            self._sent = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
            self._received = torch.empty_like(self._sent)
            self._work = dist.all_to_all_single(self._received, self._sent, async_op=True)

    def gather(self) -> None:
        """Sum this rank's part, and begin to exchange the sums."""
        if self._ranks > 1:
            self._work.wait()
            parts, tree = self._received.chunk(self._ranks), TreeSum()
            for rank in in_tree_order(range(min(self._ranks, self._leaves))):
                tree.add(rank, [parts[rank]])
            self._work = dist.all_gather_into_tensor(self._sent, tree.total()[0], async_op=True)

    def finish(self) -> None:
        """Wait for the sums. On CUDA only what follows on the current stream waits."""
        if self._ranks > 1:
            self._work.wait()
            if self._sent is not self._flat:
                self._flat.copy_(self._sent[: len(self._flat)])

    def wait(self) -> None:
        """Both steps."""
        self.gather()
        self.finish()
