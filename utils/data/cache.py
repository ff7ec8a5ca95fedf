"""`--cache`: a data set is decoded once, by all ranks of a node together, into memory that they share; or is kept on
the device."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from config import TrainingConfig, UserError
from utils.batch import leaves, map_tensors, tensors_in
from utils.data.loader import GlobalBatchLoader, fetches_batches, fingerprint
from utils.data.sampler import GlobalBatchSampler, MicroBatch
from utils.data.transfer import indices_on
from utils.data.worker import check_shared_memory
from utils.distributed.collectives import all_gather_json, on_all_ranks, require_equal
from utils.distributed.context import DistributedContext
from utils.logger import duration, show_progress
from utils.memory import free_memory, gigabytes

CHUNK = 32  # samples that a worker decodes at a time
ALIGNED = 64  # bytes
MOST_OF_MEMORY, MOST_OF_DEVICE = 0.9, 0.5  # of what is free; the rest is for training
TOKEN = 16  # random bytes at the end of the memory, by which the ranks know that it is the same


def cached(
    train_set: Dataset,
    held_out: dict[str, Dataset],
    config: TrainingConfig,
    ctx: DistributedContext,
    logger: logging.Logger,
) -> tuple[Dataset, dict[str, Dataset], TrainingConfig]:
    """The data sets as `config.cache` wants them; on every rank alike. Raises UserError where they cannot be held."""
    where = "ram" if config.cache == "device" and ctx.device.type == "cpu" else config.cache
    sets = {"train": train_set, **held_out}
    for_ram = {split: dataset for split, dataset in sets.items() if not getattr(dataset, "in_memory", False)}
    if where == "ram" and len(for_ram) < len(sets):
        kinds = ", ".join(sorted({type(dataset).__name__ for split, dataset in sets.items() if split not in for_ram}))
        logger.info("cache=%s: %s is in memory as it is, there is nothing to decode", config.cache, kinds)
    chosen = {"none": {}, "ram": for_ram, "device": sets}[where]
    rows = on_all_ranks(lambda: {split: first_row(dataset, config) for split, dataset in chosen.items()}, ctx)
    sizes = {split: len(chosen[split]) * row_bytes(row) for split, row in rows.items()}
    require_equal(
        sizes,
        f"cache={config.cache}: samples have another size on {{other}} than on {{first}}; make the data alike",
        ctx,
    )
    if sizes:
        on_all_ranks(lambda: check_room(sizes, where, config, ctx), ctx)
    for split, dataset in chosen.items():
        began = time.perf_counter()
        sets[split] = decode(dataset, rows[split], where, config, ctx, logger)
        where_to = "this device" if where == "device" else "memory that the ranks of a node share"
        logger.info(
            "cache=%s: %s samples of %s, %s in %s, decoded in %s",
            *(config.cache, f"{len(dataset):,}", getattr(dataset, "split", split), gigabytes(sizes[split]), where_to),
            duration(time.perf_counter() - began),
        )
    return sets.pop("train"), sets, config


class Cached(Dataset):
    """A data set that is held decoded, and in all else is its source.

    Args:
        rows: the batch of all samples.
    """

    in_memory = is_cached = True

    def __init__(self, source: Dataset, rows: Any) -> None:
        self.source, self._rows = source, rows
        self._device = next(tensors_in(rows)).device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        """The sample as a batch has it, without the first dimension."""
        return map_tensors(lambda rows: rows[index], self._rows)

    def __getitems__(self, indices: list[int]) -> Any:
        chosen = indices_on(indices, self._device)
        return map_tensors(lambda rows: rows.index_select(0, chosen), self._rows)

    @staticmethod
    def collate(batch: Any) -> Any:
        return batch  # __getitems__ has made it


# ---- what a set needs ----


def batch_of(source: Dataset, indices: list[int]) -> Any:
    """The collated batch of some samples."""
    samples = source.__getitems__(indices) if fetches_batches(source) else [source[index] for index in indices]
    return getattr(source, "collate", default_collate)(samples)


def first_row(source: Dataset, config: TrainingConfig) -> Any:
    """The batch of the first sample that can be read. Raises UserError where the set cannot be cached."""
    kind = f"cache={config.cache}: {type(source).__name__}"
    if not getattr(source, "cacheable", False):
        raise UserError(
            f"{kind} does not say that its samples are the same in every epoch and of one shape; "
            "set cacheable = True in the data set if they are, or leave cache none"
        )
    row = batch_of(source, [0])
    others = [type(leaf).__name__ for leaf in leaves(row) if not isinstance(leaf, Tensor)]
    if others or not all(tensor.ndim and len(tensor) == 1 for tensor in tensors_in(row)):
        what = f"has {others[0]} in a batch" if others else "has a batch of one sample that is not one row"
        raise UserError(f"{kind} {what}, and only rows of tensors can be kept; leave cache none")
    return row


def row_bytes(row: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(row))


def check_room(sizes: dict[str, int], where: str, config: TrainingConfig, ctx: DistributedContext) -> None:
    """Raises UserError where this node or this device has not the memory for the decoded sets. sizes: bytes by
    split."""
    need = sum(sizes.values())
    if where == "device":
        free, _ = torch.cuda.mem_get_info(ctx.device)
        if need > MOST_OF_DEVICE * free:
            raise UserError(
                f"cache=device: the decoded data take {gigabytes(need)}, and {ctx.device} on {ctx.host} has"
                f" {gigabytes(free)} free, of which {1 - MOST_OF_DEVICE:.0%} is left for training; give --cache ram, or"
                " a smaller --image_size or --dataset_size"
            )
        need = max(sizes.values())  # on its way, one set at a time
    free = free_memory()
    if free is not None and need > MOST_OF_MEMORY * free:
        raise UserError(
            f"cache={config.cache}: the decoded data take {gigabytes(need)} of memory, and {ctx.host} has"
            f" {gigabytes(free)} free, of which {1 - MOST_OF_MEMORY:.0%} is left for training; give the job more"
            " memory, a smaller --image_size or --dataset_size, or --cache none"
        )


# ---- memory that the ranks of a node share ----


class Rows:
    """A batch of `count` samples in a file that other processes map too. Pickled it is its name: a spawned worker maps
    the same."""

    def __init__(self, path: str, row: Any, count: int) -> None:
        self._origin = path, row, count
        file = os.open(path, os.O_RDWR)
        try:
            self.memory = mmap.mmap(file, rows_size(row, count))
        finally:
            os.close(file)
        place = 0

        def tensor_of(one: Tensor) -> Tensor:
            nonlocal place
            shape, place_here = (count, *one.shape[1:]), place
            place += aligned(count * one.nbytes)
            return torch.frombuffer(self.memory, dtype=one.dtype, count=count * one.numel(), offset=place_here).view(
                shape
            )

        self.batch = map_tensors(tensor_of, row)

    def __reduce__(self) -> tuple[type, tuple]:
        return Rows, self._origin


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def rows_size(row: Any, count: int) -> int:
    return sum(aligned(count * tensor.nbytes) for tensor in tensors_in(row)) + TOKEN


def anonymous_file(size: int) -> tuple[str, Callable[[], None]]:
    """Memory without a name, which goes with the processes that hold it, and the path by which others find it."""
    if not getattr(os, "memfd_create", None):
        return "", lambda: None
    file = os.memfd_create("cache")
    os.ftruncate(file, size)
    return f"/proc/{os.getpid()}/fd/{file}", lambda: os.close(file)


def temporary_file(size: int) -> tuple[str, Callable[[], None]]:
    """A file of this node, whose name goes when all have it open. For systems without the other, and ranks in
    containers of their own."""
    file, path = tempfile.mkstemp(prefix="cache-")
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)  # a full disk is an error here, and not a signal later
        else:
            os.ftruncate(file, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return path, lambda: os.unlink(path)


@contextlib.contextmanager
def shared_rows(row: Any, count: int, ctx: DistributedContext) -> Iterator[Rows]:
    """Rows in the memory of this node, the same for all its ranks. Others find it for as long as the context is
    open."""
    leader = ctx.hosts.index(ctx.host)
    for make in (anonymous_file, temporary_file):
        path, remove = on_all_ranks(
            lambda make=make: make(rows_size(row, count)) if ctx.rank == leader else ("", lambda: None), ctx
        )
        try:
            token, found = os.urandom(TOKEN // 2).hex(), None
            if path:
                found = Rows(path, row, count)
                found.memory[-TOKEN:] = token.encode()
            path, token = all_gather_json([path, token], ctx)[leader]
            with contextlib.suppress(OSError, ValueError):  # nothing there, or something smaller
                found = found or (Rows(path, row, count) if path else None)
            is_same = found is not None and found.memory[-TOKEN:] == token.encode()
            if all(all_gather_json(is_same, ctx)):
                yield found
                return
        finally:
            remove()
    raise UserError(
        f"cache: the ranks on {ctx.host} can share neither memory nor files in {tempfile.gettempdir()}; "
        "give them one such folder, names of their own (hostname) if they are on several machines, or --cache none"
    )


# ---- decoding ----


class Decoder(Dataset):
    """Runs in the worker: brings samples into their rows, and gives back nothing."""

    def __init__(self, source: Dataset, rows: Rows) -> None:
        self._source, self._rows = source, rows
        self.split, self.in_memory = getattr(source, "split", "the data set"), getattr(source, "in_memory", False)

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, indices: list[int]) -> list[list]:
        if not fetches_batches(self._source) and len(indices) > 1:
            return [failed for index in indices for failed in self.__getitems__([index])]
        batch = batch_of(self._source, indices)
        for rows, some in zip(tensors_in(self._rows.batch), tensors_in(batch), strict=True):
            if (some.dtype, some.shape) != (rows.dtype, (len(indices), *rows.shape[1:])):
                raise UserError(
                    f"cache: sample {indices[0]} of {self.split} is {some.dtype} {list(some.shape[1:])}, "
                    f"others {rows.dtype} {list(rows.shape[1:])}; make them alike, or leave cache none"
                )
            rows[indices[0] : indices[-1] + 1] = some
        return []

    @staticmethod
    def collate(failed: list[list]) -> list[list]:
        return failed


class Share(GlobalBatchSampler):
    """The part of a set that this rank decodes for its node: every so many-th chunk."""

    def __init__(self, dataset: Dataset, ctx: DistributedContext) -> None:
        super().__init__(
            dataset, batch_size=CHUNK, micro_batches_per_step=1, rank=ctx.rank, world_size=ctx.world_size, shuffle=False
        )
        peers = [rank for rank, host in enumerate(ctx.hosts) if host == ctx.host]
        self._chunks = range(peers.index(ctx.rank), -(-len(dataset) // CHUNK), len(peers))

    def micro_batches(self) -> Iterator[MicroBatch]:
        for chunk in self._chunks:
            yield MicroBatch(0, 0, list(range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self.dataset)))), False, True)


def decode(
    source: Dataset, row: Any, where: str, config: TrainingConfig, ctx: DistributedContext, logger: logging.Logger
) -> Cached:
    """The set, held where it is asked for. On all ranks."""
    with shared_rows(row, len(source), ctx) as rows:
        decoder = Decoder(source, rows)
        on_cpu = replace(ctx, device=torch.device("cpu"))
        loader = GlobalBatchLoader(decoder, Share(decoder, ctx), config, on_cpu)
        if len(source) >= 1000:
            logger.info(
                "decoding %s samples of %s, %d worker(s) a rank", f"{len(source):,}", decoder.split, loader.num_workers
            )

        def run() -> None:
            if loader.num_workers:  # torch's collate makes each row there first
                check_shared_memory(row, loader.num_workers, 1, ctx.local_world_size)
            total = len(loader)
            for done, _ in enumerate(loader, 1):
                show_progress(logger, done, total, f"decoding {decoder.split}")

        on_all_ranks(run, ctx)
    batch = map_tensors(lambda tensor: tensor.to(ctx.device), rows.batch) if where == "device" else rows.batch
    return Cached(source, batch)
