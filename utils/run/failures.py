"""Why a run failed: attempts that get no further, and memory that is short."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from config import TrainingConfig, TrainingError, UserError
from utils.data.sampler import GlobalBatchSampler
from utils.distributed.collectives import on_rank_0
from utils.distributed.context import DistributedContext
from utils.memory import is_out_of_memory, let_go
from utils.training.schedule import Progress

if TYPE_CHECKING:  # whose Claim needs `repeated_failures`
    from utils.run.folder import RunFolder

MAX_FAILURES = 3  # attempts in a row that get no further, before the run is stopped
KILLED = "every rank was killed"  # nobody wrote how far the attempt got, so its step is a little too low


def repeated_failures(owner: dict[str, Any], status: dict[str, Any]) -> list[dict[str, Any]]:
    """The latest consecutive attempts that failed and did not get beyond the first of them.

    Args:
        owner: what the last attempt wrote to lock.json.
        status: its status.json.
    """
    was_asked = status.get("state") not in ("running", "failed")
    if not owner.get("has_trained") or owner.get("has_diagnosed") or was_asked:  # diagnosed: the user was told
        return []
    last = {"step": status.get("step", 0), "error": status.get("error") or KILLED}
    before = owner.get("failures", [])
    furthest = max((each["step"] for each in before), default=-1)
    return [*before, last] if last["step"] <= furthest else [last]


def check_progress(run: RunFolder, progress: Progress, sampler: GlobalBatchSampler, ctx: DistributedContext) -> None:
    """Raises UserError, with the samples of the step that fails, if the last attempts got no further. Collective."""
    failures = run.claim.failures
    if len(failures) < MAX_FAILURES:
        return
    on_rank_0(lambda: run.mark_diagnosed(), ctx)
    step = max(each["step"] for each in failures) + 1
    indices = sampler.global_batch(progress.epoch, progress.samples_in_epoch, step - progress.step - 1)[:32]
    which = (
        f" (epoch {progress.epoch + 1}, samples {indices})" if indices and KILLED not in failures[-1]["error"] else ""
    )
    text = f"the last {len(failures)} attempts did not complete step {step}{which}, the last one failed with:"
    remedy = f"fix that and start again: there are {MAX_FAILURES} more attempts"
    raise UserError(f"{text} {failures[-1]['error']}; {remedy}", 0, ctx.hosts[0], is_final=True)


def explain_memory(
    error: BaseException, config: TrainingConfig, ctx: DistributedContext, is_resumed: bool = False
) -> TrainingError | None:
    """The error for a failed allocation, with flags that help; None for another error.

    is_resumed: the run has a checkpoint, so the size of its micro-batch is fixed.
    """
    if not is_out_of_memory(error):
        return None
    text = next(iter(str(error).splitlines()), type(error).__name__)
    let_go(error)
    is_of_device = isinstance(error, torch.OutOfMemoryError) or "CUDA" in text
    place = f"{ctx.device_names[ctx.rank]} ({ctx.device})" if is_of_device else "memory"
    ways: list[str] = []
    ways += ["--activation_checkpointing"] * (not config.activation_checkpointing)  # extra: compile
    if not is_of_device:
        ways += ["fewer --num_workers", "more memory for the job"]
    if is_of_device and ctx.world_size > 1 and config.sharding == "none":  # extra: sharding
        ways.append("--sharding zero3")
    flags = halved(config.micro_batch[1], config, ctx.world_size)
    if flags and not is_resumed:
        ways.insert(0, f"{flags} (the same global batch; scripts/benchmark.py --find-batch shows what fits)")
    ways.append("a smaller model or image size")
    return TrainingError(f"rank {ctx.rank} on {ctx.host} ran out of {place}: {text}; use {' or '.join(ways)}")


def halved(size: int, config: TrainingConfig, world_size: int) -> str:
    """Flags for a micro-batch of at most half of `size` with the same global batch; empty below 1."""
    name, whole = config.micro_batch[0], config.micro_batch[1] * config.micro_batches_per_step(world_size)
    size = next((size for size in range(size // 2, 0, -1) if whole % size == 0), 0)
    return f"--{name} {size} --global_batch_size {whole}" if size else ""
