"""`--cache`: the ranks of a node decode a data set once, into shared memory, or each onto its device.

Later epochs then wait for no decoding and need no workers. It costs the memory of all decoded samples. Who trains for
many epochs on samples that are slow to decode and do not change needs it.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import time
from dataclasses import replace
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from config import TrainingConfig
from utils.batch import list_tensors, map_leaves, map_tensors
from utils.data.loader import GlobalBatchLoader, has_getitems
from utils.data.sampler import Assignment, GlobalBatchSampler, MapDataset
from utils.data.transfer import indices_to_device
from utils.distributed.collectives import all_gather_json, on_all_ranks, require_equal
from utils.distributed.context import DistributedContext
from utils.logger import format_duration, show_progress_bar
from utils.memory import ALIGNMENT, format_bytes, read_free_memory
from utils.settings.errors import UserError

SAMPLES_PER_CHUNK = 32  # samples that a worker decodes at a time
MAX_MEMORY_FRACTION, MAX_DEVICE_FRACTION = 0.9, 0.5  # fractions of the free memory; the rest is for training


def cache_datasets(
    train_set: MapDataset,
    held_out: dict[str, MapDataset],
    config: TrainingConfig,
    ctx: DistributedContext,
    logger: logging.Logger,
) -> tuple[MapDataset, dict[str, MapDataset]]:
    """The data sets, cached as `config.cache` says. Call it on all ranks. Raises UserError if they do not fit."""
    location = "ram" if config.cache == "device" and ctx.device.type == "cpu" else config.cache
    sets = {"train": train_set, **held_out}
    decoded = {split for split, dataset in sets.items() if not getattr(dataset, "in_memory", False)}
    chosen = {"none": set(), "ram": decoded, "device": set(sets)}[location]
    rows = on_all_ranks(lambda: {split: fetch_first_row(sets[split], config) for split in sets if split in chosen}, ctx)
    sizes = {
        split: len(sets[split]) * sum(tensor.nbytes for tensor in list_tensors(row)) for split, row in rows.items()
    }
    difference_message = (
        f"With --cache {config.cache} all ranks need samples of the same sizes, but those of {{other}} and {{first}}"
        " differ. Use the same data on all ranks."
    )
    require_equal(sizes, difference_message, ctx)
    on_all_ranks(lambda: check_free_memory(sizes, location, config, ctx), ctx)
    for split, row in rows.items():
        began = time.perf_counter()
        sets[split] = _decode_dataset(sets[split], row, location, config, ctx, logger)
        logger.info(
            "--cache %s has decoded %s %s samples (%s) in %s.",
            *(config.cache, f"{len(sets[split]):,}", split, format_bytes(sizes[split])),
            format_duration(time.perf_counter() - began),
        )
    return sets.pop("train"), sets


class CachedDataset(Dataset):
    """A data set whose decoded samples are held in `rows`, one batch of all samples. Other attributes: the source's."""

    in_memory = is_cached = True

    def __init__(self, source: MapDataset, rows: Any) -> None:
        self.source, self._rows = source, rows
        self._device = list_tensors(rows)[0].device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda rows: rows[index], self._rows)

    def __getitems__(self, indices: list[int]) -> Any:
        chosen = indices_to_device(indices, self._device)
        return map_tensors(lambda rows: rows.index_select(0, chosen), self._rows)

    @staticmethod
    def collate(batch: Any) -> Any:
        return batch  # __getitems__ already returns a batch


def fetch_first_row(source: Any, config: TrainingConfig) -> Any:
    """The batch of the first sample. Raises UserError if the set cannot be cached."""
    kind = type(source).__name__
    if not getattr(source, "cacheable", False):
        raise UserError(
            f"--cache {config.cache} does not work with {kind}, which is not cacheable, for example because its workers"
            " draw resized crops. Use --augment crop or --cache none, or set cacheable = True in a data set whose"
            " samples never change."
        )
    samples = source.__getitems__([0]) if has_getitems(source) else [source[0]]
    row = getattr(source, "collate", default_collate)(samples)
    is_row: list[bool] = []
    map_leaves(lambda leaf: is_row.append(isinstance(leaf, Tensor) and leaf.shape[:1] == (1,)), row)
    if not is_row or not all(is_row):
        raise UserError(
            f"--cache {config.cache} does not work with {kind}, whose batches are not tensors with one row per sample."
            " Leave out --cache."
        )
    return row


