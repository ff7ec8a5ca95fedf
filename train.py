"""Train a model on one process or on many, without losing, repeating or distorting a sample.

python train.py                                                  one process
torchrun --standalone --nproc-per-node=2 train.py --epochs 5     two processes on this machine
scripts/launch.sh --epochs 5                                     several machines (see the README)
"""

from __future__ import annotations

from config import TrainingConfig, UserError
from utils.signals import StopSignals, began_at, hold

if __name__ == "__main__":
    TrainingConfig.from_args()  # answers --help and refuses a bad flag before torch, which takes seconds, is imported
    hold()

import copy
import dataclasses
import faulthandler
import logging
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from dataset import create_dataset, is_prepared, prepare_data
from ddp_utils import (
    DistributedContext,
    cleanup_distributed,
    load_checkpoint,
    open_run,
    read_launch,
    resume_run,
    setup_distributed,
    wrap_ddp,
)
from model import compute_loss, create_model, param_groups
from utils.checkpoint.format import BEST, best_or_newest
from utils.checkpoint.writer import Writer
from utils.data.cache import cached
from utils.data.loader import (
    GlobalBatchLoader,
    create_distributed_dataloader,
    create_evaluation_dataloader,
    describe,
    fingerprint,
    resolve_auto,
)
from utils.distributed.collectives import all_gather_json, on_all_ranks, on_rank_0, once_per_file_system, require_equal
from utils.distributed.consensus import Consensus, Decision, is_every
from utils.files import replace_json
from utils.logger import log_epoch_summary, setup_logger
from utils.memory import memory_explained
from utils.metrics import MetricTracker, choose_best
from utils.report.goodput import LEDGER, Ledger
from utils.report.reporter import Reporter, decisions
from utils.rng import seed_device
from utils.run import provenance, resume
from utils.run.failures import fail, leave_after, start_watch, wait_for_blame
from utils.run.folder import Run
from utils.run.saver import Saver
from utils.run.watchdog import Watch
from utils.training.activation import checkpoint_blocks
from utils.training.first_passes import compile_all_sizes, warm_up
from utils.training.precision import Precision
from utils.training.state import TrainState

