"""What a run says of itself: the banner, a record each interval, the summary; on the terminal, in the records, on
TensorBoard."""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from config import TrainingConfig, TrainingError
from utils.checkpoint.format import BEST
from utils.checkpoint.writer import Outcome
from utils.clock import STEP_PHASES, Clock, slowest
from utils.data.loader import GlobalBatchLoader
from utils.data.sampler import GlobalBatchSampler
from utils.distributed.context import DistributedContext
from utils.logger import duration, has_terminal, log_epoch_summary, log_training_step, show_progress
from utils.report.feeding import advice, feeding
from utils.report.goodput import ACCOUNTS, Ledger, goodput
from utils.report.profiler import DeviceClock, StepProfiler
from utils.report.tensorboard import Board
from utils.run.folder import Run
from utils.run.provenance import changed_files, verification, zip_code
from utils.training.state import Progress, SkippedStep, TrainState

STRAGGLES = 1.5  # times the median
LEAST_EXCESS = 0.25  # seconds over the median in an interval: below that it is noise


class Reporter:
    """Called on all ranks alike; what rank 0 alone shows or writes is sorted out by the logger, the run and the
    board."""

    def __init__(
        self,
        run: Run,
        config: TrainingConfig,
        ctx: DistributedContext,
        logger: logging.Logger,
        total_steps: int,
        sampler: GlobalBatchSampler,
        clock: Clock,
        ledger: Ledger,
    ) -> None:
        self._run, self._config, self._logger, self._hosts = run, config, logger, ctx.hosts
        self.warn = logger.warning if run.is_main else logger.info  # of what all ranks know: on the terminal once
        self._total_steps, self._world_size = total_steps, ctx.world_size
        self._sampler, self._clock, self._ledger = sampler, clock, ledger
        self._board = Board(None, 0)
        self._profiler = StepProfiler(
            run.folder / "traces" if config.enable_profiling and ctx.is_main else None, ctx.device, logger
        )
        self._train_names: list[str] = []
        self._samples, self._steps = 0, 0  # since the last log point
        self._spent = dict(clock.seconds)  # up to the last log point
        self._device_clock = DeviceClock() if ctx.device.type == "cuda" else None
        clock.on_enter = self._device_clock.mark if self._device_clock else None
        self._has_terminal = has_terminal(logger)
        self._has_advised = False

    def start(
        self, origin: dict[str, Any], decided: dict[str, str], differences: list[str], batch: Any, state: TrainState
    ) -> None:
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
            self.warn("changed: %s", line)
        run.status("running", epoch=state.progress.epoch, step=step, samples_seen=state.progress.samples_seen)
        if run.resume_path:
            self.event(
                "resumed", step, checkpoint=str(run.resume_path), world_size=self._world_size, changed=differences
            )

    # ---- training ----

    def step_done(self, samples: int, step: int) -> None:
        """After each optimizer step, over so many samples of all ranks."""
        self._samples += samples
        self._steps += 1
        if self._has_terminal:
            show_progress(self._logger, step, self._total_steps, "step")
        self._profiler.step()

    def record_samples(self, progress: Progress, indices: list[int]) -> None:
        """Write which samples this rank brought to the step just taken."""
        self._run.record_samples(progress.epoch, progress.step, indices)

    def is_due(self, step: int) -> bool:
        return step % self._config.log_interval == 0 or step == self._total_steps

    def share(self, state: TrainState, loader: GlobalBatchLoader) -> dict[str, Any]:
        """What this rank brings to a log point; reads from the device."""
        began = time.perf_counter()
        skips = state.read_skips()  # before `interval`, to which it adds
        totals = state.interval.totals()
        synced = time.perf_counter() - began
        spent = self._clock.spent()[0]
        seconds = {phase: spent[phase] - self._spent[phase] for phase in STEP_PHASES}
        self._spent = spent
        own = {
            "data": seconds["data"],
            "compute": self._device_clock.take() if self._device_clock else seconds["forward"],
        }
        return {
            "totals": totals,
            "seconds": seconds,
            "own": own,
            "memory": peak_memory(),
            "skips": skips,
            "feeding": (
                None if self._has_advised else feeding(loader, self._config.cache, seconds, own["compute"], synced)
            ),
        }

    def log(self, state: TrainState, ranks: list[dict[str, Any]]) -> None:
        """Write the train record of the interval that ends here. ranks: the `share` of each.

        Raises:
            TrainingError: when too many steps in a row were skipped.
        """
        means = state.interval.means([each["totals"] for each in ranks])
        grad_norm = means.pop("grad_norm")
        seconds = sum(sum(each["seconds"].values()) for each in ranks) / len(ranks)
        waited = sum(each["seconds"]["data"] for each in ranks) / len(ranks)
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
        self.skipped(state.note_skips([each["skips"] for each in ranks]))
        if len(ranks) > 1:
            self._say_slowest(progress.step, [each["own"] for each in ranks])
        log_training_step(self._logger, record, self._train_names[1:], self._total_steps, self._world_size)
        if not self._has_advised and (text := advice(self._samples, [each["feeding"] for each in ranks])):
            self.warn("%s", text)
        self._has_advised = True
        self._board.scalars(record)
        self._run.progress(epoch=progress.epoch, step=progress.step, samples_seen=progress.samples_seen)
        self._samples, self._steps = 0, 0
        state.interval.reset()
        if 0 < self._config.max_skipped_steps <= progress.skipped_in_row:
            raise TrainingError(
                f"the last {progress.skipped_in_row} optimizer steps, up to step {progress.step}, had a loss or a"
                " gradient that is not finite; look at their samples (skipped_step in metrics.jsonl), lower --lr or"
                " give --clip_grad_norm 1, then --resume_from auto"
            )

    def skipped(self, skipped: list[SkippedStep]) -> None:
        """Record optimizer steps that were not taken, with the samples of their global batches."""
        for each in skipped:
            indices = self._sampler.order(each.epoch)[each.first : each.first + each.samples].tolist()
            self.event("skipped_step", each.step, epoch=each.epoch, indices=indices)
        if skipped:
            steps = ", ".join(str(each.step) for each in skipped[:5]) + (", ..." if len(skipped) > 5 else "")
            self.warn("skipped %d optimizer step(s) whose loss or gradient is not finite: %s", len(skipped), steps)

    def _say_slowest(self, step: int, shares: list[dict[str, float]]) -> None:
        rank, ratio, cause = slowest(shares)
        self._logger.debug(
            "slowest: rank %d on %s, %.2f times the median, by its %s", rank, self._hosts[rank], ratio, cause
        )
        own = shares[rank]["data"] + shares[rank]["compute"]
        if ratio >= STRAGGLES and own * (1 - 1 / ratio) > LEAST_EXCESS:
            self.event("straggler", step, rank=rank, host=self._hosts[rank], times=round(ratio, 2), cause=cause)
            self.warn(
                "rank %d on %s is %.1f times slower than the median of all ranks, by its %s",
                rank,
                self._hosts[rank],
                ratio,
                cause,
            )

    # ---- checkpoints and evaluation ----

    def event(self, event: str, step: int, **values: Any) -> None:
        self._run.record("event", event=event, step=step, **values)

    def saved(self, outcome: Outcome, stood_still_s: float) -> None:
        """A checkpoint is on the disk."""
        path, step = outcome.path, outcome.step
        if path.name == BEST:
            return
        times = {"seconds": round(outcome.seconds, 3), "stood_still_s": round(stood_still_s, 5)}
        self.event("checkpoint", step, epoch=outcome.epoch, path=str(path), **times)
        self._run.status("running", checkpoint=str(path))
        self._logger.info(
            "saved %s in %.2f s; training stood still for %.1f ms", path, outcome.seconds, 1000 * stood_still_s
        )

    def best(self, progress: Progress) -> None:
        """best.pt is this state."""
        self.event("best", progress.step, epoch=progress.epoch, path=str(self._run.checkpoints / BEST))

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
        progress, ledger = state.progress, self._ledger.now()
        wall = max(1e-9, ledger["until"] - ledger["started_at"])
        trained = ledger["training"] + ledger["data_wait"]  # each step once
        rate = progress.samples_seen / trained if trained else 0.0
        chosen = "ema" if self._config.ema_decay else "model"
        evaluations = [r for r in self._run.records("eval") if r["weights"] == chosen and r not in test]
        # what is left are tests at the end of an earlier, shorter run
        if any(r["split"] == "val" for r in evaluations):
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
            "data_wait_fraction": ledger["data_wait"] / trained if trained else 0.0,
            "peak_memory_bytes": peak_memory(),
            "restarts": self._run.attempt - 1,
            "goodput": goodput(ledger),
            "overflow_steps": progress.overflow_steps,
            "ledger": {f"{name}_s": round(ledger[name], 3) for name in ACCOUNTS},
        }
        if test:
            summary["test"] = test
        self._run.write_json("summary.json", summary)
        self._run.status(ending, epoch=progress.epoch, step=progress.step, samples_seen=progress.samples_seen)
        self._profiler.close()
        self._board.close()
        self._logger.info("%s", end_text(summary, self._run, self._config, trained))
        return summary


