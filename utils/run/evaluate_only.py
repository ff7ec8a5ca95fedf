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
from utils.run.resume import compare_evaluation_data, create_train_state, load_checkpoint, require_same_model_and_data
from utils.run.start import check_ranks_equal
from utils.signals import restore_signals
from utils.training.evaluation import Evaluation
from utils.training.hooks import ModelHooks, check_model_module
from utils.training.schedule import Progress


def evaluate_only(
    config: TrainingConfig, ctx: DistributedContext, model_module: ModuleType, data_module: Any
) -> dict[str, Any]:
    """Evaluate a checkpoint, or the weights of init_from, on the held-out sets, and write only eval-<name>.json.

    Args:
        model_module: has the functions of model.py.
        data_module: has the functions of dataset.py.

    Returns:
        The content of eval-<name>.json.

    Raises:
        UserError: if there is no checkpoint, or it does not fit the model or the data.
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
        if config.resume_from in ("", "auto"):
            path = config.checkpoint_folder
        # best.pt is evaluated if no --resume_from is given: auto, or another folder, means the latest checkpoint
        find_checkpoint = partial(find_best_or_latest, path, prefer_best=not config.resume_from)
        path, _notes = on_all_ranks(find_checkpoint, ctx)

    sets = load_data(data_module, config, ctx)
    config = sets.config
    hooks = ModelHooks.from_module(model_module, config, ctx.device)
    create_state = partial(
        create_train_state,
        hooks,
        config,
        ctx=ctx,
        is_resumed=not uses_init_from,
        train_set=sets.train,
    )
    state = on_all_ranks(create_state, ctx)
    progress = Progress()
    payload: dict[str, Any] = {}  # the checkpoint; empty with init_from
    if not uses_init_from:
        payload = load_checkpoint(path, ctx, state.sharded_parameters())
        on_all_ranks(partial(require_same_model_and_data, payload, config), ctx)
        progress = Progress.from_payload(payload)
    # parts see the length of the run, which is unknown with init_from and in checkpoints of earlier versions
    total_steps = payload.get("provenance", {}).get("total_steps", 1)
    state.notify_progress(progress, total_steps)

    evaluation = Evaluation(state.model, hooks, state.precision, ctx=ctx, parts=state.parts)
    logger = setup_logger(ctx.rank)
    if payload:
        for split in sets.held_out:
            compare = partial(compare_evaluation_data, payload, config, split=split, sets=sets)
            for line in on_all_ranks(compare, ctx):
                logger.log(RANK_0_WARNING, "changed: %s", line)
    records: list[dict[str, Any]] = []
    for split, dataset in sets.held_out.items():
        began = time.perf_counter()
        weights = state.saved_weight_contexts(payload)
        loader = on_all_ranks(partial(create_evaluation_dataloader, dataset, config, ctx), ctx)
        with closing(loader):
            split_records = evaluation.evaluate_all_weights(split, loader, weights=weights, progress=progress)
        seconds = time.perf_counter() - began
        log_epoch_summary(logger, split_records, seconds, is_best=False)
        records += split_records

    # the last of several kinds of weights selects the best checkpoint
    kind = list(state.saved_weight_contexts(payload))[-1]
    outcome: dict[str, Any] = {
        "checkpoint": config.init_from or str(path),
        "data_dir": config.data_dir,
        "weights": kind,
        "records": records,
    }
    file = config.run_folder / f"eval-{path.stem}.json"

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_json(file, outcome)

    on_rank_0(write, ctx)
    logger.info("The results are in %s. The weights that select the best checkpoint are %r.", file, kind)
    return outcome