PREEMPTED = 75  # exit code


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, or 75 when a run without torchrun was asked to stop and has
    saved."""
    config = TrainingConfig.from_args(argv)
    try:
        outcome = train(config)
    except UserError as refused:
        raise refused.with_traceback(None) from None  # torchrun's summary shows the sentence, not the way to it
    except Exception as error:
        wait_for_blame(error)
        raise
    return PREEMPTED if outcome.get("state") == "preempted" and not read_launch().is_under_torchrun else 0


def train(config: TrainingConfig) -> dict[str, Any]:
    """Train as the config says, in every process of the launch alike. May be called again in the same process.

    Returns:
        What summary.json holds, or with `eval_only` the records of the evaluation.

    Raises:
        UserError: when the config or the data cannot be used; the message ends with the fix.
    """
    began = began_at()
    ctx = setup_distributed(config)
    if config.eval_only:
        with memory_explained(config, ctx):
            outcome = evaluate_only(config, ctx)
        cleanup_distributed()
        return outcome
    run = open_run(config, ctx)
    logger = setup_logger(ctx.rank, None if run.is_completed or run.is_replacing else run.log_file)
    if run.is_completed:
        more = "to train on, give --resume_from a checkpoint of it and more --epochs"
        logger.info("%s: this run is completed, nothing is left to do; %s", run.folder, more)
        outcome = {"state": "completed"}
    else:
        watch = start_watch(run, config, ctx, logger)
        try:
            with StopSignals() as signals:
                outcome = run_training(config, ctx, run, logger, signals, watch, began)
        except BaseException as error:
            fail(error, run, watch, config, ctx)
        watch.close()
    run.close()
    cleanup_distributed()
    return outcome


def run_training(
    config: TrainingConfig,
    ctx: DistributedContext,
    run: Run,
    logger: logging.Logger,
    signals: StopSignals,
    watch: Watch,
    began: float,
) -> dict[str, Any]:
    """One attempt of a run, from its data to its summary. began: when its process did, in seconds since 1970."""
    started = time.monotonic()
    writer = Writer() if ctx.is_main else None  # forked while this process is small
    if not run.is_replacing:
        run.begin()
    train_set, held_out, config = cached(*load_data(config, ctx), ctx, logger)
    loader, sampler = on_all_ranks(lambda: create_distributed_dataloader(train_set, config, ctx), ctx)
    loader.clock = watch
    held_out_loaders = {
        split: create_evaluation_dataloader(dataset, config, ctx, watch) for split, dataset in held_out.items()
    }

    weights_from = "" if run.resume_path else config.init_from  # a resumed run has its own
    state = on_all_ranks(lambda: create_state(dataclasses.replace(config, init_from=weights_from), ctx), ctx)
    model = wrap_ddp(state.model, config, ctx)
    first_batch = on_all_ranks(loader.sample_batch, ctx)
    # before the state is loaded
    names = on_all_ranks(lambda batch=first_batch: warm_up(model, batch, state, compute_loss), ctx)
    if config.compile != "off":
        loaders = (loader, held_out_loaders)
        on_all_ranks(lambda: compile_all_sizes(model, *loaders, state, compute_loss, config, ctx, logger), ctx)
    best_name, sign = on_all_ranks(lambda: choose_best(config.best_metric, names), ctx)
    progress = state.progress

    origin = provenance.collect(ctx.hosts, ctx.device_names, ctx.launch.git_commit, config.task)
    origin |= describe(train_set) | {"global_batch_size": sampler.global_batch_size}
    differences, ledger_before = resume_run(run, state, config, origin, sampler, ctx)
    state.plan(
        sampler.steps_left(progress.epoch, progress.samples_in_epoch, config.epochs), sampler.steps_per_epoch, config
    )
    ledger = Ledger(run.folder / LEDGER if ctx.is_main else None, watch, ledger_before, began)
    reporter = Reporter(run, config, ctx, logger, state.total_steps, sampler, watch, ledger)
    reporter.start(origin, decisions(config, ctx, run, model, state, loader, held_out), differences, first_batch, state)
    del first_batch

    def vote() -> Decision:
        is_time_up = 0 < config.max_time < (time.monotonic() - started) / 60
        return Decision(stop=2 if signals.received else int(is_time_up), save=int(saver.is_due()))

    settings = config.to_dict()

    def meta() -> dict[str, Any]:
        return {"config": settings, "provenance": origin | {"ledger": ledger.now()}}

    saver = Saver(run, state, config, ctx, reporter, watch, writer, meta)
    consensus = Consensus(vote, ctx.control)
    models = {"model": state.model} | ({"ema": state.average.model} if state.average else {})
    chosen = "ema" if state.average else "model"  # the weights that the best checkpoint is chosen by
    if ctx.is_main:
        watch.every_second = lambda: run.is_ours() and ledger.write()
    if run.resume_path and run.resume_path.resolve().parent == run.checkpoints.resolve():
        saver.saved_step = progress.step
    elif run.resume_path:
        saver.save_now()  # a run that goes on in another folder has a checkpoint there from the start
    is_stopped = max(all_gather_json(vote().stop, ctx)) > 0  # meanwhile, before there was a step
    while not is_stopped and progress.epoch < config.epochs and not progress.is_patience_over(config.patience):
        is_stopped = train_one_epoch(model, loader, state, config, ctx, consensus, reporter, saver).stop > 0
        is_at_end = progress.step >= state.total_steps
        if is_stopped or is_at_end or is_every(config.save_every, progress.epoch):
            saver.save_now(must=is_stopped or is_at_end)  # before the evaluation
        is_evaluation_due = (
            is_at_end or is_every(config.eval_every, progress.epoch)
        ) and progress.evaluated_step != progress.step
        if "val" in held_out_loaders and is_evaluation_due and not is_stopped:
            begin = time.perf_counter()
            records = evaluate_all(models, "val", held_out_loaders["val"], state, ctx, consensus)
            if records:
                found = next(each for each in records if each["weights"] == chosen)
                is_best = progress.note_value(found[best_name] if math.isfinite(found["loss"]) else math.nan, sign)
                reporter.evaluated(records, time.perf_counter() - begin, is_best)
                if is_best:
                    saver.save_best()
                if progress.samples_in_epoch < sampler.samples_per_epoch:
                    # max_steps ended the run here; a run that goes on comes not by this evaluation again
                    saver.save_now(is_again=True)
            else:
                is_stopped = True
                saver.save_now()
        if is_stopped:
            break
        if progress.samples_in_epoch >= sampler.samples_per_epoch:
            state.next_epoch()
        if progress.is_patience_over(config.patience):
            logger.info(
                "no better %s in %d evaluation(s): patience ends the run", best_name, progress.evaluations_since_best
            )
            saver.save_now()
        if is_at_end:
            break

    saver.finish()
    test_records = []
    if "test" in held_out_loaders and not is_stopped:
        begin = time.perf_counter()
        test_records = evaluate_best(
            run.checkpoints / BEST, chosen, models[chosen], held_out_loaders["test"], state, ctx, consensus
        )
        is_stopped = not test_records
        if test_records:
            reporter.evaluated(test_records, time.perf_counter() - begin, is_best=False)
    outcome = reporter.finish(
        "preempted" if is_stopped else "completed", state, sampler.global_batch_size, best_name, test_records
    )
    saver.close()
    return outcome


def train_one_epoch(
    model: DistributedDataParallel,
    loader: GlobalBatchLoader,
    state: TrainState,
    config: TrainingConfig,
    ctx: DistributedContext,
    consensus: Consensus,
    reporter: Reporter,
    saver: Saver,
) -> Decision:
    """Train from where `state` stands to the end of its epoch, or to the step at which the ranks agreed to stop.
    Returns the last word."""
    progress, clock = state.progress, loader.clock
    model.train()
    state.running_stats.begin_epoch()
    for global_batch in loader.global_batches(progress.epoch, progress.samples_in_epoch):
        if progress.step >= state.total_steps:
            break
        clock.begin_step(progress.step + 1)
        # of a loss: DDP averages over ranks, and gives the mean over the global batch
        share = ctx.world_size / (global_batch.weight or math.nan)
        indices = []
        for micro_batch in global_batch:
            is_padding, is_last_micro_batch = micro_batch.is_padding, micro_batch.is_last
            with nullcontext() if is_last_micro_batch else model.no_sync():
                seed_device(ctx.device, "step", config.seed, progress.step, micro_batch.number)
                with state.precision.autocast():
                    loss_sum, metrics = compute_loss(model, micro_batch.batch)
                if not is_padding:
                    weight = global_batch.weight if ctx.is_main and is_last_micro_batch else 0.0  # once, for all ranks
                    state.interval.update({"loss": (loss_sum, weight)} | metrics)
                    state.running_stats.add(len(micro_batch.indices))
                    indices += micro_batch.indices
                if is_last_micro_batch:
                    state.running_stats.start_reduce()  # beside the backward pass
                clock.enter("backward")
                state.backward(loss_sum, 0.0 if is_padding else share)
        clock.enter("update")
        saver.settle()  # the copy of a checkpoint is complete before the weights change
        state.update_if_finite(global_batch)
        state.advance(global_batch)
        reporter.step_done(global_batch.samples, progress.step)

        if config.record_samples:
            reporter.record_samples(progress, indices)
        if reporter.is_due(progress.step):
            reporter.log(state, all_gather_json(reporter.share(state, loader), ctx))
        word = consensus.step()
        if word.save or word.stop or is_every(config.save_every_steps, progress.step - 1):
            word = Decision(*map(max, word, consensus.flush()))  # no older word may be heard after a save
            if word.stop:
                return word
            saver.save()
    clock.leave_steps()
    return consensus.flush()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: GlobalBatchLoader,
    precision: Precision,
    ctx: DistributedContext,
    consensus: Consensus | None = None,
) -> dict | None:
    """The mean loss and metrics over a set on all ranks, each sample counted once, and their "count".

    None when the ranks agreed to stop meanwhile. Every rank makes the same number of steps, some of them empty.
    """
    model.eval()
    tracker, samples = MetricTracker(ctx.device), 0
    for global_batch in loader.global_batches(epoch=0):
        for micro_batch in global_batch:
            if not micro_batch.is_padding:
                with precision.autocast():
                    loss_sum, metrics = compute_loss(model, micro_batch.batch)
                tracker.update({"loss": (loss_sum, global_batch.weight if ctx.is_main else 0.0)} | metrics)
                samples += len(micro_batch.indices)
        if consensus and consensus.step().stop:
            consensus.flush()
            return None
    if consensus and consensus.flush().stop:
        return None
    ranks = all_gather_json({"totals": tracker.totals(), "samples": samples}, ctx)
    count = sum(each["samples"] for each in ranks)
    if count != len(loader.dataset):
        raise RuntimeError(f"evaluation counted {count} samples of {len(loader.dataset)}; this is a bug of the loader")
    means = tracker.means([each["totals"] for each in ranks])
    return all_gather_json(means, ctx)[0] | {"count": count}  # only rank 0 is sure to know each metric's last function


def evaluate_all(
    models: dict[str, nn.Module],
    split: str,
    loader: GlobalBatchLoader,
    state: TrainState,
    ctx: DistributedContext,
    consensus: Consensus | None,
) -> list[dict[str, Any]]:
    """An eval record for each kind of weights; none when the ranks agreed to stop meanwhile."""
    records = []
    where = {
        "epoch": state.progress.epoch,
        "step": state.progress.step,
        "split": getattr(loader.dataset, "split", split),
    }
    for weights, model in models.items():
        means = evaluate(model, loader, state.precision, ctx, consensus)
        if means is None:
            return []
        records.append({"kind": "eval", **where, "weights": weights, **means})
    return records


def evaluate_best(
    best: Path,
    weights: str,
    model: nn.Module,
    loader: GlobalBatchLoader,
    state: TrainState,
    ctx: DistributedContext,
    consensus: Consensus,
) -> list[dict[str, Any]]:
    """Evaluate the best checkpoint's weights (where there is none, the last ones) on a set that chose nothing."""
    if all_gather_json(best.exists(), ctx)[0]:
        payload = load_checkpoint(best, ctx)
        model.load_state_dict((weights == "ema" and payload["ema"]) or payload["model"])
    return evaluate_all({weights: model}, "test", loader, state, ctx, consensus)


