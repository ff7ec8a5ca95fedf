"""Where a run is, how long it is, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from config import TrainingConfig, unless_auto
from utils.data.sampler import GlobalBatchSampler
from utils.distributed.consensus import is_every


@dataclass
class Progress:
    """The progress of a run. `samples_in_epoch` is the position in the order of the epoch, over all ranks."""

    epoch: int = 0  # from 0: completed ones
    step: int = 0  # optimizer steps since the start of the run, skipped ones too
    samples_in_epoch: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0  # whose loss or gradient was not finite
    skipped_in_row: int = 0  # of these, the latest in a row
    overflow_steps: int = 0  # skipped by float16 in the search for its scale
    best_metric: str = ""  # that selects the best checkpoint, with its direction: max:top1
    best_value: float | None = None
    best_epoch: int = -1  # from 1
    best_step: int = -1
    evaluations_since_best: int = 0
    evaluated_step: int = -1  # of the last evaluation
    loss_shift: int = -1  # gradients are those of the summed loss / 2^loss_shift until the step; -1: not chosen yet
    user: dict[str, Any] = field(default_factory=dict)  # a fork's own, plain JSON values, the same on all ranks

    @classmethod
    def from_payload(cls, payload: dict[str, Any]) -> Progress:
        """Return how far the run was when this checkpoint was saved."""
        names = ("epoch", "step", "samples_in_epoch", "samples_seen")
        progress = payload["progress"]
        return cls(**{name: progress[name] for name in names})

    @property
    def epoch_number(self) -> int:
        """The epoch of the latest sample as records count it: from 1; 0 before the first sample."""
        if self.samples_in_epoch > 0:
            return self.epoch + 1
        return self.epoch

    def record_value(self, value: float, sign: int) -> bool:
        """Record an evaluation.

        Args:
            value: of the metric that selects the best checkpoint.
            sign: 1 if higher is better, -1 if lower is better, as `choose_best_metric` returns it.

        Returns:
            Whether the value is the best so far.
        """
        is_best = False
        if math.isfinite(value):
            is_best = self.best_value is None or sign * value > sign * self.best_value
        if is_best:
            self.best_value = value
            self.best_epoch = self.epoch_number
            self.best_step = self.step
            self.evaluations_since_best = 0
        else:
            self.evaluations_since_best += 1
        self.evaluated_step = self.step
        return is_best

    def reset_best(self) -> None:
        """Let the best value and patience start again. Call it if later values cannot be compared with earlier ones."""
        self.best_value = None
        self.best_epoch = -1
        self.best_step = -1
        self.evaluations_since_best = 0


class Schedule:
    """The length and the learning rate of a run, as functions of its progress. Valid once `plan` was called.

    Args:
        lr_factor: the function of model.py, or its default.
    """

    def __init__(self, config: TrainingConfig, lr_factor: Callable[..., float | dict[str, float]]) -> None:
        self.progress = Progress()
        self.total_steps = 0
        self.warmup_steps = 0
        self._config = config
        self._lr_factor = lr_factor
        self._sampler: GlobalBatchSampler | None = None
        self._has_ended = False

    def plan(self, sampler: GlobalBatchSampler) -> None:
        """Plan the whole run, which continues from `progress`."""
        progress = self.progress
        config = self._config
        epochs, steps = config.limits
        if sampler.is_packed:  # the same on each resume
            total = epochs * sampler.steps_per_epoch
        else:
            total = progress.step + sampler.count_remaining_steps(progress.epoch, progress.samples_in_epoch, epochs)
        self.total_steps = int(min(total, steps))
        by_epochs = round(config.warmup_epochs * sampler.steps_per_epoch)
        self.warmup_steps = unless_auto(config.warmup_steps, by_epochs)
        self._sampler = sampler

    def compute_lr_factor(self, step: int, progress: Progress) -> float | dict[str, float]:
        """Return the factor on the learning rate at this step, or the factors of the named parameter groups.

        Args:
            step: from 0.
        """
        length = self._config.schedule_steps or self.total_steps
        if length == self.total_steps:
            step = min(step, length - 1)  # epochs may have a few more steps than the first one
        return self._lr_factor(self._config, step, length, self.warmup_steps, progress)

    @cached_property
    def warnings(self) -> list[str]:
        """Return a line for each setting that has no effect from the first step of this attempt on."""
        config = self._config
        progress = self.progress
        warnings = []
        length = max(self.total_steps, config.schedule_steps)
        if self.warmup_steps > length:
            warnings.append(
                f"The warm-up has {self.warmup_steps:,} steps, but the run has {length:,}, so the run ends at"
                f" {length / self.warmup_steps:.1%} of the learning rate. Use fewer --warmup_epochs."
            )
        if not progress.best_metric:
            values_if_off = {"patience": 0, "best_metric": "auto", "eval_every_steps": 0}
            for name, value_if_off in values_if_off.items():
                value = getattr(config, name)
                if value != value_if_off:
                    warnings.append(
                        f"--{name} {value} has no effect, since there is no validation set. Leave this flag out."
                    )
        elif self._sampler and config.patience:
            evaluated_steps: set[int] = set()  # those before the evaluation at the end of the run
            for period in (config.eval_every_steps, config.eval_every * self._sampler.steps_per_epoch):
                if period > 0:
                    evaluated_steps.update(range(period, self.total_steps, period))
            left = sum(step > progress.step for step in evaluated_steps)
            if progress.best_value is None:
                evaluations_without_best = left - 1  # the first evaluation counts as the best one
            else:
                evaluations_without_best = left + progress.evaluations_since_best
            if evaluations_without_best < config.patience:
                warnings.append(
                    f"--patience {config.patience} has no effect, since at most {left} evaluations come before the"
                    " last one. Use a smaller --patience, or evaluate more often."
                )
        return warnings

    @property
    def is_at_end(self) -> bool:
        """Return whether all optimizer steps were made."""
        epochs, steps = self._config.limits
        progress = self.progress
        if progress.step >= steps or progress.epoch >= epochs:
            return True
        is_last_epoch = progress.epoch + 1 >= epochs
        return is_last_epoch and self.is_epoch_complete

    @property
    def is_epoch_complete(self) -> bool:
        """Return whether the epoch has no more steps."""
        if self._sampler is None:
            return True
        progress = self.progress
        next_epoch = progress.epoch + 1
        return self._sampler.count_remaining_steps(progress.epoch, progress.samples_in_epoch, next_epoch) == 0

    @property
    def is_evaluation_due(self) -> bool:
        """Return whether to evaluate between two steps. An evaluation that was made at this step is not repeated."""
        progress = self.progress
        config = self._config
        is_due = self.is_at_end or is_every(config.eval_every_steps, progress.step)
        if not is_due and self.is_epoch_complete:
            is_due = is_every(config.eval_every, progress.epoch_number)
        return is_due and progress.evaluated_step != progress.step

    @property
    def is_patience_over(self) -> bool:
        """Return whether as many evaluations in a row as `--patience` says were not the best."""
        return 0 < self._config.patience <= self.progress.evaluations_since_best

    @property
    def is_finished(self) -> bool:
        """Return whether the run has ended: by its length or by patience."""
        epochs, _ = self._config.limits
        return self._has_ended or self.progress.epoch >= epochs or self.is_patience_over

    def end_epoch(self) -> None:
        """Begin the next epoch, unless `max_steps` ended this one early. Call after the evaluation."""
        self._has_ended = self.is_at_end
        if self.is_epoch_complete:
            self.progress.epoch += 1
            self.progress.samples_in_epoch = 0
