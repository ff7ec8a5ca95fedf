"""`--reduction exact`: the same bits on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from utils.settings.checks import one_of
from utils.settings.conflicts import GIVE_ONLY_ONE, Conflict
from utils.settings.fields import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ExactSettings(Settings):
    reduction: str = setting(
        "distributed",
        "fast",
        "gradient all-reduce (exact: bitwise the same on any number of ranks, slower)",
        one_of("fast", "exact"),
        "may",
        conflicts=[
            Conflict(
                "reduction",
                f"rounds gradients before they are summed, so it contradicts --reduction exact. {GIVE_ONLY_ONE}",
                subject="comm_hook",
            )
        ],
    )
