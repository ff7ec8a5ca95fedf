"""Builds what the training loop uses, from an attempt and the functions of model.py and dataset.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from utils.data.loader import GlobalBatchLoader, create_distributed_dataloader, create_evaluation_dataloader
from utils.data.sampler import MapDataset
from utils.data.sets import load_data
from utils.distributed.collectives import on_all_ranks
from utils.distributed.consensus import Consensus, Vote
from utils.extras.cache.sample_cache import cache_datasets  # extra: cache
from utils.metrics import BestMetric
from utils.report.reporter import Reporter
from utils.report.validation import Validation
from utils.run.checkpoints import Checkpoints
from utils.run.provenance import create_provenance
from utils.run.resume import create_train_state, resume_run
from utils.run.start import Attempt
from utils.training.batchnorm import check_sync_batchnorm
from utils.training.ddp_model import WrappedModel
from utils.training.first_passes import preserve_buffers, run_first_passes
from utils.training.gradient_strategy import wrap_ddp
from utils.training.hooks import ModelHooks, check_model_module
from utils.training.state import TrainState


@dataclass(frozen=True)
class Training:
    """The objects that one attempt of a run works with. Each start and each resume of a run is an attempt."""

    attempt: Attempt
    hooks: ModelHooks
    loader: GlobalBatchLoader
    held_out: dict[str, GlobalBatchLoader]  # by split
    state: TrainState
    model: WrappedModel
    consensus: Consensus
    reporter: Reporter
    checkpoints: Checkpoints
    validation: Validation


def assemble(attempt: Attempt, model_module: ModuleType, data: Any) -> Training:
    """Build everything that an attempt needs, from data to checkpoints, and restore the state that it starts from.

    Args:
        model_module: has the functions of model.py.
        data: has the functions of dataset.py.

    Raises:
        UserError: if a function is missing, or the config, the data, the model or the checkpoint cannot be used.
    """
    ctx = attempt.ctx
    check_model_module(model_module, attempt.config, ctx)
    attempt.run.status.mark_running()  # from here on status.json says "running"

    sets = load_data(data, attempt.config, ctx)
    config = sets.config  # the data have resolved its `auto` fields
    attempt = replace(attempt, config=config)
    hooks = ModelHooks.from_module(model_module, config, ctx.device)
    is_resumed = bool(attempt.run.resume_path)
    create_state = partial(create_train_state, hooks, config, ctx=ctx, is_resumed=is_resumed, train_set=sets.train)
    state = on_all_ranks(create_state, ctx)  # if it fails on one rank, all ranks raise that error

    train_set = sets.train
    held_out = sets.held_out
    train_set, held_out = cache_datasets(train_set, held_out, config, ctx=ctx, logger=attempt.logger)  # extra: cache
    create_loader = partial(create_distributed_dataloader, train_set, config, ctx=ctx, clock=attempt.clock)
    loader, sampler = on_all_ranks(create_loader, ctx)
    attempt.resources.callback(loader.close)
    held_out_loaders = _create_held_out_loaders(attempt, held_out)

    on_all_ranks(partial(check_sync_batchnorm, state.model, sampler, ctx), ctx)
    model = wrap_ddp(state.model, config, ctx)
    best_metric = _run_first_passes(
        attempt, hooks, state, model=model, loader=loader, held_out_loaders=held_out_loaders
    )
    provenance = create_provenance(config=config, ctx=ctx, state=state, sampler=sampler) | sets.provenance
    differences = resume_run(
        attempt,
        state,
        sampler,
        provenance=provenance,
        file_listing=sets.file_listing,
        best_metric=best_metric,
    )

    reporter = Reporter(attempt, state, loader, provenance=provenance, log_images=hooks.log_images)
    attempt.resources.callback(reporter.close)
    checkpoints = Checkpoints(attempt, state, provenance=provenance, before_save=reporter.before_save)
    attempt.resources.callback(checkpoints.close)
    reporter.start(held_out_loaders, differences)
    for part in state.parts:
        attempt.resources.callback(part.close)  # after a failure; a run that ends normally has closed them before
        part.start()

    consensus = Consensus(partial(_vote, attempt, checkpoints), ctx.control_group)
    validation = Validation(
        attempt=attempt,
        state=state,
        hooks=hooks,
        consensus=consensus,
        loaders={"train": loader, **held_out_loaders},
        reporter=reporter,
        checkpoints=checkpoints,
        best_metric=best_metric,
    )
    return Training(
        attempt=attempt,
        hooks=hooks,
        loader=loader,
        held_out=held_out_loaders,
        state=state,
        model=model,
        consensus=consensus,
        reporter=reporter,
        checkpoints=checkpoints,
        validation=validation,
    )


def _vote(attempt: Attempt, checkpoints: Checkpoints) -> Vote:
    """Return what this rank wants now: to stop, to save, or to go on."""
    checkpoints.report_if_written()  # notices the end of a write, after which a save can be due
    return Vote(stop=attempt.is_stop_requested, save=checkpoints.is_save_due())


def _create_held_out_loaders(attempt: Attempt, held_out: dict[str, MapDataset]) -> dict[str, GlobalBatchLoader]:
    """Create the loaders of the held-out sets, by split. They are closed when the attempt ends."""
    ctx = attempt.ctx
    loaders = {}
    for split, dataset in held_out.items():
        create_loader = partial(create_evaluation_dataloader, dataset, attempt.config, ctx=ctx, clock=attempt.clock)
        loaders[split] = on_all_ranks(create_loader, ctx)
        attempt.resources.callback(loaders[split].close)
    return loaders


def _run_first_passes(
    attempt: Attempt,
    hooks: ModelHooks,
    state: TrainState,
    model: WrappedModel,
    loader: GlobalBatchLoader,
    held_out_loaders: dict[str, GlobalBatchLoader],
) -> BestMetric:
    """Run the passes before the first step, which leave the model's buffers as they are, and compile the model.

    Returns:
        The metric that selects the best checkpoint. The passes show which metrics an evaluation reports.
    """
    config = attempt.config
    ctx = attempt.ctx
    with preserve_buffers(state.model):
        best_metric = run_first_passes(
            model=model,
            state=state,
            loader=loader,
            held_out_loaders=held_out_loaders,
            hooks=hooks,
            ctx=ctx,
            best_metric=config.best_metric,
            max_steps=config.max_steps,
        )
        if config.compile != "off":  # extra: compile
            from utils.extras.compile.compiled import compile_all_sizes

            compile_model = partial(
                compile_all_sizes,
                model=model,
                state=state,
                loader=loader,
                held_out_loaders=held_out_loaders,
                hooks=hooks,
                config=config,
            )
            on_all_ranks(compile_model, ctx)
    return best_metric
