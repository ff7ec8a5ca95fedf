"""The cost of flags: this template as given, and with other flags, in turns in one process."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config import TrainingConfig
from ddp_utils import DistributedContext
from lib.benchmark.ours import Ours
from lib.benchmark.turns import Candidate, take_turns
from utils.table import format_table


def measure(
    options: Any, config: TrainingConfig, ctx: DistributedContext, folder: Path, say: Callable[[str], object]
) -> dict[str, Any]:
    """Wall and CPU time of a step with `--against FLAGS`, and their ratios to those without."""
    other = TrainingConfig.from_args(shlex.split(options.against), config.to_dict())
    runs = [Ours(each, ctx, folder / name, options.steps) for name, each in (("given", config), ("against", other))]
    names = ("as given", f"with {options.against}")
    given, _ = candidates = [Candidate(name, run.epoch) for name, run in zip(names, runs, strict=True)]
    for each in candidates:
        each.epoch()
    take_turns(candidates, options.rounds, ctx.device, say)
    for run in runs:
        run.close()
    rows, found = [["", "step", "wall", "control", "CPU", "control", ""]], {}
    for each in candidates:
        found[each.name] = {
            "step_s": each.seconds() / options.steps,
            **{"wall_ratio": each.ratio(given), "control_wall": each.control()},
            **{"cpu_ratio": each.ratio(given, "cpu"), "control_cpu": each.control("cpu")},
        }
        step, *ratios = found[each.name].values()
        shown = [f"{ratio:.3f}" for ratio in ratios]
        rows.append([each.name, f"{1e3 * step:.2f} ms", *shown, each.warning("wall", "cpu")])
    say(format_table(rows, range(1, 6)))
    return found
