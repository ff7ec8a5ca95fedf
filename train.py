"""Train a model on one or more processes without losing, repeating or misweighting a sample.

python train.py                                                  one process
torchrun --standalone --nproc-per-node=2 train.py --epochs 5     two processes on this machine
scripts/launch.sh --epochs 5                                     several machines (see the README)
"""

from __future__ import annotations

from config import TrainingConfig, UserError
from utils.run.command_line import check_command_line
from utils.signals import StopSignals, began_at, hold, release

if __name__ == "__main__":
    check_command_line()  # before torch is imported, which takes seconds
    hold()

import faulthandler
import logging
import math
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import dataset as your_data
import model as your_model
from ddp_utils import (
    DistributedContext,
    cleanup_distributed,
    load_checkpoint,
    read_launch,
    setup_distributed,
    wrap_ddp,
)
from utils.checkpoint.format import BEST, best_or_latest, load_weights, take_weights
from utils.clock import Clock
from utils.data.cache import cached
from utils.data.loader import (
    GlobalBatchLoader,
    create_distributed_dataloader,
    create_evaluation_dataloader,
)
from utils.data.sampler import MicroBatch
from utils.data.sets import describe, kind_of, load_data
from utils.distributed.collectives import broadcast_json, on_all_ranks, on_rank_0
from utils.distributed.consensus import Consensus, Decision, is_every
from utils.files import replace_json
from utils.logger import log_epoch_summary, setup_logger
from utils.metrics import choose_best
from utils.redact import stored
from utils.report.banner import decisions
from utils.report.goodput import Goodput
from utils.report.reporter import Reporter
from utils.rng import seed_device
from utils.run.checkpoints import Checkpoints
from utils.run.failures import PREEMPTED, leave_after, open_run, wait_for_blame, watched
from utils.run.folder import Run
from utils.run.provenance import collect, task_of, verification
from utils.run.resume import check_evaluation, resume_run
from utils.training.activation import checkpoint_blocks
from utils.training.batchnorm import check_sync_batchnorm
from utils.training.cross_check import CrossCheck
from utils.training.evaluation import evaluate_all
from utils.training.first_passes import first_passes
from utils.training.parallel import Wrapped
from utils.training.precision import Precision
from utils.training.seams import Seams
from utils.training.sharding import build_sharded
from utils.training.state import Progress, TrainState
from utils.training.unsaved import KEY, complete, digests, left_out


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, or 75 for a run without torchrun that was stopped and saved."""
    config = TrainingConfig.from_args(argv)
    try:
        outcome = train(config)
    except UserError as error:
        raise error.with_traceback(None) from None  # torchrun's summary shows the sentence, not the traceback
    except Exception as error:
        wait_for_blame(error)
        raise
    return PREEMPTED if outcome.get("state") == "preempted" and not read_launch().is_under_torchrun else 0


def train(config: TrainingConfig) -> dict[str, Any]:
    """Train according to the config. Call it on every rank; it may be called again in the same process.

    Returns:
        The content of summary.json, or with `eval_only` the evaluation records.

    Raises:
        UserError: if the config or the data cannot be used; the message ends with the fix.
    """
    began = began_at()
    ctx = setup_distributed(config)
    clock, logger = Clock(ctx.device), setup_logger(ctx.rank)
    if config.eval_only:
        release()  # an evaluation has nothing to save: a signal ends it
        with watched(config.run_folder, config, ctx, clock):
            outcome = evaluate_only(config, ctx)
        cleanup_distributed()
        return outcome
    with StopSignals() as signals, open_run(config, ctx, clock) as run:
        if run.start.is_completed:
            more = "to train longer, increase --epochs"
            logger.info("%s: this run is already completed; %s", run.folder, more)
            outcome = {"state": "completed"}
        else:
            setup_logger(ctx.rank, run.log_file)
            with closing(Goodput(run, clock, began)) as goodput:
                outcome = run_training(assemble(config, ctx, run, logger, clock, goodput, signals))
    cleanup_distributed()
    return outcome


@dataclass(frozen=True)
class Training:
    """The parts of one attempt of a run."""

    config: TrainingConfig  # `auto` fields resolved
    ctx: DistributedContext
    run: Run
    logger: logging.Logger
    clock: Clock
    seams: Seams
    loader: GlobalBatchLoader
    held_out: dict[str, GlobalBatchLoader]  # by split
    state: TrainState
    model: Wrapped
    consensus: Consensus
    reporter: Reporter
    checkpoints: Checkpoints
    cross_check: CrossCheck
    best_metric: str
    best_sign: int  # 1: the highest value is best, -1: the lowest

    def weights(self) -> dict[str, AbstractContextManager]:
        """The weights to evaluate, each with the context in which the model has them. The last selects the best."""
        average = self.state.average
        return {"model": nullcontext()} | ({"ema": average.swapped()} if average else {})


def assemble(
    config: TrainingConfig,
    ctx: DistributedContext,
    run: Run,
    logger: logging.Logger,
    clock: Clock,
    goodput: Goodput,
    signals: StopSignals,
) -> Training:
    """Build everything that an attempt needs, from data to checkpoints, and restore the state it starts from."""
    started, seams = time.monotonic(), Seams.of(your_model, ctx.device)
    run.begin()
    sets = load_data(your_data, config, ctx)
    state = on_all_ranks(lambda: create_state(seams, sets.config, ctx, is_resumed=bool(run.resume_path)), ctx)
    config = sets.config
    train_set, held_out = cached(sets.train, sets.held_out, config, ctx, logger)
    loader, sampler = on_all_ranks(lambda: create_distributed_dataloader(train_set, config, ctx, clock), ctx)
    loaders = {split: create_evaluation_dataloader(dataset, config, ctx, clock) for split, dataset in held_out.items()}

    on_all_ranks(lambda: check_sync_batchnorm(state.model, sampler, ctx), ctx)
    model = wrap_ddp(state.model, config, ctx)
    first_batch = on_all_ranks(loader.sample_batch, ctx)
    # before the state is loaded, which undoes their changes
    names = first_passes(model, first_batch, state, loader, loaders, seams, config, ctx)
    best_metric, best_sign = on_all_ranks(lambda: choose_best(config.best_metric, names), ctx)

    verified = verification(task_of(state.model, kind_of(train_set)), config)
    origin = collect(ctx.hosts, ctx.device_names, ctx.launch.git_commit, verified)
    origin |= describe(train_set) | sets.content | {"global_batch_size": sampler.global_batch_size}
    origin |= {KEY: state.unsaved} if state.unsaved else {}
    origin |= {"cpu_threads": torch.get_num_threads(), "precision": state.precision.name}
    differences, saved_goodput = resume_run(run, state, config, origin, sampler, "test" in held_out, ctx, sets.listing)
    if folder := ctx.launch.flight_recorder and Path(ctx.launch.flight_recorder).parent:
        on_all_ranks(lambda: folder.mkdir(parents=True, exist_ok=True), ctx)  # torch does not create it
    state.plan(sampler, ctx.world_size)
    goodput.resume(saved_goodput, state.progress.step)
    reporter = Reporter(run, config, ctx, logger, state, loader, clock, goodput, origin, seams.log_images)
    decided = decisions(config, ctx, run, state, loader, held_out, origin)
    reporter.start(decided, differences, state.progress)
    settings = stored(config)

    def meta() -> dict[str, Any]:
        return {"config": settings, "provenance": origin | {"goodput": goodput.now(), "total_steps": state.total_steps}}

    checkpoints = Checkpoints(run, state, config, ctx, sampler, clock, meta)

    def save() -> None:
        checkpoints.save(must=True)
        checkpoints.finish()

    check = on_all_ranks(lambda: CrossCheck(state, loader, config, ctx, run.event, run.warn, save), ctx)

    def vote() -> Decision:
        is_time_up = 0 < config.max_time < (time.monotonic() - started) / 60
        return Decision(stop=int(bool(signals.received) or is_time_up), save=int(checkpoints.is_due()))

    return Training(
        config=config,
        ctx=ctx,
        run=run,
        logger=logger,
        clock=clock,
        seams=seams,
        loader=loader,
        held_out=loaders,
        state=state,
        model=model,
        consensus=Consensus(vote, ctx.control),
        reporter=reporter,
        checkpoints=checkpoints,
        cross_check=check,
        best_metric=best_metric,
        best_sign=best_sign,
    )


def run_training(training: Training) -> dict[str, Any]:
    """Train until the run ends or the ranks agree to stop. Returns the content of summary.json."""
    config, state, checkpoints, reporter = training.config, training.state, training.checkpoints, training.reporter
    progress = state.progress
    if training.run.resume_path:
        checkpoints.save(must=True)  # does nothing if the checkpoint is already in this run's folder
        checkpoints.wait()
    is_stopped = training.consensus.decide().stop > 0  # asked to stop before the first step
    while not (is_stopped or state.is_finished):
        is_stopped = train_one_epoch(training).stop > 0
        if is_stopped or state.is_at_end or is_every(config.save_every, progress.epoch):
            # before the evaluation, so that a failure there loses no training; a resume repeats the evaluation
            checkpoints.save(must=is_stopped or state.is_at_end)
            checkpoints.wait()
        if "val" in training.held_out and state.is_evaluation_due and not is_stopped:
            is_stopped = validate(training)
        if not is_stopped:
            state.end_epoch()
            if state.is_patience_over:
                training.logger.info("patience: no improvement in %d evaluations, so the run ends", config.patience)
                checkpoints.save(must=True)
    checkpoints.finish()
    test_records = []
    if "test" in training.held_out and not is_stopped:
        test_records = test_best(training)
        is_stopped = not test_records
    outcome = reporter.finish("preempted" if is_stopped else "completed", state, training.best_metric, test_records)
    checkpoints.close()
    for loader in (training.loader, *training.held_out.values()):
        loader.close()
    return outcome


def train_one_epoch(training: Training) -> Decision:
    """Train to the end of the current epoch, or until the ranks agree to stop. Returns the last decision."""
    config, state, loader, model = training.config, training.state, training.loader, training.model
    clock, progress = training.clock, state.progress
    consensus, checkpoints, reporter = training.consensus, training.checkpoints, training.reporter
    model.train()
    state.sums.running_stats.begin_epoch()
    for global_batch in training.seams.counted(loader.global_batches(progress.epoch, progress.samples_in_epoch)):
        if state.is_at_end:
            break
        # here, so that a resume at this step evaluates too; the workers keep the batches that they have fetched
        if config.eval_every_steps and state.is_evaluation_due:
            if (end := validate_within_epoch(training)) is not None:
                return end
            model.train()  # again, after the evaluation
        clock.begin_step(progress.step + 1)
        state.show(progress)
        indices = training.cross_check.run(global_batch, partial(compute_gradient, training))
        clock.enter("update")
        checkpoints.wait()  # for the copy, before the weights change
        state.update_if_finite(global_batch)
        state.advance(global_batch)
        reporter.step_done(global_batch.samples, progress.step)

        if config.record_samples:
            reporter.record_samples(progress, indices)
        if reporter.is_due(progress.step):
            reporter.log(state)
            checkpoints.compare_buffers(is_first=True)
        decision = consensus.step()
        if decision.save or decision.stop or is_every(config.save_every_steps, progress.step - 1):
            decision = Decision(*map(max, decision, consensus.flush()))  # an earlier vote must not count after a save
            if decision.stop:
                return decision
            checkpoints.save()
    clock.leave_steps()
    return consensus.flush()


def compute_gradient(training: Training, micro_batches: Iterable[MicroBatch]) -> list[int]:
    """The passes of this rank in one optimizer step, which leave its gradient and sums. Returns this rank's samples."""
    state, model, clock, indices = training.state, training.model, training.clock, []
    for micro_batch in micro_batches:  # padding with zero gradient on an idle rank: DDP needs every rank
        is_padding, is_last_micro_batch = micro_batch.is_padding, micro_batch.is_last
        with model.accumulating(micro_batch):
            seed_device(training.ctx.device, "step", training.config.seed, state.progress.step, micro_batch.number)
            with state.precision.autocast():
                metrics = training.seams.compute_loss(model, micro_batch.batch)
            if not micro_batch.is_extra:
                state.sums.add(metrics, micro_batch)
                indices += micro_batch.indices
            if is_last_micro_batch:
                state.sums.start_reduce(micro_batch)  # overlaps the backward pass
            clock.enter("backward")
            state.backward(metrics["loss"][0], is_padding)
    return indices


