"""What one number of ranks gives: the step with and without communication, when the buckets become ready, the
all-reduce. In each rank."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import train
from benching.ours import Ours
from config import TrainingConfig, UserError
from ddp_utils import DistributedContext, wrap_ddp
from scales.knobs import judge, variants
from scripts.lib.preflight import links
from utils.data.loader import create_distributed_dataloader
from utils.distributed.collectives import all_gather_json
from utils.training import batchnorm as running_stats

SIZES = (2**3, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)  # bytes of an all-reduce; the last on CUDA alone
MOST_STEPS, MOST_EPOCHS = 200, 20
MOST_SYNTHETIC = 2**16  # samples of a synthetic set: 200 MB of small images
PASSES = 5


class Timed:
    """Ours, in rounds of whole epochs of so many steps."""

    def __init__(self, config: TrainingConfig, ctx: DistributedContext, folder: Path, epochs: int) -> None:
        self._ours, self._ctx, self._epochs = Ours(config, ctx, folder), ctx, epochs
        self._ours.epoch()  # workers come up, caches fill

    def round(self, is_alone: bool = False) -> tuple[float, float]:
        """Seconds of a step, and what of it was spent waiting for data: the mean over the round, of the slowest rank.

        is_alone: without the all-reduces of gradients and running statistics; the ranks then train on by themselves.
        """
        all_gather_json(None, self._ctx)  # all begin together
        waited, steps, began = self._ours.watch.spent()[0]["data"], 0, time.perf_counter()
        with self._alone() if is_alone else contextlib.nullcontext():
            for _ in range(self._epochs):
                steps += self._ours.epoch()
        links.sync(self._ctx.device)
        seconds = time.perf_counter() - began
        waited = self._ours.watch.spent()[0]["data"] - waited
        return max(tuple(each) for each in all_gather_json([seconds / steps, waited / steps], self._ctx))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        alone = SimpleNamespace(get_world_size=lambda: 1)  # the statistics are then nobody else's
        with self._ours.model.no_sync(), mock.patch.object(running_stats, "dist", alone):
            yield

    def close(self) -> None:
        self._ours.close()


def measure(job: dict[str, Any], config: TrainingConfig, ctx: DistributedContext, folder: Path) -> dict[str, Any]:
    """All of one config. Plain JSON, the same on all ranks.

    job: "rounds", the "seconds" of one, "global_batch" of strong scaling (0: none), "is_swept".

    Raises UserError where the data set is too small.
    """
    quiet = {
        "epochs": 1000,
        "max_steps": 0,
        "max_time": 0.0,
        "save_every": 0,
        "save_every_steps": 0,
        "save_every_minutes": 0.0,
    }
    weak = dataclasses.replace(config, **quiet, eval_every=0, global_batch_size=0)
    is_cuda = ctx.device.type == "cuda"
    found: dict[str, Any] = {
        "ranks": ctx.world_size,
        "here": ctx.local_world_size,
        "device": ctx.device_names[0],
        "threads": torch.get_num_threads(),
        "batch": weak.batch_size * weak.grad_accum_steps,
    }
    if ctx.world_size > 1:
        began, worked = time.perf_counter(), time.process_time()
        found["all_reduce"] = links.all_reduce_times(None, ctx.device, SIZES)
        share = (time.process_time() - worked) / (time.perf_counter() - began)
        found["work"] = 0.0 if is_cuda else statistics.fmean(all_gather_json(share, ctx))
    samples, found["profile"] = profile(weak, ctx)
    half = dataclasses.replace(weak, batch_size=max(1, weak.batch_size // 2))
    found["half"] = (
        {"batch": half.batch_size, **profile(half, ctx)[1]}
        if ctx.world_size == 1 and half.batch_size < weak.batch_size
        else {}
    )

    configs = {"weak": weak}
    if job["global_batch"]:
        configs["strong"] = strong_config(weak, job["global_batch"], ctx.world_size)
    one = found["profile"]["plain"]
    for name, each in configs.items():
        if (
            name == "strong"
            and global_batch(each, ctx) == global_batch(weak, ctx)
            and each.batch_size == weak.batch_size
        ):
            found["strong"] = found["weak"]  # the same run
            continue
        sized, epochs = plan(each, samples, one * each.batch_size / weak.batch_size, job["seconds"], ctx)
        timed, rows = Timed(sized, ctx, folder / name, epochs), []
        for _ in range(job["rounds"]):
            rows.append([*timed.round(), timed.round(is_alone=True)[0]])
        timed.close()
        found[name] = {"samples": global_batch(each, ctx), "rounds": rows}
    if job["is_swept"] and ctx.world_size > 1:
        found["sweep"] = sweep(
            *plan(weak, samples, one, job["seconds"], ctx), job["rounds"], found["profile"]["gradient"], ctx, folder
        )
    return found


def strong_config(weak: TrainingConfig, samples: int, ranks: int) -> TrainingConfig:
    """The same global batch on any number of ranks: micro-batches of batch_size, or smaller ones where there are not
    enough for all."""
    size = min(weak.batch_size, max(1, samples // ranks))
    if samples % (size * ranks):
        raise UserError(
            f"global_batch_size={samples}: cannot be dealt evenly to {ranks} ranks; give a multiple of"
            f" {weak.batch_size * ranks}"
        )
    return dataclasses.replace(weak, batch_size=size, grad_accum_steps=1, global_batch_size=samples)


def global_batch(config: TrainingConfig, ctx: DistributedContext) -> int:
    return config.batch_size * config.micro_batches_per_step(ctx.world_size)


def plan(
    config: TrainingConfig, samples: int, one: float, seconds: float, ctx: DistributedContext
) -> tuple[TrainingConfig, int]:
    """The config with a data set of some whole steps, and how many epochs of it are a round of so many seconds. one:
    those of a pass."""
    size = global_batch(config, ctx)
    wanted = max(all_gather_json(seconds / (one * config.micro_batches_per_step(ctx.world_size) / ctx.world_size), ctx))
    steps = min(MOST_STEPS, math.ceil(wanted))
    steps = min(steps, samples // size)
    if not steps:
        raise UserError(
            f"batch_size={config.batch_size}: one global batch is {size}, the data set has {samples}; give a smaller"
            " batch_size"
        )
    epochs = max(1, min(MOST_EPOCHS, round(wanted / steps)))
    return dataclasses.replace(config, dataset_size=steps * size), epochs


def profile(config: TrainingConfig, ctx: DistributedContext) -> tuple[int, dict[str, Any]]:
    """Samples that the data set can give, and of one micro-batch the seconds of a pass without DDP's part ("plain"),
    and with it but
    nothing sent: forward, backward, and when each bucket's gradients are ready. One rank alone has no such part."""
    config = dataclasses.replace(config, comm_hook="none", compile="off")
    is_ours = config.dataset == "synthetic" and not config.dataset_size  # any number of samples
    train_set, _, config = train.load_data(
        dataclasses.replace(config, dataset_size=max(64, config.batch_size)) if is_ours else config, ctx
    )
    loader, _ = create_distributed_dataloader(train_set, config, ctx)
    state = train.create_state(config, ctx)
    model = wrap_ddp(state.model, config, ctx)
    marks: list[Any] = []
    sizes: list[int] = []

    def mark() -> None:
        if ctx.device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    def note(_, bucket):  # without annotations: DDP compares them with its own, and here they would be text
        """Of a bucket whose gradients are there: as DDP does it, but nothing is sent."""
        mark()
        sizes.append(bucket.buffer().div_(ctx.world_size).nbytes)
        return noop_hook(None, bucket)

    model.register_comm_hook(None, note)
    batch = loader.sample_batch()

    def one_pass() -> list[float]:
        """Seconds of forward, then from there until each mark."""
        marks.clear(), sizes.clear()
        links.sync(ctx.device)
        mark()
        with state.precision.autocast():
            loss_sum, _ = train.compute_loss(model, batch)
        mark()
        loss_sum.backward()
        mark()
        links.sync(ctx.device)
        state.optimizer.zero_grad()
        return [between(marks[0], marks[1]), *(between(marks[1], each) for each in marks[2:])]

    rows, plain = [], []
    for _ in range(2 + PASSES):
        with model.no_sync():
            plain.append(sum(one_pass()))
        rows.append(one_pass())
    # DDP orders its buckets in the first two
    forward, *ready, backward = (statistics.median(column) for column in zip(*rows[2:], strict=True))
    moments = sum(
        2 * m.running_mean.nbytes
        for m in state.model.modules()
        if isinstance(getattr(m, "running_mean", None), torch.Tensor)
    )
    # the running statistics' own all-reduce begins with the backward pass
    buckets = [[0.0, moments]] if moments else []
    buckets += [[when, size] for when, size in zip(ready, sizes, strict=True)]
    told = {
        "plain": statistics.median(plain[2:]),
        "forward": forward,
        "backward": backward,
        "ready": buckets,
        "gradient": sum(sizes),
    }
    return MOST_SYNTHETIC if is_ours else len(train_set), told


def between(first: Any, second: Any) -> float:
    """Seconds."""
    return first.elapsed_time(second) / 1000 if isinstance(first, torch.cuda.Event) else second - first


def sweep(
    config: TrainingConfig, epochs: int, rounds: int, gradient: int, ctx: DistributedContext, folder: Path
) -> list[dict[str, Any]]:
    """Each setting of the communication's flags beside the one asked for, in turns: its step, and the ratios round by
    round."""
    plain, found = Timed(config, ctx, folder / "plain", epochs), []

    def compare(change: dict[str, Any]) -> None:
        try:
            other = Timed(dataclasses.replace(config, **change), ctx, folder / f"variant-{len(found)}", epochs)
        except UserError as refused:
            found.append({"change": change, "problem": str(refused)})
            return
        turns = [(plain.round()[0], other.round()[0]) for _ in range(rounds)]
        other.close()
        found.append(
            {"change": change, "step_s": statistics.median(b for _, b in turns), "ratios": [a / b for a, b in turns]}
        )

    compare({})  # the control
    for change in variants(config, gradient):
        compare(change)
    if len(both := judge(found)[0]) > 1:  # a bucket size and a hook are each better: are they together?
        compare(both)
    plain.close()
    return found
