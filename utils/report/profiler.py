"""`--enable_profiling`: a trace of a few steps of rank 0 for https://ui.perfetto.dev, and the costliest operations."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WAIT, WARM_UP, ACTIVE = 2, 1, 3  # optimizer steps
ROWS = 10


class StepProfiler:
    """Call `step` after each optimizer step. Without a folder (profiling off, or another rank) it does nothing."""

    def __init__(self, folder: Path | None, device: torch.device, logger: logging.Logger) -> None:
        self._logger, self._steps = logger, 0
        self._profile: profile | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
            self._sort = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
            report = functools.partial(self._report, folder / "rank0.json.gz")
            plan = schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1)
            self._profile = profile(activities=activities, schedule=plan, on_trace_ready=report, acc_events=True)
            self._profile.start()

    def step(self) -> None:
        if self._profile:
            self._steps += 1
            self._profile.step()
            if self._steps == WAIT + WARM_UP + ACTIVE:
                self.close()

    def close(self) -> None:
        if self._profile:
            finished, self._profile = self._profile, None
            finished.stop()
            if self._steps < WAIT + WARM_UP + ACTIVE:
                needed = WAIT + WARM_UP + ACTIVE
                self._logger.warning("profiling: the run ended after %d steps, but %d are needed", self._steps, needed)

    def _report(self, path: Path, finished: profile) -> None:
        finished.export_chrome_trace(str(path))
        table = finished.key_averages().table(sort_by=self._sort, row_limit=ROWS, max_name_column_width=45)
        text = "profile of %d steps in %s (open it in https://ui.perfetto.dev); the costliest operations:\n%s"
        self._logger.info(text, ACTIVE, path, table)