def validate_within_epoch(training: Training) -> Decision | None:
    """`validate` between two steps of an epoch. Returns a decision if training ends here."""
    if "val" not in training.held_out:
        return None
    training.clock.leave_steps()
    decision = training.consensus.flush()  # an earlier vote must not count after the evaluation
    if decision.stop:
        return decision
    if validate(training):
        return Decision(stop=1)
    return Decision() if training.state.is_patience_over else None


def validate(training: Training) -> bool:
    """Evaluate the validation set and keep the best checkpoint. Returns True if the ranks agreed to stop."""
    state, progress, checkpoints = training.state, training.state.progress, training.checkpoints
    began = time.perf_counter()
    checkpoints.wait()  # for the copy: the weights are exchanged for their average
    records = evaluate_split(training, "val", training.weights(), progress)
    if not records:
        checkpoints.save(must=True)
        return True
    if training.best_metric not in records[-1]:
        raise UserError(f"best_metric={training.best_metric}: is missing in this evaluation; report it in each one")
    value = records[-1][training.best_metric] if math.isfinite(records[-1]["loss"]) else math.nan
    is_best = progress.note_value(value, training.best_sign)
    title = "" if state.is_epoch_complete else f"step {progress.step}"
    training.reporter.evaluated(records, time.perf_counter() - began, is_best, title)
    with training.weights()[records[-1]["weights"]]:
        training.reporter.show_images("val", state.model, training.held_out["val"], progress.step)
    if is_best:
        checkpoints.save_best()
    if state.is_at_end and not state.is_epoch_complete:  # max_steps: a longer run must not repeat this evaluation
        checkpoints.save(must=True, is_again=True)
        checkpoints.wait()
    return False


