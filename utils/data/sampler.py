"""The order of an epoch, cut into micro-batches and global batches.

The order is cut into micro-batches of `batch_size` consecutive entries; `micro_batches_per_step` consecutive
micro-batches form a global batch, that is one optimizer step. Micro-batch m of a global batch goes to rank
m % world_size, or, for exact sums, each rank gets a run of consecutive ones. The number of ranks decides only which
rank computes a micro-batch, never what is in it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from config import UserError
from utils.distributed.consensus import is_every
from utils.distributed.tree import run_of
from utils.rng import derive_seed


class MapDataset(Protocol):
    """What a data set must have; docs/reference.md lists what it may have."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(slots=True)
class MicroBatch:
    """`batch_size` consecutive entries of the order (the last of an epoch may be short), and their position."""

    epoch: int
    number: int  # within its global batch, over all ranks; in an exact evaluation within the whole set
    indices: list[int]
    is_padding: bool  # zero gradient, so that an idle rank takes part in the collectives
    is_last: bool  # this rank's last one in the global batch
    count: int  # micro-batches in the global batch, over all ranks; or in the whole set
    batch: Any = None  # on the device, once the loader has fetched it
    is_check: bool = False  # another rank's first one, whose gradient is compared and not used
    is_stand_in: bool = False  # this one could not be fetched: its batch is another one

    @property
    def is_extra(self) -> bool:
        """Whether it adds nothing to the step on this rank."""
        return self.is_padding or self.is_check


@dataclass(slots=True)
class GlobalBatch:
    """One global batch as seen by one rank. Iterating yields this rank's micro-batches."""

    samples: int  # of all ranks
    micro_batches: list[MicroBatch]
    fetch: Callable[[MicroBatch], MicroBatch] | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self.fetch, self.micro_batches) if self.fetch else iter(self.micro_batches)


def shifts_of(hosts: Sequence[str]) -> list[int]:
    """The distances at which ranks check each other, in turn: those at which most have a rank on another host."""
    ranks = len(hosts)
    abroad = [sum(hosts[k] != hosts[(k + shift) % ranks] for k in range(ranks)) for shift in range(ranks)]
    return [shift for shift in range(1, ranks) if abroad[shift] == max(abroad[1:])]


@dataclass(frozen=True)
class Assignment:
    """Which micro-batches of a global batch a rank computes.

    Args:
        in_runs: consecutive ones, for exact sums (utils/distributed/tree.py). An evaluation's sums span all of its
            steps, so there they are consecutive in the whole set.
        is_padded: every rank computes equally many, some of them padding: sharded parameters are gathered from all
            ranks in each of them.
        check_every: in every so many steps, and in the first one, a rank also gets another rank's first micro-batch.
        hosts: of all ranks, for these checks.
    """

    rank: int
    world_size: int
    in_runs: bool = False
    is_padded: bool = False
    check_every: int = 0
    hosts: Sequence[str] = ()


