"""The flags of communication: which are tried, and which of them to paste."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from config import TrainingConfig

LEAST_GAIN = 0.01  # of a step; less is not worth a flag


def variants(config: TrainingConfig, gradient: int) -> list[dict[str, Any]]:
    """Buckets of a quarter of the present size and of four times it, and the other hooks. gradient: bytes."""
    whole = gradient / 2**20
    now = config.bucket_cap_mb or min(25.0, max(1.0, whole / 4))  # as wrap_ddp chooses it
    sizes = [float(f"{size:.2g}") for size in (now / 4, now * 4)]
    buckets = [{"bucket_cap_mb": size} for size in sizes if min(size, now) < whole]  # else both are one bucket
    return buckets + [{"comm_hook": hook} for hook in ("none", "fp16", "bf16") if hook != config.comm_hook]


def gain(row: dict[str, Any]) -> float:
    return statistics.median(row["ratios"]) - 1


def judge(sweep: list[dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """The changes that gain more than the noise, and the noise: how far rounds of the same settings, the first row,
    differ.

    Of the rows that were measured as they would be used, the best one; where a bucket size and a hook each gain and
    were not yet
    tried together, both.
    """
    control, *rows = sweep
    noise = max(LEAST_GAIN, *(abs(ratio - 1) for ratio in control["ratios"]))
    good = sorted((row for row in rows if "ratios" in row and gain(row) > noise), key=gain, reverse=True)
    if not good:
        return {}, noise
    if any(len(row["change"]) > 1 for row in rows):  # both were tried
        return good[0]["change"], noise
    both: dict[str, Any] = {}
    for row in good:
        both = row["change"] | both
    return both, noise


def advice(sweep: list[dict[str, Any]]) -> str:
    """One line: flags to paste, or that there are none."""
    change, noise = judge(sweep)
    if not change:
        return f"flags: none; no other setting of bucket_cap_mb or comm_hook gains more than the noise of {noise:.1%}"
    row = next(row for row in sweep if row["change"] == change)
    words = " ".join(
        f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}" for name, value in change.items()
    )
    rounds = f"; {change['comm_hook']} rounds the gradients" if change.get("comm_hook", "none") != "none" else ""
    return f"flags: {words}   (a step is {gain(row):.1%} faster, noise {noise:.1%}{rounds})"