def test_best(training: Training) -> list[dict[str, Any]]:
    """Evaluate the best checkpoint (or else the last weights) on the test set.

    This overwrites the trained weights, so do not save afterwards. Returns an empty list if the ranks agreed to stop.
    """
    weights = training.weights()
    kind = list(weights)[-1]
    best, progress = training.run.checkpoints / BEST, training.state.progress
    began = time.perf_counter()
    if broadcast_json(best.exists(), training.ctx):
        payload = load_checkpoint(best, training.ctx, training.state.layouts())
        training.state.load_model(payload, kind if payload[kind] else "model")
        weights[kind], progress = nullcontext(), progress_of(payload)
    records = evaluate_split(training, "test", {kind: weights[kind]}, progress)
    if records:
        training.reporter.evaluated(records, time.perf_counter() - began, False, "best checkpoint")
    return records


def progress_of(payload: dict[str, Any]) -> Progress:
    """Where a checkpoint was saved, for the records of its evaluation."""
    names = ("epoch", "step", "samples_in_epoch", "samples_seen")
    return Progress(**{name: payload["progress"][name] for name in names})


def evaluate_split(
    training: Training, split: str, weights: dict[str, AbstractContextManager], progress: Progress
) -> list[dict[str, Any]]:
    """`evaluate_all` for one of the held-out sets. progress: where the weights were made."""
    state = training.state
    state.show(progress)
    return evaluate_all(
        state.model,
        weights,
        split,
        loader=training.held_out[split],
        compute_loss=training.seams.compute_loss,
        progress=progress,
        precision=state.precision,
        ctx=training.ctx,
        logger=training.logger,
        consensus=training.consensus,
        summary=training.seams.summary,
    )


