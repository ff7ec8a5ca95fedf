"""The input pipeline alone: samples per second of the loader while nothing is computed."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import dataset as fork_dataset
from config import TrainingConfig
from ddp_utils import DistributedContext
from lib.benchmark.turns import Candidate, take_turns
from utils.data.cache import cached
from utils.data.loader import create_distributed_dataloader
from utils.data.sets import load_data
from utils.table import format_table

MAX_SAMPLES = {True: 16_384, False: 2_048}  # per turn: in memory, from files
WORKERS = (0, 1, 2)


def measure(
    options: Any, config: TrainingConfig, ctx: DistributedContext, folder: Path, say: Callable[[str], object]
) -> dict[str, Any]:
    """In memory: the loader against plain tensor indexing. From files: 0, 1, 2 workers against --cache ram."""
    flat = {"cache": "none", "grad_accum_steps": 1, "global_batch_size": 0, "drop_last": True}
    sets = load_data(fork_dataset, dataclasses.replace(config, **flat), ctx)
    data, config = sets.train, sets.config
    in_memory, found = getattr(data, "in_memory", False), {}
    samples = min(len(data), MAX_SAMPLES[in_memory]) // config.batch_size * config.batch_size
    if in_memory:
        epochs = {"loader": loading(data, config, ctx, samples), "plain indexing": indexing(data, config, ctx, samples)}
    else:
        began, with_cache = time.perf_counter(), dataclasses.replace(config, cache="ram")
        held, _ = cached(data, {}, with_cache, ctx, logging.getLogger("ddp"))
        found["decoded_s"] = time.perf_counter() - began
        of_workers = {number: dataclasses.replace(config, num_workers=number) for number in WORKERS}
        epochs = {f"workers {k}": loading(data, each, ctx, samples) for k, each in of_workers.items()}
        epochs["cache ram"] = loading(held, with_cache, ctx, samples)
    first, *_ = candidates = [Candidate(name, epoch) for name, epoch in epochs.items()]
    for each in candidates:
        each.epoch()  # workers start
    take_turns(candidates, options.rounds, ctx.device)
    rows = [["", "samples/s", f"time over {candidates[-1].name}", "control", ""]]
    for each in candidates:
        rate, ratio, control = samples / each.seconds(), each.ratio(candidates[-1]), each.control()
        found[each.name] = {"samples_per_s": rate, "ratio": ratio, "control": control, "turns_s": each.wall}
        rows.append([each.name, f"{rate:,.0f}", f"{ratio:.3f}", f"{control:.3f}", each.warning("wall")])
    say(format_table(rows, range(1, 4)))
    if "decoded_s" in found:
        say(f"decoded into the cache once in {found['decoded_s']:.1f} s")
    return found


def loading(data: Dataset, config: TrainingConfig, ctx: DistributedContext, samples: int) -> Callable[[], None]:
    """One pass of the loader over the last `samples` samples of an epoch."""
    loader, sampler = create_distributed_dataloader(data, config, ctx)
    epochs = itertools.count()

    def one_pass() -> None:
        for global_batch in loader.global_batches(next(epochs), sampler.samples_per_epoch - samples):
            for _ in global_batch:
                pass

    return one_pass


def indexing(data: Dataset, config: TrainingConfig, ctx: DistributedContext, samples: int) -> Callable[[], None]:
    """The same rows by plain tensor indexing, with the same device transform."""
    whole, epochs = data.__getitems__(list(range(len(data)))), itertools.count()

    def one_pass() -> None:
        epoch = next(epochs)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for chosen in order[:samples].split(config.batch_size):
            batch = [rows[chosen].to(ctx.device, non_blocking=True) for rows in whole]
            data.device_transform(batch, config.seed, epoch, chosen.to(ctx.device))

    return one_pass