def evaluate_only(config: TrainingConfig, ctx: DistributedContext) -> dict[str, Any]:
    """Evaluate a checkpoint on what is held out, and write eval-<checkpoint>.json into the run's folder; nothing else
    is touched."""
    logger = setup_logger(ctx.rank)
    asked = Path(config.resume_from) if config.resume_from not in ("", "auto") else None
    path = asked or on_all_ranks(
        lambda: best_or_newest(config.checkpoint_folder, prefers_best=not config.resume_from), ctx
    )
    payload = load_checkpoint(path, ctx)
    _, held_out, config = load_data(config, ctx)
    on_all_ranks(lambda: resume.check_evaluation(payload, config), ctx)
    state = on_all_ranks(lambda: create_state(dataclasses.replace(config, init_from=""), ctx), ctx)
    on_all_ranks(lambda: state.load_model(payload), ctx)
    models = {"model": state.model}
    if payload["ema"]:
        models["ema"] = copy.deepcopy(state.model)
        models["ema"].load_state_dict(payload["ema"])
    state.progress.epoch, state.progress.step = payload["progress"]["epoch"], payload["progress"]["step"]
    records = []
    for split, dataset in held_out.items():
        begin = time.perf_counter()
        found = evaluate_all(models, split, create_evaluation_dataloader(dataset, config, ctx), state, ctx, None)
        log_epoch_summary(logger, found, time.perf_counter() - begin, is_best=False)
        records += found
    outcome = {"checkpoint": str(path), "data_dir": config.data_dir, "records": records}
    file = config.run_folder / f"eval-{path.stem}.json"
    on_rank_0(lambda: (file.parent.mkdir(parents=True, exist_ok=True), replace_json(file, outcome)), ctx)
    logger.info("wrote %s", file)
    return outcome


