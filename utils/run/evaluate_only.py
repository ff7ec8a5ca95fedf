"""`--eval_only`: the evaluation of a checkpoint, which changes nothing of a run."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from config import TrainingConfig
from utils.checkpoint.format import find_best_or_latest
from utils.data.loader import create_evaluation_dataloader
from utils.data.sets import load_data
from utils.distributed.collectives import on_all_ranks, on_rank_0
from utils.distributed.context import DistributedContext
from utils.files import replace_json
from utils.logger import RANK_0_WARNING, log_epoch_summary, setup_logger
from utils.run.exit import supervise_ranks
from utils.run.resume import check_evaluation, compare_evaluation_data, create_train_state, load_checkpoint
from utils.run.start import check_ranks_equal
from utils.signals import restore_signals
from utils.training.evaluation import Evaluation
from utils.training.hooks import ModelHooks, check_model_module
from utils.training.schedule import Progress


def evaluate_only(
    config: TrainingConfig, ctx: DistributedContext, model_module: ModuleType, data_module: Any
) -> dict[str, Any]:
    """Evaluate a checkpoint, or the weights of init_from, on the held-out sets, and write only eval-<name>.json.

    model_module, data_module: have the functions of model.py and dataset.py. Raises UserError.
    """
    restore_signals()  # an evaluation has nothing to save: a signal ends it
    with supervise_ranks(config.run_folder, config, ctx):  # if a rank hangs or is gone, all end
        check_ranks_equal(config, ctx)
        return _evaluate(config, ctx, model_module, data_module)


def _evaluate(
    config: TrainingConfig, ctx: DistributedContext, model_module: ModuleType, data_module: Any
) -> dict[str, Any]:
    check_model_module(model_module, config, ctx)
    uses_init_from = bool(config.init_from)
    path = Path(config.init_from or config.resume_from)
    if not uses_init_from:
        source = config.checkpoint_folder if config.resume_from in ("", "auto") else path
        path, _ = on_all_ranks(lambda: find_best_or_latest(source, not config.resume_from), ctx)
    sets = load_data(data_module, config, ctx)
    config = sets.config
    hooks = ModelHooks.from_module(model_module, config, ctx.device)
    state = on_all_ranks(lambda: create_train_state(hooks, config, ctx, not uses_init_from, sets.train), ctx)
    progress = Progress()
    payload: dict[str, Any] = {}  # the checkpoint; empty with init_from
    if not uses_init_from:
        payload = load_checkpoint(path, ctx, state.sharded_parameters())
        on_all_ranks(lambda: check_evaluation(payload, config), ctx)
        progress = Progress.from_payload(payload)
    state.notify_progress(progress, payload.get("provenance", {}).get("total_steps", 1))
    evaluation, logger = Evaluation(state.model, hooks, state.precision, ctx, state.parts), setup_logger(ctx.rank)
    for split in sets.held_out if payload else ():
        for line in on_all_ranks(partial(compare_evaluation_data, payload, config, split, sets), ctx):
            logger.log(RANK_0_WARNING, "changed: %s", line)
    records: list[dict[str, Any]] = []
    for split, dataset in sets.held_out.items():
        began = time.perf_counter()
        weights = state.load_evaluated_weights(payload)
        with closing(on_all_ranks(partial(create_evaluation_dataloader, dataset, config, ctx), ctx)) as loader:
            split_records = evaluation.evaluate_all_weights(split, loader, weights, progress)
        log_epoch_summary(logger, split_records, time.perf_counter() - began, is_best=False)
        records += split_records
    kind = list(state.load_evaluated_weights(payload))[-1]
    outcome: dict[str, Any] = {
        "checkpoint": config.init_from or str(path),
        "data_dir": config.data_dir,
        "weights": kind,  # that select the best checkpoint, of those in the records
        "records": records,
    }
    file = config.run_folder / f"eval-{path.stem}.json"

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_json(file, outcome)

    on_rank_0(write, ctx)
    logger.info("wrote %s; the weights that select the best checkpoint are %r", file, kind)
    return outcome
