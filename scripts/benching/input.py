"""What input costs: an in-memory set against plain tensor indexing; an image folder decoded in workers against one that
is cached.

python scripts/benching/input.py [flags of train.py]      this alone, on one rank
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import train
from config import TrainingConfig
from utils.data.cache import cached
from utils.data.loader import create_distributed_dataloader

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from ddp_utils import DistributedContext

ROUNDS = 7
MOST_SAMPLES = 16_384  # of a pass; from files fewer, so that a round takes seconds
MOST_FILES = 2_048
WORKERS = (0, 1, 2)


def input_rates(config: TrainingConfig, ctx: DistributedContext) -> dict[str, Any]:
    """Samples a second of this rank's loader while nothing is computed: medians over rounds in turns, by what is
    measured.

    For a set in memory: "loader", "indexing" (the same rows by plain tensor indexing, the same transform), "again"
    (indexing once more), and the
    median ratios "cost" = loader / indexing and "control" = again / indexing of the seconds, which is 1 but for noise.
    For an image folder: "workers 0", "workers 1", "workers 2", and "cache ram" (with "decoded_s", once).
    """
    config = dataclasses.replace(config, cache="none")
    data, _, config = train.load_data(config, ctx)
    if getattr(data, "in_memory", False):
        seconds, samples = _in_turns(_of_memory(data, config, ctx), ctx)
        found = {name: samples / statistics.median(each) for name, each in seconds.items()}
        ratios = {"cost": "loader", "control": "again"}
        return found | {
            name: statistics.median(a / b for a, b in zip(seconds[which], seconds["indexing"], strict=True))
            for name, which in ratios.items()
        }
    began = time.perf_counter()
    held, _, _ = cached(data, {}, dataclasses.replace(config, cache="ram"), ctx, logging.getLogger("ddp"))
    decoded_s = time.perf_counter() - began
    each = {f"workers {number}": _passes(data, config, ctx, MOST_FILES, num_workers=number) for number in WORKERS}
    seconds, samples = _in_turns(each | {"cache ram": _passes(held, config, ctx, MOST_FILES)}, ctx)
    return {name: samples / statistics.median(each) for name, each in seconds.items()} | {"decoded_s": decoded_s}


def _in_turns(passes: dict[str, Callable[[int], int]], ctx: DistributedContext) -> tuple[dict[str, list[float]], int]:
    """Seconds of each pass in each round, and the samples of one. The first round, in which workers start, does not
    count."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(ROUNDS + 1):
        for name, one_pass in passes.items():
            _wait_for(ctx.device)
            began = time.perf_counter()
            samples = one_pass(number)
            _wait_for(ctx.device)
            seconds[name].append(time.perf_counter() - began)
    return {name: each[1:] for name, each in seconds.items()}, samples


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _passes(
    data: Dataset, config: TrainingConfig, ctx: DistributedContext, most: int, **changes: Any
) -> Callable[[int], int]:
    """A pass of the loader over as many samples at most, of this rank alone. It returns how many they were."""
    alone = dataclasses.replace(ctx, rank=0, world_size=1, local_world_size=1)
    config = dataclasses.replace(config, grad_accum_steps=1, global_batch_size=0, drop_last=True, **changes)
    loader, sampler = create_distributed_dataloader(data, config, alone)

    def one_pass(epoch: int) -> int:
        samples, start = 0, max(0, sampler.samples_per_epoch - most // config.batch_size * config.batch_size)
        for global_batch in loader.global_batches(epoch, start):
            for micro_batch in global_batch:  # it lives, as in a loop, until the next one is there
                samples += len(micro_batch.indices)
        return samples

    return one_pass


def _of_memory(data: Dataset, config: TrainingConfig, ctx: DistributedContext) -> dict[str, Callable[[int], int]]:
    loader = _passes(data, config, ctx, MOST_SAMPLES)
    size, used = config.batch_size, len(data) - len(data) % config.batch_size
    whole = data.__getitems__(list(range(len(data))))

    def indexing(epoch: int) -> int:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        images, labels = whole
        start = max(0, used - MOST_SAMPLES // size * size)
        for first in range(start, used, size):
            chosen = order[first : first + size]
            batch = [rows[chosen].to(ctx.device, non_blocking=True) for rows in (images, labels)]
            batch = data.device_transform(batch, config.seed, epoch, chosen.to(ctx.device))
        return used - start

    return {"loader": loader, "indexing": indexing, "again": indexing}


def table(found: dict[str, Any]) -> str:
    """The rates as lines to print."""
    rates = [
        f"  {name:<12}{value:>12,.0f} samples/s"
        for name, value in found.items()
        if name not in ("cost", "control", "decoded_s")
    ]
    if "cost" in found:
        noisy = "  (noisy: the control is off by more than 3 %)" if abs(found["control"] - 1) > 0.03 else ""
        return "\n".join(
            [*rates, f"  loader over plain indexing: {found['cost']:.3f}, control {found['control']:.3f}{noisy}"]
        )
    return "\n".join([*rates, f"  decoded once in {found['decoded_s']:.1f} s"])


if __name__ == "__main__":
    from ddp_utils import cleanup_distributed, setup_distributed

    flags = TrainingConfig.from_args()
    context = setup_distributed(flags)
    print(table(input_rates(flags, context)))
    cleanup_distributed()
