"""The flags of communication: which to try, and which to paste."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from config import TrainingConfig

MIN_GAIN = 0.01  # of a step; less is not worth a flag


def variants(config: TrainingConfig, gradient: int, bucket: int) -> list[list[dict[str, Any]]]:
    """Buckets of a quarter and of four times the present size, then the other hooks. gradient, bucket: bytes."""
    whole, now = gradient / 2**20, bucket / 2**20
    sizes = [float(f"{size:.2g}") for size in (now / 4, now * 4)]
    buckets = [{"bucket_cap_mb": size} for size in sizes if min(size, now) < whole]  # else both are one bucket
    return [buckets, [{"comm_hook": hook} for hook in ("none", "fp16", "bf16") if hook != config.comm_hook]]


def gain(row: dict[str, Any]) -> float:
    return statistics.median(row["ratios"]) - 1


def judge(sweep: list[dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """The fastest change that gains more than the noise, and the noise.

    The first row is the control: its rounds compare the same settings, and the noise is how far they differ.
    """
    control, *rows = sweep
    noise = max(MIN_GAIN, *(abs(ratio - 1) for ratio in control["ratios"]))
    good = [row for row in rows if "ratios" in row and gain(row) > noise]
    return (max(good, key=gain)["change"] if good else {}), noise


def paste(change: dict[str, Any]) -> str:
    return " ".join(
        f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}" for name, value in change.items()
    )


def advice(sweep: list[dict[str, Any]]) -> str:
    """One line: flags to paste, or that there are none."""
    change, noise = judge(sweep)
    if not change:
        return f"flags: none; no other bucket_cap_mb or comm_hook gains more than the noise of {noise:.1%}"
    row = next(row for row in sweep if row["change"] == change)
    rounding = f"; {change['comm_hook']} rounds the gradients" if change.get("comm_hook", "none") != "none" else ""
    return f"flags: {paste(change)}   (a step is {gain(row):.1%} faster, noise {noise:.1%}{rounding})"
