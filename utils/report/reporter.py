"""Reports a run on the terminal, in files and on TensorBoard: a record per interval, evaluations, the summary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from config import TrainingConfig, TrainingError
from utils.checkpoint.format import step_checkpoints
from utils.clock import slowest
from utils.data.loader import GlobalBatchLoader, usable_cpus
from utils.distributed.collectives import broadcast_json, gather, lowest_rank
from utils.logger import count, duration, has_terminal, log_epoch_summary, log_training_step, show, show_progress
from utils.memory import peak_memory
from utils.metrics import RESERVED
from utils.redact import stored
from utils.report.banner import decisions
from utils.report.goodput import accounts_of, attempts_of
from utils.report.profiler import StepProfiler
from utils.report.tensorboard import Board
from utils.rng import seed_evaluation, set_apart
from utils.run.attempt import Attempt
from utils.run.folder import Run
from utils.run.provenance import zip_code
from utils.training.fingerprint import fingerprint, shown
from utils.training.interval import EMPTY, Read, is_empty
from utils.training.state import TrainState

STRAGGLES = 1.5  # times the median
LEAST_EXCESS = 0.25  # seconds over the median in an interval; less is noise
MIN_SECONDS_FOR_GOODPUT = 60  # in a shorter run, start-up dominates
READ_AFTER = 4  # steps after a log point, on all ranks, its values are read
NOT_FINITE = "a non-finite loss or gradient"
LogImages = Callable[[nn.Module, Any], dict[str, Tensor]]
MAX_DATA_WAIT = 0.2  # fraction of an interval above which a warning suggests flags


@dataclass(frozen=True)
class LogPoint:
    """The end of an interval, whose values are on their way to the host."""

    read: Read
    take_seconds: Callable[[], tuple[float, float, float]]  # of this rank, from `Clock.take`
    at: dict[str, int]  # epoch and step
    samples: int  # in the interval, of all ranks
    steps: int
    lrs: dict[str, Any]
    peak_memory: int


class Reporter:
    """Called on all ranks; the logger, the run and the board decide what only rank 0 shows or writes.

    Args:
        loader: of the training set.
        origin: content of provenance.json.
        log_images: from model.py.
    """

    def __init__(
        self,
        attempt: Attempt,
        state: TrainState,
        loader: GlobalBatchLoader,
        origin: dict[str, Any],
        log_images: LogImages | None = None,
    ) -> None:
        run, config, ctx, logger = attempt.run, attempt.config, attempt.ctx, attempt.logger
        self._log_images = log_images if run.is_main or config.sharding != "none" else None
        self._attempt, self._run, self._config, self._ctx, self._logger = attempt, run, config, ctx, logger
        self._state, self._loader, self._sampler = state, loader, loader.sampler
        self._clock = attempt.clock
        self._total_steps, self._origin = state.schedule.total_steps, origin
        self._board = Board(run.folder / "tensorboard" if ctx.is_main else None, state.progress.step)
        folder = run.folder / "traces" if config.enable_profiling and ctx.is_main else None
        self._profiler = StepProfiler(folder, ctx.device, logger)
        self._samples, self._steps = 0, 0  # since the last log point
        self._unwritten: LogPoint | None = None
        self._log_points = 0
        self._has_terminal = has_terminal(logger)
        self._latest: dict[str, Any] = {}  # train record, for the progress bar

    def start(self, held_out: dict[str, GlobalBatchLoader], differences: list[str]) -> None:
        """Report the resolved settings and the provenance of the run.

        Args:
            held_out: by split.
            differences: what has changed since the checkpoint that the run resumes from.
        """
        run, origin, progress = self._run, self._origin, self._state.progress
        run.write_json("config.json", stored(self._config))
        run.write_json("provenance.json", origin)
        if run.is_main:
            zip_code(run.folder / "code.zip")
        self._board.texts(config=stored(self._config), environment=origin)
        for line in run.notes:
            self._logger.warning("%s", line)
        decided = decisions(self._attempt, self._state, self._loader, held_out, origin)
        width = max(map(len, decided))
        self._logger.info("%s", "\n".join(f"  {name:<{width}}  {value}" for name, value in decided.items()))
        for line in differences:
            run.warn("changed: %s", line)
        if warning := self._state.schedule.warning:
            run.warn("%s", warning)
        where = {"epoch": progress.epoch_number, "step": progress.step, "samples_seen": progress.samples_seen}
        source = {"checkpoint": str(run.resume_path), "changed": differences} if run.resume_path else {}
        run.mark_beginning(self._attempt.began, where, world_size=self._ctx.world_size, **source)

    # ---- training ----

    def step_done(self, samples: int, indices: list[int]) -> None:
        """Call after each optimizer step. samples: their number on all ranks. indices: of those of this rank."""
        progress = self._state.progress
        step = progress.step
        if self._config.record_samples:
            self._run.record_samples(progress.epoch_number, step, indices)
        self._run.progress(epoch=progress.epoch_number, step=step, samples_seen=progress.samples_seen)
        self._samples += samples
        self._steps += 1
        if self._unwritten and step - self._unwritten.at["step"] >= READ_AFTER:
            self.catch_up()
        if self._has_terminal:
            more = ""
            if latest := self._latest:
                left = duration(latest["step_s"] * (self._total_steps - step))
                more = f" | loss {show(latest['loss'])} | {latest['samples_per_s']:,.0f} samples/s | {left} left"
            show_progress(self._logger, step, self._total_steps, "step", more)
        self._profiler.step()

    @property
    def is_due(self) -> bool:
        """Whether the step just made ends an interval."""
        step = self._state.progress.step
        return step % self._config.log_interval == 0 or step == self._total_steps

    def log(self) -> None:
        """Begin the train record of the interval that ends here. Its values are read a few steps later, when the device
        has reached this step and has work for the meantime."""
        self.catch_up()
        state, progress = self._state, self._state.progress
        self._unwritten = LogPoint(
            read=state.begin_read(fingerprint(state)),
            take_seconds=self._clock.take(),
            at={"epoch": progress.epoch_number, "step": progress.step},
            samples=self._samples,
            steps=max(1, self._steps),
            lrs=_learning_rates(self._config.lr * state.factor, state.lrs),
            peak_memory=peak_memory(),
        )
        self._samples, self._steps = 0, 0
        state.interval.reset()

    def catch_up(self) -> None:
        """Write the train record that `log` has begun, if there is one. A collective: call it on all ranks at the same
        step, and before each save, evaluation and end of training.

        Raises:
            TrainingError: when too many steps in a row were skipped.
        """
        point, self._unwritten = self._unwritten, None
        if point is None:
            return
        step = point.at["step"]
        sums, skipped, [digest] = self._state.finish_read(point.read)
        row = torch.tensor([*point.take_seconds(), point.peak_memory], dtype=torch.float64)
        ranks = gather(row, self._ctx)  # on rank 0
        seconds, waited = (sum(each[k] for each in ranks) / len(ranks) for k in (0, 1))
        means, count = sums.means(), sums.count_of("loss")
        grad_norm, _ = means.pop("grad_norm"), means.pop("skipped_steps")
        skips = int(sums.sum_of("skipped_steps"))
        means = {"loss": means.pop("loss")} | means
        record = self._latest = self._run.record(
            "train",
            **point.at,
            **means,
            **({"skipped_steps": skips} if skips else {}),
            **point.lrs,
            grad_norm=grad_norm,
            samples_per_s=point.samples / seconds if seconds else 0.0,
            data_wait_s=waited / point.steps,
            step_s=seconds / point.steps,
            peak_memory_bytes=int(max(memory for *_, memory in ranks)),
            fingerprint=shown(int(digest)),
        )
        self._run.record_skipped(skipped, self._sampler)
        if len(ranks) > 1:
            self._report_slowest(step, [{"data": data, "compute": own} for _, data, own, _ in ranks])
        per_s = targets_in(count, point.samples) / seconds if seconds else 0.0
        if record["loss"] is None and is_empty(skipped):
            record = record | {"loss": "without targets"}
        names = [name for name in means if name != "loss"]
        log_training_step(self._logger, record, names, self._total_steps, self._ctx.world_size, per_s)
        self._log_points += 1
        if self._log_points == 2:  # the first interval includes the start of the workers
            self._advise(waited / seconds if seconds else 0.0)
        self._board.scalars(record)
        self._check_skips(step, "no targets" if is_empty(skipped) else NOT_FINITE)

    def before_save(self) -> None:
        """Write the records of all steps so far, and count those that were skipped, as a checkpoint holds them."""
        self.catch_up()
        self._run.record_skipped(self._state.read_skips(), self._sampler)

    def _check_skips(self, step: int, why: str) -> None:
        if 0 < self._config.max_skipped_steps <= (in_row := self._state.progress.skipped_in_row):
            if lowest_rank(self._loader.failure is not None, self._ctx) is not None:
                return  # a rank could not fetch its samples, which ends the run
            raise TrainingError(
                f"the last {in_row} optimizer steps, up to step {step}, had {why}; look at their samples (skipped_step"
                " in metrics.jsonl), use a lower --lr or --clip_grad_norm 1, then --resume_from auto"
            )

    def _advise(self, data_wait: float) -> None:
        dataset, workers = self._loader.dataset, self._loader.num_workers
        if data_wait > MAX_DATA_WAIT and not getattr(dataset, "in_memory", False):
            cpus = usable_cpus() // self._ctx.local_world_size
            cache = " or --cache ram" if getattr(dataset, "cacheable", False) else ""
            text = "data loading takes %.0f%% of the time: try more --num_workers (now %d per rank, with %d CPUs)%s"
            self._run.warn(text, 100 * data_wait, workers, cpus, cache)

    def _report_slowest(self, step: int, ranks: list[dict[str, float]]) -> None:
        rank, ratio, cause = slowest(ranks)
        host = self._ctx.hosts[rank]
        own = ranks[rank]["data"] + ranks[rank]["compute"]
        if ratio >= STRAGGLES and own * (1 - 1 / ratio) > LEAST_EXCESS:
            self._run.event("straggler", step, rank=rank, host=host, times=round(ratio, 2), cause=cause)
            text = "rank %d on %s is %.1f times slower than the median rank because of its %s"
            self._run.warn(text, rank, host, ratio, cause)

    # ---- evaluation and the end ----

    def show_images(self, split: str, loader: GlobalBatchLoader) -> None:
        """Show model.log_images of the first batch of a set on TensorBoard: on rank 0, which needs all if sharded."""
        if self._log_images:
            self._clock.enter("evaluation")
            self._clock.call("log_images")
            self._show_images(self._log_images, split, loader)
            self._clock.enter("evaluation")
        broadcast_json(None, self._ctx)  # the other ranks wait here, where `timeout` does not apply

    def _show_images(self, log_images: LogImages, split: str, loader: GlobalBatchLoader) -> None:
        model, device = cast(Any, self._state.model), self._ctx.device
        try:
            with torch.no_grad(), self._state.precision.autocast(), set_apart(device):
                batch = loader.sample_batch()
                seed_evaluation(device, self._config.seed, "log_images", split, [0])
                images = log_images(model.eval(), batch)
            if self._run.is_main:
                self._board.images(split, images, self._state.progress.step)
        except torch.AcceleratorError:  # the device computes nothing after it
            raise
        except Exception as error:  # images must not end a run
            # parameters that the pass has gathered are sharded again: they may be those of the average
            getattr(model, "reset_iter_state", model.state_dict)()
            self._log_images = None
            self._run.warn("log_images: %s: %s; no more images are shown in this attempt", type(error).__name__, error)

    def evaluated(self, records: list[dict[str, Any]], seconds: float, is_best: bool, title: str = "") -> None:
        for record in records:
            self._run.record(**record)
            self._board.scalars(record)
        self._run.event("evaluation", records[0]["step"], split=records[0]["split"], seconds=round(seconds, 3))
        log_epoch_summary(self._logger, records, seconds, is_best, title)
        if odd := [record for record in records if not math.isfinite(record["loss"])]:
            text = "evaluation of %s: the loss is %s; if it has no labels, use --split predict of scripts/predict.py"
            self._run.warn(text, odd[0]["split"], odd[0]["loss"])
            self._run.event("non_finite_evaluation", odd[0]["step"], split=odd[0]["split"])

    def finish(self, ending: str, best_metric: str, test: list[dict[str, Any]]) -> dict[str, Any]:
        """Write summary.json and the last status, and show the next commands."""
        progress, records = self._state.progress, self._run.records()
        attempts = attempts_of(records, self._run.now(), progress.step)
        accounts = accounts_of(attempts)
        wall = max(1e-9, sum(accounts.values()))
        trained = accounts["training"] + accounts["data_wait"]  # counts each step once
        # the run may have begun with the checkpoint of another one
        samples = progress.samples_seen - min((each.first["samples_seen"] for each in attempts), default=0)
        rate = samples / trained if trained else 0.0
        chosen = "ema" if self._config.ema_decay else "model"
        evaluations = [r for r in records if r["kind"] == "eval" and r["weights"] == chosen and r not in test]
        if any(r["split"] == "val" for r in evaluations):  # the others are tests at the end of an earlier, shorter run
            evaluations = [r for r in evaluations if r["split"] == "val"]
        final = evaluations[-1] if evaluations else {}
        best: dict[str, Any] = next((r for r in reversed(evaluations) if r["step"] == progress.best_step), {})
        summary = {
            "state": ending,
            "epochs": progress.epoch,
            "steps": progress.step,
            "skipped_steps": progress.skipped_steps,
            "samples_seen": progress.samples_seen,
            "wall_s": wall,
            "samples_per_s": rate,
            "samples_per_s_per_rank": rate / self._ctx.world_size,
            "world_size": self._ctx.world_size,
            "global_batch_size": self._sampler.global_batch_size,
            "best_metric": best_metric,
            "best_value": progress.best_value,
            "best_epoch": progress.best_epoch,
            "best": _metrics_of(best),
            "final": _metrics_of(final),
            "data_wait_fraction": accounts["data_wait"] / trained if trained else 0.0,
            "peak_memory_bytes": peak_memory(),
            "restarts": self._run.start.attempt - 1,
            "goodput": accounts["training"] / wall,
            "overflow_steps": progress.overflow_steps,
            "time": {f"{name}_s": round(seconds, 3) for name, seconds in accounts.items()},
        }
        if test:
            summary["test"] = test
        empty_steps = sum(each.get("reason") == EMPTY for each in records)
        if warnings := self._warnings(summary, evaluations, empty_steps):
            summary["warnings"] = warnings
        for line in warnings:
            self._run.warn("%s", line)
        self._run.write_json("summary.json", summary)
        self._run.status(ending, epoch=progress.epoch_number, step=progress.step, samples_seen=progress.samples_seen)
        self._profiler.close()
        self._board.close()
        self._logger.info("%s", end_text(summary, self._run, self._config, trained, empty_steps))
        return summary

    def _warnings(self, summary: dict[str, Any], evaluations: list[dict[str, Any]], empty_steps: int) -> list[str]:
        """What the run has not done although it ends without an error."""
        never = ", ".join(name for name in summary["final"] if all(each.get(name) is None for each in evaluations))
        is_empty, has_no_best = 0 < summary["steps"] == empty_steps, evaluations and summary["best_value"] is None
        found = [
            self._state.schedule.warning,
            "training: all steps were without targets, so nothing was learned; label the samples" * is_empty,
            f"evaluation: {never}: never finite" * bool(never),
            f"best_metric={summary['best_metric']}: was never finite, so there is no best.pt" * bool(has_no_best),
        ]
        return [each for each in found if each]


def targets_in(count: Tensor, samples: int) -> float:
    """The loss count of an interval; 0 if it says no more than the samples, is a sum of weights, or is one per term."""
    counted = 0.0 if count.ndim else float(count)
    return counted if counted != samples and counted.is_integer() else 0.0


def _learning_rates(lr: float, groups: list[float]) -> dict[str, Any]:
    """The learning rate of the schedule, and those of the parameter groups if they differ."""
    return {"lr": lr} | ({"lr_of_groups": groups} if any(each != lr for each in groups) else {})


def _metrics_of(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in RESERVED}


def end_text(summary: dict[str, Any], run: Run, config: TrainingConfig, trained_s: float, empty_steps: int = 0) -> str:
    """The end summary, with the next commands.

    Args:
        trained_s: seconds in training, of all attempts.
        empty_steps: of the skipped ones, those without targets.
    """
    why = "without targets" if summary["skipped_steps"] == empty_steps else "non-finite loss or gradient"
    skipped = f" ({summary['skipped_steps']} skipped: {why})" if summary["skipped_steps"] else ""
    times = {name.removesuffix("_s").replace("_", " "): seconds for name, seconds in summary["time"].items()}
    idle = times.pop("down")  # between attempts
    shown = ", ".join(f"{name} {duration(seconds)}" for name, seconds in times.items() if seconds >= 0.5)
    total = sum(times.values())
    goodput = f", goodput {times['training'] / total:.0%}" if total >= MIN_SECONDS_FOR_GOODPUT else ""
    restarts = f", {count(summary['restarts'], 'restart')}" if summary["restarts"] else ""
    restarts += f", {duration(idle)} between attempts" if idle >= 0.5 else ""
    lines = [
        f"{summary['state']}: {count(summary['epochs'], 'epoch')}, {count(summary['steps'], 'step')}{skipped},"
        f" {summary['samples_seen']:,} samples in {duration(trained_s)} of training,"
        f" {summary['samples_per_s']:,.0f} samples/s, peak memory {summary['peak_memory_bytes'] / 2**30:.2f} GiB",
        f"time: {duration(total)} ({shown}){goodput}{restarts}",
    ]
    if summary["best_value"] is not None:
        whose = " (averaged weights)" if config.ema_decay else ""
        what = f"{summary['best_metric']} {summary['best_value']:.4f}{whose}"
        lines.append(f"best: {what} in epoch {summary['best_epoch']}")
    if summary["state"] == "preempted":
        change = "with --resume_from auto" + (" instead of --overwrite" if config.overwrite else "")
        return "\n".join([*lines, f"to continue: the same command {change}"])
    best = run.checkpoints / "best.pt"
    source = best if best.exists() else [best, *step_checkpoints(run.checkpoints)][-1]
    average = " --ema" if config.ema_decay else ""  # the weights that selected the best checkpoint
    return "\n".join(
        [
            *lines,
            "next:",
            f"  tensorboard --logdir {run.folder}",
            f"  python scripts/runs.py {run.folder} --plot {run.folder}/curves.svg",
            *[f"  python train.py --config {run.folder}/config.json --eval_only"] * bool(summary["final"]),
            f"  python scripts/export.py {source} {run.folder}/model.pt{average}",
        ]
    )
