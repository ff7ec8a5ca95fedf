"""Tells what a run does to its records, the terminal and TensorBoard: steps, log windows, evaluations and the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from utils.data.loader import GlobalBatchLoader
from utils.distributed.collectives import broadcast_json, gather_rows
from utils.logger import log_epoch_summary
from utils.memory import read_peak_memory
from utils.redact import redact_config
from utils.report.records import LogPoint
from utils.report.stragglers import report_straggler
from utils.report.summary import count_empty_steps, create_summary, describe_run_end
from utils.report.tensorboard import TensorBoardWriter
from utils.report.terminal import Terminal
from utils.rng import preserve_rng_state, seed_evaluation
from utils.run.provenance import write_code_zip
from utils.run.start import Attempt
from utils.settings.errors import TrainingError
from utils.training.fingerprint import fingerprint_parameters, fingerprint_state, format_fingerprint
from utils.training.log_window import are_all_steps_empty
from utils.training.state import TrainState

STEPS_BEFORE_READ = 4  # all ranks read the values of a log point so many steps later
LogImages = Callable[[nn.Module, Any], dict[str, Tensor]]


class Reporter:
    """Reports what a run does. All ranks call the methods.

    The logger, the run folder and the TensorBoard writer decide what only rank 0 shows or writes.

    Args:
        loader: of the training set.
        provenance: content of provenance.json.
        log_images: from model.py.
    """

    def __init__(
        self,
        attempt: Attempt,
        state: TrainState,
        loader: GlobalBatchLoader,
        provenance: dict[str, Any],
        log_images: LogImages | None = None,
    ) -> None:
        run = attempt.run
        self._attempt = attempt
        self._run = run
        self._config = attempt.config
        self._ctx = attempt.ctx
        self._state = state
        self._loader = loader
        self._provenance = provenance
        self._log_images: LogImages | None = None
        if run.is_main or not state.strategy.has_whole_gradients:  # a model in shards computes on all ranks
            self._log_images = log_images
        tensorboard_folder = run.folder / "tensorboard" if run.is_main else None
        self._tensorboard = TensorBoardWriter(tensorboard_folder, state.progress.step)
        self._terminal = Terminal(attempt, state, loader)
        # since the last log point
        self._interval_samples = 0
        self._interval_steps = 0
        self._pending_log_point: LogPoint | None = None

    def start(self, held_out_loaders: dict[str, GlobalBatchLoader], differences: list[str]) -> None:
        """Report the resolved settings and the provenance of the run.

        Args:
            held_out_loaders: by split.
            differences: what has changed since the checkpoint that the run resumes from.
        """
        run = self._run
        provenance = self._provenance
        progress = self._state.progress
        run.write_json("config.json", redact_config(self._config))
        run.write_json("provenance.json", provenance)
        if run.is_main:
            write_code_zip(run.folder / "code.zip")
        self._tensorboard.write_texts(config=redact_config(self._config), environment=provenance)
        for line in run.notes:
            self._attempt.logger.warning("%s", line)
        self._terminal.show_start(held_out_loaders, provenance)

        for line in differences:
            run.warn("changed: %s", line)
        for line in self._state.schedule.warnings:
            run.warn("%s", line)

        position = {"epoch": progress.epoch_number, "step": progress.step, "samples_seen": progress.samples_seen}
        source: dict[str, Any] = {}
        if run.resume_path:
            source["checkpoint"] = str(run.resume_path)
            source["changed"] = differences
        else:
            # do runs with other seeds start elsewhere?
            source["weights"] = format_fingerprint(fingerprint_parameters(self._state.model))
        run.record_start(self._attempt.started_at, position, world_size=self._ctx.world_size, **source)

    # ---- training ----

    def record_step(self, samples: int, indices: list[int]) -> None:
        """Record an optimizer step. Call this after each one.

        Args:
            samples: their number in the step, on all ranks.
            indices: of the samples of this rank.
        """
        progress = self._state.progress
        step = progress.step
        if self._config.record_samples:
            self._run.records.append_samples(progress.epoch_number, step, indices)
        self._run.status.update_progress(epoch=progress.epoch_number, step=step, samples_seen=progress.samples_seen)
        self._interval_samples += samples
        self._interval_steps += 1
        if self._pending_log_point and step - self._pending_log_point.position["step"] >= STEPS_BEFORE_READ:
            self.finish_log_point()
        self._terminal.show_step(step)

    @property
    def is_log_due(self) -> bool:
        """Return whether the step just made ends a log window."""
        step = self._state.progress.step
        return step % self._config.log_interval == 0 or self._state.schedule.is_at_end

    def begin_log_point(self) -> None:
        """Begin the train record of the log window that ends here. Its values are read a few steps later, when the
        device has reached this step and has work for the meantime."""
        self.finish_log_point()
        state = self._state
        progress = state.progress
        lr = self._config.lr * state.lr_factor
        position: dict[str, Any] = {"epoch": progress.epoch_number, "step": progress.step, "lr": lr}
        if any(group_lr != lr for group_lr in state.learning_rates):
            position["lr_of_groups"] = state.learning_rates
        # the steps since the last record count, also those of an earlier attempt
        steps_since_record = progress.step % self._config.log_interval
        if steps_since_record == 0:
            steps_since_record = self._config.log_interval
        token_density = self._loader.sampler.measure_token_density(
            progress.epoch, progress.samples_in_epoch, steps_since_record
        )
        self._pending_log_point = LogPoint(
            position=position,
            samples=self._interval_samples,
            token_density=token_density,
            steps=max(1, self._interval_steps),
            pending_read=state.log_window.begin_read(fingerprint_state(state), is_log_point=True),
            read_step_times=self._attempt.clock.take_step_times(),
        )
        self._interval_samples = 0
        self._interval_steps = 0
        state.log_window.values.zero_()

    def finish_log_point(self) -> None:
        """Write the train record that `begin_log_point` has begun, if there is one. A collective: call it on all ranks
        at the same step, and before each save, evaluation and end of training.

        Raises:
            TrainingError: when too many steps in a row were skipped.
        """
        point = self._pending_log_point
        self._pending_log_point = None
        if point is None:
            return
        window = self._state.log_window.finish_read(point.pending_read, self._state.progress)
        sums = window.sums
        [digest] = window.other_tensors
        step_times = point.read_step_times()
        step_seconds = step_times[0]
        logged: dict[str, float] = {}
        for part in self._state.parts:
            logged |= part.log_values(step_seconds)
        row = torch.tensor([*step_times, read_peak_memory(), *logged.values()], dtype=torch.float64)
        rank_values = gather_rows(row, self._ctx)  # on rank 0

        values = point.create_record(sums, rank_values, list(logged))
        values |= window.part_entries
        values["fingerprint"] = format_fingerprint(int(digest))
        record = self._run.records.append("train", **values)
        self._run.records.append_skipped_steps(window.skipped_steps, self._loader.sampler)
        step = point.position["step"]
        report_straggler(self._run, hosts=self._ctx.hosts, step=step, rank_values=rank_values)

        is_empty = are_all_steps_empty(window.skipped_steps)
        targets = count_targets(sums.count_view("loss"), point.samples)
        targets_per_s = targets / (record["step_s"] * point.steps or math.inf)
        self._terminal.show_record(record, sums.means(), targets_per_s=targets_per_s, is_empty=is_empty)
        self._tensorboard.write_scalars(record)
        reason = "no targets" if is_empty else "a non-finite loss or gradient"
        self._check_skipped_steps(step, reason)

    def before_save(self) -> None:
        """Write the records of all steps so far, and count those that were skipped, as a checkpoint holds them."""
        self.finish_log_point()
        self._run.records.append_skipped_steps(self._state.read_skipped_steps(), self._loader.sampler)

    def _check_skipped_steps(self, step: int, reason: str) -> None:
        """Raise TrainingError if too many steps in a row were skipped. step: the last one."""
        in_row = self._state.progress.skipped_in_row
        if 0 < self._config.max_skipped_steps <= in_row:
            raise TrainingError(
                f"The last {in_row} optimizer steps, up to step {step}, had {reason}. Look at their samples"
                " (skipped_step in metrics.jsonl), use a lower --lr or --clip_grad_norm 1, then start again with"
                " --resume_from auto."
            )

    # ---- evaluation and the end ----

    def show_images(self, split: str, loader: GlobalBatchLoader) -> None:
        """Show model.log_images of the first batch of a set on TensorBoard: on rank 0, which needs all if sharded."""
        if self._log_images:
            self._attempt.clock.enter_phase("evaluation")
            self._attempt.clock.enter_hook("log_images")
            self._show_images(self._log_images, split, loader)
            self._attempt.clock.enter_phase("evaluation")
        broadcast_json(None, self._ctx)  # the other ranks wait here, where `timeout` does not apply

    def _show_images(self, log_images: LogImages, split: str, loader: GlobalBatchLoader) -> None:
        model = cast(Any, self._state.model)
        device = self._ctx.device
        try:
            with torch.no_grad(), self._state.precision.autocast(), preserve_rng_state(device):
                batch = loader.fetch_example_batch()
                seed_evaluation(device, self._config.seed, "log_images", split, [0])
                images = log_images(model.eval(), batch)
            if self._run.is_main:
                self._tensorboard.write_images(split, images, self._state.progress.step)
        except torch.AcceleratorError:  # the device computes nothing after it
            raise
        except Exception as error:  # images must not end a run
            # parameters that the pass has gathered are sharded again: they may be those of the average
            shard_again = getattr(model, "reset_iter_state", model.state_dict)
            shard_again()
            self._log_images = None
            text = "log_images failed (%s: %s). No more images are shown in this attempt."
            self._run.warn(text, type(error).__name__, error)

    def record_evaluation(self, records: list[dict[str, Any]], seconds: float, is_best: bool, title: str = "") -> None:
        """Report an evaluation: a record for each kind of weights."""
        split = records[0]["split"]
        step = records[0]["step"]
        for record in records:
            self._run.records.append(**record)
            self._tensorboard.write_scalars(record)
        self._run.records.append_event("evaluation", step, split=split, seconds=round(seconds, 3))
        log_epoch_summary(self._attempt.logger, records, seconds, is_best=is_best, title=title)
        if not all(math.isfinite(record["loss"]) for record in records):
            self._run.records.append_event("non_finite_evaluation", step, split=split)

    def finish(self, final_state: str, best_metric: str, test_records: list[dict[str, Any]]) -> dict[str, Any]:
        """Write summary.json and the last status, show the next commands, and wait for the programs beside training."""
        progress = self._state.progress
        records = self._run.records.read()
        summary = create_summary(
            self._attempt,
            self._state,
            global_batch_size=self._loader.sampler.global_batch_size,
            final_state=final_state,
            best_metric=best_metric,
            records=records,
            test_records=test_records,
        )
        for line in summary.get("warnings", []):
            self._run.warn("%s", line)
        self._run.write_json("summary.json", summary)
        self._run.status.write(
            final_state, epoch=progress.epoch_number, step=progress.step, samples_seen=progress.samples_seen
        )
        self.close()

        trained_s = summary["time"]["training_s"] + summary["time"]["data_wait_s"]
        text = describe_run_end(
            summary,
            self._run,
            trained_s,
            empty_steps=count_empty_steps(records),
            is_averaged=self._config.ema_decay > 0,
            overwrite=self._config.overwrite,
        )
        self._attempt.logger.info("%s", text)
        self._finish_companions()
        return summary

    def _finish_companions(self) -> None:
        """Wait for the programs beside training, for a limited time: for those of rank 0, then for those of others."""
        self._run.mark_ended()
        companions = self._run.companions
        if companions and self._run.is_main:
            companions.finish(self._signal_progress)
        broadcast_json(None, self._ctx)  # the other ranks wait here, where `timeout` does not apply
        if companions and not self._run.is_main:
            companions.finish(self._signal_progress)

    def _signal_progress(self) -> None:
        self._attempt.clock.enter_phase("save")  # a long upload is not a hang

    def close(self) -> None:
        """Close TensorBoard's file."""
        self._tensorboard.close()


def count_targets(count: Tensor, samples: int) -> float:
    """Return the loss count of a log window.

    It is 0 if the count says no more than the samples, is a sum of weights, or there is one per term.
    """
    if count.ndim:
        return 0.0
    targets = float(count)
    if targets == samples or not targets.is_integer():
        return 0.0
    return targets
