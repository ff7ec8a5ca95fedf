"""The cost of checkpoints: how long one blocks training, and how much slower a run with checkpoints is."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from config import TrainingConfig
from ddp_utils import DistributedContext
from lib.benchmark.ours import Ours
from lib.benchmark.turns import Candidate, take_turns
from utils.files import replace_file


def measure(
    options: Any, config: TrainingConfig, ctx: DistributedContext, folder: Path, say: Callable[[str], object]
) -> dict[str, Any]:
    """Alternate between a run with a checkpoint every --steps steps, one without, and torch.save of the same state.

    A turn is two epochs with the checkpoint between them, so that it is written within the turn.
    """
    half = max(1, options.steps // 2)
    saving, without = (
        Ours(dataclasses.replace(config, save_every_minutes=0.0, save_every_steps=every), ctx, folder / name, half)
        for name, every in (("saving", 2 * half), ("without", 0))
    )
    for _ in range(3):  # warm up, with the first checkpoint in the middle
        saving.epoch()
        without.epoch()

    def reference() -> None:
        """torch.save, fsync and rename of the same state, into the same file system."""
        if ctx.is_main:
            replace_file(folder / "reference.pt", lambda file: torch.save(saving.state.state_dict(), file))

    a, b, c = candidates = [
        Candidate("checkpoints", lambda: [saving.epoch() for _ in range(2)]),
        Candidate("reference", reference),
        Candidate("none", lambda: [without.epoch() for _ in range(2)]),
    ]
    reference()
    take_turns(candidates, options.rounds, ctx.device, say)
    for each in (saving, without):
        each.close()
    if not ctx.is_main:
        return {}
    blocked, megabytes = saving.blocked()[-2 * options.rounds :], (folder / "reference.pt").stat().st_size / 1e6
    found = {"megabytes": megabytes, "blocked_s": blocked, "reference_s": b.wall, "slowdown": a.ratio(c) - 1}
    ratio = statistics.median(b.wall) / statistics.median(blocked)
    say(f"a checkpoint of {megabytes:.1f} MB in {folder}")
    say(f"torch.save + fsync + rename: {milliseconds(b.wall)}")
    say(f"training blocked:            {milliseconds(blocked)}, 1/{ratio:.0f} of that")
    controls = f"controls {a.control():.3f} and {c.control():.3f}"
    say(f"saving every {2 * half} steps changes the run time by {found['slowdown']:+.1%} ({controls})")
    return found


def milliseconds(values: Sequence[float]) -> str:
    low, middle, high = (1000 * value for value in (min(values), statistics.median(values), max(values)))
    return f"{middle:.2f} ms (n = {len(values)}, {low:.2f} to {high:.2f})"
