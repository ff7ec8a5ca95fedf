"""Batches on the device: workers fetch this rank's micro-batches ahead of the loop, which moves them there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import DataLoader, Sampler, Subset

from config import TrainingConfig
from utils.batch import list_tensors
from utils.clock import PhaseClock
from utils.cpus import count_usable_cpus
from utils.data.sampler import Assignment, GlobalBatchSampler, MapDataset, MicroBatch
from utils.data.transfer import SideStream, indices_to_device, pin_batch, to_device
from utils.data.worker import Fetcher, check_socket_folder, explain_worker_error
from utils.distributed.context import DistributedContext
from utils.settings.errors import TrainingError, UserError
from utils.signals import ignore_signals_in_worker, signals_blocked

PREFETCH_FACTOR = 2  # batches of each worker
MAX_WORKERS = 8  # per rank, where num_workers is "auto"


class GlobalBatchLoader:
    """The loader fetches a sampler's micro-batches in workers, moves them to the device and applies `device_transform`.

    Training uses `micro_batches(epoch, start)`. Iterating yields only the batches; each pass is the next epoch.

    Args:
        num_workers: the number of loader processes, or "auto", which `choose_num_workers` resolves.
        clock: records when the loop waits for data and when it computes.
        phases: the names of these two phases.
    """

    def __init__(
        self,
        sampler: GlobalBatchSampler,
        num_workers: int | str,
        ctx: DistributedContext,
        clock: PhaseClock | None = None,
        phases: tuple[str, str] = ("data", "forward"),
    ) -> None:
        dataset = sampler.dataset
        is_on_cpu = ctx.device.type == "cpu"
        self.dataset = dataset
        self.sampler = sampler
        self.device = ctx.device
        self.num_workers = choose_num_workers(num_workers, dataset, ctx.local_world_size)
        self._clock = clock or PhaseClock()
        self._phases = phases
        self.device_transform = getattr(dataset, "device_transform", None)
        self._fetcher = Fetcher(dataset, has_getitems(dataset), sampler.seed)
        self._side_stream = None if is_on_cpu else SideStream(ctx.device)
        self._loader: DataLoader | None = None
        # how many tensors of workers are in shared memory at a time, at most; known after `fetch_example_batches`
        self.shared_tensor_count = 0
        if self.num_workers:
            check_socket_folder()
            self._loader = DataLoader(
                self._fetcher,
                batch_sampler=_MicroBatchSampler(sampler),
                collate_fn=cast(Any, self._fetcher.collate),  # of what the fetcher returns, not of a list
                num_workers=self.num_workers,
                prefetch_factor=PREFETCH_FACTOR,
                worker_init_fn=ignore_signals_in_worker,
                persistent_workers=True,
                pin_memory=not is_on_cpu,
                generator=torch.Generator(),  # for the workers' base seed: the global generator does not advance
            )

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the epoch from sample `start` on, with their batches on the device.

        Each micro-batch is fetched when the loop asks for it. On CUDA the host is ahead of the device: while the device
        computes a micro-batch, the loop has already asked for the next one, which is transferred and transformed in the
        side stream. No micro-batch waits for the one after it.

        Raises:
            UserError: if a sample or a batch cannot be used.
            TrainingError: if a worker failed.
        """
        data_phase, compute_phase = self._phases
        self.sampler.set_epoch(epoch, start)
        try:
            batches = self._collated_micro_batches()
            while True:
                self._clock.enter_phase(data_phase)
                item = next(batches, None)
                self._clock.enter_phase(compute_phase)
                if item is None:
                    return
                micro_batch = self._start_transfer(item)
                item = None  # frees the batch in shared memory
                yield micro_batch
        except Exception as error:
            failure = explain_worker_error(error, self.sampler.rank)
            if failure is None:
                raise
            raise failure from None

    def _collated_micro_batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Return an iterator over micro-batches and their collated samples, which workers or this process fetch."""
        if self._side_stream:
            self._side_stream.wait_for_current_stream()
        if self._loader is None:
            return map(self._fetch_micro_batch, self._remaining_micro_batches())
        with signals_blocked():
            return iter(self._loader)

    def _remaining_micro_batches(self) -> Iterator[MicroBatch]:
        """Return this rank's micro-batches of the epoch, from the current position on."""
        return self.sampler.micro_batches(self.sampler.epoch, self.sampler.start)

    def list_example_indices(self) -> list[list[int]]:
        """List the samples of a full micro-batch, or of those that need the most memory if lengths differ."""
        if self.sampler.largest_micro_batches:
            return self.sampler.largest_micro_batches
        size = min(self.sampler.batch_size, len(self.dataset))
        return [list(range(size))]

    def fetch_example_batches(self) -> list[Any]:
        """Fetch the micro-batches of `list_example_indices` in this process, for the passes before the first step.

        Returns:
            Their batches, on the device.

        Raises:
            UserError: if no tensor is found in a batch. None would go to the device.
        """
        batches: list[Any] = []
        for indices in self.list_example_indices():
            _, collated, batch = self.fetch_samples(indices)
            batches.append(batch)
            shared = self._count_shared_tensors(collated)
            self.shared_tensor_count = max(self.shared_tensor_count, shared)
        if not list_tensors(batches):
            raise UserError(
                f"No tensor is found in a batch of {type(self.dataset).__name__}, which is a"
                f" {type(batches[0]).__name__}. Return tensors in tuples, lists, dicts or dataclasses, or give the"
                " class of the batch a method to(device)."
            )
        return batches

    def _count_shared_tensors(self, collated: Any) -> int:
        """Return how many open files the batches of all workers need at most, if they are all like this one.

        Each storage of a batch in shared memory needs one, if torch passes on file descriptors.
        """
        if self.num_workers == 0 or get_sharing_strategy() != "file_descriptor":
            return 0
        # tensors of other layouts have no storage
        dense = [tensor for tensor in list_tensors(collated) if tensor.layout == torch.strided]
        storages = {tensor.untyped_storage().data_ptr() for tensor in dense}
        # the batches that workers have fetched, that of this step, and that of the step before, which is freed later
        max_batches_held = PREFETCH_FACTOR * self.num_workers + 2
        return max_batches_held * len(storages)

    def fetch_example_batch(self) -> Any:
        """Return the first batch of `fetch_example_batches`."""
        return self.fetch_example_batches()[0]

    def fetch_samples(self, indices: list[int], epoch: int = 0) -> tuple[Any, Any, Any]:
        """Fetch samples in this process.

        Returns:
            The samples as the data set gives them, their batch as collated, and their batch on the device.
        """
        micro_batch = MicroBatch(epoch, 0, indices, is_padding=False, is_last=True, micro_batches_in_step=1)
        fetched = self._fetcher.__getitems__(micro_batch)
        collated = self._fetcher.collate(fetched)
        return fetched[1], collated[1], self._to_device(collated).batch

    def close(self) -> None:
        """End the workers, also those in the code of the data set."""
        iterator: Any = getattr(self._loader, "_iterator", None)
        self._loader = None
        if iterator is not None:  # not by its truth: an iterator has a length, which may be 0
            iterator._shutdown_workers()  # not left to its destructor: an exception's traceback may keep the iterator
            for worker in iterator._workers:
                worker.kill()
                worker.join()

    def __iter__(self) -> Iterator[Any]:
        for micro_batch in self.micro_batches(self.sampler.epoch, self.sampler.start):
            if not micro_batch.is_padding:
                yield micro_batch.batch
        self.sampler.set_epoch(self.sampler.epoch + 1)

    def __len__(self) -> int:
        return sum(not micro_batch.is_padding for micro_batch in self._remaining_micro_batches())

    def _fetch_micro_batch(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        if not self._side_stream:
            return self._fetcher.collate(self._fetcher.__getitems__(micro_batch))
        with self._side_stream.stream:  # a data set on the device is indexed on this stream
            micro_batch, batch = self._fetcher.collate(self._fetcher.__getitems__(micro_batch))
        return micro_batch, pin_batch(batch)

    def _start_transfer(self, item: tuple[MicroBatch, Any]) -> MicroBatch:
        """Return the micro-batch with its batch on the device, or on its way there: the current stream waits for it."""
        _, batch_or_error = item
        if isinstance(batch_or_error, (UserError, TrainingError)):
            raise type(batch_or_error)(f"Rank {self.sampler.rank} failed: {batch_or_error}")
        if not self._side_stream:
            return self._to_device(item)
        micro_batch, event = self._side_stream.run(partial(self._to_device, item))
        self._side_stream.sync_to_current_stream(micro_batch.batch, event)
        return micro_batch

    def _to_device(self, item: tuple[MicroBatch, Any]) -> MicroBatch:
        micro_batch, batch = item
        if isinstance(batch, UserError):
            raise batch
        if self._side_stream:
            batch = to_device(batch, self.device)
        if self.device_transform:
            indices = indices_to_device(micro_batch.indices, self.device)
            batch = self.device_transform(batch, self.sampler.seed, micro_batch.epoch, indices)
        return dataclasses.replace(micro_batch, batch=batch)


def has_getitems(dataset: Any) -> bool:
    """Return whether a data set has `__getitems__`. torch's Subset always has it, so the data set inside decides."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


class _MicroBatchSampler(Sampler):
    """The DataLoader's batch sampler. It yields micro-batches, not lists, so that workers know epoch and position.

    It does not refer to the loader: garbage in a cycle, collected in a worker, would end the workers of another loader.
    """

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._sampler.micro_batches(self._sampler.epoch, self._sampler.start)


def choose_num_workers(num_workers: int | str, dataset: MapDataset, local_world_size: int) -> int:
    """Choose the number of loader processes of this rank.

    Args:
        num_workers: a number, or "auto": 0 for data in memory, else the rank's share of the node's CPUs, at most 8.
    """
    if getattr(dataset, "is_cached", False):  # the samples are decoded and in memory, whatever num_workers is
        return 0
    if isinstance(num_workers, int):
        return num_workers
    if getattr(dataset, "in_memory", False):
        return 0
    cpus_per_rank = count_usable_cpus() // local_world_size
    return max(1, min(MAX_WORKERS, cpus_per_rank))


def create_assignment(config: TrainingConfig, ctx: DistributedContext, is_padded: bool) -> Assignment:
    """Create the assignment of micro-batches to this rank. `is_padded` is as for `Assignment`."""
    if config.reduction == "exact":  # extra: exact
        from utils.extras.exact.reduction import ContiguousAssignment

        return ContiguousAssignment(ctx.rank, ctx.world_size, is_padded)
    return Assignment(ctx.rank, ctx.world_size, is_padded)


def create_sampler_factory(
    dataset: MapDataset, config: TrainingConfig, ctx: DistributedContext, is_training: bool
) -> Callable[..., GlobalBatchSampler]:
    """Return a function that creates the sampler of a set. It takes the options of GlobalBatchSampler but batch_size.

    Args:
        is_training: False takes the batch size of evaluations.
    """
    if config.batch_tokens:  # extra: lengths
        from utils.extras.lengths.token_budget import create_budget_factory

        return create_budget_factory(dataset, config, ctx, is_training=is_training)
    batch_size = config.batch_size
    if not is_training and config.eval_batch_size:
        batch_size = config.eval_batch_size
    return partial(GlobalBatchSampler, dataset, batch_size=batch_size)


def create_distributed_dataloader(
    dataset: MapDataset,
    config: TrainingConfig,
    ctx: DistributedContext,
    clock: PhaseClock | None = None,
) -> tuple[GlobalBatchLoader, GlobalBatchSampler]:
    """Create the loader of the training set on this rank, and its sampler.

    Raises:
        UserError: if the set does not fill a global batch.
    """
    is_padded = False
    is_padded = config.sharding != "none"  # extra: sharding
    create_sampler = create_sampler_factory(dataset, config, ctx, is_training=True)
    sampler = create_sampler(
        micro_batches_per_step=config.micro_batches_per_step(ctx.world_size),
        assignment=create_assignment(config, ctx, is_padded),
        seed=config.seed,
        drop_last=config.drop_last,
    )
    size = sampler.global_batch_size
    if not sampler.steps_per_epoch:
        text = f"The {len(dataset)} samples of the training set do not fill a global batch of {size}."
        raise UserError(f"{text} Reduce --{config.micro_batch[0]}.")
    loader = GlobalBatchLoader(sampler, config.num_workers, ctx, clock=clock)
    return loader, sampler


def create_evaluation_dataloader(
    dataset: MapDataset,
    config: TrainingConfig,
    ctx: DistributedContext,
    clock: PhaseClock | None = None,
) -> GlobalBatchLoader:
    """Create the loader of an evaluation set, which has equally many micro-batches on each rank.

    A micro-batch has `eval_batch_size` samples, or is packed by a budget. Micro-batch b is on rank b % world_size,
    unless packed ones go to the ranks by size. For exact sums the whole set is one global batch, of which each rank
    gets consecutive micro-batches.
    """
    assignment = create_assignment(config, ctx, is_padded=True)
    create_sampler = create_sampler_factory(dataset, config, ctx, is_training=False)
    sampler = create_sampler(micro_batches_per_step=1, assignment=assignment, seed=config.seed, shuffle=False)
    sampler.micro_batches_per_step = assignment.evaluation_group_size(sampler.micro_batches_per_epoch)
    phases = ("evaluation", "evaluation")
    return GlobalBatchLoader(sampler, config.num_workers, ctx, clock=clock, phases=phases)