def load_data(config: TrainingConfig, ctx: DistributedContext) -> tuple[Dataset, dict[str, Dataset], TrainingConfig]:
    """The training set, the held-out sets by split, and the config with its `auto` fields taken from the data."""
    once_per_file_system(Path(config.data_dir), lambda: is_prepared(config), lambda: prepare_data(config), ctx)
    sets = {
        split: on_all_ranks(lambda split=split: create_dataset(config, split), ctx)
        for split in ("train", "val", "test")
    }
    train_set = sets.pop("train")
    if train_set is None:
        raise UserError(
            f"data_dir={config.data_dir}: create_dataset found no training set there; give the folder that holds it"
        )
    config = on_all_ranks(lambda: resolve_auto(config, train_set), ctx)
    held_out = {split: dataset for split, dataset in sets.items() if dataset is not None and len(dataset)}
    seen = [[split, len(dataset), fingerprint(dataset)] for split, dataset in [("train", train_set), *held_out.items()]]
    require_equal(
        seen, f"data_dir={config.data_dir}: holds other data on {{other}} than on {{first}}; make them alike", ctx
    )
    return train_set, held_out, config


def create_state(config: TrainingConfig, ctx: DistributedContext) -> TrainState:
    """The model with its optimizer and all else that survives a restart, at step 0."""
    torch.manual_seed(config.seed)
    model = create_model(config, ctx.device)
    if config.activation_checkpointing:
        checkpoint_blocks(model)
    return TrainState(
        model, param_groups(model, config), config, Precision.choose(config, ctx.device, ctx.fast_bf16), ctx.is_main
    )


def run_as_script() -> None:
    """Run the command line and end this process with the contract's exit code."""
    faulthandler.enable()  # a crash of native code says where
    try:
        sys.exit(main())
    except (Exception, KeyboardInterrupt) as error:
        launch = read_launch()
        leave_after(error, launch.rank, launch.may_restart)


if __name__ == "__main__":
    run_as_script()
