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
        """Where a checkpoint was saved."""
        names = ("epoch", "step", "samples_in_epoch", "samples_seen")
        return cls(**{name: payload["progress"][name] for name in names})

    @property
    def epoch_number(self) -> int:
        """The epoch of the latest sample as records count it: from 1; 0 before the first sample."""
        return self.epoch + (self.samples_in_epoch > 0)

    def record_value(self, value: float, sign: int) -> bool:
        """Record an evaluation. Returns whether its value is the best so far, by the sign of `choose_best_metric`."""
        is_best = math.isfinite(value) and (self.best_value is None or sign * value > sign * self.best_value)
        if is_best:
            self.best_value, self.best_epoch, self.best_step = value, self.epoch_number, self.step
        self.evaluated_step = self.step
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best

    def reset_best(self) -> None:
        """Let the best value and patience start again: call it if later values cannot be compared with earlier ones."""
        self.best_value, self.best_epoch, self.best_step, self.evaluations_since_best = None, -1, -1, 0


class Schedule:
    """The length and the learning rate of a run, as functions of its progress. Valid once it is planned.

    lr_factor: that of model.py.
    """

    def __init__(self, config: TrainingConfig, lr_factor: Callable[..., float | dict[str, float]]) -> None:
        self.progress, self.total_steps = Progress(), 0
        self._config, self._lr_factor, self.warmup_steps = config, lr_factor, 0
        self._sampler: GlobalBatchSampler | None = None
        self._has_ended = False

    def plan(self, sampler: GlobalBatchSampler) -> None:
        """Plan the whole run, which continues from `progress`."""
        progress, config = self.progress, self._config
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
        """The factor on the learning rate at this step, from 0, or those of the named parameter groups."""
        length = self._config.schedule_steps or self.total_steps
        if length == self.total_steps:
            step = min(step, length - 1)  # epochs may have a few more steps than the first one
        return self._lr_factor(self._config, step, length, self.warmup_steps, progress)

    @cached_property
    def warnings(self) -> list[str]:
        """Settings that have no effect from the first step of this attempt on: a line for each."""
        config, warnings = self._config, []
        length = max(self.total_steps, config.schedule_steps)
        if self.warmup_steps > length:
            warnings.append(
                f"warm-up: has {self.warmup_steps:,} steps, but the run {length:,}: it ends at"
                f" {length / self.warmup_steps:.1%} of the learning rate; use fewer --warmup_epochs"
            )
        if not self.progress.best_metric:
            for name, off in {"patience": 0, "best_metric": "auto", "eval_every_steps": 0}.items():
                if (value := getattr(config, name)) != off:
                    warnings.append(f"{name}={value}: has no effect, since there is no validation set; leave it out")
        elif self._sampler and config.patience:
            periods = config.eval_every_steps, config.eval_every * self._sampler.steps_per_epoch
            due = {step for period in periods if period for step in range(period, self.total_steps, period)}
            left = sum(step > self.progress.step for step in due)
            # the first evaluation, if this attempt makes it, counts as the best one
            counted = -1 if self.progress.best_value is None else self.progress.evaluations_since_best
            if counted + left < config.patience:
                warnings.append(
                    f"patience={config.patience}: has no effect, since at most {left} evaluations come before the last"
                    " one; use a smaller --patience, or evaluate more often"
                )
        return warnings

    @property
    def is_at_end(self) -> bool:
        """Whether all optimizer steps were made."""
        epochs, steps = self._config.limits
        epoch, step = self.progress.epoch, self.progress.step
        return step >= steps or epoch >= epochs or (epoch + 1 >= epochs and self.is_epoch_complete)

    @property
    def is_epoch_complete(self) -> bool:
        epoch, start = self.progress.epoch, self.progress.samples_in_epoch
        return self._sampler is None or self._sampler.count_remaining_steps(epoch, start, epoch + 1) == 0

    @property
    def is_evaluation_due(self) -> bool:
        """Between two steps; an evaluation that was made at this step is not repeated."""
        progress, config = self.progress, self._config
        is_due = self.is_at_end or (self.is_epoch_complete and is_every(config.eval_every, progress.epoch_number))
        is_due = is_due or is_every(config.eval_every_steps, progress.step)
        return is_due and progress.evaluated_step != progress.step

    @property
    def is_patience_over(self) -> bool:
        return 0 < self._config.patience <= self.progress.evaluations_since_best

    @property
    def is_finished(self) -> bool:
        return self._has_ended or self.progress.epoch >= self._config.limits[0] or self.is_patience_over

    def end_epoch(self) -> None:
        """After the evaluation: the next epoch begins, unless `max_steps` ended this one early."""
        self._has_ended = self.is_at_end
        if self.is_epoch_complete:
            self.progress.epoch += 1
            self.progress.samples_in_epoch = 0
