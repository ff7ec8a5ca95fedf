"""What a run shows on the terminal and in its log: the decisions at the start, progress, advice."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from config import TrainingConfig
from utils.cpus import count_usable_cpus
from utils.data.loader import GlobalBatchLoader
from utils.data.sets import choose_split_name, dataset_class_name
from utils.logger import format_count, format_duration, format_value, has_terminal, log_training_step, show_progress_bar
from utils.metrics import RESERVED_NAMES
from utils.run.start import Attempt
from utils.training.ddp_model import choose_bucket_megabytes
from utils.training.state import TrainState

DEVICE_READ_NOTE = (
    ", with one read from the device per step, since it lacks found_inf (torch's fused optimizers have it)"
)
SECONDS_TO_SHOW_WEEKDAY = 12 * 3600  # of a run that ends so much later, the day is shown as well
SHOWN_VERSIONS = ("torch", "cuda", "nccl")
MAX_DATA_WAIT = 0.2  # fraction of a log window above which a warning suggests flags


class Terminal:
    """Called on all ranks: the logger decides what only rank 0 shows."""

    def __init__(self, attempt: Attempt, state: TrainState, loader: GlobalBatchLoader) -> None:
        self._attempt = attempt
        self._state = state
        self._loader = loader
        self._logger = attempt.logger
        self._total_steps = state.schedule.total_steps
        self._has_bar = has_terminal(attempt.logger)
        self._latest_record: dict[str, Any] = {}  # train record
        self._record_count = 0

    def show_start(self, held_out_loaders: dict[str, GlobalBatchLoader], provenance: dict[str, Any]) -> None:
        """Show what was decided and changes the result or the cost.

        Args:
            held_out_loaders: by split.
            provenance: content of provenance.json.
        """
        config = self._attempt.config
        ctx = self._attempt.ctx
        run = self._attempt.run
        state = self._state
        progress = state.progress
        sampler = self._loader.sampler

        steps = f"{self._total_steps:,} optimizer steps, {sampler.steps_per_epoch:,} per epoch"
        if math.inf not in config.limits:
            limits = [f"--epochs {config.epochs}", f"--max_steps {config.max_steps}"]
            if self._total_steps == config.max_steps:
                limits.reverse()
            steps += f" ({limits[0]} ends the run before {limits[1]})"
        nodes = format_count(set(ctx.hosts), "node")
        devices = ", ".join(sorted(set(ctx.device_names)))
        micro_batches = math.ceil(sampler.micro_batches_per_step / ctx.world_size)  # of this rank in a step
        optimizer = type(state.optimizer).__name__
        if not state.updater.skips_on_device:
            optimizer += DEVICE_READ_NOTE
        gradients = ""
        if ctx.world_size > 1 and state.strategy.has_whole_gradients:
            gradients = _format_gradient_line(state, config.comm_hook, config.bucket_cap_mb)
        evaluation = ""
        if not held_out_loaders:
            evaluation = "none: the data has no validation or test set"
        versions = [f"{name} {version}" for name, version in provenance["versions"].items() if name in SHOWN_VERSIONS]
        resumed = ""
        if run.resume_path:
            resumed = f"from {run.resume_path} at step {progress.step}, in epoch {progress.epoch + 1}"
            resumed += f" after {progress.samples_in_epoch:,} of its {sampler.samples_per_epoch:,} samples"
        decided = {
            "run": str(run.folder),
            "ranks": f"{format_count(ctx.world_size, 'rank')} on {nodes} ({devices})",
            "model": _format_model_line(config, state),
            "data": _format_data_line(self._loader, held_out_loaders),
            "evaluation": evaluation,
            "workers": _format_worker_line(self._loader.num_workers),
            "batch": _format_batch_line(config.micro_batch, sampler.micro_batches_per_step, ctx.world_size),
            "BatchNorm": _format_batchnorm_line(state.step_sums.running_stats.momenta, micro_batches),
            "budget": sampler.provenance.get("budget"),  # of a micro-batch
            "steps": steps,
            "precision": state.precision.title,
            "optimizer": optimizer,
            "gradients": gradients,
            "checkpoints": _format_checkpoint_line(
                config.save_every_minutes, config.save_every_steps, config.save_every
            ),
            "verify": provenance.get("verification"),
            "versions": ", ".join(versions),
            "resumed": resumed,
        }
        lines = [f"  {name:<11}  {value}" for name, value in decided.items() if value]
        self._logger.info("%s", "\n".join(lines))

    def show_step(self, step: int) -> None:
        """Move the progress bar."""
        if not self._has_bar:
            return
        suffix = ""
        latest = self._latest_record
        if latest:
            seconds = latest["step_s"] * max(0, self._total_steps - step)
            time_format = "%a %H:%M" if seconds > SECONDS_TO_SHOW_WEEKDAY else "%H:%M"
            ends = time.strftime(time_format, time.localtime(time.time() + seconds))
            suffix = f" | loss {format_value(latest['loss'])} | {latest['samples_per_s']:,.0f} samples/s"
            suffix += f" | {format_duration(seconds)} left, until {ends}"
        total_steps = max(step, self._total_steps)
        show_progress_bar(self._logger, step, total_steps, label="step", suffix=suffix)

    def show_record(self, record: dict[str, Any], metrics: Iterable[str], targets_per_s: float, is_empty: bool) -> None:
        """Show a train record.

        Args:
            metrics: the names of the metrics of compute_loss; other entries are not shown.
            is_empty: steps were skipped, and their losses counted nothing.
        """
        self._latest_record = record
        ctx = self._attempt.ctx
        names = [name for name in metrics if name not in RESERVED_NAMES and name != "loss"]
        shown = dict(record)
        if record["loss"] is None and is_empty:
            shown["loss"] = "without targets"
        total_steps = max(record["step"], self._total_steps)  # epochs may have more steps than the first one
        log_training_step(
            self._logger,
            shown,
            metrics=names,
            total_steps=total_steps,
            world_size=ctx.world_size,
            targets_per_s=targets_per_s,
        )

        self._record_count += 1
        dataset = self._loader.dataset
        wait_fraction = record["data_wait_s"] / (record["step_s"] or math.inf)
        # the first log window includes the start of the workers
        is_waiting = self._record_count == 2 and wait_fraction > MAX_DATA_WAIT
        if is_waiting and not getattr(dataset, "in_memory", False):
            alternative = ""
            if getattr(dataset, "cacheable", False):  # extra: cache
                alternative = " or --cache ram"
            text = "Data loading takes %.0f%% of the time. Try more --num_workers (now %d per rank, with %d CPUs)%s."
            cpus = count_usable_cpus() // ctx.local_world_size
            self._attempt.run.warn(text, 100 * wait_fraction, self._loader.num_workers, cpus, alternative)


def _format_model_line(config: TrainingConfig, state: TrainState) -> str:
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    trained = 0
    for group in state.optimizer.param_groups:
        for tensor in group["params"]:
            trained += state.parameters_by_tensor[tensor].numel()
    line = f"{type(state.model).__name__}, {parameters:,} parameters, "
    if trained < parameters:
        line += f"{trained:,} of them trained"
    else:
        line += "all trained"
    if not state.strategy.has_whole_gradients:
        line += state.strategy.banner_note
    if config.activation_checkpointing or config.compile != "off":  # extra: compile
        if config.activation_checkpointing:
            line += ", activation checkpointing"
        if config.compile != "off":
            line += f", compiled ({config.compile})"
    return line


def _format_worker_line(num_workers: int) -> str:
    if num_workers == 0:
        return "none, so each rank loads its own batches"
    return f"{format_count(num_workers, 'loader worker')} per rank"


def _format_data_line(loader: GlobalBatchLoader, held_out_loaders: dict[str, GlobalBatchLoader]) -> str:
    dropped = len(loader.dataset) - loader.sampler.samples_per_epoch
    line = f"{dataset_class_name(loader.dataset)}, {len(loader.dataset):,} training samples"
    if dropped > 0:
        line += f" ({dropped} dropped, different ones in each epoch)"
    sizes = {}
    for split, eval_loader in held_out_loaders.items():
        sizes[choose_split_name(eval_loader.dataset, split)] = len(eval_loader.dataset)
    role = ""
    if "val" in held_out_loaders and list(sizes) == ["test"]:
        role = ", which also selects the best checkpoint"
    for split, size in sizes.items():
        line += f", {size:,} for evaluation ({split}{role})"
    classes = getattr(loader.dataset, "classes", ())
    if classes:
        line += f", {len(classes):,} classes"
    return line


def _format_batch_line(micro_batch: tuple[str, int], micro_batches: int, ranks: int) -> str:
    """512 samples per optimizer step: 64 per rank x 2 accumulation steps x 4 ranks.

    Args:
        micro_batch: the setting that gives a micro-batch its size, and the size.
        micro_batches: in an optimizer step, of all ranks.
    """
    setting, size = micro_batch
    passes = math.ceil(micro_batches / ranks)
    total = f"{format_count(micro_batches * size, 'sample')} per optimizer step"
    if setting != "batch_size":
        total = f"at most {micro_batches * size:,} tokens per optimizer step"
    rank_count = format_count(ranks, "rank")
    if micro_batches == passes * ranks:
        return f"{total}: {size} per rank x {format_count(passes, 'accumulation step')} x {rank_count}"
    idle = 1 - micro_batches / (passes * ranks)
    return f"{total}: {micro_batches} micro-batches of {size} on {rank_count}, which are idle {idle:.0%} of the time"


def _format_batchnorm_line(momenta: list[float], updates: int) -> str:
    """Return which momentum has the memory that torch's has with an update per micro-batch; "" if a step has one."""
    if updates == 1 or not momenta:
        return ""
    same = []
    for momentum in momenta:
        equivalent = 1 - (1 - momentum) ** updates
        same.append(f"{equivalent:.3g} for the memory that {momentum:g} has in torch")
    advice = f"Use momentum {', '.join(same)}."
    return f"The running statistics move once per optimizer step, not per micro-batch. {advice}"


def _format_gradient_line(state: TrainState, comm_hook: str, bucket_cap_mb: float) -> str:
    """Return the gradients that an optimizer step sends."""
    size = 0
    for parameter in state.model.parameters():
        if parameter.requires_grad:
            size += parameter.numel() * parameter.element_size()
    bucket = choose_bucket_megabytes(state.model, bucket_cap_mb)
    line = f"{size / 2**20:.2f} MB per rank and step, all-reduced in buckets of about {bucket:.2f} MB"
    if comm_hook != "none":
        line += f", rounded to {comm_hook}"
    return line + state.strategy.banner_note


def _format_checkpoint_line(minutes: float, steps: int, epochs: int) -> str:
    periods = []
    if minutes > 0:
        periods.append(f"{minutes:g} min")
    if steps > 0:
        periods.append(format_count(steps, "step"))
    if epochs > 0:
        periods.append(format_count(epochs, "epoch"))
    if not periods:
        return "only at the end"
    line = f"every {' or '.join(periods)}"
    if len(periods) > 1:
        line += ", whichever comes first"
    return line + ", and when asked to stop"
