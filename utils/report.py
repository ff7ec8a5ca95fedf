"""What a run says of itself: the banner, a record each interval, the summary; on the terminal, in the records, on TensorBoard."""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from config import TrainingConfig
from utils.loading import WindowLoader
from utils.logger import duration, log_epoch_summary, log_training_step, show_progress
from utils.profiling import StepProfiler
from utils.provenance import changed_files, verification, zip_code
from utils.run_folder import Run
from utils.tensorboard import Board
from utils.train_state import Progress, TrainState

if TYPE_CHECKING:
    from ddp_utils import DistributedContext


class Reporter:
    """Called on all ranks alike; what rank 0 alone shows or writes is sorted out by the logger, the run and the board."""

    def __init__(
        self,
        run: Run,
        config: TrainingConfig,
        ctx: DistributedContext,
        logger: logging.Logger,
        total_steps: int,
        ledger: dict[str, float] | None,
    ) -> None:
        self._run, self._config, self._logger = run, config, logger
        self._warn = logger.warning if run.is_main else logger.info  # of what all ranks know: on the terminal once
        self._total_steps, self._world_size = total_steps, ctx.world_size
        self.ledger = ledger or {"started_at": time.time(), "trained_s": 0.0, "waited_s": 0.0}  # over all attempts; kept in checkpoints
        self._board = Board(None, 0)
        self._profiler = StepProfiler(run.folder / "traces" if config.enable_profiling and ctx.is_main else None, ctx.device, logger)
        self._train_names: list[str] = []
        self._samples, self._steps, self._seconds = 0, 0, 0.0  # since the last log point
        self._mark = time.perf_counter()
        self.saved_at, self.saved_step = time.monotonic(), -1

    def start(self, origin: dict[str, Any], decided: dict[str, str], differences: list[str], batch: Any, state: TrainState) -> None:
        """Say what was decided and where the run comes from.

        Args:
            origin: goes to provenance.json.
            differences: what is not as it was in the checkpoint that is resumed from.
            batch: of the training set, as the model gets it; images in it are shown on TensorBoard.
        """
        step, run = state.progress.step, self._run
        run.write_json("config.json", self._config.to_dict())
        run.write_json("provenance.json", origin)
        if run.is_main:
            zip_code(run.folder / "code.zip")
            self._board = Board(run.folder / "tensorboard", step)
        self._board.texts(config=self._config.to_dict(), environment=origin)
        images = batch[0] if isinstance(batch, tuple | list) and len(batch) else None
        if isinstance(images, torch.Tensor) and images.ndim == 4 and origin["mean"]:
            mean, std = (torch.tensor(origin[name]).view(-1, 1, 1) for name in ("mean", "std"))
            self._board.images(images.float().cpu() * std + mean)
        for line in run.notes:
            self._logger.warning("%s", line)
        self._logger.info("%s", banner(decided))
        for line in differences:
            self._warn("changed: %s", line)
        run.status("running", epoch=state.progress.epoch, step=step, samples_seen=state.progress.samples_seen)
        if run.resume_path:
            if run.resume_path.resolve().parent == run.checkpoints.resolve():
                self.saved_step = step
            self.event("resumed", step, checkpoint=str(run.resume_path), world_size=self._world_size, changed=differences)

    # ---- training ----

    def start_clock(self) -> None:
        """What follows is training time, up to `step_done`."""
        self._mark = time.perf_counter()

    def step_done(self, samples: int, step: int) -> None:
        """After each optimizer step, over so many samples of all ranks."""
        now = time.perf_counter()
        self._samples += samples
        self._steps += 1
        self._seconds += now - self._mark
        self.ledger["trained_s"] += now - self._mark
        self._mark = now
        show_progress(self._logger, step, self._total_steps, "step")
        self._profiler.step()

    def record_samples(self, progress: Progress, indices: list[int]) -> None:
        """Write which samples this rank brought to the step just taken."""
        self._run.record_samples(progress.epoch, progress.step, indices)

    def is_due(self, step: int) -> bool:
        return step % self._config.log_interval == 0 or step == self._total_steps

    def share(self, state: TrainState, loader: WindowLoader) -> dict[str, Any]:
        """What this rank brings to a log point; reads from the device."""
        return {
            "totals": state.interval.totals(),
            "seconds": self._seconds,
            "waited": loader.take_seconds_waited(),
            "memory": peak_memory(),
        }

    def log(self, state: TrainState, ranks: list[dict[str, Any]]) -> None:
        """Write the train record of the interval that ends here. ranks: the `share` of each."""
        means = state.interval.means([each["totals"] for each in ranks])
        grad_norm = means.pop("grad_norm")
        seconds, waited = (sum(each[name] for each in ranks) / len(ranks) for name in ("seconds", "waited"))
        self.ledger["waited_s"] += waited
        progress, steps = state.progress, max(1, self._steps)
        means = {"loss": means.pop("loss")} | means
        self._train_names = list(means)
        record = self._run.record(
            "train",
            epoch=progress.epoch,
            step=progress.step,
            **means,
            lr=state.lr,
            grad_norm=grad_norm,
            samples_per_s=self._samples / seconds if seconds else 0.0,
            data_wait_s=waited / steps,
            step_s=seconds / steps,
            peak_memory_bytes=max(each["memory"] for each in ranks),
        )
        state.read_skipped()
        skipped = progress.skipped_steps - progress.skipped_steps_said
        progress.skipped_steps_said = progress.skipped_steps
        if skipped:
            self.event("skipped_step", progress.step, count=skipped)
            self._warn("skipped %d optimizer step(s) with a gradient that is not finite, up to step %d", skipped, progress.step)
        log_training_step(self._logger, record, self._train_names[1:], self._total_steps, self._world_size)
        self._board.scalars(record)
        self._run.status("running", epoch=progress.epoch, step=progress.step, samples_seen=progress.samples_seen)
        self._samples, self._steps, self._seconds = 0, 0, 0.0
        state.interval.reset()

    # ---- checkpoints and evaluation ----

    def event(self, event: str, step: int, **values: Any) -> None:
        self._run.record("event", event=event, step=step, **values)

    def saved(self, path: Path, state: TrainState, seconds: float, is_best: bool) -> None:
        progress = state.progress
        self.event("best" if is_best else "checkpoint", progress.step, epoch=progress.epoch, path=str(path), seconds=round(seconds, 3))
        if not is_best:
            self.saved_at, self.saved_step = time.monotonic(), progress.step
            self._run.status("running", epoch=progress.epoch, step=progress.step, samples_seen=progress.samples_seen, checkpoint=str(path))
            self._logger.info("saved %s in %.2f s", path, seconds)

    def evaluated(self, records: list[dict[str, Any]], seconds: float, is_best: bool) -> None:
        for record in records:
            self._run.record(**record)
            self._board.scalars(record)
        self._board.layout(self._train_names, records)
        log_epoch_summary(self._logger, records, seconds, is_best)

    # ---- the end ----

    def finish(
        self, ending: str, state: TrainState, global_batch_size: int, best_metric: str, test: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Write summary.json and the last status, and say what to type next."""
        progress, ledger = state.progress, self.ledger
        wall = max(1e-9, time.time() - ledger["started_at"])
        rate = progress.samples_seen / ledger["trained_s"] if ledger["trained_s"] else 0.0
        chosen = "ema" if self._config.ema_decay else "model"
        evaluations = [r for r in self._run.records("eval") if r["weights"] == chosen and r not in test]
        if any(r["split"] == "val" for r in evaluations):  # what is left are tests at the end of an earlier, shorter run
            evaluations = [r for r in evaluations if r["split"] == "val"]
        final = evaluations[-1] if evaluations else {}
        best = next((r for r in reversed(evaluations) if r["step"] == progress.best_step), {})
        summary = {
            "state": ending,
            "epochs": progress.epoch,
            "steps": progress.step,
            "skipped_steps": progress.skipped_steps,
            "samples_seen": progress.samples_seen,
            "wall_s": wall,
            "samples_per_s": rate,
            "samples_per_s_per_rank": rate / self._world_size,
            "world_size": self._world_size,
            "global_batch_size": global_batch_size,
            "best_metric": best_metric,
            "best_value": progress.best_value,
            "best_top1": best.get("top1"),
            "best_epoch": progress.best_epoch,
            "final_top1": final.get("top1"),
            "final_loss": final.get("loss"),
            "data_wait_fraction": ledger["waited_s"] / ledger["trained_s"] if ledger["trained_s"] else 0.0,
            "peak_memory_bytes": peak_memory(),
            "restarts": self._run.attempt - 1,
            "goodput": min(1.0, ledger["trained_s"] / wall),
        }
        if test:
            summary["test"] = test
        self._run.write_json("summary.json", summary)
        self._run.status(ending, epoch=progress.epoch, step=progress.step, samples_seen=progress.samples_seen)
        self._profiler.close()
        self._board.close()
        self._logger.info("%s", end_text(summary, self._run, self._config, ledger["trained_s"]))
        return summary


def decisions(
    config: TrainingConfig, ctx: DistributedContext, run: Run, state: TrainState, loader: WindowLoader, held_out: dict[str, Dataset]
) -> dict[str, str]:
    """What the banner says: all that was decided at the start, in numbers."""
    sampler, progress = loader.sampler, state.progress
    per_step, samples = sampler.micro_batches_per_step, len(loader.dataset)
    rounds = math.ceil(per_step / ctx.world_size)
    batch = f"{config.batch_size} a micro-batch x {per_step} micro-batches on {ctx.world_size} ranks = {sampler.global_batch_size} a global batch"
    if per_step % ctx.world_size:
        batch += f" (not dealt evenly: {1 - per_step / (rounds * ctx.world_size):.0%} of the ranks' time is lost)"
    data = f"{type(loader.dataset).__name__}, {samples:,} training samples"
    if sampler.samples_per_epoch < samples:
        data += f" ({samples - sampler.samples_per_epoch} of them, others in each epoch, dropped)"
    data += "".join(f", {len(dataset):,} to evaluate on ({getattr(dataset, 'split', split)})" for split, dataset in held_out.items())
    if list(held_out) == ["val"] and getattr(held_out["val"], "split", "val") == "test":
        data += "; the test set also chooses the best checkpoint, so its best value flatters"
    trained = sum(p.numel() for group in state.optimizer.param_groups for p in group["params"])
    decided = {
        "run": str(run.folder),
        "ranks": f"{ctx.world_size} on {len(set(ctx.hosts))} node(s): {', '.join(sorted(set(ctx.device_names)))}",
        "model": f"{type(state.model).__name__}, {sum(p.numel() for p in state.model.parameters()):,} parameters, {trained:,} of them trained",
        "data": data,
        "workers": f"{loader.num_workers} a rank",
        "batch": batch,
        "steps": f"{state.total_steps:,}, {sampler.steps_per_epoch:,} an epoch",
        "precision": f"{state.precision.name}{', channels_last' if config.channels_last else ''}, {config.optimizer} (fused)",
        "a kill costs": f"at most {kill_cost(config)}",
    }
    if run.resume_path:
        decided["resumed"] = (
            f"{run.resume_path}: epoch {progress.epoch}, step {progress.step}, {progress.samples_in_epoch:,} samples into it"
        )
    decided["invariants"] = verification(config.task)[1]
    if origin_files := changed_files():
        decided["changed"] = f"files of the template: {', '.join(origin_files)}"
    return decided


def kill_cost(config: TrainingConfig) -> str:
    """How much work lies between two checkpoints."""
    minutes, steps, epochs = config.save_every_minutes, config.save_every_steps, config.save_every
    parts = [(minutes, f"{minutes:g} min"), (steps, f"{steps} steps"), (epochs, f"{epochs} epoch(s)")]
    return " or ".join(text for value, text in parts if value) + ", what comes first" if any(value for value, _ in parts) else "everything"


def banner(decided: dict[str, str]) -> str:
    """What was decided at the start, one line each."""
    width = max(map(len, decided))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in decided.items())


def end_text(summary: dict[str, Any], run: Run, config: TrainingConfig, trained_s: float) -> str:
    """The end summary, with the next commands to type. trained_s: seconds in training, of all attempts."""
    folder = run.folder
    skipped = f" ({summary['skipped_steps']} of them skipped, their gradients were not finite)" if summary["skipped_steps"] else ""
    lines = [
        f"{summary['state']}: {summary['epochs']} epochs, {summary['steps']} steps{skipped}, {summary['samples_seen']:,} samples "
        f"in {duration(trained_s)} of training, {summary['samples_per_s']:,.0f} samples/s",
    ]
    average = " --ema" if config.ema_decay else ""  # the weights that the best checkpoint was chosen by
    if summary["best_value"] is not None:
        whose = " (averaged weights)" if average else ""
        lines.append(f"best {summary['best_metric']} {summary['best_value']:.4f}{whose} in epoch {summary['best_epoch']}")
    if summary["state"] == "preempted":
        change = "with --resume_from auto" + (" in place of --overwrite" if config.overwrite else "")
        return "\n".join([*lines, f"to go on: the same command {change}"])
    best = run.checkpoints / "best.pt"
    source = best if best.exists() else next(iter(sorted(run.checkpoints.glob("step_*.pt"), reverse=True)), best)
    return "\n".join(
        [
            *lines,
            "next:",
            f"  tensorboard --logdir {folder}",
            f"  python scripts/runs.py {folder.parent} --plot {folder}/curves.svg",
            f"  python scripts/export.py {source} {folder}/model.pt{average}",
        ]
    )


def peak_memory() -> int:
    """Bytes: of the GPU's allocator, else of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
