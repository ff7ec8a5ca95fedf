"""Builds what the training loop uses, from an attempt and the functions of model.py and dataset.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from utils.data.loader import GlobalBatchLoader, create_distributed_dataloader, create_evaluation_dataloader
from utils.data.sets import load_data
from utils.distributed.collectives import on_all_ranks
from utils.distributed.consensus import Consensus, Vote
from utils.extras.cache.sample_cache import cache_datasets  # extra: cache
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
    """What one attempt of a run works with: each start and each resume is an attempt."""

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
    run = attempt.run
    clock = attempt.clock
    check_model_module(model_module, attempt.config, ctx)
    run.status.mark_running()  # from here on status.json says "running"

    sets = load_data(data, attempt.config, ctx)
    config = sets.config  # in which the data have resolved `auto` fields
    attempt = replace(attempt, config=config)
    hooks = ModelHooks.from_module(model_module, config, ctx.device)
    is_resumed = bool(run.resume_path)
    state = on_all_ranks(lambda: create_train_state(hooks, config, ctx, is_resumed, sets.train), ctx)

    train_set, held_out_sets = sets.train, sets.held_out
    train_set, held_out_sets = cache_datasets(train_set, held_out_sets, config, ctx, attempt.logger)  # extra: cache
    loader, sampler = on_all_ranks(lambda: create_distributed_dataloader(train_set, config, ctx, clock), ctx)
    attempt.resources.callback(loader.close)
    held_out = {}
    for split, held_out_set in held_out_sets.items():
        create_loader = partial(create_evaluation_dataloader, held_out_set, config, ctx, clock)
        held_out[split] = on_all_ranks(create_loader, ctx)
        attempt.resources.callback(held_out[split].close)

    on_all_ranks(lambda: check_sync_batchnorm(state.model, sampler, ctx), ctx)
    model = wrap_ddp(state.model, config, ctx)
    with preserve_buffers(state.model):
        metric_and_sign = run_first_passes(
            model,
            state,
            loader,
            held_out,
            hooks,
            ctx,
            best_metric=config.best_metric,
            max_steps=config.max_steps,
        )
        if config.compile != "off":  # extra: compile
            from utils.extras.compile.compiled import compile_all_sizes

            on_all_ranks(lambda: compile_all_sizes(model, state, loader, held_out, hooks, config), ctx)
    provenance = create_provenance(config, ctx, state, sampler) | sets.provenance
    differences = resume_run(attempt, state, sampler, provenance, sets.file_listing, metric_and_sign)

    reporter = Reporter(attempt, state, loader, provenance, hooks.log_images)
    attempt.resources.callback(reporter.close)
    checkpoints = Checkpoints(attempt, state, provenance, reporter.before_save)
    attempt.resources.callback(checkpoints.close)
    reporter.start(held_out, differences)
    for part in state.parts:
        attempt.resources.callback(part.close)
        part.start()

    def vote() -> Vote:
        return Vote(stop=attempt.is_stop_requested, save=checkpoints.is_save_due())

    consensus = Consensus(vote, ctx.control_group)
    loaders = {"train": loader, **held_out}
    validation = Validation(attempt, state, hooks, consensus, loaders, reporter, checkpoints, metric_and_sign)
    return Training(
        attempt=attempt,
        hooks=hooks,
        loader=loader,
        held_out=held_out,
        state=state,
        model=model,
        consensus=consensus,
        reporter=reporter,
        checkpoints=checkpoints,
        validation=validation,
    )
