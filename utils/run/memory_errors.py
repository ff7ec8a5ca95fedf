"""The error for a run that has no memory left."""

from __future__ import annotations

import torch

from config import TrainingConfig
from utils.distributed.context import DistributedContext
from utils.memory import drop_traceback, is_out_of_memory
from utils.settings.errors import TrainingError


def explain_out_of_memory(
    error: BaseException, config: TrainingConfig, ctx: DistributedContext, is_resumed: bool = False
) -> TrainingError | None:
    """Return the error for a failed allocation, with flags that help.

    Args:
        is_resumed: the run has a checkpoint, so the size of its micro-batch is fixed.

    Returns:
        The error that names the fix, or None if the given error is not about memory.
    """
    if isinstance(error, TrainingError) or not is_out_of_memory(error):
        return None
    lines = str(error).splitlines()
    text = lines[0] if lines else type(error).__name__
    drop_traceback(error)
    is_of_device = isinstance(error, torch.OutOfMemoryError) or "CUDA" in text
    resource = "memory"
    if is_of_device:
        resource = f"{ctx.device_names[ctx.rank]} ({ctx.device})"

    ways: list[str] = []
    if not config.activation_checkpointing:  # extra: compile
        ways.append("--activation_checkpointing")
    if not is_of_device:
        ways += ["fewer --num_workers", "more memory for the job"]
    if is_of_device and ctx.world_size > 1 and config.sharding == "none":  # extra: sharding
        ways.append("--sharding zero3")
    name, size = config.micro_batch
    global_size = size * config.micro_batches_per_step(ctx.world_size)
    flags = suggest_half_batch(name, size, global_size)
    if flags and not is_resumed:
        ways.insert(0, f"{flags} (the same global batch)")
    ways.append("a smaller model or image size")
    cause = text.rstrip(".")
    return TrainingError(f"Rank {ctx.rank} on {ctx.host} ran out of {resource} ({cause}). Use {' or '.join(ways)}.")


def suggest_half_batch(name: str, size: int, global_size: int) -> str:
    """Return flags for a micro-batch of at most half of `size` with the same global batch.

    Args:
        name: the setting that gives the micro-batch its size.

    Returns:
        The flags, or "" if `size` is 1 and has no half.
    """
    for smaller_size in range(size // 2, 0, -1):
        if global_size % smaller_size == 0:
            return f"--{name} {smaller_size} --global_batch_size {global_size}"
    return ""
