"""`--ema_decay`: a moving average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from utils.settings.checks import between
from utils.settings.fields import Settings, setting


@dataclass(frozen=True, kw_only=True)
class AverageSettings(Settings):
    ema_decay: float = setting(
        "training",
        0.0,
        "decay of the weight EMA (0 = off); after n updates at most n / (9 + n)",
        between(0, 1),
        "may",
        rare=True,
    )