def decisions(
    config: TrainingConfig,
    ctx: DistributedContext,
    run: Run,
    model: DistributedDataParallel,
    state: TrainState,
    loader: GlobalBatchLoader,
    held_out: dict[str, Dataset],
) -> dict[str, str]:
    """What the banner says: all that was decided at the start, in numbers."""
    sampler, progress = loader.sampler, state.progress
    per_step, samples = sampler.micro_batches_per_step, len(loader.dataset)
    rounds = math.ceil(per_step / ctx.world_size)
    batch = (
        f"{config.batch_size} a micro-batch x {per_step} micro-batches on {ctx.world_size} ranks ="
        f" {sampler.global_batch_size} a global batch"
    )
    if per_step % ctx.world_size:
        batch += f" (not dealt evenly: {1 - per_step / (rounds * ctx.world_size):.0%} of the ranks' time is lost)"
    data = f"{type(getattr(loader.dataset, 'source', loader.dataset)).__name__}, {samples:,} training samples"
    if sampler.samples_per_epoch < samples:
        data += f" ({samples - sampler.samples_per_epoch} of them, others in each epoch, dropped)"
    data += "".join(
        f", {len(dataset):,} to evaluate on ({getattr(dataset, 'split', split)})" for split, dataset in held_out.items()
    )
    if list(held_out) == ["val"] and getattr(held_out["val"], "split", "val") == "test":
        data += "; the test set also chooses the best checkpoint, so its best value flatters"
    trained = sum(p.numel() for group in state.optimizer.param_groups for p in group["params"])
    decided = {
        "run": str(run.folder),
        "ranks": f"{ctx.world_size} on {len(set(ctx.hosts))} node(s): {', '.join(sorted(set(ctx.device_names)))}",
        "model": (
            f"{type(state.model).__name__}, {sum(p.numel() for p in state.model.parameters()):,} parameters,"
            f" {trained:,} of them trained"
            + (", activations of its blocks computed again" if config.activation_checkpointing else "")
            + (f", compiled ({config.compile})" if config.compile != "off" else "")
        ),
        "data": data,
        "workers": f"{loader.num_workers} a rank",
        "batch": batch,
        "steps": f"{state.total_steps:,}, {sampler.steps_per_epoch:,} an epoch",
        "precision": (
            f"{state.precision.title}{', channels_last' if config.channels_last else ''}, {config.optimizer} (fused)"
        ),
        "gradients": communication(model, config, ctx.world_size),
        "a kill costs": kill_cost(config),
    }
    if run.resume_path:
        decided["resumed"] = (
            f"{run.resume_path}: epoch {progress.epoch}, step {progress.step}, {progress.samples_in_epoch:,} samples"
            " into it"
        )
    decided["invariants"] = verification(config.task)[1]
    if origin_files := changed_files():
        decided["changed"] = f"files of the template: {', '.join(origin_files)}"
    return decided


