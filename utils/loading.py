"""From the order of an epoch to batches on the device: sampler, windows, workers.

The order of an epoch is cut into micro-batches of `batch_size` consecutive entries; `micro_batches_per_step` consecutive
micro-batches are one global batch, one optimizer step. Micro-batch m of a global batch goes to rank m % world_size. Ranks
decide only who computes a micro-batch, never what is in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate

from config import Refused, TrainingConfig, UnreadableSample
from utils.prefetch import SideStream, indices_on, one_ahead, pinned, to_device
from utils.signals import ignore_in_worker, kept_back
from utils.streams import derive_seed
from utils.watchdog import Clock
from utils.workers import Collate, Fetcher, check_shared_memory, explain, no_longer_than, tensors_in

if TYPE_CHECKING:
    from ddp_utils import DistributedContext

MOST_WORKERS = 8  # that "auto" asks for, of one rank


@dataclass(slots=True)
class MicroBatch:
    """`batch_size` consecutive entries of the order (the last of an epoch may be short), and where they stand."""

    epoch: int
    number: int  # within its global batch, over all ranks
    indices: list[int]
    is_counted: bool  # False: a stand-in with weight 0, so that an idle rank takes part in the all-reduce
    is_last: bool  # of this rank in its window
    batch: Any = None  # on the device, once the loader has fetched it
    replaced: list[tuple[int, str]] = field(default_factory=list)  # indices whose sample could not be read, and why


@dataclass(slots=True)
class Window:
    """One global batch as one rank sees it. Iterating gives this rank's micro-batches."""

    samples: int  # of all ranks
    weight: float  # of all ranks' samples; the divisor of the loss
    micro_batches: list[MicroBatch]
    fetched: Iterator[MicroBatch] | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        return (next(self.fetched) for _ in self.micro_batches) if self.fetched else iter(self.micro_batches)


