"""Measure one number of ranks, on each rank: steps with and without communication, the all-reduce, other flags."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

from config import TrainingConfig, UserError
from ddp_utils import DistributedContext
from lib.benchmark.find_batch import keeping
from lib.benchmark.ours import Ours
from lib.benchmark.turns import synchronize
from lib.preflight.links import all_reduce_times
from lib.scaling.flags import variants
from utils.distributed.collectives import all_gather_json
from utils.training.parallel import bucket_megabytes
from utils.training.step_sums import StepSums


def measure(
    config: TrainingConfig, ctx: DistributedContext, folder: Path, rounds: int, steps: int, most: int
) -> dict[str, Any]:
    """Weak and strong scaling and, from `most` ranks on, communication flags. Plain JSON, equal on all ranks.

    Strong scaling uses global_batch_size if it is set, else the global batch of `most` ranks.
    """
    weak = dataclasses.replace(config, global_batch_size=0, save_every_steps=0, save_every_minutes=0.0)
    whole = config.global_batch_size or config.batch_size * config.grad_accum_steps * most
    size = keeping(whole, config.batch_size, ctx.world_size)
    strong = dataclasses.replace(weak, batch_size=size, grad_accum_steps=1, global_batch_size=whole)
    found: dict[str, Any] = {"ranks": ctx.world_size, "device": ctx.device_names[0]}
    if ctx.world_size > 1:
        found["all_reduce"] = all_reduce_times(None, ctx.device)
    for name, each in {"weak": weak, "strong": strong}.items():
        ours = warm(each, ctx, folder / name, steps)
        rows = [[*timed_epoch(ours, ctx), timed_epoch(ours, ctx, is_alone=True)[0]] for _ in range(rounds)]
        found[name] = {"samples": ours.samples // steps, "rounds": [[s / steps for s in row] for row in rows]}
        found["gradient"] = sum(p.nbytes for p in ours.model.parameters() if p.requires_grad)
        found["bucket"] = int(2**20 * bucket_megabytes(ours.state.model, config))
        ours.close()
    if ctx.world_size >= max(2, most):
        changes = variants(config.comm_hook, found["gradient"], found["bucket"])
        found["sweep"] = sweep(weak, ctx, folder, rounds, steps, changes)
    return found


def warm(config: TrainingConfig, ctx: DistributedContext, folder: Path, steps: int) -> Ours:
    """A run after its first epoch: workers are started, caches filled."""
    try:
        ours = Ours(config, ctx, folder, steps)
    except UserError as error:
        if str(error).startswith("dataset_size="):  # the user did not set it
            raise UserError(f"--steps {steps}: needs more samples than the training set has; give fewer") from None
        raise
    ours.epoch()
    return ours


def timed_epoch(ours: Ours, ctx: DistributedContext, is_alone: bool = False) -> tuple[float, float]:
    """The slowest rank's seconds for an epoch, and for its data waits.

    is_alone: without all-reduces of gradients, sums and running statistics; the ranks then diverge.
    """
    all_gather_json(None, ctx)  # start together
    waited, began = ours.spent()["data"], time.perf_counter()
    with contextlib.ExitStack() as stack:
        if is_alone:
            stack.enter_context(ours.model.no_sync())
            stack.enter_context(mock.patch.object(StepSums, "start_reduce", lambda sums, micro_batch: None))
        ours.epoch()
    synchronize(ctx.device)
    mine = [time.perf_counter() - began, ours.spent()["data"] - waited]
    return max(tuple(each) for each in all_gather_json(mine, ctx))


def sweep(
    config: TrainingConfig,
    ctx: DistributedContext,
    folder: Path,
    rounds: int,
    steps: int,
    changes: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Time each change and the unchanged config in turns: step time and ratio per round. The first is the control.

    Changes that this build of torch does not support are skipped.
    """
    plain, found = warm(config, ctx, folder / "plain", steps), []
    for number, change in enumerate([{}, *changes]):
        try:
            other = warm(dataclasses.replace(config, **change), ctx, folder / f"variant-{number}", steps)
        except UserError:
            continue
        turns = [(timed_epoch(plain, ctx)[0], timed_epoch(other, ctx)[0]) for _ in range(rounds)]
        other.close()
        ratios = [a / b for a, b in turns]
        found.append({"change": change, "step_s": statistics.median(b for _, b in turns) / steps, "ratios": ratios})
    plain.close()
    return found