def evaluate_only(config: TrainingConfig, ctx: DistributedContext) -> dict[str, Any]:
    """Evaluate a checkpoint, or the weights of init_from, on the held-out sets, and write only eval-<name>.json."""
    logger, is_published = setup_logger(ctx.rank), bool(config.init_from)
    path, seams = Path(config.init_from or config.resume_from), Seams.of(your_model, ctx.device)
    if not is_published and config.resume_from in ("", "auto"):
        path = on_all_ranks(lambda: best_or_latest(config.checkpoint_folder, not config.resume_from), ctx)
    sets = load_data(your_data, config, ctx)
    config = sets.config
    state = on_all_ranks(lambda: create_state(seams, config, ctx, is_resumed=not is_published), ctx)
    progress, total_steps = Progress(), 1
    weights: dict[str, dict[str, Any]] = {"model": {}}
    records: list[dict[str, Any]] = []
    if not is_published:
        payload = load_checkpoint(path, ctx, state.layouts())
        on_all_ranks(lambda: check_evaluation(payload, config), ctx)
        progress, weights = progress_of(payload), {kind: payload[kind] for kind in ("model", "ema") if payload[kind]}
        total_steps = payload["provenance"].get("total_steps", 1)
    state.show(progress, total_steps)
    for split, dataset in sets.held_out.items():
        began = time.perf_counter()
        loader = create_evaluation_dataloader(dataset, config, ctx)
        found, common = [], (split, loader, seams.compute_loss, progress, state.precision, ctx, logger)
        for kind, values in weights.items():
            if values:
                on_all_ranks(partial(state.load_model, payload, kind), ctx)
            found += evaluate_all(state.model, {kind: nullcontext()}, *common, summary=seams.summary)
        log_epoch_summary(logger, found, time.perf_counter() - began, is_best=False)
        records += found
    outcome = {"checkpoint": str(path), "data_dir": config.data_dir, "records": records}
    file = config.run_folder / f"eval-{path.stem}.json"

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_json(file, outcome)

    on_rank_0(write, ctx)
    logger.info("wrote %s", file)
    return outcome


