# extra: benchmark and template
"""The baseline of an accuracy curve: tests/plain_loop.py with a run's flags, written as a run that runs.py can plot."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dataset as fork_dataset
import model as fork_model
from comparison import loops
from config import TrainingConfig
from ddp_utils import DistributedContext
from utils.data.loader import create_distributed_dataloader, create_evaluation_dataloader
from utils.data.sets import load_data
from utils.files import replace_json
from utils.settings.errors import UserError
from utils.training.evaluation import Evaluation
from utils.training.hooks import ModelHooks
from utils.training.precision import Precision


def measure(
    options: argparse.Namespace,
    config: TrainingConfig,
    ctx: DistributedContext,
    folder: Path,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Train in this process, evaluate after each epoch, write config.json, metrics.jsonl and status.json to run_dir."""
    run, records = config.run_folder, []
    if run.exists():
        raise UserError(f"run_dir={run}: exists; give a new folder")
    sets = load_data(fork_dataset, config, ctx)
    precision = Precision.choose(
        use_amp=config.use_amp, amp_dtype=config.amp_dtype, device=ctx.device, fast_bf16=ctx.fast_bf16
    )
    if not sets.held_out:
        raise UserError("dataset: has neither a val nor a test set, so there is no curve; create one in create_dataset")
    accumulation = config.micro_batches_per_step(1)
    config = dataclasses.replace(sets.config, grad_accum_steps=accumulation, global_batch_size=0)
    steps_per_epoch = create_distributed_dataloader(sets.train, config, ctx)[1].steps_per_epoch
    held_out = create_evaluation_dataloader(next(iter(sets.held_out.values())), config, ctx)
    run.mkdir(parents=True)
    replace_json(run / "config.json", config.to_dict())
    began = time.monotonic()
    for step, (model, _, _) in enumerate(loops.plain(config, ctx, precision, sets.train), start=1):
        epoch, rest = divmod(step, steps_per_epoch)
        if not rest:
            means = Evaluation(model, ModelHooks.from_module(fork_model, config, ctx.device), precision, ctx).evaluate(
                held_out
            )
            model.train()
            records.append({"kind": "eval", "step": step, "epoch": epoch, **means})
            (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            say(f"epoch {epoch}, {time.monotonic() - began:.0f} s: {json.dumps(means)}")
        replace_json(run / "status.json", {"state": "running", "step": step, "epoch": epoch}, fsync=False)
    held_out.close()
    replace_json(run / "status.json", {"state": "completed", "step": step, "epoch": epoch})
    return {"records": records}