class WindowSampler(DistributedSampler):
    """A DistributedSampler that deals whole micro-batches, never repeats a sample, and starts at any position of an epoch.

    As an iterable it gives this rank's indices of `epoch` from `start` on. A data set may bring `weights` (one number a
    sample) and `epoch_order(seed, epoch, n)` (an order of its own: n indices, each once unless it says `with_replacement = True`).
    Raises Refused when these do not fit the data set.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        micro_batches_per_step: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.batch_size = batch_size
        self.micro_batches_per_step = micro_batches_per_step
        self.start = 0
        weights = getattr(dataset, "weights", None)
        self.weights = None if weights is None else torch.as_tensor(weights, dtype=torch.float64)
        if weights is not None and not (len(weights) == len(dataset) and ((self.weights >= 0) & self.weights.isfinite()).all()):
            raise Refused(f"weights: must be {len(dataset)} numbers, one a sample, finite and not negative; mend them in the data set")
        self._order: tuple[int, Tensor] | None = None

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.micro_batches_per_step

    @property
    def samples_per_epoch(self) -> int:
        """All samples, or with drop_last those that fill global batches."""
        n = len(self.dataset)
        return n - n % self.global_batch_size if self.drop_last else n

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.samples_per_epoch / self.global_batch_size)

    def steps_left(self, epoch: int, start: int, epochs: int) -> int:
        """Optimizer steps from sample `start` of an epoch to the end of the last of so many epochs."""
        here = math.ceil((self.samples_per_epoch - start) / self.global_batch_size)
        return max(0, here) + max(0, epochs - epoch - 1) * self.steps_per_epoch if epoch < epochs else 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        super().set_epoch(epoch)
        self.start = start

    def order(self, epoch: int) -> Tensor:
        """int64 [samples_per_epoch]: the samples of the epoch, a pure function of (seed, epoch). Raises Refused."""
        if self._order is None or self._order[0] != epoch:
            n = len(self.dataset)
            if self.shuffle and hasattr(self.dataset, "epoch_order"):
                order = torch.as_tensor(self.dataset.epoch_order(self.seed, epoch, n), dtype=torch.int64)
                if len(order) != n or (n and not 0 <= order.min() <= order.max() < n):
                    raise Refused(f"epoch_order: gave {len(order)} indices for {n} samples; return n indices from 0 to n - 1")
                if len(order.unique()) < n and not getattr(self.dataset, "with_replacement", False):
                    raise Refused(
                        f"epoch_order: leaves out {n - len(order.unique())} of {n} samples and repeats others; "
                        "give each index once, or declare with_replacement = True in the data set"
                    )
            elif self.shuffle:
                generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
                order = torch.randperm(n, generator=generator)
            else:
                order = torch.arange(n)
            self._order = (epoch, order[: self.samples_per_epoch])
        return self._order[1]

    def windows(self, epoch: int, start: int = 0) -> Iterator[Window]:
        """The global batches of the epoch from position `start` on, as this rank sees them."""
        order, size = self.order(epoch), self.batch_size
        for first in range(start, len(order), self.global_batch_size):
            end = min(first + self.global_batch_size, len(order))
            weight = float(end - first) if self.weights is None else self.weights[order[first:end]].sum().item()
            mine = range(self.rank, math.ceil((end - first) / size), self.num_replicas)
            parts = {number: order[first + number * size : min(first + (number + 1) * size, end)].tolist() for number in mine or [0]}
            micro_batches = [MicroBatch(epoch, number, parts[number], True, number == mine[-1]) for number in mine]
            yield Window(end - first, weight, micro_batches or [MicroBatch(epoch, 0, parts[0], False, True)])

    def micro_batches(self) -> Iterator[MicroBatch]:
        """What this rank computes from here on, stand-ins of an idle rank included."""
        return (micro_batch for window in self.windows(self.epoch, self.start) for micro_batch in window.micro_batches)

    def __iter__(self) -> Iterator[int]:
        return (index for micro_batch in self.micro_batches() if micro_batch.is_counted for index in micro_batch.indices)

    def __len__(self) -> int:
        return sum(len(micro_batch.indices) for micro_batch in self.micro_batches() if micro_batch.is_counted)


class WindowLoader:
    """Fetches the sampler's micro-batches in workers, moves them to the device and applies the data set's device transform.

    `windows(epoch, start)` is what training uses. Iterating gives the batches alone, and each pass is the next epoch.
    """

    def __init__(self, dataset: Dataset, sampler: WindowSampler, config: TrainingConfig, ctx: DistributedContext) -> None:
        self.dataset, self.sampler, self.num_workers = dataset, sampler, choose_workers(config, dataset, ctx.local_world_size)
        self._is_replacing = config.corrupt_images == "replace"
        if self._is_replacing and sampler.weights is not None:
            raise Refused(
                "corrupt_images=replace: the data set has weights, and another sample would count with that of the one it stands for; leave it fail"
            )
        self.clock, self.phases = Clock(), ("data", "forward")  # while it waits for data, and while the loop computes with it
        self._replaced: list[list] = []
        self._patience = 0.9 * config.hang_timeout if self.num_workers else 0.0  # seconds; the watchdog has more
        self._seed, self.device, self.local_world_size = config.seed, ctx.device, ctx.local_world_size
        self._transform = getattr(dataset, "device_transform", None)
        self._fetcher = Fetcher(dataset, fetches_batches(dataset), config.seed, self._is_replacing)
        self._collate = Collate(getattr(dataset, "collate", default_collate))
        is_cuda = ctx.device.type == "cuda"
        self._side = SideStream(ctx.device) if is_cuda else None
        self._loader = self.num_workers and DataLoader(
            self._fetcher,
            batch_sampler=_Plan(sampler),
            collate_fn=self._collate,
            num_workers=self.num_workers,
            worker_init_fn=ignore_in_worker,
            persistent_workers=True,
            pin_memory=is_cuda,
            generator=torch.Generator(),  # the workers' base seed, which nothing uses, comes not from the model's generator
        )
        # where max_steps ends an epoch, the training set's wait there while the evaluation's come
        self._batches_ahead = self._loader.prefetch_factor * (2 if config.max_steps else 1) if self._loader else 0
        self.first_wait: float | None = None  # seconds, once there was one: in it workers start
        self.sample_bytes = 0.0  # of a collated sample, once one was looked at

    def windows(self, epoch: int, start: int = 0) -> Iterator[Window]:
        """The global batches of the epoch from sample `start` on, their micro-batches fetched as they are asked for."""
        self.sampler.set_epoch(epoch, start)
        fetched = self._fetch()
        for window in self.sampler.windows(epoch, start):
            window.fetched = fetched
            yield window

    def sample_batch(self) -> Any:
        """The first micro-batch of the data set, fetched in this process: for the passes before the first step and for a look.

        Raises Refused where /dev/shm cannot hold as many of it as workers make ahead.
        """
        count = min(self.sampler.batch_size, len(self.dataset))
        _, collated, batch = self.fetch(list(range(count)))
        self.sample_bytes = sum(tensor.nbytes for tensor in tensors_in(collated)) / count
        if self.num_workers:
            check_shared_memory(collated, self.num_workers, self._batches_ahead, self.local_world_size)
        return batch

    def fetch(self, indices: list[int], epoch: int = 0) -> tuple[Any, Any, Any]:
        """Some samples: as the data set gives them, as collated, and as the loop gets them on the device. Fetched in this process."""
        fetched = self._fetcher.__getitems__(MicroBatch(epoch, 0, indices, True, True))
        collated = self._collate(fetched)
        return fetched[1], collated[1], self._to_device(collated).batch

    def take_replaced(self) -> list[list]:
        """[index, why] of each sample that was replaced by another since the last call, on this rank."""
        taken, self._replaced = self._replaced, []
        return taken

    def __iter__(self) -> Iterator[Any]:
        yield from (micro_batch.batch for micro_batch in self._fetch() if micro_batch.is_counted)
        self.sampler.set_epoch(self.sampler.epoch + 1)

    def __len__(self) -> int:
        return sum(micro_batch.is_counted for micro_batch in self.sampler.micro_batches())

    def _fetch(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches as the loop gets them; on CUDA the next one is under way meanwhile."""
        if self._side:
            self._side.begin()
        for micro_batch, event in one_ahead(self._staged()) if self._side else self._staged():
            if event:
                self._side.hand_over(micro_batch.batch, event)
            if micro_batch.is_counted:
                self._replaced += map(list, micro_batch.replaced)
            yield micro_batch

    def _staged(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Each micro-batch with its batch on the device, or on its way there, and the event that says when it is."""
        number = 0
        try:
            batches = self._batches()
            while True:
                self.clock.enter(self.phases[0])
                began = time.perf_counter() if self.first_wait is None else 0.0
                with no_longer_than(self._patience):
                    item = next(batches, None)
                self.first_wait = time.perf_counter() - began if began else self.first_wait
                self.clock.enter(self.phases[1])
                if item is None:
                    return
                staged, item = self._stage(item), None  # what lies in shared memory is let go
                yield staged
                number += 1
        except RuntimeError as error:
            failure = explain(error, self.sampler.rank, self._what_is_read(number))
            if failure is None:
                raise
            raise failure from None

    def _batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Each micro-batch with its collated samples: from workers, else made here when it is asked for."""
        if self._loader:
            with no_longer_than(self._patience), kept_back():
                return iter(self._loader)
        return map(self._make, self.sampler.micro_batches())

    def _make(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        if not self._side:
            return self._collate(self._fetcher.__getitems__(micro_batch))
        with self._side.queued():  # a set that is on the device is indexed there
            micro_batch, batch = self._collate(self._fetcher.__getitems__(micro_batch))
        return micro_batch, pinned(batch)

    def _what_is_read(self, number: int) -> str:
        """Names the number-th micro-batch that this rank reads from here on."""
        micro_batch = next(itertools.islice(self.sampler.micro_batches(), number, None), None)
        indices = micro_batch.indices if micro_batch else []
        some = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        return f"samples {some} of {getattr(self.dataset, 'split', 'the data set')} in epoch {self.sampler.epoch}"

    def _stage(self, item: tuple[MicroBatch, Any]) -> tuple[MicroBatch, Any]:
        return self._side.run(lambda: self._to_device(item)) if self._side else (self._to_device(item), None)

    def _to_device(self, item: tuple[MicroBatch, Any]) -> MicroBatch:
        micro_batch, batch = item
        if isinstance(batch, UnreadableSample):
            way_out = "" if self._is_replacing else " (--corrupt_images replace goes on without it)"
            raise Refused(f"rank {self.sampler.rank} met a corrupt sample{way_out}: {batch}")
        if isinstance(batch, Refused):
            raise batch
        batch = to_device(batch, self.device) if self._side else batch
        if self._transform:
            batch = self._transform(batch, self._seed, micro_batch.epoch, indices_on(micro_batch.indices, self.device))
        micro_batch.batch = batch
        return micro_batch


def fetches_batches(dataset: Dataset) -> bool:
    """Whether a data set fetches a micro-batch at once. torch's Subset always says so; what it holds decides."""
    return fetches_batches(dataset.dataset) if isinstance(dataset, Subset) else hasattr(dataset, "__getitems__")


class _Plan:
    """The batch sampler of the DataLoader: micro-batches instead of lists, so that epoch and position travel to the workers."""

    def __init__(self, sampler: WindowSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._sampler.micro_batches()

    def __len__(self) -> int:
        return sum(1 for _ in self._sampler.micro_batches())


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity mask (where the system has one) and its container's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))
    except (OSError, ValueError):
        return cpus


def choose_workers(config: TrainingConfig, dataset: Dataset, local_world_size: int) -> int:
    """Loader processes of this rank. "auto": none for data in memory, else its share of the node's CPUs. None for what utils/cache.py holds."""
    if getattr(dataset, "is_cached", False):
        return 0
    if config.num_workers != "auto":
        return config.num_workers
    if getattr(dataset, "in_memory", False):
        return 0
    return max(1, min(MOST_WORKERS, usable_cpus() // local_world_size))


def create_distributed_dataloader(dataset: Dataset, config: TrainingConfig, ctx: DistributedContext) -> tuple[WindowLoader, WindowSampler]:
    """The loader of the training set on this rank, and its sampler. Raises Refused when an epoch would be empty."""
    sampler = WindowSampler(
        dataset,
        batch_size=config.batch_size,
        micro_batches_per_step=config.micro_batches_per_step(ctx.world_size),
        rank=ctx.rank,
        world_size=ctx.world_size,
        seed=config.seed,
        drop_last=config.drop_last,
    )
    if not sampler.steps_per_epoch:
        size = sampler.global_batch_size
        raise Refused(f"dataset: its {len(dataset)} samples do not fill one global batch of {size}; give more data or a smaller batch_size")
    last = math.ceil((sampler.samples_per_epoch % sampler.global_batch_size) / config.batch_size)  # micro-batches of the short window
    if config.sync_bn and ctx.device.type == "cuda" and (sampler.micro_batches_per_step % ctx.world_size or last % ctx.world_size):
        raise Refused(
            "sync_bn=True: needs as many micro-batches on each rank, in the last step of an epoch too; "
            "give --drop_last, and a global batch that the ranks divide"
        )
    return WindowLoader(dataset, sampler, config, ctx), sampler


def create_evaluation_dataloader(
    dataset: Dataset, config: TrainingConfig, ctx: DistributedContext, clock: Clock | None = None
) -> WindowLoader:
    """The loader of an evaluation set: in order, micro-batch b on rank b % world_size, as many windows on every rank."""
    sampler = WindowSampler(
        dataset,
        batch_size=config.batch_size,
        micro_batches_per_step=ctx.world_size,
        rank=ctx.rank,
        world_size=ctx.world_size,
        shuffle=False,
    )
    loader = WindowLoader(dataset, sampler, config, ctx)
    loader.clock, loader.phases = clock or loader.clock, ("evaluation", "evaluation")
    return loader


def settle(config: TrainingConfig, dataset: Dataset) -> TrainingConfig:
    """The config with `auto` fields taken from the data. Raises Refused when the data and the config contradict each other."""
    found = {name: getattr(dataset, name) for name in ("num_classes", "in_channels", "image_size") if hasattr(dataset, name)}
    if config.num_classes != "auto" and found.get("num_classes", 0) > config.num_classes:
        need = found["num_classes"]
        raise Refused(f"num_classes={config.num_classes}: the data has labels of {need} classes; give num_classes={need} or leave it auto")
    classes = found.get("num_classes", 0) if config.num_classes == "auto" else config.num_classes
    labels = getattr(dataset, "targets", ())
    if classes and len(labels) and not 0 <= min(labels) <= max(labels) < classes:
        wrong = next(index for index, label in enumerate(labels) if not 0 <= label < classes)
        raise Refused(
            f"dataset: sample {wrong} has label {labels[wrong]}, outside the {classes} classes; mend the label or give num_classes"
        )
    return dataclasses.replace(config, **{name: value for name, value in found.items() if getattr(config, name) == "auto"})
