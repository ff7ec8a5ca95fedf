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
        "cache of decoded images, before augmentation (ram: shared by a node's ranks, device: per GPU)",
        one_of("none", "ram", "device"),
        rare=True,
    )
