"""`--cache`: decoded samples stay in memory."""

from __future__ import annotations

from dataclasses import dataclass

from utils.settings.checks import one_of
from utils.settings.fields import Settings, setting


@dataclass(frozen=True, kw_only=True)
class CacheSettings(Settings):
    cache: str = setting(
        "data",
        "none",
        "place of decoded images, before augmentation: host memory (ram) or the GPU (device)",
        one_of("none", "ram", "device"),
        rare=True,
    )
