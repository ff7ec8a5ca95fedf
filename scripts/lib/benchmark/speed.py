# extra: benchmark
"""Measure the speed of train.py's loop: as given, with other flags, without communication, and by number of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from config import TrainingConfig
from ddp_utils import DistributedContext
from lib.benchmark.in_process_run import InProcessRun
from lib.benchmark.turns import Candidate, take_turns
from utils.distributed.collectives import all_gather_json
from utils.settings.errors import UserError
from utils.table import format_table
from utils.training.step_sums import StepSums

AS_GIVEN, WITHOUT_COMMUNICATION = "as given", "without communication"


def measure_speed(
    options: Any, config: TrainingConfig, ctx: DistributedContext, folder: Path, print_line: Callable[[str], object]
) -> dict[str, Any]:
    """Time a step as given, and with each of `--against` FLAGS, in turns. Print a table, and return its figures."""
    configs, memory, candidates = create_configs(options.against, config, ctx), {}, []
    runs: dict[str, InProcessRun] = {}
    waited: Counter[str] = Counter()
    for name, variant in configs.items():
        before = reset_peak_memory(ctx.device)
        runs[name] = create_warm_run(variant, ctx, folder / f"run-{len(runs)}", options.steps)
        memory[name] = torch.cuda.max_memory_allocated() - before if ctx.device.type == "cuda" else 0

        def run_epoch(run: InProcessRun = runs[name], name: str = name) -> None:
            before = run.seconds_by_phase()["data"]
            with disable_communication(run, ctx) if name == WITHOUT_COMMUNICATION else contextlib.nullcontext():
                run.train_epoch()
            waited[name] += run.seconds_by_phase()["data"] - before

        candidates.append(Candidate(name, run_epoch))
    take_turns(candidates, options.rounds, ctx.device, print_line)
    for run in runs.values():
        run.close()
    rows = {}
    for variant in candidates:
        rows[variant.name] = {
            "step_s": variant.seconds() / options.steps,
            "wall_ratio": variant.ratio(candidates[0]),
            "control_wall": variant.control(),
            "cpu_ratio": variant.ratio(candidates[0], "cpu"),
            "control_cpu": variant.control("cpu"),
            "samples_per_s": runs[variant.name].samples_per_epoch / variant.seconds(),
            "data_wait": waited[variant.name] / sum(variant.wall),
            "memory_bytes": memory[variant.name],
            "warning": variant.warning("wall", "cpu"),
        }
    print_line(format_rows(rows))
    return {"rows": rows}


def create_configs(against: list[str], config: TrainingConfig, ctx: DistributedContext) -> dict[str, TrainingConfig]:
    """Return the configs that are measured, by name."""
    configs = {AS_GIVEN: config}
    configs |= {f"with {words}": TrainingConfig.from_args(shlex.split(words), config.to_dict()) for words in against}
    # FSDP communicates within the passes, and exact sums hold what other ranks have to add
    can_skip_communication = ctx.world_size > 1
    can_skip_communication = can_skip_communication and config.sharding == "none"  # extra: sharding
    can_skip_communication = can_skip_communication and config.reduction != "exact"  # extra: exact
    if can_skip_communication:
        # the ranks diverge, so that no checkpoint may be saved
        configs[WITHOUT_COMMUNICATION] = dataclasses.replace(config, save_every_steps=0, save_every_minutes=0.0)
    return configs


def reset_peak_memory(device: torch.device) -> int:
    """Measure the peak from here on, and return the bytes in use now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def create_warm_run(config: TrainingConfig, ctx: DistributedContext, folder: Path, steps: int) -> InProcessRun:
    """Return a run after its first epoch, when workers are started and caches are filled."""
    try:
        run = InProcessRun(config, ctx, folder, steps)
    except UserError as error:
        if "dataset_size" in str(error):  # the user did not set it
            raise UserError(
                f"--steps {steps} needs more samples than the training set has. Give fewer steps."
            ) from None
        raise
    run.train_epoch()
    return run


@contextlib.contextmanager
def disable_communication(run: InProcessRun, ctx: DistributedContext) -> Iterator[None]:
    """Leave out the all-reduces of gradients, of sums and of running statistics."""
    skip_reduce = mock.patch.object(StepSums, "start_reduce", lambda sums, micro_batch: None)
    with run.model.no_sync(), skip_reduce:
        yield
    all_gather_json(None, ctx)  # all ranks wait for the slowest one


def format_rows(rows: dict[str, dict[str, Any]]) -> str:
    lines = [["", "step", "wall", "control", "CPU", "control", "samples/s", "data wait", "memory", ""]]
    for name, row in rows.items():
        ratios = [f"{row[key]:.3f}" for key in ("wall_ratio", "control_wall", "cpu_ratio", "control_cpu")]
        memory = f"{row['memory_bytes'] / 2**20:,.0f} MiB" if row["memory_bytes"] else "-"
        rate = [f"{row['samples_per_s']:,.0f}", f"{row['data_wait']:.1%}", memory]
        lines.append([name, f"{1e3 * row['step_s']:.2f} ms", *ratios, *rate, row["warning"]])
    return format_table(lines, range(1, 9))


# ---- --json: one report of launches on several numbers of ranks ----


def read_report(file: Path | None, flags: list[str]) -> dict[str, Any]:
    """Return the report in FILE, or a new one. Raises UserError if the report was measured with other flags."""
    if not file or not file.exists():
        return {"flags": flags, "measured": []}
    try:
        report = {name: json.loads(file.read_text())[name] for name in ("flags", "measured")}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--json {file} exists, but is not a report of this script. Give another name.") from None
    if report["flags"] != flags:
        words = " ".join(report["flags"]) or "none"
        raise UserError(f"--json {file} was measured with other flags ({words}). Give another name.")
    return report


def add_launch(report: dict[str, Any], new_launch: dict[str, Any]) -> None:
    """Put a launch into the report. It replaces an earlier launch on as many ranks."""
    other_launches = [launch for launch in report["measured"] if launch["ranks"] != new_launch["ranks"]]
    report["measured"] = sorted([*other_launches, new_launch], key=lambda launch: launch["ranks"])


def format_scaling(report: dict[str, Any]) -> str:
    """Format a line for each number of ranks.

    The efficiency is the speed of a rank, relative to that of a rank in the launch with the fewest ranks.
    """
    lines = [["ranks", "samples/s", "efficiency", "step", "data wait", "communication"]]
    for launch in report["measured"]:
        row, first = launch["rows"][AS_GIVEN], report["measured"][0]
        base = first["rows"][AS_GIVEN]["samples_per_s"] / first["ranks"]
        without_communication = launch["rows"].get(WITHOUT_COMMUNICATION)
        share = f"{max(0.0, 1 - without_communication['step_s'] / row['step_s']):.1%}" if without_communication else "-"
        rate = [f"{row['samples_per_s']:,.0f}", f"{row['samples_per_s'] / launch['ranks'] / base:.1%}"]
        lines.append([launch["ranks"], *rate, f"{1e3 * row['step_s']:,.2f} ms", f"{row['data_wait']:.1%}", share])
    return format_table(lines, range(6))