def create_state(seams: Seams, config: TrainingConfig, ctx: DistributedContext, is_resumed: bool = False) -> TrainState:
    """Create the training state at step 0: the model, its optimizer and everything else that a checkpoint stores.

    is_resumed: the weights will come from a checkpoint, not from `init_from`.
    """

    def build(device: torch.device) -> nn.Module:
        torch.manual_seed(config.seed)
        model = seams.create_model(config, device)
        if config.init_from and not is_resumed and device.type != "meta":
            own = seams.initial_weights
            weights = own(config) if own else load_weights(Path(config.init_from))
            given = left_out(model, seams.is_saved)
            weights = complete(weights, {}, model, digests(given), config.init_from)
            take_weights(model, weights, config.init_from, must_be_whole=config.eval_only, given=given)
        if config.activation_checkpointing:
            checkpoint_blocks(model, seams.blocks(model))
        return model

    model = build(ctx.device) if config.sharding == "none" else build_sharded(build, seams.blocks, config, ctx)
    precision = Precision.choose(config, ctx.device, ctx.fast_bf16)
    return TrainState(model, seams, config, precision)


def run_as_script() -> None:
    """Run the command line and exit: 0 completed, 2 user error, 75 preempted and saved, 1 any other error."""
    faulthandler.enable()  # prints the stack if native code crashes
    try:
        sys.exit(main())
    except (Exception, KeyboardInterrupt) as error:
        leave_after(error)


if __name__ == "__main__":
    run_as_script()
