"""Communication flags: which to try, and which to recommend."""

from __future__ import annotations

import statistics
from typing import Any

MIN_GAIN = 0.01  # fraction of a step; a smaller gain is not worth a flag


def variants(hook: str, gradient: int, bucket: int) -> list[dict[str, Any]]:
    """Buckets of a quarter and of four times the current size, and the other hooks. gradient, bucket: bytes."""
    whole, now = gradient / 2**20, bucket / 2**20
    sizes = [float(f"{size:.2g}") for size in (now / 4, now * 4)]
    buckets = [{"bucket_cap_mb": size} for size in sizes if min(size, now) < whole]  # else both use one bucket
    return buckets + [{"comm_hook": other} for other in ("none", "fp16", "bf16") if other != hook]


def gain(row: dict[str, Any]) -> float:
    return statistics.median(row["ratios"]) - 1


def paste(change: dict[str, Any]) -> str:
    """One flag for the command line."""
    return " ".join(f"--{name} {value}" for name, value in change.items())


def advice(sweep: list[dict[str, Any]]) -> str:
    """One line with the flag to use, if any.

    The first row is the control: its rounds compare the same settings, and the noise is how far they differ.
    """
    control, *rows = sweep
    noise = max(MIN_GAIN, *(abs(ratio - 1) for ratio in control["ratios"]))
    best = max(rows, key=gain, default=control)
    if gain(best) <= noise:
        return f"flags: none; no other bucket_cap_mb or comm_hook gains more than the noise of {noise:.1%}"
    hook = best["change"].get("comm_hook", "none")
    rounding = f"; {hook} rounds the gradients" if hook != "none" else ""
    return f"flags: {paste(best['change'])}   (a step is {gain(best):.1%} faster, noise {noise:.1%}{rounding})"
