"""`--hang_timeout`: when a rank that makes no progress ends the run."""

from __future__ import annotations

from dataclasses import dataclass

from utils.settings.checks import at_least
from utils.settings.fields import Settings, setting


@dataclass(frozen=True, kw_only=True)
class WatchSettings(Settings):
    hang_timeout: float = setting(
        "distributed", 300.0, "seconds without progress of a rank before the run ends (0: no limit)", at_least(0)
    )
