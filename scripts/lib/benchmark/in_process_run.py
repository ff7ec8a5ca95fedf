# extra: benchmark or replay
"""A complete run within this process, for measurements.

It calls `train.train_one_epoch` with everything that a run sets up around it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import train
from config import TrainingConfig
from ddp_utils import DistributedContext
from utils.assembly import assemble
from utils.rng import derive_seed
from utils.run.start import open_run

SCHEDULE_EPOCHS = 1000  # epochs of the schedule, of which fewer are measured


class InProcessRun:
    """A run with consensus, watchdog, records, TensorBoard and checkpoints, but without terminal output.

    Create it on all ranks, after `setup_distributed`.

    Args:
        config: the settings of the run.
        ctx: the ranks.
        folder: the run folder, which must not contain a run.
        steps: the optimizer steps of an epoch (0: the whole training set, or `max_steps`).
        resume_from: a checkpoint to continue from.
    """

    def __init__(
        self, config: TrainingConfig, ctx: DistributedContext, folder: Path, steps: int, resume_from: str = ""
    ) -> None:
        self.samples_per_epoch = steps * config.batch_size * config.micro_batches_per_step(ctx.world_size)
        overrides: dict[str, Any] = {
            "run_dir": str(folder),
            "checkpoint_dir": "",
            "mirror": "",  # extra: companions
            "track": "none",  # extra: companions
            "on_checkpoint": "",  # extra: companions
            "resume_from": resume_from,
        }
        config = dataclasses.replace(config, **overrides, overwrite=False)
        if steps:
            no_limits: dict[str, Any] = {"max_steps": 0, "max_time": 0.0}
            config = dataclasses.replace(
                config, dataset_size=self.samples_per_epoch, epochs=SCHEDULE_EPOCHS, **no_limits
            )
        if ctx.heartbeats:  # several runs share the process group, and each closes its heartbeats
            ctx = dataclasses.replace(ctx, heartbeats=ctx.heartbeats.create_for_next_run())
        self._exit_stack = ExitStack()
        attempt = self._exit_stack.enter_context(open_run(config, ctx))
        self._devnull = open(os.devnull, "w")  # the end of the run closes it
        for handler in attempt.logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(self._devnull)
        data = create_data_without_repeats() if steps else train.your_data
        self.training = assemble(attempt, train.your_model, data)
        self.config, self.state = self.training.attempt.config, self.training.state
        self.model, self.loader = self.training.model, self.training.loader

    def train_epoch(self) -> None:
        """Train the next epoch."""
        train.train_one_epoch(self.training)
        self.state.schedule.end_epoch()

    def seconds_by_phase(self) -> dict[str, float]:
        """Return the seconds so far in each phase of the loop."""
        return self.training.attempt.clock.seconds_by_phase()

    def close(self) -> None:
        self.training.checkpoints.finish_writing()
        self.training.checkpoints.close()
        self.loader.close()
        self._exit_stack.close()
        logging.getLogger("ddp").handlers.clear()
        self._devnull.close()


def create_data_without_repeats() -> SimpleNamespace:
    """Return a stand-in for dataset.py whose epochs have each sample once.

    `dataset_size` cannot cut an order that repeats samples.
    """

    def create_dataset(config: TrainingConfig, split: str) -> Any:
        dataset: Any = train.your_data.create_dataset(config, split)
        if getattr(dataset, "with_replacement", False):
            dataset.with_replacement, dataset.epoch_order = False, shuffle_epoch
        return dataset

    return SimpleNamespace(**vars(train.your_data) | {"create_dataset": create_dataset})


def shuffle_epoch(seed: int, epoch: int, n: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed("order", seed, epoch)))
