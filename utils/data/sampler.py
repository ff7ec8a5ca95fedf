"""The order of an epoch, cut into micro-batches: one stream for each rank.

The order is cut into micro-batches of `batch_size` consecutive samples. `micro_batches_per_step` consecutive
micro-batches form a global batch, the samples of one optimizer step. Rank r computes the micro-batches r, r + world
size, r + 2 x world size and so on of each global batch. For exact sums, each rank gets consecutive ones instead.

With --global_batch_size, the number of ranks decides who computes a micro-batch, never what is in it. Samples of
unequal length may be packed by a budget of tokens instead.
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
    """A micro-batch has the samples of one forward pass. The last one of an epoch may be short."""

    epoch: int
    number: int  # position in the global batch, over all ranks
    indices: list[int]  # the samples
    is_padding: bool  # an idle rank repeats a micro-batch with gradient 0, since DDP's collectives need every rank
    is_last: bool  # whether it is this rank's last micro-batch in the global batch
    micro_batches_in_step: int  # over all ranks
    samples_in_step: int = 0  # over all ranks
    batch: Any = None  # the batch on the device: the loader fills it in


@dataclass(frozen=True)
class Assignment:
    """An assignment says which micro-batches of a global batch a rank computes.

    Args:
        is_padded: whether padding gives every rank equally many micro-batches. That is needed if each micro-batch has a
            collective: sharded parameters are gathered, or the ranks of an evaluation vote. Without it, padding is only
            for ranks that have no micro-batch at all.
    """

    rank: int
    world_size: int
    is_padded: bool = False

    def micro_batch_numbers(self, rank: int, count: int) -> Sequence[int]:
        """Return the numbers of the micro-batches that a rank computes in a global batch of `count` micro-batches."""
        return range(rank, count, self.world_size)

    def evaluation_group_size(self, count: int) -> int:
        """Return how many micro-batches a global batch has in an evaluation of `count` micro-batches: one per rank.

        An assignment for exact sums needs the count.
        """
        return self.world_size

    def create_rank_sum(self) -> RankSum:
        """Return the object that sums an evaluation over micro-batches and ranks. Its order fits the assignment."""
        return RankSum()


class GlobalBatchSampler(DistributedSampler):
    """A DistributedSampler that assigns whole micro-batches, never repeats a sample, and starts anywhere in an epoch.

    Training uses `micro_batches`. Iterating yields this rank's indices of `epoch` from `start` on, for torch's
    DataLoader. A data set may define its own order (`epoch_order`, docs/reference.md).

    Args:
        batch_size: samples in a micro-batch.
        micro_batches_per_step: micro-batches in a global batch, over all ranks.
        drop_last: whether the samples that do not fill a global batch are left out.
    """

    dataset: Any  # a MapDataset
    is_packed = False  # whether samples are packed by length: epochs may then differ in the number of micro-batches
    # the samples of the micro-batches that need the most memory, if samples are packed: they are tried before step 1
    largest_micro_batches: list[list[int]] = []
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
        super().__init__(
            dataset,
            num_replicas=assignment.world_size,
            rank=assignment.rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
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
        """Return the number of samples in an epoch: all, or with drop_last those that fill whole global batches."""
        n = len(self.dataset)
        if self.drop_last:
            return n - n % self.global_batch_size
        return n

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.micro_batches_per_epoch / self.micro_batches_per_step)

    @property
    def micro_batches_per_epoch(self) -> int:
        """Return the number of micro-batches in an epoch, over all ranks."""
        return math.ceil(self.samples_per_epoch / self.batch_size)

    @property
    def passes_per_epoch(self) -> int:
        """Return the number of micro-batches that each rank computes in an evaluation, padding included."""
        return math.ceil(self.micro_batches_per_epoch / self.num_replicas)

    def find_smallest_micro_batch(self, max_steps: int = 0) -> list[list[int]]:
        """Find the short last micro-batch of the first epoch. It is tried before the first step.

        Args:
            max_steps: the steps of the run, if they are limited; else 0.

        Returns:
            A list with the samples of that micro-batch. It is empty if the run has no short micro-batch.
        """
        samples = self.samples_per_epoch
        if samples < self.batch_size or samples % self.batch_size == 0:
            return []
        if 0 < max_steps < self.steps_per_epoch:  # the run ends before the last micro-batch, the only small one
            return []
        smallest = self.epoch_order(0)[-(samples % self.batch_size) :]
        return [smallest.tolist()]

    def count_remaining_steps(self, epoch: int, start: int, epochs: float) -> float:
        """Count the optimizer steps from position `start` of an epoch to the end of a run of so many epochs.

        Args:
            start: a position in the order of the epoch, over all ranks.
            epochs: may be infinite.
        """
        if epoch >= epochs:
            return 0
        remaining_samples = self.samples_per_epoch - start
        steps_in_epoch = max(0, math.ceil(remaining_samples / self.global_batch_size))
        later_epochs = max(0, epochs - epoch - 1)
        return steps_in_epoch + later_epochs * self.steps_per_epoch

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        super().set_epoch(epoch)
        self.start = start

    def epoch_order(self, epoch: int) -> Tensor:
        """Return the samples of an epoch in their order, which is a pure function of (seed, epoch).

        Returns:
            Indices of shape [samples_per_epoch], int32 if the data set is small enough for that.

        Raises:
            UserError: if the data set defines its own order, and that is not valid.
        """
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = None  # one order in memory at a time
            self._epoch_order = (epoch, self._create_epoch_order(epoch))
        return self._epoch_order[1]

    def _create_epoch_order(self, epoch: int) -> Tensor:
        n = len(self.dataset)
        copies = getattr(self.dataset, "copies", 1)  # index k * n + j is copy k of sample j, with its own random draws
        dtype = torch.int32 if n * copies < 2**31 else torch.int64  # the permutation is the same in both
        if self.shuffle and hasattr(self.dataset, "epoch_order"):
            order = self._read_dataset_order(epoch, n, copies)
        elif self.shuffle:
            generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
            order = torch.randperm(n, generator=generator, dtype=dtype)
        else:
            order = torch.arange(n, dtype=dtype)
        return order[: self.samples_per_epoch].to(dtype)

    def _read_dataset_order(self, epoch: int, n: int, copies: int) -> Tensor:
        """Return the data set's own order, int64 [n]. Raises UserError if that is not an order of its n samples."""
        order = torch.as_tensor(self.dataset.epoch_order(self.seed, epoch, n), dtype=torch.int64)
        is_valid = len(order) == n
        if is_valid and n > 0:  # an empty tensor has no minimum
            is_valid = 0 <= int(order.min()) and int(order.max()) < n * copies
        if not is_valid:
            returned = f"{len(order)} indices"
            if len(order):
                returned += f" from {int(order.min())} to {int(order.max())}"
            raise UserError(f"epoch_order must return {n} indices from 0 to {n * copies - 1}, but returned {returned}.")
        is_in_order = torch.zeros(n, dtype=torch.bool).index_fill_(0, order % n, True)
        left_out = n - int(is_in_order.sum())
        if left_out and not getattr(self.dataset, "with_replacement", False):
            raise UserError(
                f"epoch_order leaves out {left_out} of {n} samples and repeats others. "
                "Give each index once, or set with_replacement = True in the data set."
            )
        return order

    def measure_token_density(self, epoch: int, end: int, steps: int) -> tuple[float, float]:
        """Measure the last `steps` steps before position `end` of the epoch. A packed sampler overrides this.

        Returns:
            The tokens per sample and the share of padding. Both are 0 if the sampler does not know the lengths.
        """
        return 0.0, 0.0

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this rank from position `start` of the epoch on, including padding."""
        order = self.epoch_order(epoch)
        for begin in range(start, len(order), self.global_batch_size):
            global_batch = order[begin : begin + self.global_batch_size]
            count = math.ceil(len(global_batch) / self.batch_size)
            own_numbers = self.assignment.micro_batch_numbers(self.rank, count)
            passes = max(1, len(own_numbers))  # DDP needs a backward pass of every rank
            if self.assignment.is_padded:
                passes = math.ceil(count / self.num_replicas)
            repeated_number = own_numbers[0] if own_numbers else 0
            for k in range(passes):
                is_padding = k >= len(own_numbers)
                number = repeated_number if is_padding else own_numbers[k]
                first = number * self.batch_size
                yield MicroBatch(
                    epoch=epoch,
                    number=number,
                    indices=global_batch[first : first + self.batch_size].tolist(),
                    is_padding=is_padding,
                    is_last=k == passes - 1,
                    micro_batches_in_step=count,
                    samples_in_step=len(global_batch),
                )

    def __iter__(self) -> Iterator[int]:
        for micro_batch in self.micro_batches(self.epoch, self.start):
            if not micro_batch.is_padding:
                yield from micro_batch.indices

    def __len__(self) -> int:
        return sum(1 for _ in self)
