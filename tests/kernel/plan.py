# extra: template
"""Which micro-batches a rank computes, and their batches. The number of ranks decides only who computes one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from utils.rng import derive_seed, seed_host


@dataclass(slots=True)
class MicroBatch:
    number: int  # within its global batch, over all ranks
    indices: list[int]
    is_padding: bool  # its gradient is 0: a rank without a micro-batch takes part in the collectives
    is_last: bool  # of this rank in the global batch
    samples: int  # in the global batch, of all ranks


@dataclass(frozen=True)
class Plan:
    """The micro-batches of one rank. per_step: micro-batches in a global batch, of all ranks."""

    data: Any
    size: int
    per_step: int
    rank: int
    ranks: int
    seed: int
    shuffles: bool = True
    drop_last: bool = False

    @property
    def samples_per_epoch(self) -> int:
        whole = self.size * self.per_step
        return len(self.data) // whole * whole if self.drop_last else len(self.data)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.samples_per_epoch / (self.size * self.per_step))

    def order(self, epoch: int) -> torch.Tensor:
        """A function of (seed, epoch), unless the data set has its own."""
        size = len(self.data)
        if not self.shuffles:
            return torch.arange(size)
        if hasattr(self.data, "epoch_order"):
            return torch.as_tensor(self.data.epoch_order(self.seed, epoch, size))
        return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed("order", self.seed, epoch)))

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """From this sample of the epoch on. Micro-batch m of a global batch is computed by rank m % ranks."""
        order = self.order(epoch)
        whole = self.size * self.per_step
        for first in range(start, self.samples_per_epoch, whole):
            window = order[first : first + whole]
            parts = [part.tolist() for part in window.split(self.size)]
            numbers = range(self.rank, len(parts), self.ranks)
            for number in numbers or [0]:
                is_last = not numbers or number == numbers[-1]
                yield MicroBatch(number, parts[number], not numbers, is_last, len(window))

    def batch(self, indices: list[int], epoch: int = 0) -> Any:
        """The samples as the model gets them: what the data set draws is a function of (seed, epoch, indices)."""
        if hasattr(self.data, "__getitems__"):
            seed_host("sample", self.seed, epoch, *indices)
            samples = self.data.__getitems__(indices)
        else:
            samples = []
            for index in indices:
                seed_host("sample", self.seed, epoch, index)
                samples.append(self.data[index % len(self.data)])  # copies have numbers of their own
        batch = getattr(self.data, "collate", default_collate)(samples)
        transform = getattr(self.data, "device_transform", None)
        return transform(batch, self.seed, epoch, torch.tensor(indices)) if transform else batch
