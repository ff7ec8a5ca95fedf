"""Train a model on one or more processes without losing, repeating or misweighting a sample.

python train.py                                                  one process
torchrun --standalone --nproc-per-node=2 train.py --epochs 5     two processes on this machine
scripts/launch.sh --epochs 5                                     several machines (see the README)
"""

from __future__ import annotations

from utils.settings.errors import ends_with_a_sentence

with ends_with_a_sentence():  # if a setting of config.py cannot be declared so
    from config import PATHS, TrainingConfig

from utils.run.command_line import check_command_line
from utils.signals import hold

if __name__ == "__main__":
    check_command_line()  # before torch is imported, which takes seconds
    hold()  # stop signals: the run acts on them once it can save

import faulthandler
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

import dataset as your_data
import model as your_model
from ddp_utils import cleanup_distributed, read_launch, setup_distributed, wrap_ddp
from utils.data.loader import GlobalBatchLoader, create_distributed_dataloader, create_evaluation_dataloader
from utils.data.sampler import MicroBatch
from utils.data.sets import load_data
from utils.distributed.collectives import broadcast_json, on_all_ranks
from utils.distributed.consensus import Consensus, Stopped, Vote, is_every
from utils.extras.cache.sample_cache import cached  # extra: cache
from utils.report.reporter import Reporter
from utils.report.validation import Validation
from utils.rng import seed_device
from utils.run.attempt import Attempt
from utils.run.checkpoints import Checkpoints
from utils.run.create import create_state
from utils.run.ending import PREEMPTED, for_torchrun, leave_after, released
from utils.run.evaluate_only import evaluate_only
from utils.run.provenance import provenance_of
from utils.run.resume import resume_run
from utils.run.start import open_run
from utils.training.batchnorm import check_sync_batchnorm
from utils.training.first_passes import first_passes
from utils.training.replicated import Wrapped
from utils.training.seams import Seams
from utils.training.state import TrainState


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, or 75 if stopped and saved (0 under torchrun: 75 fails there)."""
    config = TrainingConfig.from_args(argv)
    try:
        outcome = train(config)
    except Exception as error:
        raise for_torchrun(error) from error.__cause__
    return PREEMPTED if outcome.get("state") == "preempted" and not read_launch().is_under_torchrun else 0


@released()
def train(
    config: TrainingConfig, data: Any = your_data, after_epoch: Callable[[Training], object] | None = None
) -> dict[str, Any]:
    """Train according to the config. Call it on every rank; it may be called again in the same process, also after an
    exception.

    Args:
        data: has the functions of dataset.py.
        after_epoch: called on all ranks at the end of each epoch and of the run. A save need not have its changes.

    Returns:
        The content of summary.json (only `state` if the run was already completed); with `eval_only`, of eval-*.json.

    Raises:
        UserError: if the config or the data cannot be used; the message ends with the fix.
    """
    ctx = setup_distributed(config)
    # `~` is that of rank 0; data may be mounted elsewhere on another node
    config = replace(config, **broadcast_json({name: getattr(config, name) for name in {*PATHS} - {"data_dir"}}, ctx))
    if config.eval_only:
        outcome = evaluate_only(config, ctx, your_model, data)
    else:
        with open_run(config, ctx) as attempt:  # ranks are watched, stop signals count, a failure is in status.json
            if attempt.run.claim.is_completed:
                outcome = {"state": "completed"}
            else:
                outcome = run_training(assemble(attempt, data), after_epoch)
    cleanup_distributed()  # not after a failure: ranks that are gone do not take part
    return outcome


@dataclass(frozen=True)
class Training:
    """The parts of one attempt of a run: each start and each resume is an attempt."""

    attempt: Attempt
    seams: Seams
    loader: GlobalBatchLoader
    held_out: dict[str, GlobalBatchLoader]  # by split
    state: TrainState
    model: Wrapped
    consensus: Consensus
    reporter: Reporter
    checkpoints: Checkpoints
    validation: Validation


def assemble(attempt: Attempt, data: Any = your_data) -> Training:
    """Build everything that an attempt needs, from data to checkpoints, and restore the state it starts from."""
    run, ctx, seams = attempt.run, attempt.ctx, Seams.of(your_model)
    run.begin()
    sets = load_data(data, attempt.config, ctx)
    config = sets.config  # in which the data have resolved `auto` fields
    attempt = replace(attempt, config=config)
    seams = Seams.of(your_model, config, ctx.device)
    is_resumed = bool(run.resume_path)
    state = on_all_ranks(lambda: create_state(seams, config, ctx, is_resumed, sets.train), ctx)
    train_set, held_out = sets.train, sets.held_out
    train_set, held_out = cached(train_set, held_out, config, ctx, attempt.logger)  # extra: cache
    clock = attempt.clock
    loader, sampler = on_all_ranks(lambda: create_distributed_dataloader(train_set, config, ctx, clock), ctx)
    loaders = {
        split: on_all_ranks(partial(create_evaluation_dataloader, held_out_set, config, ctx, clock), ctx)
        for split, held_out_set in held_out.items()
    }
    for each in (loader, *loaders.values()):
        attempt.resources.callback(each.close)
    on_all_ranks(lambda: check_sync_batchnorm(state.model, sampler, ctx), ctx)
    model = wrap_ddp(state.model, config, ctx)
    # before resume_run: the model's buffers, which these passes may change, are then those of the checkpoint
    best = first_passes(model, state, loader, loaders, seams, config, ctx)
    provenance = provenance_of(config, ctx, state, sampler) | sets.content
    differences = resume_run(attempt, state, sampler, provenance, sets.listing, best)
    reporter = Reporter(attempt, state, loader, provenance, seams.log_images)
    attempt.resources.callback(reporter.close)
    checkpoints = Checkpoints(attempt, state, provenance, reporter.before_save)
    attempt.resources.callback(checkpoints.close)
    reporter.start(loaders, differences)  # training begins
    for part in state.parts:
        attempt.resources.callback(part.close)
        part.start()
    every = {"train": loader, **loaders}

    def vote() -> Vote:
        return Vote(stop=attempt.is_asked_to_stop, save=checkpoints.is_due())

    consensus = Consensus(vote, ctx.control)
    validation = Validation(attempt, state, seams, consensus, every, reporter, checkpoints, best=best)
    return Training(
        attempt=attempt,
        seams=seams,
        loader=loader,
        held_out=loaders,
        state=state,
        model=model,
        consensus=consensus,
        reporter=reporter,
        checkpoints=checkpoints,
        validation=validation,
    )


def run_training(training: Training, after_epoch: Callable[[Training], object] | None = None) -> dict[str, Any]:
    """Train until the run ends or the ranks agree to stop. Returns the content of summary.json."""
    attempt, schedule, checkpoints = training.attempt, training.state.schedule, training.checkpoints
    config, ending, test_records = attempt.config, "completed", []
    try:
        if attempt.run.resume_path:
            checkpoints.save(now=True)  # does nothing if the checkpoint is already in this run's folder
            if schedule.is_at_end:
                attempt.logger.info("nothing is left to train; to train longer, increase --epochs or --max_steps")
        training.consensus.flush()  # raises Stopped if a rank was asked to stop before the first step
        while not schedule.is_finished:  # by epochs, max_steps or patience
            train_one_epoch(training)
            if after_epoch:
                checkpoints.finish_copy()  # it may change the weights
                after_epoch(training)
            if schedule.is_at_end or is_every(config.save_every, schedule.progress.epoch_number):
                # before the evaluation, so that a failure there loses no training; a resume repeats the evaluation
                checkpoints.save(now=schedule.is_at_end)
            if schedule.is_evaluation_due:
                validate(training)
            schedule.end_epoch()
            if schedule.is_patience_over:
                checkpoints.save(now=True)
        if schedule.is_patience_over:
            text = "patience: no improvement in %d evaluations, so the run ends; to train longer, increase --patience"
            attempt.logger.info(text, config.patience)
        checkpoints.finish_writing()
        test_records = training.validation.test_best()
    except Stopped:
        ending = "preempted"
        checkpoints.save_and_finish()  # saves nothing after the last step, which is saved before the test
    except BaseException:
        checkpoints.finish_begun()  # what this failure need not cost
        raise
    for part in training.state.parts:
        part.close()
    return training.reporter.finish(ending, training.validation.best[0], test_records)


def train_one_epoch(training: Training) -> None:
    """Train to the end of the epoch, or of the run. Raises Stopped between two steps if the ranks agree to stop."""
    config, clock, state, loader = training.attempt.config, training.attempt.clock, training.state, training.loader
    schedule, progress = state.schedule, state.progress
    consensus, checkpoints, reporter = training.consensus, training.checkpoints, training.reporter
    training.model.train()
    state.sums.running_stats.begin_epoch()
    stream = loader.micro_batches(progress.epoch, progress.samples_in_epoch)
    for part in state.parts:
        stream = part.micro_batches(stream)
    while not (schedule.is_epoch_complete or schedule.is_at_end):  # max_steps
        if schedule.is_evaluation_due:  # by steps
            leave_steps(training)
            validate(training)  # here, so that a resume at this step evaluates too
            if schedule.is_patience_over:
                return  # run_training ends the run: no evaluation is due, and the epoch does not count as complete
        clock.begin_step(progress.step + 1)
        state.show(progress)  # what functions of model.py may read
        samples, indices = compute_gradient(training, stream)  # forward and backward
        clock.enter("update")
        checkpoints.finish_copy()  # before the weights change
        state.update_if_finite(samples)  # divides by the count, clips, steps; if not finite, all ranks skip it
        state.advance(samples)
        reporter.step_done(samples, indices)
        if reporter.is_due:
            reporter.log()
        # the vote of an earlier step, whether to save; it raises Stopped if a rank was asked to stop
        if consensus.step() or is_every(config.save_every_steps, progress.step):
            consensus.flush()  # an earlier vote must not count after a save
            checkpoints.save()
    leave_steps(training)


def compute_gradient(training: Training, stream: Iterable[MicroBatch]) -> tuple[int, list[int]]:
    """This rank's passes of a step. Returns the samples in the global batch, and the indices of this rank's."""
    attempt, state, model, indices = training.attempt, training.state, training.model, []
    for micro_batch in stream:  # padding with zero gradient on an idle rank: DDP needs every rank
        is_padding, is_last_micro_batch = micro_batch.is_padding, micro_batch.is_last
        with model.accumulating(micro_batch):
            seed_device(attempt.ctx.device, "step", attempt.config.seed, state.progress.step, micro_batch.number)
            with state.precision.autocast():
                metrics = training.seams.compute_loss(model, micro_batch.batch)
            metrics = state.divide_loss(metrics, micro_batch.number)
            if not is_padding:
                state.sums.add(metrics, micro_batch)
                indices += micro_batch.indices
            if is_last_micro_batch:
                state.sums.start_reduce(micro_batch)  # overlaps the backward pass
            attempt.clock.enter("backward")
            state.backward(metrics["loss"][0], is_padding)  # of the sum; the count [1] divides in the update
        if is_last_micro_batch:
            return micro_batch.samples, indices
    raise RuntimeError("the stream of micro-batches ended within a step; this is a bug in the loader")


def leave_steps(training: Training) -> None:
    """For an evaluation, before which workers keep the batches that they have fetched, or for the end of an epoch."""
    training.attempt.clock.leave_steps()
    training.consensus.flush()  # an earlier vote must not count after it
    training.reporter.catch_up()


def validate(training: Training) -> None:
    """Evaluate the validation set, if there is one, and keep the best checkpoint."""
    training.validation.validate()
    training.model.train()


def run_as_script() -> None:
    """Run the command line and exit: 0 completed, 2 user error, 75 preempted and saved (0 under torchrun), 1 else."""
    faulthandler.enable()  # prints the stack if native code crashes
    try:
        sys.exit(main())
    except (Exception, KeyboardInterrupt) as error:
        leave_after(error)


if __name__ == "__main__":
    run_as_script()
