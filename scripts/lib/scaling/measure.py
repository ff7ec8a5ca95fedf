"""What one number of ranks gives: steps with and without communication, the all-reduce, and other flags. On each rank."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import train
from config import TrainingConfig, UserError
from ddp_utils import DistributedContext
from lib.benchmark.find_batch import keeping
from lib.benchmark.ours import Ours
from lib.benchmark.turns import synchronize
from lib.preflight.links import all_reduce_times
from lib.scaling.flags import judge, variants
from utils.distributed.collectives import all_gather_json
from utils.training.batchnorm import RunningStats

SIZES = (2**3, 2**16, 2**20, 2**24, 2**26)  # bytes of an all-reduce; the last on CUDA only
PROBE_STEPS, MAX_STEPS, MAX_EPOCHS = 3, 200, 20
SYNTHETIC_SAMPLES = 2**16  # of the built-in synthetic set, unless --dataset_size is given
QUIET = {"epochs": 1000, "max_steps": 0, "max_time": 0.0, "eval_every": 0}
QUIET |= {"save_every": 0, "save_every_steps": 0, "save_every_minutes": 0.0}


class TimedRun:
    """A run in rounds of whole epochs."""

    def __init__(self, config: TrainingConfig, ctx: DistributedContext, folder: Path, epochs: int = 1) -> None:
        self.ours, self._ctx, self._epochs = Ours(config, ctx, folder), ctx, epochs
        self.ours.epoch()  # workers start, caches fill

    def round(self, is_alone: bool = False) -> tuple[float, float]:
        """Seconds of a step, and of its wait for data: means over the round, of the slowest rank.

        is_alone: without all-reduces of gradients and running statistics; the ranks then diverge.
        """
        all_gather_json(None, self._ctx)  # start together
        waited, steps, began = self.ours.spent()["data"], 0, time.perf_counter()
        with self._alone() if is_alone else contextlib.nullcontext():
            for _ in range(self._epochs):
                steps += self.ours.epoch()
        synchronize(self._ctx.device)
        seconds, waited = time.perf_counter() - began, self.ours.spent()["data"] - waited
        return max(tuple(each) for each in all_gather_json([seconds / steps, waited / steps], self._ctx))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self.ours.model.no_sync(), mock.patch.object(RunningStats, "start_reduce", lambda stats: None):
            yield


def measure(job: dict[str, Any], config: TrainingConfig, ctx: DistributedContext, folder: Path) -> dict[str, Any]:
    """Weak scaling, strong scaling and the flags of communication. Returns plain JSON, the same on all ranks.

    job: "rounds", the "seconds" of one, the "global_batch" of strong scaling, and whether flags "is_swept".
    """
    weak = dataclasses.replace(config, **QUIET, global_batch_size=0)
    size = keeping(job["global_batch"], weak.batch_size, ctx.world_size)
    strong = dataclasses.replace(weak, batch_size=size, grad_accum_steps=1, global_batch_size=job["global_batch"])
    found: dict[str, Any] = {"ranks": ctx.world_size, "device": ctx.device_names[0]}
    if ctx.world_size > 1:
        found["all_reduce"] = all_reduce_times(None, ctx.device, SIZES)
    for name, each in {"weak": weak, "strong": strong}.items():
        sized, epochs, samples = plan(each, job["seconds"], ctx, folder / f"{name}-probe")
        timed = TimedRun(sized, ctx, folder / name, epochs)
        rows = [[*timed.round(), timed.round(is_alone=True)[0]] for _ in range(job["rounds"])]
        found[name] = {"samples": samples, "rounds": rows}
        found["gradient"] = sum(p.nbytes for p in timed.ours.model.parameters() if p.requires_grad)
        found["bucket"] = timed.ours.model.bucket_bytes_cap
        timed.ours.close()
    if job["is_swept"] and ctx.world_size > 1:
        sized, epochs, _ = plan(weak, job["seconds"], ctx, folder / "sweep-probe")
        choices = variants(config, found["gradient"], found["bucket"])
        found["sweep"] = sweep(sized, epochs, job["rounds"], choices, ctx, folder)
    return found


def plan(
    config: TrainingConfig, seconds: float, ctx: DistributedContext, folder: Path
) -> tuple[TrainingConfig, int, int]:
    """The config with a data set of whole steps, the epochs of a round of so many seconds, and the global batch."""
    global_batch = config.batch_size * config.micro_batches_per_step(ctx.world_size)
    is_any_size = getattr(config, "dataset", "") == "synthetic" and not config.dataset_size
    most = (SYNTHETIC_SAMPLES if is_any_size else len(train.load_data(config, ctx).train)) // global_batch
    if not most:
        raise UserError(
            f"batch_size={config.batch_size}: one global batch has {global_batch} samples, the data set fewer;"
            " give a smaller --batch_size or more data"
        )
    probe = TimedRun(dataclasses.replace(config, dataset_size=min(PROBE_STEPS, most) * global_batch), ctx, folder)
    wanted = math.ceil(seconds / probe.round()[0])
    probe.ours.close()
    steps = min(wanted, MAX_STEPS, most)
    epochs = max(1, min(MAX_EPOCHS, round(wanted / steps)))
    return dataclasses.replace(config, dataset_size=steps * global_batch), epochs, global_batch


def sweep(
    config: TrainingConfig,
    epochs: int,
    rounds: int,
    choices: list[list[dict[str, Any]]],
    ctx: DistributedContext,
    folder: Path,
) -> list[dict[str, Any]]:
    """Each setting beside the one asked for, in turns: its step, and the ratio of each round.

    Each list of choices is tried together with the best of those before it.
    """
    plain, found = TimedRun(config, ctx, folder / "plain", epochs), []

    def compare(change: dict[str, Any]) -> None:
        try:
            other = TimedRun(dataclasses.replace(config, **change), ctx, folder / f"variant-{len(found)}", epochs)
        except UserError as error:
            found.append({"change": change, "problem": str(error)})
            return
        turns = [(plain.round()[0], other.round()[0]) for _ in range(rounds)]
        other.ours.close()
        ratios = [a / b for a, b in turns]
        found.append({"change": change, "step_s": statistics.median(b for _, b in turns), "ratios": ratios})

    compare({})  # the control
    for changes in choices:
        best = judge(found)[0]
        for change in changes:
            compare(best | change)
    plain.ours.close()
    return found
