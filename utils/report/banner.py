"""The banner: everything that was decided at the start, a line each."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from config import TrainingConfig
from utils.data.loader import GlobalBatchLoader
from utils.data.sets import kind_of, split_of
from utils.distributed.device import unused_accelerator
from utils.logger import count
from utils.run.attempt import Attempt
from utils.training.replicated import bucket_megabytes
from utils.training.state import TrainState

READS = ": one device read per step, since it does not support found_inf (torch's fused optimizers do)"


def decisions(
    attempt: Attempt,
    state: TrainState,
    loader: GlobalBatchLoader,
    held_out: dict[str, GlobalBatchLoader],
    origin: dict[str, Any],
) -> dict[str, str]:
    """The lines of the banner: everything decided at the start. origin: content of provenance.json."""
    config, ctx, run = attempt.config, attempt.ctx, attempt.run
    total, sampler = state.schedule.total_steps, loader.sampler
    has_ddp = ctx.world_size > 1 and config.sharding == "none"
    decided = {
        "run": str(run.folder),
        "ranks": f"{ctx.world_size} on {count(set(ctx.hosts), 'node')}: {', '.join(sorted(set(ctx.device_names)))}",
        "model": _model_line(config, state),
        "data": _data_line(loader, held_out),
        **({} if held_out else {"evaluation": "none: the data has no validation or test set"}),
        "workers": f"{loader.num_workers} per rank",
        "batch": _batch_line(config, sampler.micro_batches_per_step, ctx.world_size),
        "steps": f"{total:,}, {sampler.steps_per_epoch:,} per epoch" + _shorter_limit(config, total),
        "precision": state.precision.title + ", channels_last" * is_channels_last(state.model),
        "optimizer": type(state.optimizer).__name__ + ("" if state.updater.skips_on_device else READS),
        **({"gradients": _gradient_line(config, state.model)} if has_ddp else {}),
        "checkpoints": _checkpoint_line(config),
        "verify": origin["verification"],
        "versions": _versions_line(origin["versions"]),
        "commit": origin["git_commit"][:12] + ", with uncommitted changes" * origin["git_dirty"] or "unknown",
    }
    if unused := unused_accelerator(config.backend):
        decided["unused"] = unused
    if run.resume_path:
        progress, samples = state.progress, f"{state.progress.samples_in_epoch:,} of {sampler.samples_per_epoch:,}"
        where = f"step {progress.step}, epoch {progress.epoch + 1}, {samples} samples"
        decided["resumed"] = f"{run.resume_path}: {where}"
    if changed := origin["changed_template_files"]:
        decided["changed"] = f"template files: {', '.join(changed)}"
    return decided


def _shorter_limit(config: TrainingConfig, total_steps: int) -> str:
    """Which of two limits ends the run."""
    if math.inf in config.limits:
        return ""
    limits = [f"epochs={config.epochs}", f"max_steps={config.max_steps}"]
    first, other = reversed(limits) if total_steps == config.max_steps else limits
    return f" ({first} ends the run before {other})"


def is_channels_last(model: nn.Module) -> bool:
    """Whether a convolution of the model has that memory format."""
    weights = [p for p in model.parameters() if p.ndim == 4]
    return any(p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous() for p in weights)


def _model_line(config: TrainingConfig, state: TrainState) -> str:
    parameters = sum(p.numel() for p in state.model.parameters())
    trained = sum(state.owners[p].numel() for group in state.optimizer.param_groups for p in group["params"])
    line = f"{type(state.model).__name__}, {parameters:,} parameters"
    line += f", {trained:,} of them trained" if trained < parameters else ", all trained"
    kind = config.sharding + ", in host memory" * config.cpu_offload
    line += f", sharded ({kind})" if config.sharding != "none" else ""
    line += ", activation checkpointing" if config.activation_checkpointing else ""
    return line + (f", compiled ({config.compile})" if config.compile != "off" else "")


def _data_line(loader: GlobalBatchLoader, held_out: dict[str, GlobalBatchLoader]) -> str:
    dataset, sampler = loader.dataset, loader.sampler
    line = f"{kind_of(dataset)}, {len(dataset):,} training samples"
    if sampler.samples_per_epoch < len(dataset):
        line += f" ({len(dataset) - sampler.samples_per_epoch} dropped, different ones in each epoch)"
    splits = {split_of(each.dataset, split): len(each.dataset) for split, each in held_out.items()}
    more = ", which also selects the best checkpoint" if list(splits) == ["test"] else ""
    line += "".join(f", {size:,} for evaluation ({split}{more})" for split, size in splits.items())
    classes = getattr(dataset, "classes", ())
    return line + (f", {len(classes):,} classes" if classes else "")


def _batch_line(config: TrainingConfig, micro_batches: int, ranks: int) -> str:
    """64 per rank x 2 accumulation x 4 ranks = 512 global."""
    total, size = micro_batches * config.batch_size, config.batch_size
    if micro_batches % ranks == 0:
        return f"{size} per rank x {micro_batches // ranks} accumulation x {count(ranks, 'rank')} = {total} global"
    idle = 1 - micro_batches / (math.ceil(micro_batches / ranks) * ranks)
    return (
        f"{micro_batches} x {size} on {count(ranks, 'rank')} = {total} global ({idle:.0%} of the ranks' time is idle)"
    )


def _versions_line(versions: dict[str, str]) -> str:
    """torch 2.15.0, CUDA 13.0, NCCL 2.28.3, Python 3.11.2."""
    titles = {"torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "python": "Python"}
    return ", ".join(f"{title} {versions[name]}" for name, title in titles.items() if name in versions)


def _gradient_line(config: TrainingConfig, model: nn.Module) -> str:
    """The gradients that an optimizer step sends."""
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / 2**20
    hook = "" if config.comm_hook == "none" else f", rounded to {config.comm_hook}"
    hook += ", summed in one order on any number of ranks" * (config.reduction == "exact")
    return f"{size:.2f} MB per step, in buckets of about {bucket_megabytes(model, config):.2f} MB{hook}"


def _checkpoint_line(config: TrainingConfig) -> str:
    minutes, steps, epochs = config.save_every_minutes, config.save_every_steps, config.save_every
    parts = [f"{minutes:g} min"] * (minutes > 0) + [count(steps, "step")] * (steps > 0)
    parts += [count(epochs, "epoch")] * (epochs > 0)
    if not parts:
        return "only at the end"
    return f"every {' or '.join(parts)}{', whichever comes first' * (len(parts) > 1)}, and when asked to stop"