def communication(model: DistributedDataParallel, config: TrainingConfig, world_size: int) -> str:
    """What an optimizer step sends, after the passes in which DDP laid out its buckets."""
    if world_size == 1:
        return "not sent: there is one rank"
    # as DDP itself asks, for Join
    buckets = [bucket.buffer().nbytes for bucket in model.reducer._get_zeros_like_grad_buckets()]
    hook = "" if config.comm_hook == "none" else f", rounded to {config.comm_hook} on the way"
    return f"{sum(buckets) / 2**20:.2f} MB in {len(buckets)} bucket(s) of up to {max(buckets) / 2**20:.2f} MB{hook}"


def kill_cost(config: TrainingConfig) -> str:
    """How much work lies between two checkpoints that are on the disk."""
    minutes, steps, epochs = config.save_every_minutes, config.save_every_steps, config.save_every
    parts = [(minutes, f"{minutes:g} min"), (steps, f"{steps} steps"), (epochs, f"{epochs} epoch(s)")]
    first = " or ".join(text for value, text in parts if value)
    if not first:
        return "everything: no save is asked for but the last"
    return (
        f"at most the work of {first}, what comes first, and of the time that it takes to write one; a request to stop"
        " costs nothing"
    )


def banner(decided: dict[str, str]) -> str:
    """What was decided at the start, one line each."""
    width = max(map(len, decided))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in decided.items())


def end_text(summary: dict[str, Any], run: Run, config: TrainingConfig, trained_s: float) -> str:
    """The end summary, with the next commands to type. trained_s: seconds in training, of all attempts."""
    folder = run.folder
    skipped = (
        f" ({summary['skipped_steps']} of them skipped, their loss or gradient was not finite)"
        if summary["skipped_steps"]
        else ""
    )
    lines = [
        (
            f"{summary['state']}: {summary['epochs']} epochs, {summary['steps']} steps{skipped},"
            f" {summary['samples_seen']:,} samples in {duration(trained_s)} of training,"
            f" {summary['samples_per_s']:,.0f} samples/s"
        ),
    ]
    lines.append(time_text(summary))
    average = " --ema" if config.ema_decay else ""  # the weights that the best checkpoint was chosen by
    if summary["best_value"] is not None:
        whose = " (averaged weights)" if average else ""
        lines.append(
            f"best {summary['best_metric']} {summary['best_value']:.4f}{whose} in epoch {summary['best_epoch']}"
        )
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


def time_text(summary: dict[str, Any]) -> str:
    """Where the time went, over all restarts."""
    shown = [
        f"{name.removesuffix('_s').replace('_', ' ')} {duration(seconds)}"
        for name, seconds in summary["ledger"].items()
        if seconds >= 0.5
    ]
    restarts = f", {summary['restarts']} restart(s)" if summary["restarts"] else ""
    return (
        f"time: {duration(summary['wall_s'])} in all ({', '.join(shown)}), goodput {summary['goodput']:.0%}{restarts}"
    )


def peak_memory() -> int:
    """Bytes: of the GPU's allocator, else of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