class GlobalBatchSampler(DistributedSampler):
    """A DistributedSampler that assigns whole micro-batches, never repeats a sample, and starts anywhere in an epoch.

    Iterating yields this rank's indices of `epoch` from `start` on. A data set may define its own order (`epoch_order`,
    docs/reference.md).
    """

    dataset: Any  # a MapDataset

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        micro_batches_per_step: int,
        assignment: Assignment,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        ranks = {"num_replicas": assignment.world_size, "rank": assignment.rank}
        super().__init__(dataset, **ranks, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.batch_size = batch_size
        self.micro_batches_per_step = micro_batches_per_step
        self.is_in_runs, self._is_padded = assignment.in_runs, assignment.is_padded
        self.start = 0
        self._check_every = assignment.check_every
        self._shifts = shifts_of(assignment.hosts) if assignment.check_every else []
        self._first_step = -1  # of this attempt, once it is known
        self._order: tuple[int, Tensor] | None = None

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.micro_batches_per_step

    @property
    def samples_per_epoch(self) -> int:
        """All samples, or with drop_last those that fill whole global batches."""
        n = len(self.dataset)
        return n - n % self.global_batch_size if self.drop_last else n

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.samples_per_epoch / self.global_batch_size)

    def steps_left(self, epoch: int, start: int, epochs: float) -> float:
        """Optimizer steps from sample `start` of an epoch to the end of a run of so many epochs."""
        here = math.ceil((self.samples_per_epoch - start) / self.global_batch_size)
        return max(0, here) + max(0, epochs - epoch - 1) * self.steps_per_epoch if epoch < epochs else 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        super().set_epoch(epoch)
        self.start = start
        if self._first_step < 0:
            self._first_step = self._step_at(epoch, start)

    def _step_at(self, epoch: int, start: int) -> int:
        return epoch * self.steps_per_epoch + math.ceil(start / self.global_batch_size)

    def shift_at(self, epoch: int, start: int) -> int:
        """In the step that begins there, rank r checks rank (r + shift) % world_size; 0 if that is no check step."""
        if not self._shifts:
            return 0
        step = self._step_at(epoch, start)
        is_due = step == self._first_step or is_every(self._check_every, step + 1)
        return self._shifts[(step + 1) // self._check_every % len(self._shifts)] if is_due else 0

    def first_of(self, rank: int, epoch: int, start: int) -> MicroBatch:
        """The first micro-batch of a rank in the step that begins there, with which another one checks it."""
        other = copy.copy(self)
        other.rank, other._shifts = rank, []
        first = next(other.global_batches(epoch, start)).micro_batches[0]
        return dataclasses.replace(first, is_last=False, is_check=True)

    def order(self, epoch: int) -> Tensor:
        """[samples_per_epoch]: the samples of the epoch, a pure function of (seed, epoch). Raises UserError."""
        if self._order is None or self._order[0] != epoch:
            self._order = None  # one order in memory at a time
            n, copies = len(self.dataset), getattr(self.dataset, "copies", 1)
            dtype = torch.int32 if n * copies < 2**31 else torch.int64  # randperm draws the same in both
            if self.shuffle and hasattr(self.dataset, "epoch_order"):
                order = torch.as_tensor(self.dataset.epoch_order(self.seed, epoch, n), dtype=torch.int64)
                if len(order) != n or (n and not 0 <= order.min() <= order.max() < n * copies):
                    problem = f"epoch_order: returned {len(order)} indices for {n} samples"
                    raise UserError(f"{problem}; return n indices from 0 to n - 1")
                left_out = n - int(torch.zeros(n, dtype=torch.bool).index_fill_(0, order % n, True).sum())
                if left_out and not getattr(self.dataset, "with_replacement", False):
                    raise UserError(
                        f"epoch_order: leaves out {left_out} of {n} samples and repeats others; "
                        "give each index once, or set with_replacement = True in the data set"
                    )
            elif self.shuffle:
                generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
                order = torch.randperm(n, generator=generator, dtype=dtype)
            else:
                order = torch.arange(n, dtype=dtype)
            self._order = (epoch, order[: self.samples_per_epoch].to(dtype))
        return self._order[1]

    def global_batches(self, epoch: int, start: int = 0) -> Iterator[GlobalBatch]:
        """The global batches of the epoch from position `start` on, as seen by this rank."""
        order, size = self.order(epoch), self.batch_size
        if self.is_in_runs and not self.shuffle:
            count = math.ceil(len(order) / size)
            for step in range(self.steps_per_epoch):
                numbers = range(step, count, self.steps_per_epoch)
                missing = count * size - len(order) if count - 1 in numbers else 0
                mine = numbers[self.rank : self.rank + 1]
                yield GlobalBatch(len(numbers) * size - missing, self._micro_batches(epoch, order, mine, count))
            return
        for first in range(start, len(order), self.global_batch_size):
            entries = order[first : first + self.global_batch_size]
            count = math.ceil(len(entries) / size)
            run = run_of(self.rank, self.num_replicas, count)
            mine = run if self.is_in_runs else range(self.rank, count, self.num_replicas)
            found = self._micro_batches(epoch, entries, mine, count)
            if shift := self.shift_at(epoch, first):
                found.insert(0, self.first_of((self.rank + shift) % self.num_replicas, epoch, first))
            yield GlobalBatch(len(entries), found)

    def _micro_batches(self, epoch: int, entries: Tensor, mine: range, count: int) -> list[MicroBatch]:
        """This rank's micro-batches, of `count` in these entries of the order: of these numbers, and padding."""
        parts = {number: entries[number * self.batch_size :][: self.batch_size].tolist() for number in mine or [0]}
        lacks_one = len(mine) < (math.ceil(count / self.num_replicas) if self._is_padded else 1)
        last = -1 if lacks_one else mine[-1]
        found = [MicroBatch(epoch, each, parts[each], False, each == last, count) for each in mine]
        if lacks_one:
            number, indices = next(iter(parts.items()))
            found.append(MicroBatch(epoch, number, indices, True, True, count))
        return found

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The micro-batches of this rank from the current position on, including padding."""
        for global_batch in self.global_batches(self.epoch, self.start):
            yield from global_batch.micro_batches

    def __iter__(self) -> Iterator[int]:
        for micro_batch in self.micro_batches():
            if not micro_batch.is_extra:
                yield from micro_batch.indices

    def __len__(self) -> int:
        return sum(1 for _ in self)
