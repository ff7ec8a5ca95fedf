"""`--enable_profiling`: a trace of a few steps."""

from __future__ import annotations

from dataclasses import dataclass

from utils.settings.fields import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ProfilerSettings(Settings):
    enable_profiling: bool = setting("logging", False, "profile a few steps of rank 0 into run_dir/traces")