def check_free_memory(sizes: dict[str, int], location: str, config: TrainingConfig, ctx: DistributedContext) -> None:
    """Raises UserError if the decoded sets do not fit into the memory of this node or device.

    Args:
        sizes: bytes of each split.
        location: none, ram or device.
    """
    need = sum(sizes.values())
    if location == "device":
        free, _ = torch.cuda.mem_get_info(ctx.device)
        if need > MAX_DEVICE_FRACTION * free:
            raise UserError(
                f"--cache device needs {format_bytes(need)} for the decoded data, but {ctx.device} on {ctx.host} has"
                f" {format_bytes(free)} of free memory, and half of that is kept for training. Use --cache ram or a"
                " smaller --image_size."
            )
        need = max(sizes.values())  # one set at a time passes through the node's memory
    left = read_free_memory()
    if left is not None and need > MAX_MEMORY_FRACTION * left:
        raise UserError(
            f"--cache {config.cache} needs {format_bytes(need)} for the decoded data, but {ctx.host} has"
            f" {format_bytes(left)} of free memory. Give the job more memory, use a smaller --image_size or"
            " --dataset_size, or use --cache none."
        )


def _decode_dataset(
    source: MapDataset, row: Any, location: str, config: TrainingConfig, ctx: DistributedContext, logger: logging.Logger
) -> CachedDataset:
    """Each rank decodes its part of the samples into rows that all ranks of the node map."""
    peers = [rank for rank, host in enumerate(ctx.hosts) if host == ctx.host]
    sampler = GlobalBatchSampler(
        source,
        batch_size=SAMPLES_PER_CHUNK,
        micro_batches_per_step=len(peers),
        assignment=Assignment(peers.index(ctx.rank), len(peers)),
        seed=config.seed,
        shuffle=False,
    )
    on_cpu = replace(ctx, device=torch.device("cpu"))
    loader = on_all_ranks(lambda: GlobalBatchLoader(sampler, config.num_workers, on_cpu), ctx)
    loader.device_transform = None  # the rows are what collate returns
    rows = _create_shared_rows(row, len(source), ctx)

    def decode_samples() -> None:
        for done, micro_batch in enumerate(loader.micro_batches(epoch=0), 1):  # one in each step
            if not micro_batch.is_padding:
                _fill_rows(rows, micro_batch.indices, micro_batch.batch)
            show_progress_bar(logger, done, sampler.steps_per_epoch, "decoding")

    on_all_ranks(decode_samples, ctx)
    loader.close()
    return CachedDataset(
        source, map_tensors(lambda tensor: tensor.to(ctx.device), rows) if location == "device" else rows
    )


def _fill_rows(rows: Any, indices: list[int], batch: Any) -> None:
    for target, source in zip(list_tensors(rows), list_tensors(batch), strict=True):
        if (source.dtype, source.shape[1:]) != (target.dtype, target.shape[1:]):
            raise UserError(
                f"Samples {indices[0]} to {indices[-1]} are {source.dtype} {list(source.shape[1:])}, but other samples"
                f" are {target.dtype} {list(target.shape[1:])}. Make all samples alike, or use --cache none."
            )
        target[indices[0] : indices[-1] + 1] = source


def _create_shared_rows(row: Any, count: int, ctx: DistributedContext) -> Any:
    """A batch of `count` samples in a file that all ranks of this node map, freed with the last process that maps it.

    The file is in /dev/shm if that has the space, else in the temporary folder. It is unlinked before it has a size, so
    that a kill leaves nothing there.
    """
    sizes = [-(-count * tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in list_tensors(row)]
    leader = ctx.hosts.index(ctx.host)
    path = on_all_ranks(lambda: _create_shared_file(sum(sizes)) if ctx.rank == leader else "", ctx)
    try:
        shared = all_gather_json(path, ctx)[leader]
        file = on_all_ranks(lambda: _open_shared_file(shared, ctx), ctx)
    finally:
        if path:
            os.unlink(path)
    on_all_ranks(lambda: _allocate_file(file, sum(sizes)) if ctx.rank == leader else None, ctx)
    with file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), sum(sizes)), dtype=torch.uint8)
    parts = iter(memory.split(sizes))

    def take_rows(tensor: Tensor) -> Tensor:
        return next(parts)[: count * tensor.nbytes].view(tensor.dtype).view(count, *tensor.shape[1:])

    return map_tensors(take_rows, row)


def _create_shared_file(size: int) -> str:
    """An empty file where there is room for this size."""
    try:
        room = os.statvfs("/dev/shm")
        folder = "/dev/shm" if room.f_bavail * room.f_frsize > size or not room.f_blocks else None  # 0: no limit
    except (AttributeError, OSError):  # not Linux
        folder = None
    file, path = tempfile.mkstemp(prefix="cache-", dir=folder)
    os.close(file)
    return path


def _open_shared_file(path: str, ctx: DistributedContext) -> IO[bytes]:
    try:
        return open(path, "r+b")
    except FileNotFoundError:
        raise UserError(
            f"The ranks on {ctx.host} do not share {path}. Run them in one container or with --ipc=host, or use"
            " --cache none."
        ) from None


def _allocate_file(file: IO[bytes], size: int) -> None:
    """Now, so that a full disk is an error and not a bus error later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        os.ftruncate(file.fileno(), size)
