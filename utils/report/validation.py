"""The evaluations of a run: the validation set, which selects the best checkpoint, and the test set at the end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from utils.data.loader import GlobalBatchLoader
from utils.distributed.consensus import Consensus
from utils.metrics import BestMetric
from utils.report.reporter import Reporter
from utils.run.checkpoints import Checkpoints
from utils.run.resume import load_best_checkpoint
from utils.run.start import Attempt
from utils.settings.errors import UserError
from utils.training.evaluation import Evaluation
from utils.training.hooks import ModelHooks
from utils.training.schedule import Progress
from utils.training.state import TrainState


@dataclass(frozen=True)
class Validation:
    """Evaluates, reports and keeps the best checkpoint. All ranks call its methods."""

    attempt: Attempt
    state: TrainState
    hooks: ModelHooks
    consensus: Consensus
    loaders: dict[str, GlobalBatchLoader]  # by split: train, and the held-out ones
    reporter: Reporter
    checkpoints: Checkpoints
    best_metric: BestMetric

    @property
    def evaluation(self) -> Evaluation:
        """The evaluation of the model as it is now."""
        return Evaluation(
            model=self.state.model,
            hooks=self.hooks,
            precision=self.state.precision,
            ctx=self.attempt.ctx,
            parts=self.state.parts,
            consensus=self.consensus,
            clock=self.attempt.clock,
        )

    def validate(self) -> None:
        """Evaluate the validation set, if there is one, and keep the best checkpoint."""
        schedule = self.state.schedule
        progress = schedule.progress
        checkpoints = self.checkpoints
        checkpoints.settle_best()  # of an earlier evaluation
        began = time.perf_counter()
        self.state.notify_progress(progress)
        if "val" not in self.loaders:
            shown_weights = list(checkpoints.weight_contexts().values())[-1]
            with shown_weights:
                self.reporter.show_images("train", self.loaders["train"])
            return

        loader = self.loaders["val"]
        contexts = checkpoints.weight_contexts()
        records = self.evaluation.evaluate_all_weights("val", loader, weights=contexts, progress=progress)
        selecting = records[-1]  # of the averaged weights, if there are any
        metric = self.best_metric.name
        if metric not in selecting:
            raise UserError(
                f"--best_metric {metric} is missing in this evaluation. Report this metric in each evaluation."
            )
        value = selecting[metric]
        if not math.isfinite(selecting["loss"]):
            value = math.nan
        is_best = progress.record_value(value, self.best_metric.sign)
        title = "" if schedule.is_epoch_complete else f"step {progress.step}"
        seconds = time.perf_counter() - began
        self.reporter.record_evaluation(records, seconds, is_best=is_best, title=title)
        selecting_weights = checkpoints.weight_contexts()[selecting["weights"]]
        with selecting_weights:
            self.reporter.show_images("val", loader)
        if is_best:
            checkpoints.save_best()
        if schedule.is_at_end and not schedule.is_epoch_complete:  # max_steps: a longer run does not evaluate it again
            checkpoints.save(blocking=True, force=True)

    def evaluate_best_on_test(self) -> list[dict[str, Any]]:
        """Evaluate the best checkpoint (or else the last weights) on the test set, if there is one.

        This overwrites the trained weights, so do not save afterwards.
        """
        if "test" not in self.loaders:
            return []
        began = time.perf_counter()
        state = self.state
        contexts = state.weight_contexts()
        kind = list(contexts)[-1]  # the averaged weights, if there are any
        progress = state.progress
        best = load_best_checkpoint(self.attempt.run, state, self.attempt.ctx)
        if best:
            contexts = state.saved_weight_contexts(best)
            progress = Progress.from_payload(best)
        state.notify_progress(progress)
        chosen = {kind: contexts.get(kind, contexts["model"])}
        loader = self.loaders["test"]
        records = self.evaluation.evaluate_all_weights("test", loader, weights=chosen, progress=progress)
        seconds = time.perf_counter() - began
        self.reporter.record_evaluation(records, seconds, is_best=False, title="best checkpoint")
        return records
