# extra: benchmark
"""The speed of train.py's loop: as given, with other flags, without communication, and by number of ranks."""

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
from lib.benchmark.ours import Ours
from lib.benchmark.turns import Candidate, take_turns
from utils.distributed.collectives import all_gather_json
from utils.settings.errors import UserError
from utils.table import format_table
from utils.training.step_sums import StepSums

GIVEN, ALONE = "as given", "without communication"


def measure(
    options: Any, config: TrainingConfig, ctx: DistributedContext, folder: Path, say: Callable[[str], object]
) -> dict[str, Any]:
    """Time a step as given, and with each of `--against` FLAGS, in turns. Prints a table, and returns its figures."""
    configs, memory, candidates = configs_of(options.against, config, ctx), {}, []
    runs: dict[str, Ours] = {}
    waited: Counter[str] = Counter()
    for name, variant in configs.items():
        before = start_memory(ctx.device)
        runs[name] = warm_run(variant, ctx, folder / f"run-{len(runs)}", options.steps)
        memory[name] = torch.cuda.max_memory_allocated() - before if ctx.device.type == "cuda" else 0

        def epoch(run: Ours = runs[name], name: str = name) -> None:
            before = run.spent()["data"]
            with without_communication(run, ctx) if name == ALONE else contextlib.nullcontext():
                run.epoch()
            waited[name] += run.spent()["data"] - before

        candidates.append(Candidate(name, epoch))
    take_turns(candidates, options.rounds, ctx.device, say)
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
            "samples_per_s": runs[variant.name].samples / variant.seconds(),
            "data_wait": waited[variant.name] / sum(variant.wall),
            "memory_bytes": memory[variant.name],
            "warning": variant.warning("wall", "cpu"),
        }
    say(table(rows))
    return {"rows": rows}


def configs_of(against: list[str], config: TrainingConfig, ctx: DistributedContext) -> dict[str, TrainingConfig]:
    """What is measured, by name."""
    configs = {GIVEN: config}
    configs |= {f"with {words}": TrainingConfig.from_args(shlex.split(words), config.to_dict()) for words in against}
    # FSDP communicates within the passes, and exact sums hold what others have to add
    is_alone = ctx.world_size > 1
    is_alone = is_alone and config.sharding == "none"  # extra: sharding
    is_alone = is_alone and config.reduction != "exact"  # extra: exact
    if is_alone:
        configs[ALONE] = dataclasses.replace(config, save_every_steps=0, save_every_minutes=0.0)  # the ranks diverge
    return configs


def start_memory(device: torch.device) -> int:
    """Bytes in use; the peak is measured from here on."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def warm_run(config: TrainingConfig, ctx: DistributedContext, folder: Path, steps: int) -> Ours:
    """A run after its first epoch: workers are started, caches filled."""
    try:
        ours = Ours(config, ctx, folder, steps)
    except UserError as error:
        if str(error).startswith("dataset_size="):  # the user did not set it
            raise UserError(f"--steps {steps}: needs more samples than the training set has; give fewer") from None
        raise
    ours.epoch()
    return ours


@contextlib.contextmanager
def without_communication(run: Ours, ctx: DistributedContext) -> Iterator[None]:
    """Leave out the all-reduces of gradients, sums and running statistics."""
    nothing = mock.patch.object(StepSums, "start_reduce", lambda sums, micro_batch: None)
    with run.model.no_sync(), nothing:
        yield
    all_gather_json(None, ctx)  # the time is that of the slowest rank


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [["", "step", "wall", "control", "CPU", "control", "samples/s", "data wait", "memory", ""]]
    for name, row in rows.items():
        ratios = [f"{row[key]:.3f}" for key in ("wall_ratio", "control_wall", "cpu_ratio", "control_cpu")]
        memory = f"{row['memory_bytes'] / 2**20:,.0f} MiB" if row["memory_bytes"] else "-"
        rate = [f"{row['samples_per_s']:,.0f}", f"{row['data_wait']:.1%}", memory]
        lines.append([name, f"{1e3 * row['step_s']:.2f} ms", *ratios, *rate, row["warning"]])
    return format_table(lines, range(1, 9))


# ---- --json: one report of launches on several numbers of ranks ----


def open_report(file: Path | None, flags: list[str]) -> dict[str, Any]:
    """The report in FILE, or a new one. Raises UserError if it was measured with other flags."""
    if not file or not file.exists():
        return {"flags": flags, "measured": []}
    try:
        report = {name: json.loads(file.read_text())[name] for name in ("flags", "measured")}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--json {file}: exists but is not a report of this script; give another name") from None
    if report["flags"] != flags:
        words = " ".join(report["flags"]) or "none"
        raise UserError(f"--json {file}: was measured with other flags ({words}); give another name")
    return report


def add(report: dict[str, Any], job: dict[str, Any]) -> None:
    """Put a launch into the report; it replaces one on as many ranks."""
    other_launches = [launch for launch in report["measured"] if launch["ranks"] != job["ranks"]]
    report["measured"] = sorted([*other_launches, job], key=lambda launch: launch["ranks"])


def scaling(report: dict[str, Any]) -> str:
    """A line for each number of ranks. The efficiency is that of a rank over one of the launch with the fewest."""
    lines = [["ranks", "samples/s", "efficiency", "step", "data wait", "communication"]]
    for job in report["measured"]:
        row, first = job["rows"][GIVEN], report["measured"][0]
        base = first["rows"][GIVEN]["samples_per_s"] / first["ranks"]
        alone = job["rows"].get(ALONE)
        share = f"{max(0.0, 1 - alone['step_s'] / row['step_s']):.1%}" if alone else "-"
        rate = [f"{row['samples_per_s']:,.0f}", f"{row['samples_per_s'] / job['ranks'] / base:.1%}"]
        lines.append([job["ranks"], *rate, f"{1e3 * row['step_s']:,.2f} ms", f"{row['data_wait']:.1%}", share])
    return format_table(lines, range(6))
