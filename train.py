"""Train a model on one or more processes without losing, repeating or misweighting a sample.

python train.py                                                  one process
torchrun --standalone --nproc-per-node=2 train.py --epochs 5     two processes on this machine
"""

from __future__ import annotations

from utils.settings.errors import exit_on_user_error

with exit_on_user_error():  # a setting that config.py declares wrongly ends the program with one sentence
    from config import PATH_SETTINGS, TrainingConfig

from utils.run.command_line import check_command_line
from utils.signals import catch_stop_signals

if __name__ == "__main__":
    check_command_line()  # before torch is imported, which takes seconds
    catch_stop_signals()  # stop signals: the run acts on them once it can save

import faulthandler
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

import dataset as your_data
import model as your_model
from ddp_utils import DistributedContext, cleanup_distributed, read_launch, setup_distributed
from utils.assembly import Training, assemble
from utils.data.sampler import MicroBatch
from utils.distributed.collectives import broadcast_json
from utils.distributed.consensus import Stopped, is_every
from utils.rng import seed_device
from utils.run.evaluate_only import evaluate_only
from utils.run.exit import EXIT_PREEMPTED, clean_up_on_exit, exit_with_error, prepare_for_torchrun
from utils.run.start import open_run


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0, or 75 if the run was stopped and saved. Under torchrun, which takes 75 for a failure, it is 0.
    """
    config = TrainingConfig.from_args(argv)
    try:
        outcome = train(config)
    except Exception as error:
        raise prepare_for_torchrun(error) from error.__cause__  # "from" keeps the cause of the error
    is_preempted = outcome.get("state") == "preempted"
    if is_preempted and not read_launch().is_under_torchrun:
        return EXIT_PREEMPTED
    return 0


@clean_up_on_exit()
def train(
    config: TrainingConfig, data: Any = your_data, after_epoch: Callable[[Training], object] | None = None
) -> dict[str, Any]:
    """Train according to the config. Call this on every rank.

    It may be called again in the same process, also after an exception.

    Args:
        data: a module or an object with the functions of dataset.py.
        after_epoch: a function that all ranks call at the end of each epoch and of the run. A run that resumes from the
            end of an epoch calls it again for that epoch, since the checkpoint may have been saved before the call.

    Returns:
        The content of summary.json. It has only `state` if the run was already completed. With `eval_only`, the content
        of eval-*.json.

    Raises:
        UserError: if the config or the data cannot be used. The message ends with the fix.
    """
    ctx = setup_distributed(config)
    config = broadcast_paths(config, ctx)
    if config.eval_only:
        outcome = evaluate_only(config, ctx, model_module=your_model, data_module=data)
    else:
        # open_run watches the ranks, turns stop signals into a flag, and writes a failure to status.json
        with open_run(config, ctx) as attempt:
            if attempt.run.start_decision.is_completed:
                outcome = {"state": "completed"}
            else:
                outcome = run_training(assemble(attempt, your_model, data), after_epoch)
    cleanup_distributed()  # not after a failure: its barrier would wait for ranks that are gone
    return outcome


def broadcast_paths(config: TrainingConfig, ctx: DistributedContext) -> TrainingConfig:
    """Return the config with the paths of rank 0, since `~` may be another folder on another node.

    `data_dir` stays as it is, since data may be mounted elsewhere on another node.
    """
    paths = {name: getattr(config, name) for name in PATH_SETTINGS if name != "data_dir"}
    return replace(config, **broadcast_json(paths, ctx))


def run_training(training: Training, after_epoch: Callable[[Training], object] | None = None) -> dict[str, Any]:
    """Train until the run ends or the ranks agree to stop. Returns the content of summary.json."""
    checkpoints = training.checkpoints
    final_state = "completed"
    test_records = []
    try:
        train_epochs(training, after_epoch)
        checkpoints.finish_writing()
        test_records = training.validation.evaluate_best_on_test()
    except Stopped:
        final_state = "preempted"
        # a stop during the test saves nothing: the last step is saved, and the model has the weights of the best one
        checkpoints.save_and_wait()
    except BaseException:
        checkpoints.wait_briefly_for_write()  # so that a checkpoint that was begun is still completed
        raise
    for part in training.state.parts:  # before the summary, since the profiler logs here
        part.close()
    best_metric = training.validation.best_metric.name
    return training.reporter.finish(final_state, best_metric, test_records)


def train_epochs(training: Training, after_epoch: Callable[[Training], object] | None) -> None:
    """Train, evaluate and save until the run ends: by epochs, max_steps or patience. Raises Stopped."""
    config = training.attempt.config
    logger = training.attempt.logger
    schedule = training.state.schedule
    checkpoints = training.checkpoints
    if training.attempt.run.resume_path:
        checkpoints.save(blocking=True)  # a run continued from another folder gets a first checkpoint of its own
        if schedule.is_at_end:
            logger.info("Nothing is left to train. To train longer, increase --epochs or --max_steps.")
    training.consensus.vote_and_wait()  # raises Stopped if a rank was asked to stop before the first step
    while not schedule.is_finished:
        train_one_epoch(training)
        if after_epoch:
            checkpoints.finish_copy()  # after_epoch may change the weights
            after_epoch(training)
        if schedule.is_at_end or is_every(config.save_every, schedule.progress.epoch_number):
            # before the evaluation, so that a failure there loses no training; a resume repeats the evaluation
            checkpoints.save(blocking=schedule.is_at_end)
        if schedule.is_evaluation_due:
            validate(training)
        schedule.end_epoch()
        if schedule.is_patience_over:
            checkpoints.save(blocking=True)
    if schedule.is_patience_over:
        text = "The run ends, since %d evaluations had no improvement. To train longer, increase --patience."
        logger.info(text, config.patience)


def train_one_epoch(training: Training) -> None:
    """Train to the end of the epoch, or of the run. Raises Stopped between two steps if the ranks agree to stop."""
    config = training.attempt.config
    clock = training.attempt.clock
    state = training.state
    schedule = state.schedule
    progress = state.progress
    checkpoints = training.checkpoints
    reporter = training.reporter

    training.model.train()
    state.step_sums.running_stats.begin_epoch()
    stream = training.loader.micro_batches(progress.epoch, progress.samples_in_epoch)
    for part in state.parts:
        stream = part.micro_batches(stream)
    while not (schedule.is_epoch_complete or schedule.is_at_end):  # max_steps may end the run within an epoch
        if schedule.is_evaluation_due:  # within an epoch, by steps; train_epochs evaluates at its end
            pause_steps(training)
            validate(training)  # here, so that a resume at this step evaluates too
            if schedule.is_patience_over:
                return  # train_epochs ends the run
        clock.begin_step(progress.step + 1)
        state.notify_progress(progress)  # shows it to the parts, and to functions of model.py that ask for it
        samples, own_indices = compute_gradient(training, stream)  # forward and backward
        clock.enter_phase("update")
        checkpoints.finish_copy()  # before the weights change
        state.update_if_finite(samples)  # divides by the count, clips, steps; if not finite, all ranks skip it
        state.advance(samples)
        reporter.record_step(samples, own_indices)
        if reporter.is_log_due:
            reporter.begin_log_point()
        has_voted_to_save = training.consensus.step()  # raises Stopped if a rank was asked to stop
        if has_voted_to_save or is_every(config.save_every_steps, progress.step):
            training.consensus.vote_and_wait()  # a vote under way would ask for a second save
            checkpoints.save()
    pause_steps(training)


def compute_gradient(training: Training, micro_batches: Iterator[MicroBatch]) -> tuple[int, list[int]]:
    """Compute this rank's micro-batches of one step. The last backward pass sums the gradient over the ranks.

    The next call continues the stream where this one stopped.

    Returns:
        The number of samples in the global batch, and the indices of those of this rank.
    """
    attempt = training.attempt
    state = training.state
    own_indices: list[int] = []
    for micro_batch in micro_batches:
        with training.model.accumulate(micro_batch):
            seed_device(attempt.ctx.device, "step", attempt.config.seed, state.progress.step, micro_batch.number)
            with state.precision.autocast():
                metrics = training.hooks.compute_loss(training.model, micro_batch.batch)
            metrics = state.after_forward(metrics, micro_batch.number)
            if not micro_batch.is_padding:  # an idle rank gets padding, since DDP waits for every rank
                state.step_sums.add(metrics, micro_batch)
                own_indices += micro_batch.indices
            if micro_batch.is_last:
                state.step_sums.start_reduce(micro_batch)  # overlaps the backward pass
            attempt.clock.enter_phase("backward")
            loss_sum = metrics["loss"][0]  # the update divides by the count of the global batch
            state.backward(loss_sum, micro_batch.is_padding)
        if micro_batch.is_last:
            return micro_batch.samples_in_step, own_indices
    raise RuntimeError("The stream of micro-batches ended within a step. This is a bug in the loader.")


def pause_steps(training: Training) -> None:
    """Vote, and write the train record that is due, before an evaluation or at the end of an epoch.

    Raises Stopped if a rank was asked to stop.
    """
    training.attempt.clock.pause_steps()
    training.consensus.vote_and_wait()  # a vote from before the pause must not count after it
    training.reporter.finish_log_point()


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
        exit_with_error(error)


if __name__ == "__main__":
    run_as_script()
