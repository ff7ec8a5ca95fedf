"""A complete run for measurements: `train.train_one_epoch` with everything that a run sets up around it."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from pathlib import Path

import train
from config import TrainingConfig
from ddp_utils import DistributedContext, open_run, wrap_ddp
from utils.checkpoint.writer import Writer
from utils.data.loader import create_distributed_dataloader, describe
from utils.distributed.consensus import Consensus, Decision
from utils.logger import setup_logger
from utils.report.goodput import LEDGER, Ledger
from utils.report.reporter import Reporter, decisions
from utils.run import provenance
from utils.run.failures import start_watch
from utils.run.saver import Saver


class Ours:
    """Consensus, watchdog, records, TensorBoard and checkpoint writer as in a run, but nothing on the terminal.

    Create it on all ranks, after `setup_distributed`.

    Args:
        config: `dataset_size` sets the steps of an epoch, `epochs` the schedule.
        folder: must not hold a run.
    """

    def __init__(self, config: TrainingConfig, ctx: DistributedContext, folder: Path) -> None:
        config = dataclasses.replace(config, run_dir=str(folder), checkpoint_dir="", resume_from="", overwrite=False)
        self._run = open_run(config, ctx)
        logger = setup_logger(ctx.rank, self._run.log_file)
        self._nowhere = open(os.devnull, "w")  # open as long as the run
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(self._nowhere)
        self._run.begin()
        self.watch = start_watch(self._run, config, ctx, logger)
        self._writer = Writer() if ctx.is_main else None
        train_set, held_out, self.config = train.cached(*train.load_data(config, ctx), ctx, logger)
        self.loader, sampler = create_distributed_dataloader(train_set, self.config, ctx)
        self.loader.clock = self.watch
        self.state = train.create_state(self.config, ctx)
        self.model = wrap_ddp(self.state.model, self.config, ctx)
        batch = self.loader.sample_batch()
        train.warm_up(self.model, batch, self.state, train.compute_loss)
        if config.compile != "off":
            train.compile_all_sizes(
                self.model, self.loader, {}, self.state, train.compute_loss, self.config, ctx, logger
            )
        self.state.plan(sampler.steps_left(0, 0, config.epochs), sampler.steps_per_epoch, self.config)
        origin = provenance.collect(ctx.hosts, ctx.device_names, ctx.launch.git_commit, config.task)
        origin |= describe(train_set) | {"global_batch_size": sampler.global_batch_size}
        ledger = Ledger(self._run.folder / LEDGER if ctx.is_main else None, self.watch, None, time.time())
        reporter = Reporter(self._run, self.config, ctx, logger, self.state.total_steps, sampler, self.watch, ledger)
        reporter.start(
            origin,
            decisions(self.config, ctx, self._run, self.model, self.state, self.loader, held_out),
            [],
            batch,
            self.state,
        )
        settings = self.config.to_dict()
        self._saver = Saver(
            self._run,
            self.state,
            self.config,
            ctx,
            reporter,
            self.watch,
            self._writer,
            lambda: {"config": settings, "provenance": origin},
        )
        consensus = Consensus(lambda: Decision(save=int(self._saver.is_due())), ctx.control)
        self._rest = (self.config, ctx, consensus, reporter, self._saver)
        if ctx.is_main:
            self.watch.every_second = lambda: self._run.is_ours() and ledger.write()

    def epoch(self) -> int:
        """Train the next epoch. Returns its number of optimizer steps."""
        step = self.state.progress.step
        train.train_one_epoch(self.model, self.loader, self.state, *self._rest)
        self.state.next_epoch()
        return self.state.progress.step - step

    def losses(self) -> list[float]:
        """The training loss of each log interval so far, on rank 0."""
        return [record["loss"] for record in self._run.records("train")]

    def spent(self) -> dict[str, float]:
        """Seconds so far in each phase of the loop."""
        return self.watch.spent()[0]

    def blocked(self) -> list[float]:
        """Seconds for which each checkpoint so far blocked training, on rank 0."""
        events = self._run.records("event")
        return [record["stood_still_s"] for record in events if record["event"] == "checkpoint"]

    def close(self) -> None:
        self._saver.settle()
        self._saver.finish()
        self._saver.close()
        self.watch.close()
        self._run.close()
        logging.getLogger("ddp").handlers.clear()
        self._nowhere.close()
