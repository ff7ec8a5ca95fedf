"""`--enable_profiling`: a trace of a few steps of rank 0 for https://ui.perfetto.dev, and the costliest operations.

It costs memory and time in these steps only. Who looks for what makes a step slow needs it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from utils.logger import LOGGER_NAME
from utils.training.parts.part import Part

# in optimizer steps
WAIT_STEPS = 2
WARM_UP_STEPS = 1
ACTIVE_STEPS = 3
MAX_TABLE_ROWS = 10


class Profiler(Part):
    """Writes the trace to a file in the folder, and logs the costliest operations."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._logger = logging.getLogger(LOGGER_NAME)
        self._profile: profile | None = None  # between the first step and the end

    def start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=WAIT_STEPS, warmup=WARM_UP_STEPS, active=ACTIVE_STEPS, repeat=1)
        self._profile = profile(
            activities=activities,
            schedule=plan,
            on_trace_ready=self._write_trace,
            acc_events=True,
        )
        self._profile.start()

    def after_update(self, model: nn.Module, skipped: Tensor) -> None:
        if self._profile:
            self._profile.step()

    def close(self) -> None:
        if not self._profile:
            return
        needed = WAIT_STEPS + WARM_UP_STEPS + ACTIVE_STEPS
        if self._profile.step_num < needed:
            text = "The run ended after %d steps, but profiling needs %d."
            self._logger.warning(text, self._profile.step_num, needed)
        self._profile.stop()
        self._profile = None

    def _write_trace(self, finished: profile) -> None:
        path = self._folder / "rank0.json.gz"
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(path))
        sort_by = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = finished.key_averages().table(sort_by=sort_by, row_limit=MAX_TABLE_ROWS, max_name_column_width=45)
        text = "The profile of %d steps is in %s (open it in https://ui.perfetto.dev). The costliest operations:\n%s"
        self._logger.info(text, ACTIVE_STEPS, path, table)
