"""The order of an epoch, cut into micro-batches: one stream for each rank.

The order is cut into micro-batches of `batch_size` consecutive entries; `micro_batches_per_step` consecutive
micro-batches form a global batch, that is one optimizer step. Micro-batch m of a global batch goes to rank
m % world_size, or, for exact sums, each rank gets consecutive ones. Given `micro_batches_per_step`, which
--global_batch_size fixes, ranks decide only who computes a micro-batch, never what is in it. Samples of unequal length
may be packed by a budget instead (utils/extras/lengths).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from utils.distributed.collectives import RankSum
from utils.rng import derive_seed
from utils.settings.errors import UserError


class MapDataset(Protocol):
    """What a data set must have; docs/reference.md lists what it may have."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(slots=True)
class MicroBatch:
    """`batch_size` consecutive entries of the order (the last of an epoch may be short), and their position."""

    epoch: int
    number: int  # within its global batch, over all ranks
    indices: list[int]
    is_padding: bool  # zero gradient, so that an idle rank takes part in the collectives
    is_last: bool  # this rank's last one in the global batch
    count: int  # micro-batches in the global batch, over all ranks
    samples: int = 0  # in the global batch, of all ranks
    batch: Any = None  # on the device, once the loader has fetched it


@dataclass(frozen=True)
class Assignment:
    """Which micro-batches of a global batch a rank computes.

    Args:
        is_padded: every rank computes equally many, some of them padding, for what all ranks do in each of them: they
            gather sharded parameters, or may stop an evaluation.
    """

    rank: int
    world_size: int
    is_padded: bool = False

    def micro_batch_numbers(self, rank: int, count: int) -> Sequence[int]:
        """Those of a rank, of `count` micro-batches."""
        return range(rank, count, self.world_size)

    def evaluation_group_size(self, count: int) -> int:
        """The micro-batches in a global batch of an evaluation that has `count` of them."""
        return self.world_size

    def create_rank_sum(self) -> RankSum:
        """Forms the sums of an evaluation over micro-batches and ranks."""
        return RankSum()


class GlobalBatchSampler(DistributedSampler):
    """A DistributedSampler that assigns whole micro-batches, never repeats a sample, and starts anywhere in an epoch.

    Iterating yields this rank's indices of `epoch` from `start` on. A data set may define its own order (`epoch_order`,
    docs/reference.md).
    """

    dataset: Any  # a MapDataset
    is_packed = False  # by length: epochs may differ in the number of their micro-batches
    largest_micro_batches: list[list[int]] = []  # if it is: the samples of micro-batches that need the most memory
    provenance: dict[str, Any] = {}  # what must be the same on a resume, besides the config

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
        self.assignment = assignment
        self.start = 0
        self._epoch_order: tuple[int, Tensor] | None = None

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
        return math.ceil(self.micro_batches_per_epoch / self.micro_batches_per_step)

    @property
    def micro_batches_per_epoch(self) -> int:
        """The micro-batches of an epoch, over all ranks."""
        return math.ceil(self.samples_per_epoch / self.batch_size)

    @property
    def passes_per_epoch(self) -> int:
        """The micro-batches of each rank, padding included, where all have equally many."""
        return math.ceil(self.micro_batches_per_epoch / self.num_replicas)

    def find_smallest_micro_batch(self, max_steps: int = 0) -> list[list[int]]:
        """The samples of the smallest micro-batch of the first epoch, or of so many steps if they are fewer (0: no
        limit); none if all are equally large."""
        samples, size = self.samples_per_epoch, self.batch_size
        if samples < size or samples % size == 0 or 0 < max_steps < self.steps_per_epoch:
            return []
        return [self.epoch_order(0)[-(samples % size) :].tolist()]

    def count_remaining_steps(self, epoch: int, start: int, epochs: float) -> float:
        """Optimizer steps from sample `start` of an epoch to the end of a run of so many epochs."""
        left_in_epoch = math.ceil((self.samples_per_epoch - start) / self.global_batch_size)
        return max(0, left_in_epoch) + max(0, epochs - epoch - 1) * self.steps_per_epoch if epoch < epochs else 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        super().set_epoch(epoch)
        self.start = start

    def epoch_order(self, epoch: int) -> Tensor:
        """[samples_per_epoch]: the samples of the epoch, a pure function of (seed, epoch). Raises UserError."""
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = None  # one order in memory at a time
            n, copies = len(self.dataset), getattr(self.dataset, "copies", 1)
            dtype = torch.int32 if n * copies < 2**31 else torch.int64  # randperm draws the same in both
            if self.shuffle and hasattr(self.dataset, "epoch_order"):
                order = torch.as_tensor(self.dataset.epoch_order(self.seed, epoch, n), dtype=torch.int64)
                if len(order) != n or (n and not 0 <= order.min() <= order.max() < n * copies):
                    problem = f"epoch_order: returned {len(order)} indices for {n} samples"
                    raise UserError(f"{problem}; return n indices from 0 to {n * copies - 1}")
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
            self._epoch_order = (epoch, order[: self.samples_per_epoch].to(dtype))
        return self._epoch_order[1]

    def measure_token_density(self, epoch: int, end: int, steps: int) -> tuple[float, float]:
        """In so many steps before `end` of the epoch, tokens per sample and the share of padding; or zeros."""
        return 0.0, 0.0

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """The micro-batches of this rank from position `start` of the epoch on, including padding."""
        order, size, ranks = self.epoch_order(epoch), self.batch_size, self.num_replicas
        for first in range(start, len(order), self.global_batch_size):
            entries = order[first : first + self.global_batch_size]
            count = math.ceil(len(entries) / size)
            numbers = self.assignment.micro_batch_numbers(self.rank, count)
            passes = math.ceil(count / ranks) if self.assignment.is_padded else max(1, len(numbers))
            for k in range(passes):
                is_padding = k >= len(numbers)
                number = (numbers[0] if numbers else 0) if is_padding else numbers[k]
                indices = entries[number * size :][:size].tolist()
                yield MicroBatch(epoch, number, indices, is_padding, k == passes - 1, count, len(entries))

    def __iter__(self) -> Iterator[int]:
        for micro_batch in self.micro_batches(self.epoch, self.start):
            if not micro_batch.is_padding:
                yield from micro_batch.indices

    def __len__(self) -> int:
        return sum(1 for _ in self)
