"""`--enable_profiling`: a trace of a few steps of rank 0 for https://ui.perfetto.dev, and the costliest operations.

It costs memory and time in these steps only. Who looks for what makes a step slow needs it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WAIT, WARM_UP, ACTIVE = 2, 1, 3  # optimizer steps
ROWS = 10


class Profiler:
    """Call `start` before the first optimizer step, `step` after each one, and `end`."""

    def __init__(self, folder: Path, device: torch.device, logger: logging.Logger) -> None:
        path, activities, sort = folder / "rank0.json.gz", [ProfilerActivity.CPU], "self_cpu_time_total"
        if device.type == "cuda":
            activities, sort = [*activities, ProfilerActivity.CUDA], "self_device_time_total"

        def report(finished: profile) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(path))
            table = finished.key_averages().table(sort_by=sort, row_limit=ROWS, max_name_column_width=45)
            text = "profile of %d steps in %s (open it in https://ui.perfetto.dev); the costliest operations:\n%s"
            logger.info(text, ACTIVE, path, table)

        plan = schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1)
        self._profile = profile(activities=activities, schedule=plan, on_trace_ready=report, acc_events=True)
        self._logger, self.start, self.step = logger, self._profile.start, self._profile.step

    def end(self) -> None:
        needed = WAIT + WARM_UP + ACTIVE
        if self._profile.step_num < needed:
            text = "profiling: the run ended after %d steps, but %d are needed"
            self._logger.warning(text, self._profile.step_num, needed)
        self._profile.stop()
