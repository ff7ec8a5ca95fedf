"""The settings of the extras (docs/extras.md). scripts/without.sh deletes the two lines of an extra with its folder."""

from __future__ import annotations

from dataclasses import dataclass

from utils.extras.average.settings import AverageSettings
from utils.extras.cache.settings import CacheSettings
from utils.extras.companions.settings import CompanionSettings
from utils.extras.compile.settings import CompileSettings
from utils.extras.exact.settings import ExactSettings
from utils.extras.images.settings import ImageSettings
from utils.extras.lengths.settings import LengthsSettings
from utils.extras.profiler.settings import ProfilerSettings
from utils.extras.sharding.settings import ShardingSettings
from utils.extras.watch.settings import WatchSettings
from utils.settings.fields import Settings


@dataclass(frozen=True, kw_only=True)
class ExtraSettings(
    CompanionSettings,
    CacheSettings,
    CompileSettings,
    LengthsSettings,
    AverageSettings,
    WatchSettings,
    ExactSettings,
    ShardingSettings,
    ProfilerSettings,
    ImageSettings,
    Settings,
):
    """The settings of all extras. `--help` lists them in this order, after the others of their group."""
