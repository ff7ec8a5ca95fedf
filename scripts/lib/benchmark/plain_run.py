"""The baseline of an accuracy curve: tests/plain_loop.py with a run's flags, written as a run that runs.py can plot."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dataset as fork_dataset
from config import TrainingConfig, UserError
from ddp_utils import DistributedContext
from lib.benchmark import loops
from model import compute_loss
from utils.data.sets import load_data
from utils.files import replace_json
from utils.metrics import MetricTracker, check_metrics
from utils.training.precision import Precision


def measure(
    options: argparse.Namespace,
    config: TrainingConfig,
    ctx: DistributedContext,
    folder: Path,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Train in this process, evaluate after each epoch, write config.json, metrics.jsonl and status.json to run_dir."""
    precision = Precision.choose(config, ctx.device, ctx.fast_bf16)
    sets = load_data(fork_dataset, config, ctx)
    config, held_out = sets.config.plain(), loops.RankSubset(next(iter(sets.held_out.values())), ctx)
    steps_per_epoch = -(-len(sets.train) // (config.batch_size * config.grad_accum_steps))
    run, records = Path(config.run_dir), []
    if run.exists():
        raise UserError(f"run_dir={run}: exists; give a new folder")
    run.mkdir(parents=True)
    replace_json(run / "config.json", vars(config))
    began = time.monotonic()
    for step, (model, _, _) in enumerate(loops.plain(config, ctx, precision, sets.train), start=1):
        if step % steps_per_epoch == 0:
            record = {"kind": "eval", "step": step, "epoch": step // steps_per_epoch - 1}
            record |= evaluate(model, held_out, config, precision) | {"wall_s": time.monotonic() - began}
            records.append(record)
            (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
            replace_json(run / "status.json", {"state": "running", "step": step, "epoch": step // steps_per_epoch})
            say(" ".join(f"{name} {value}" for name, value in record.items()))
    replace_json(run / "status.json", {"state": "completed", "step": step, "epoch": config.epochs})
    return {"records": records}


@torch.no_grad()
def evaluate(
    model: nn.Module, data: loops.RankSubset, config: TrainingConfig, precision: Precision
) -> dict[str, float]:
    """The means of loss and metrics over a set."""
    fetch = getattr(data, "__getitems__", lambda chosen: [data[k] for k in chosen])
    transform = getattr(data, "device_transform", lambda batch, *_: batch)
    tracker = MetricTracker()
    model.eval()
    for chosen in torch.arange(len(data)).split(config.batch_size):
        batch = transform(data.collate(fetch(chosen.tolist())), config.seed, 0, chosen)
        with precision.autocast():
            metrics = compute_loss(model, batch)
        if not tracker.layout:
            tracker.lay_out(check_metrics(metrics))
        tracker.update(metrics)
    model.train()
    return tracker.means()
