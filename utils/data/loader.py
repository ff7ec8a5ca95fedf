"""From the order of an epoch to batches on the device: sampler, global batches, workers.

The order of an epoch is cut into micro-batches of `batch_size` consecutive entries; `micro_batches_per_step`
consecutive
micro-batches are one global batch, one optimizer step. Micro-batch m of a global batch goes to rank m % world_size.
Ranks
decide only who computes a micro-batch, never what is in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from config import TrainingConfig, UserError
from utils.batch import tensors_in
from utils.clock import Clock
from utils.data.sampler import GlobalBatch, GlobalBatchSampler, MicroBatch
from utils.data.transfer import SideStream, indices_on, one_ahead, pinned, to_device
from utils.data.worker import Collate, Fetcher, check_shared_memory, explain, no_longer_than
from utils.distributed.context import DistributedContext
from utils.signals import ignore_in_worker, kept_back

MOST_WORKERS = 8  # that "auto" asks for, of one rank


class GlobalBatchLoader:
    """Fetches the sampler's micro-batches in workers, moves them to the device and applies the data set's device
    transform.

    `global batches(epoch, start)` is what training uses. Iterating gives the batches alone, and each pass is the next
    epoch.
    """

    def __init__(
        self, dataset: Dataset, sampler: GlobalBatchSampler, config: TrainingConfig, ctx: DistributedContext
    ) -> None:
        self.dataset, self.sampler, self.num_workers = (
            dataset,
            sampler,
            choose_workers(config, dataset, ctx.local_world_size),
        )
        # while it waits for data, and while the loop computes with it
        self.clock, self.phases = (
            Clock(),
            ("data", "forward"),
        )
        self._patience = 0.9 * config.hang_timeout if self.num_workers else 0.0  # seconds; the watchdog has more
        self._seed, self.device, self.local_world_size = config.seed, ctx.device, ctx.local_world_size
        self._transform = getattr(dataset, "device_transform", None)
        self._fetcher = Fetcher(dataset, fetches_batches(dataset), config.seed)
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
            # the workers' base seed, which nothing uses, comes not from the model's generator
            generator=torch.Generator(),
        )
        # where max_steps ends an epoch, the training set's wait there while the evaluation's come
        self._batches_ahead = self._loader.prefetch_factor * (2 if config.max_steps else 1) if self._loader else 0
        self.first_wait: float | None = None  # seconds, once there was one: in it workers start
        self.sample_bytes = 0.0  # of a collated sample, once one was looked at

    def global_batches(self, epoch: int, start: int = 0) -> Iterator[GlobalBatch]:
        """The global batches of the epoch from sample `start` on, their micro-batches fetched as they are asked for."""
        self.sampler.set_epoch(epoch, start)
        fetched = self._fetch()
        for global_batch in self.sampler.global_batches(epoch, start):
            global_batch.fetched = fetched
            yield global_batch

    def sample_batch(self) -> Any:
        """The first micro-batch of the data set, fetched in this process: for the passes before the first step and for
        a look.

        Raises UserError where /dev/shm cannot hold as many of it as workers make ahead.
        """
        count = min(self.sampler.batch_size, len(self.dataset))
        _, collated, batch = self.fetch(list(range(count)))
        self.sample_bytes = sum(tensor.nbytes for tensor in tensors_in(collated)) / count
        if self.num_workers:
            check_shared_memory(collated, self.num_workers, self._batches_ahead, self.local_world_size)
        return batch

    def fetch(self, indices: list[int], epoch: int = 0) -> tuple[Any, Any, Any]:
        """Some samples: as the data set gives them, as collated, and as the loop gets them on the device. Fetched in
        this process."""
        fetched = self._fetcher.__getitems__(MicroBatch(epoch, 0, indices, False, True))
        collated = self._collate(fetched)
        return fetched[1], collated[1], self._to_device(collated).batch

    def __iter__(self) -> Iterator[Any]:
        yield from (micro_batch.batch for micro_batch in self._fetch() if not micro_batch.is_padding)
        self.sampler.set_epoch(self.sampler.epoch + 1)

    def __len__(self) -> int:
        return sum(not micro_batch.is_padding for micro_batch in self.sampler.micro_batches())

    def _fetch(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches as the loop gets them; on CUDA the next one is under way meanwhile."""
        if self._side:
            self._side.begin()
        for micro_batch, event in one_ahead(self._staged()) if self._side else self._staged():
            if event:
                self._side.hand_over(micro_batch.batch, event)
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
        if isinstance(item[1], UserError):
            raise UserError(f"rank {self.sampler.rank}: {item[1]}")
        return self._side.run(lambda: self._to_device(item)) if self._side else (self._to_device(item), None)

    def _to_device(self, item: tuple[MicroBatch, Any]) -> MicroBatch:
        micro_batch, batch = item
        if isinstance(batch, UserError):
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
    """The batch sampler of the DataLoader: micro-batches instead of lists, so that epoch and position travel to the
    workers."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
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
    """Loader processes of this rank. "auto": none for data in memory, else its share of the node's CPUs. None for what
    utils/data/cache.py holds."""
    if getattr(dataset, "is_cached", False):
        return 0
    if config.num_workers != "auto":
        return config.num_workers
    if getattr(dataset, "in_memory", False):
        return 0
    return max(1, min(MOST_WORKERS, usable_cpus() // local_world_size))


def create_distributed_dataloader(
    dataset: Dataset, config: TrainingConfig, ctx: DistributedContext
) -> tuple[GlobalBatchLoader, GlobalBatchSampler]:
    """The loader of the training set on this rank, and its sampler. Raises UserError when an epoch would be empty."""
    sampler = GlobalBatchSampler(
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
        raise UserError(
            f"dataset: its {len(dataset)} samples do not fill one global batch of {size}; give more data or a smaller"
            " batch_size"
        )
    # micro-batches of the short global batch
    last = math.ceil((sampler.samples_per_epoch % sampler.global_batch_size) / config.batch_size)
    if (
        config.sync_bn
        and ctx.device.type == "cuda"
        and (sampler.micro_batches_per_step % ctx.world_size or last % ctx.world_size)
    ):
        raise UserError(
            "sync_bn=True: needs as many micro-batches on each rank, in the last step of an epoch too; "
            "give --drop_last, and a global batch that the ranks divide"
        )
    return GlobalBatchLoader(dataset, sampler, config, ctx), sampler


def create_evaluation_dataloader(
    dataset: Dataset, config: TrainingConfig, ctx: DistributedContext, clock: Clock | None = None
) -> GlobalBatchLoader:
    """The loader of an evaluation set: in order, micro-batch b on rank b % world_size, as many global batches on every
    rank."""
    sampler = GlobalBatchSampler(
        dataset,
        batch_size=config.batch_size,
        micro_batches_per_step=ctx.world_size,
        rank=ctx.rank,
        world_size=ctx.world_size,
        shuffle=False,
    )
    loader = GlobalBatchLoader(dataset, sampler, config, ctx)
    loader.clock, loader.phases = clock or loader.clock, ("evaluation", "evaluation")
    return loader


def resolve_auto(config: TrainingConfig, dataset: Dataset) -> TrainingConfig:
    """The config with `auto` fields taken from the data. Raises UserError when the data and the config contradict each
    other."""
    found = {
        name: getattr(dataset, name) for name in ("num_classes", "in_channels", "image_size") if hasattr(dataset, name)
    }
    if config.num_classes != "auto" and found.get("num_classes", 0) > config.num_classes:
        need = found["num_classes"]
        raise UserError(
            f"num_classes={config.num_classes}: the data has labels of {need} classes; give num_classes={need} or leave"
            " it auto"
        )
    classes = found.get("num_classes", 0) if config.num_classes == "auto" else config.num_classes
    labels = getattr(dataset, "targets", ())
    if classes and len(labels) and not 0 <= min(labels) <= max(labels) < classes:
        wrong = next(index for index, label in enumerate(labels) if not 0 <= label < classes)
        raise UserError(
            f"dataset: sample {wrong} has label {labels[wrong]}, outside the {classes} classes; mend the label or give"
            " num_classes"
        )
    return dataclasses.replace(
        config, **{name: value for name, value in found.items() if getattr(config, name) == "auto"}
    )


def fingerprint(dataset: Dataset) -> str:
    """What tells this set from another; its type and size where it brings no fingerprint of its own."""
    return getattr(dataset, "fingerprint", f"{type(dataset).__name__} of {len(dataset)}")


def describe(dataset: Dataset) -> dict[str, Any]:
    """What an export or a resume has to know of a training set."""
    as_list = {
        name: torch.as_tensor(getattr(dataset, name)).tolist() for name in ("mean", "std") if hasattr(dataset, name)
    }
    return {
        "fingerprint": fingerprint(dataset),
        "classes": list(getattr(dataset, "classes", [])),
        "mean": as_list.get("mean", []),
        "std": as_list.get("std", []),
    }
